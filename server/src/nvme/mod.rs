//! The software drive: an NVMe controller on disks, behind vfio-user.
//!
//! Three kinds of thread meet here. The session's thread reads and writes registers and posted doorbells, which
//! are memory, and never waits for the drive (`device`). The drive's thread owns the controller (`worker`)
//! and reaches the client through the `machine`. The disks' kernel threads do the I/O.

mod bar0;
mod device;
mod machine;
mod mirror;
mod options;
mod worker;

pub use device::{Drive, DriveError};
pub use options::{DoorbellMode, Options};
