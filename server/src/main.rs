//! outboard-server: a thin main over the library.
fn main() {}
