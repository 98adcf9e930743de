//! What needs more than one crate: tests of real processes stand in `tests/`, the scripts of `tests/run` beside
//! them. What they share, and what can be pointed at a server that is not ours, is here: the points of the
//! protocol as checks ([`conformance`]), and what they are tried on.

pub mod conformance;
pub mod drive;
pub mod in_process;
pub mod plain;
pub mod process;
