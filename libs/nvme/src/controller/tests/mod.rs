//! The controller against a host and disks in memory.

mod admin;
mod format;
mod interleaving;
mod interrupts;
mod io;
mod lifecycle;
mod logs;
pub(crate) mod machine;
mod media;
mod model;
mod power;
mod shadow;
mod statuses;
