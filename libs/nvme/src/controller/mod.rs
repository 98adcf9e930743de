//! Plays an NVMe drive.

mod disk;
mod host;

pub use disk::{Disk, DiskError, Geometry, LbaRange, Operation, Submission, Tag};
pub use host::{Direction, DmaError, Host, Segment};
