//! What the controller did, for whoever watches.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only the controller's thread raises and any thread may read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// There is one writer, so no locked instruction is needed.
    pub(super) fn add(&self, count: u64) {
        self.0.store(self.get().wrapping_add(count), Ordering::Relaxed);
    }
}

/// The controller's counters, since it was made; resets do not clear them.
#[derive(Debug, Default)]
pub struct Counters {
    /// Read commands that succeeded.
    pub reads: Counter,
    /// Write commands that succeeded.
    pub writes: Counter,
    /// Compare commands that succeeded.
    pub compares: Counter,
    /// Verify commands that succeeded.
    pub verifies: Counter,
    /// Write Uncorrectable commands that succeeded.
    pub write_uncorrectables: Counter,
    /// Flush commands that succeeded.
    pub flushes: Counter,
    /// Write Zeroes commands that succeeded.
    pub write_zeroes: Counter,
    /// Dataset Management commands that succeeded.
    pub dataset_management: Counter,
    /// Admin commands that were completed.
    pub admin: Counter,
    /// I/O commands that came with an SGL.
    pub sgls: Counter,
    /// Bytes moved to the host by Read commands that succeeded.
    pub bytes_read: Counter,
    /// Bytes taken from the host by Write commands that succeeded.
    pub bytes_written: Counter,
    /// Bytes of the namespaces that Compare and Verify commands that succeeded read.
    pub bytes_checked: Counter,
    /// Changes of doorbells (registers or shadow) that were seen.
    pub doorbells: Counter,
    /// Interrupts raised.
    pub interrupts: Counter,
    /// Batches of completions that raised no interrupt because the host had not consumed the last ones.
    pub interrupts_withheld: Counter,
    /// Commands completed with an error.
    pub errors: Counter,
    /// Of these, those of the medium.
    pub media_errors: Counter,
    /// Resets: CC.EN cleared, function level reset, device reset, client gone.
    pub resets: Counter,
}
