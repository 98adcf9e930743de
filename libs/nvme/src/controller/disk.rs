//! What the controller needs of a namespace's storage.

use super::{Host, Segment};
use crate::Lba;

/// Names a command under way between the controller and its disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub u32);

/// The shape of a disk. Only [`Operation::Format`] changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// log2 of the LBA size: 9 or 12.
    pub block_shift: u32,
    /// log2 of the LBA sizes that the disk can be formatted with, in the order of the LBA formats; at most 16, and
    /// the present one is among them.
    pub formats: &'static [u32],
    /// The capacity in blocks.
    pub blocks: u64,
    /// Writes are refused (Namespace is Write Protected).
    pub read_only: bool,
    /// A write may be lost in a power cut until it is flushed: the volatile write cache is present.
    pub volatile_cache: bool,
    /// Deallocated blocks are given back and read as zeroes.
    pub deallocates: bool,
}

impl Geometry {
    /// The bytes of a range.
    pub fn bytes(&self, range: LbaRange) -> u64 {
        range.blocks.checked_shl(self.block_shift).unwrap_or(u64::MAX)
    }

    /// The shape after a format.
    #[must_use]
    pub fn formatted(self, block_shift: u32) -> Self {
        let bytes = self.blocks.checked_shl(self.block_shift).unwrap_or(0);
        Self { block_shift, blocks: bytes.checked_shr(block_shift).unwrap_or(0), ..self }
    }
}

/// A run of blocks, already checked against the disk's capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaRange {
    /// The first block.
    pub start: Lba,
    /// How many; may be 0 in a deallocation.
    pub blocks: u64,
}

/// One validated command to a disk. Data segments sum up to the range's length exactly; they need not be
/// aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Disk to host memory.
    Read {
        /// What to read.
        range: LbaRange,
        /// Where to put it.
        data: &'a [Segment],
    },
    /// Host memory to disk.
    Write {
        /// What to write.
        range: LbaRange,
        /// Where it lies.
        data: &'a [Segment],
        /// Complete it only when it is durable (FUA, or the write cache is switched off).
        durable: bool,
    },
    /// Fails with [`DiskError::Mismatch`] unless the blocks hold the host's data.
    Compare {
        /// What to compare.
        range: LbaRange,
        /// With what.
        data: &'a [Segment],
    },
    /// Reads the blocks and drops what it reads.
    Verify {
        /// Which.
        range: LbaRange,
    },
    /// All that was completed before is durable when this completes.
    Flush,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// What to clear.
        range: LbaRange,
        /// The host allows the blocks to be deallocated (DEAC).
        deallocate: bool,
        /// As in a write.
        durable: bool,
    },
    /// All blocks read as zeroes, durably, and have this size from now on. No other operation is under way, but
    /// for flushes.
    Format {
        /// log2 of the LBA size, one of [`Geometry::formats`].
        block_shift: u32,
    },
    /// The host no longer needs these blocks; at most 256 ranges.
    Deallocate {
        /// Which.
        ranges: &'a [LbaRange],
    },
}

/// Why a disk failed an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// Host memory could not be reached: Data Transfer Error.
    #[error("Host memory could not be reached")]
    DataTransfer,
    /// The medium failed to read: Unrecovered Read Error.
    #[error("The medium failed to read")]
    Read,
    /// The medium failed to write: Write Fault.
    #[error("The medium failed to write")]
    Write,
    /// The blocks hold other data than the host's: Compare Failure.
    #[error("The data differ")]
    Mismatch,
    /// No room on the medium: Capacity Exceeded.
    #[error("No room is left on the medium")]
    Capacity,
    /// Anything else: Internal Error.
    #[error("The disk failed")]
    Internal,
}

/// What became of an operation that was handed to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// It is over; its tag will not be reported again.
    Done(Result<(), DiskError>),
    /// It will be reported by [`Disk::reap`].
    Pending,
}

/// The storage of a namespace, as the controller's poll loop uses it: no call blocks on the medium.
pub trait Disk<H: Host> {
    /// The disk's shape, the new one as soon as a format is over.
    fn geometry(&self) -> Geometry;

    /// Takes an operation. Segments and ranges are only borrowed: a pending operation copies what it needs,
    /// and holds the host memory that it uses until it is over.
    fn submit(&mut self, host: &mut H, tag: Tag, operation: Operation<'_>) -> Submission;

    /// Called once at the end of each batch of submissions: starts what was queued.
    fn commit(&mut self, host: &mut H);

    /// Reports operations that are over, each once, by pushing to `done`.
    fn reap(&mut self, host: &mut H, done: &mut Vec<(Tag, Result<(), DiskError>)>);
}
