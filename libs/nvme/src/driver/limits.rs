//! The driver's limits.

use std::time::Duration;

/// Bytes of a memory page (CC.MPS 0).
pub const PAGE_SIZE: usize = 4096;

/// Entries of the admin queues.
pub const ADMIN_ENTRIES: u16 = 32;

/// Entries of an I/O queue at most; leaves four bits of a command identifier for its sequence.
pub const MAX_QUEUE_ENTRIES: u16 = 4096;

/// Blocks in a command at most (NLB is 16 bits and zero-based).
pub const MAX_BLOCKS: u32 = 1 << 16;

/// Ranges in a Dataset Management command at most (6.7).
pub const MAX_DSM_RANGES: u32 = 256;

/// Bytes in a command at most, where the drive says less or nothing.
pub const MAX_TRANSFER: usize = 1 << 30;

/// How long an admin command may take.
pub const ADMIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How long CSTS.RDY may take at most: the longest that CAP.TO can say.
pub const READY_TIMEOUT: Duration = Duration::from_millis(255 * 500);

/// How long a shutdown may take, where the drive says less.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a shutdown may take, whatever the drive says.
pub const MAX_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
