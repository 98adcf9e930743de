//! The controller against a host and disks in memory.

mod admin;
mod io;
mod machine;
