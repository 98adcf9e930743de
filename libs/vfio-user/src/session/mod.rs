//! Sessions as state machines without I/O.

pub mod client;
pub mod server;
