//! The server over real sockets: throw-away devices ([`devices`]), the protocol's fine print ([`conformance`]), a
//! client that takes its memory away ([`lost_memory`]), what others got wrong and nothing else here provokes
//! ([`faults`]), a second socket ([`twin`]), and what a message costs ([`round_trips`]). The numbers in names and comments are those of the
//! project's lists of conformance points ("point") and of peers' faults ("fault", docs/faults.md).

mod client;
mod conformance;
mod devices;
mod faults;
mod lost_memory;
mod round_trips;
mod twin;
