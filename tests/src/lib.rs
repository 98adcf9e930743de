//! What needs more than one crate: tests of real processes stand in `tests/`, the scripts of `tests/run` beside
//! them; this library is empty.
