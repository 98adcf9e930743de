//! What the controller tells about itself: error log, SMART, asynchronous events (Base Specification 1.4,
//! sections 5.14.1.1 and 5.14.1.2). A reset does not clear the logs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::{FromZeros, IntoBytes};

use super::completion::Origin;
use super::counters::Counters;
use super::events::{Events, INVALID_DOORBELL_REGISTER, INVALID_DOORBELL_VALUE};
use super::limits::ERROR_LOG_ENTRIES;
use crate::spec::{
    AsyncEvent, CriticalWarning, ErrorLogEntry, ParameterErrorLocation, SmartLog, Status, StatusField,
    StatusType,
};

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
    unsafe_shutdowns: u64,
    started: Instant,
    /// Time in which there were commands, but for the present one.
    busy: Duration,
    busy_since: Option<Instant>,
    last_warning: Option<Instant>,
}

impl Health {
    pub(super) fn new() -> Self {
        Self {
            counters: Arc::default(),
            events: Events::default(),
            errors: VecDeque::with_capacity(ERROR_LOG_ENTRIES.into()),
            error_count: 0,
            unsafe_shutdowns: 0,
            started: Instant::now(),
            busy: Duration::ZERO,
            busy_since: None,
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

    /// A command failed with `status`, for what stands at `location`.
    pub(super) fn record_error(
        &mut self,
        origin: Origin,
        status: StatusField,
        location: ParameterErrorLocation,
    ) {
        self.counters.errors.add(1);
        let code = status.status();
        if code.kind() == StatusType::MEDIA && code != Status::COMPARE_FAILURE {
            self.counters.media_errors.add(1);
        }
        self.log_error(ErrorLogEntry {
            submission_queue: origin.queue.0.into(),
            command_id: origin.command.into(),
            status,
            parameter_location: location,
            lba: origin.lba.0.into(),
            nsid: origin.nsid.0.into(),
            ..ErrorLogEntry::default()
        });
    }

    /// A doorbell was rung whose queue does not exist (5.2.1).
    #[cold]
    pub(super) fn record_stray_doorbell(&mut self, index: usize) {
        tracing::debug!(index, "A doorbell was rung whose queue does not exist");
        self.record_doorbell(INVALID_DOORBELL_REGISTER, Status::INVALID_QUEUE_ID);
    }

    /// A doorbell was rung with a value that its queue cannot have (5.2.1).
    #[cold]
    pub(super) fn record_doorbell_value(&mut self) {
        tracing::debug!("A doorbell was rung with a value that its queue cannot have");
        self.record_doorbell(INVALID_DOORBELL_VALUE, Status::INVALID_FIELD);
    }

    fn record_doorbell(&mut self, event: AsyncEvent, status: Status) {
        self.log_error(ErrorLogEntry {
            // It belongs to no command.
            submission_queue: u16::MAX.into(),
            command_id: u16::MAX.into(),
            status: StatusField::new(status),
            parameter_location: ParameterErrorLocation::from_bits(u16::MAX),
            ..ErrorLogEntry::default()
        });
        self.events.raise(event);
    }

    fn log_error(&mut self, entry: ErrorLogEntry) {
        self.error_count = self.error_count.saturating_add(1);
        self.errors.truncate(usize::from(ERROR_LOG_ENTRIES).saturating_sub(1));
        self.errors.push_front(ErrorLogEntry { error_count: self.error_count.into(), ..entry });
    }

    /// The power went while the controller was enabled and not shut down.
    pub(super) fn record_unsafe_shutdown(&mut self) {
        self.unsafe_shutdowns = self.unsafe_shutdowns.saturating_add(1);
    }

    /// There are commands.
    #[inline]
    pub(super) fn work(&mut self) {
        if self.busy_since.is_none() {
            self.busy_since = Some(Instant::now());
        }
    }

    /// There were none for a while.
    pub(super) fn rest(&mut self) {
        if let Some(since) = self.busy_since.take() {
            self.busy = self.busy.saturating_add(since.elapsed());
        }
    }

    /// The Error Information log page.
    pub(super) fn error_log(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.errors.iter().flat_map(|entry| entry.as_bytes()).copied().collect();
        page.resize(usize::from(ERROR_LOG_ENTRIES).saturating_mul(size_of::<ErrorLogEntry>()), 0);
        page
    }

    /// The SMART / Health Information log page.
    pub(super) fn smart_log(&self, warnings: CriticalWarning, power_cycles: u32) -> SmartLog {
        let counters = &self.counters;
        let units = |bytes: u64| u128::from(bytes.div_ceil(DATA_UNIT)).into();
        let mut log = SmartLog::new_zeroed();
        log.critical_warning = warnings;
        log.temperature = TEMPERATURE.into();
        log.available_spare = 100;
        log.spare_threshold = 10;
        log.data_units_read = units(counters.bytes_read.get().saturating_add(counters.bytes_checked.get()));
        log.data_units_written = units(counters.bytes_written.get());
        let reads = [&counters.reads, &counters.compares, &counters.verifies];
        log.host_reads = reads.map(|counter| u128::from(counter.get())).iter().sum::<u128>().into();
        log.media_errors = u128::from(counters.media_errors.get()).into();
        log.host_writes = u128::from(counters.writes.get()).into();
        let busy = self.busy_since.map_or(Duration::ZERO, |since| since.elapsed());
        log.busy_minutes = u128::from(self.busy.saturating_add(busy).as_secs() / 60).into();
        log.power_cycles = u128::from(power_cycles).into();
        log.power_on_hours = u128::from(self.started.elapsed().as_secs() / 3600).into();
        log.unsafe_shutdowns = u128::from(self.unsafe_shutdowns).into();
        log.error_log_entries = u128::from(self.error_count).into();
        log
    }
}
