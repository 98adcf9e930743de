//! What a run may take.

use std::time::Duration;

/// The deepest queue: one command less than the driver's largest.
pub const DEPTH: u16 = 4095;

/// The fewest entries of a queue, if the drive allows them; what SPDK's tools have.
pub const QUEUE_ENTRIES: u16 = 256;

/// The most jobs, each with a queue pair of its own.
pub const JOBS: u16 = 128;

/// The largest I/O: what one page of PRP entries describes.
pub const BLOCK: usize = 2 << 20;

/// How long outstanding I/O may take when a run is over.
pub const DRAIN: Duration = Duration::from_secs(10);

/// How long nothing may happen before the connection is looked at.
pub const PATIENCE: Duration = Duration::from_millis(100);

/// How long a server may take to open its socket, and to end.
pub const SERVER: Duration = Duration::from_secs(10);

/// How long an admin command may take, and enabling or disabling the drive.
pub const ADMIN: Duration = Duration::from_secs(10);
