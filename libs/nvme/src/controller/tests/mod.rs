//! The controller against a host and disks in memory.

mod admin;
mod io;
pub(crate) mod machine;
