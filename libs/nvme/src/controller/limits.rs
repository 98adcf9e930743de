//! The controller's limits.

/// The memory page size, fixed by CAP.MPSMIN = CAP.MPSMAX = 0.
pub(super) const PAGE_SIZE: usize = 4096;

/// The most I/O queue pairs that an option may ask for.
pub(super) const MAX_QUEUE_PAIRS: u16 = 1024;

/// Submissions taken from a queue before the next queue's turn.
pub(super) const BATCH: usize = 32;

/// Commands under way at the disks, over all queues; submissions wait in their queues beyond it.
pub(super) const MAX_IN_FLIGHT: u16 = 8192;

/// Asynchronous Event Requests that may be parked (AERL + 1).
pub(super) const MAX_PARKED_EVENTS: u8 = 4;

/// Events that wait for the host to ask; more of a kind that already waits are not counted.
pub(super) const MAX_PENDING_EVENTS: usize = 16;

/// Entries of the Error Information log (ELPE + 1); they fill a page.
pub(super) const ERROR_LOG_ENTRIES: u8 = 64;

/// Ranges of a Dataset Management command.
pub(super) const MAX_DEALLOCATE_RANGES: usize = 256;

/// Descriptors of an SGL, over all its segments; a transfer of 1 MiB in pieces of 512 bytes has as many.
pub(super) const MAX_SGL_DESCRIPTORS: usize = 2048;

/// Segments of an SGL besides the one in the command: each costs an access to the host's memory.
pub(super) const MAX_SGL_SEGMENTS: usize = 64;

/// Parts of a namespace, of 4096 blocks each, in which blocks may be marked by Write Uncorrectable.
pub(super) const MAX_UNCORRECTABLE_PARTS: usize = 1024;

/// Polls over which an interrupt may be withheld from a host that does not move its completion queue's head:
/// one that consumes entries without telling must still hear of the next ones.
pub(super) const WITHHOLD_POLLS: u32 = 256;

/// The most namespaces of a controller: they fill one Identify list.
pub(super) const MAX_NAMESPACES: usize = 1024;
