//! The vfio-user protocol, both ends.
//!
//! It knows no device and no VMM.

pub mod memory;
