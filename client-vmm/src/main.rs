//! outboard-vmm: a thin main over the library.
fn main() {}
