//! The vfio-user protocol, both ends.
//!
//! A device server implements [`device::Device`], or, when its device is no more than registers and a pin,
//! [`function::Registers`], and calls [`listen::Source::serve`], or [`server::serve`] with each client's socket.
//! docs/writing-a-device.md shows how. The layers below can be used, tested and fuzzed by themselves:
//!
//! * [`wire`]: bytes to typed messages and back, no I/O.
//! * [`session`]: the state machines of both ends, no I/O.
//! * [`transport`]: a client's socket, with descriptors; [`listen`]: the one that clients connect to.
//! * [`dma`]: a client's memory as a device reaches it; [`irq`]: its interrupts.
//!
//! What it does not do: it knows no device and no VMM, and there is no migration (its commands are answered as "not
//! supported").
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

// Under loom only the DMA table is what it is elsewhere, so what stands on it is left out: see tests/loom.rs.
#[cfg(not(loom))]
pub mod client;
#[cfg(not(loom))]
pub mod counters;
#[cfg(not(loom))]
pub mod device;
pub mod dma;
#[cfg(not(loom))]
pub mod function;
#[cfg(not(loom))]
pub mod irq;
pub mod limits;
#[cfg(not(loom))]
pub mod listen;
pub mod memory;
#[cfg(not(loom))]
pub mod server;
#[cfg(not(loom))]
pub mod session;
pub mod transport;
pub mod wire;
