//! What the controller tells about itself: error log, SMART, asynchronous events (Base Specification 1.4,
//! sections 5.14.1.1 and 5.14.1.2). A reset does not clear the logs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::{FromZeros, IntoBytes};

use super::completion::Origin;
use super::counters::Counters;
use super::events::Events;
use super::limits::ERROR_LOG_ENTRIES;
use crate::spec::{CriticalWarning, ErrorLogEntry, SmartLog, Status, StatusField, StatusType};

/// Warning Composite Temperature Threshold: 70 °C in kelvin.
pub(super) const WARNING_TEMPERATURE: u16 = 343;
/// Critical Composite Temperature Threshold: 80 °C in kelvin.
pub(super) const CRITICAL_TEMPERATURE: u16 = 353;
/// A drive without a sensor: 35 °C in kelvin.
pub(super) const TEMPERATURE: u16 = 308;

/// Bytes of a data unit of the SMART log (5.14.1.2).
const DATA_UNIT: u64 = 512_000;

pub(super) struct Health {
    pub(super) counters: Arc<Counters>,
    pub(super) events: Events,
    /// The newest first.
    errors: VecDeque<ErrorLogEntry>,
    error_count: u64,
    started: Instant,
    last_warning: Option<Instant>,
}

impl Health {
    pub(super) fn new() -> Self {
        Self {
            counters: Arc::default(),
            events: Events::default(),
            errors: VecDeque::with_capacity(ERROR_LOG_ENTRIES.into()),
            error_count: 0,
            started: Instant::now(),
            last_warning: None,
        }
    }

    /// Whether the log may get another warning: one a second.
    pub(super) fn may_warn(&mut self) -> bool {
        let may = self.last_warning.is_none_or(|last| last.elapsed() >= Duration::from_secs(1));
        if may {
            self.last_warning = Some(Instant::now());
        }
        may
    }

    /// A command failed with `status`.
    pub(super) fn record_error(&mut self, origin: Origin, status: StatusField) {
        self.counters.errors.add(1);
        let code = status.status();
        if code.kind() == StatusType::MEDIA && code != Status::COMPARE_FAILURE {
            self.counters.media_errors.add(1);
        }
        self.error_count = self.error_count.saturating_add(1);
        self.errors.truncate(usize::from(ERROR_LOG_ENTRIES).saturating_sub(1));
        self.errors.push_front(ErrorLogEntry {
            error_count: self.error_count.into(),
            submission_queue: origin.queue.0.into(),
            command_id: origin.command.into(),
            status,
            lba: origin.lba.0.into(),
            nsid: origin.nsid.0.into(),
            ..ErrorLogEntry::default()
        });
    }

    /// The Error Information log page.
    pub(super) fn error_log(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.errors.iter().flat_map(|entry| entry.as_bytes()).copied().collect();
        page.resize(usize::from(ERROR_LOG_ENTRIES).saturating_mul(size_of::<ErrorLogEntry>()), 0);
        page
    }

    /// The SMART / Health Information log page; `temperature_warning`: a threshold is passed.
    pub(super) fn smart_log(&self, temperature_warning: bool, power_cycles: u32) -> SmartLog {
        let counters = &self.counters;
        let units = |bytes: u64| u128::from(bytes.div_ceil(DATA_UNIT)).into();
        let mut log = SmartLog::new_zeroed();
        log.critical_warning = CriticalWarning::default().with_temperature(temperature_warning);
        log.temperature = TEMPERATURE.into();
        log.available_spare = 100;
        log.spare_threshold = 10;
        log.data_units_read = units(counters.bytes_read.get().saturating_add(counters.bytes_checked.get()));
        log.data_units_written = units(counters.bytes_written.get());
        let reads = [&counters.reads, &counters.compares, &counters.verifies];
        log.host_reads = reads.map(|counter| u128::from(counter.get())).iter().sum::<u128>().into();
        log.media_errors = u128::from(counters.media_errors.get()).into();
        log.host_writes = u128::from(counters.writes.get()).into();
        log.power_cycles = u128::from(power_cycles).into();
        log.power_on_hours = u128::from(self.started.elapsed().as_secs() / 3600).into();
        log.error_log_entries = u128::from(self.error_count).into();
        log
    }
}
