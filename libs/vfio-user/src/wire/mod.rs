//! The messages of vfio-user: bytes to typed values and back.
//!
//! No I/O happens here. [`Command::decode`] and [`Reply::decode`] are the border: what they return is valid as
//! far as that can be told without knowing the device; nothing that a peer sends makes them panic, or allocate
//! more than a small multiple of what it sent. Encoding is the inverse.
//!
//! Section numbers are those of QEMU's `docs/interop/vfio-user.rst`. The protocol uses the host's byte order,
//! which is little-endian on every host that we run on.

#![forbid(unsafe_code)]

mod access;
mod command;
mod device;
mod dma;
mod error;
mod header;
mod irq;
mod reply;
mod version;

pub use access::{DmaAccess, DmaWrite, RegionAccess, RegionWrite, RegionWrites};
pub use command::Command;
pub use device::{
    DeviceFlags, DeviceInfo, IoFd, IoFdKind, IoFds, Query, RegionCapability, RegionFlags, RegionInfo, Shadow,
    SparseArea,
};
pub use dma::{Backing, DmaMap, DmaUnmap, UnmapTarget};
pub use error::{DecodeError, ReplyError};
pub use header::{CommandCode, HEADER_SIZE, Header, Kind};
pub use irq::{IrqAction, IrqData, IrqFlags, IrqIndex, IrqInfo, SetIrqs};
pub use reply::{Reply, encode_error};
pub use version::{Capabilities, IovaRanges, Offer, TwinSocket, Version};

use zerocopy::{FromBytes, Immutable, KnownLayout};

/// The fixed part of a body and what follows it.
fn split<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<(T, &[u8]), DecodeError> {
    T::read_from_prefix(body).map_err(|_| DecodeError::Short { length: body.len(), needed: size_of::<T>() })
}

/// A length as a field of a message. Bodies are far smaller than 4 GiB; a larger one is no valid message anyway.
fn field(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
