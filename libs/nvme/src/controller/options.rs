//! What whoever makes a controller chooses.

use super::features::FeatureLimits;
use super::limits::{MAX_NAMESPACES, MAX_QUEUE_PAIRS, PAGE_SIZE};
use super::queues::QueueLimits;
use crate::spec::Capabilities;

/// A controller's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// SN: at most 20 printable ASCII characters. The namespaces' UUIDs are made from it.
    pub serial: String,
    /// MN: at most 40 printable ASCII characters.
    pub model: String,
    /// FR: at most 8 printable ASCII characters.
    pub firmware: String,
    /// VID and SSVID, as in configuration space.
    pub vendor: u16,
    /// I/O queue pairs, from 1.
    pub queue_pairs: u16,
    /// Entries of the largest queue (MQES + 1), 2 to 65536.
    pub queue_entries: u32,
    /// Interrupt vectors, from 1.
    pub vectors: u16,
    /// MDTS: log2 of the largest transfer, in pages of 4 KiB; 1 to 9.
    pub max_transfer_shift: u8,
    /// Offer Doorbell Buffer Config: for doorbells whose every write is a message. Only with a stride of 0.
    pub shadow_doorbells: bool,
    /// CAP.DSTRD: doorbells are `4 << doorbell_stride` bytes apart; 0 to 15.
    pub doorbell_stride: u8,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            serial: "OUTBOARD0001".into(),
            model: "Outboard NVMe Drive".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
            // Red Hat's, under which virtual devices live.
            vendor: 0x1b36,
            queue_pairs: 64,
            queue_entries: 1024,
            vectors: 65,
            max_transfer_shift: 7,
            shadow_doorbells: false,
            doorbell_stride: 0,
        }
    }
}

/// An option is out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidOptions {
    /// A text of Identify Controller.
    #[error("The {what} {text:?} is not 1 to {most} printable ASCII characters")]
    Text {
        /// Which.
        what: &'static str,
        /// As given.
        text: String,
        /// Its field's length.
        most: usize,
    },
    /// A number.
    #[error("{value} {what} are asked for, where {least} to {most} are possible")]
    Number {
        /// Of what.
        what: &'static str,
        /// As given.
        value: usize,
        /// The least.
        least: usize,
        /// The most.
        most: usize,
    },
}

impl Options {
    pub(super) fn check(&self, namespaces: usize) -> Result<(), InvalidOptions> {
        for (what, text, most) in [
            ("serial number", &self.serial, 20),
            ("model number", &self.model, 40),
            ("firmware revision", &self.firmware, 8),
        ] {
            let printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            if text.is_empty() || text.len() > most || !printable {
                return Err(InvalidOptions::Text { what, text: text.clone(), most });
            }
        }
        for (what, value, least, most) in [
            ("queue pairs", self.queue_pairs.into(), 1, MAX_QUEUE_PAIRS.into()),
            ("queue entries", self.queue_entries as usize, 2, 0x1_0000),
            ("interrupt vectors", self.vectors.into(), 1, 2048),
            ("doublings of a page of data", self.max_transfer_shift.into(), 1, 9),
            ("namespaces", namespaces, 0, MAX_NAMESPACES),
            // The shadow doorbells of many queues with gaps between them do not fit into their one page.
            (
                "doublings of the doorbells' distance",
                self.doorbell_stride.into(),
                0,
                if self.shadow_doorbells { 0 } else { 15 },
            ),
        ] {
            if value < least || value > most {
                return Err(InvalidOptions::Number { what, value, least, most });
            }
        }
        Ok(())
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        let largest = u16::try_from(self.queue_entries.saturating_sub(1)).unwrap_or(u16::MAX);
        Capabilities::default()
            .with_max_queue_entries(largest)
            .with_contiguous_queues(true)
            .with_doorbell_stride(self.doorbell_stride)
            // 30 s: a reset waits for the disks.
            .with_timeout(60)
            .with_subsystem_reset(true)
            .with_nvm_command_set(true)
    }

    /// MDTS in bytes.
    pub(super) fn max_transfer(&self) -> usize {
        PAGE_SIZE << self.max_transfer_shift.min(9)
    }

    pub(super) fn queue_limits(&self) -> QueueLimits {
        QueueLimits { pairs: self.queue_pairs, entries: self.queue_entries, vectors: self.vectors }
    }

    pub(super) fn feature_limits(&self, cache: bool, namespaces: usize) -> FeatureLimits {
        FeatureLimits { pairs: self.queue_pairs, vectors: self.vectors, cache, namespaces }
    }
}
