//! The session's server over real sockets, with devices that only a test would make: throw-away ones ([`devices`]),
//! one whose accesses the test decides over ([`plain`]), a client that takes its memory away ([`lost_memory`]), what
//! others got wrong and nothing else here provokes ([`faults`]), memory that a client makes up ([`fuse`]), a second socket ([`twin`]), and what a message
//! costs ([`round_trips`]). The numbers in names and comments are those of the project's lists of
//! conformance points ("point") and of peers' faults ("fault", docs/faults.md).

mod devices;
mod faults;
mod fuse;
mod lost_memory;
mod plain;
mod round_trips;
mod twin;
