//! The server over real sockets: throw-away devices ([`devices`]) and the protocol's fine print ([`conformance`]).
//! The numbers in names and comments are those of the project's lists of conformance points ("point") and of
//! peers' faults ("fault").

mod client;
mod conformance;
mod devices;
