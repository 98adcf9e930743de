//! The vfio-user protocol, both ends.
//!
//! It knows no device and no VMM.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

pub mod dma;
// Under loom only the table is built: see tests/loom.rs.
#[cfg(not(loom))]
pub mod irq;
pub mod limits;
pub mod memory;
pub mod transport;
pub mod wire;
