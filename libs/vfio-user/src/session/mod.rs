//! Sessions as state machines without I/O.

pub mod server;
