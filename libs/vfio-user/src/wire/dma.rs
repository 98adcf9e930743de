//! DMA_MAP and DMA_UNMAP: a client's memory comes and goes.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DecodeError, split};
use crate::limits;
use crate::memory::Access;

const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const BY_MAPPING: u32 = 1 << 2;
const BY_FILE: u32 = 1 << 3;

/// How the memory behind a DMA_MAP is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// No descriptor: DMA_READ and DMA_WRITE messages.
    Messages,
    /// The descriptor is to be mapped, at this offset.
    Mapping {
        /// In bytes from the start of the file.
        offset: u64,
    },
    /// The descriptor is to be read and written (pread, pwrite), at this offset.
    File {
        /// In bytes from the start of the file.
        offset: u64,
    },
}

/// DMA_MAP ("VFIO_USER_DMA_MAP").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// The first address in the client's DMA space.
    pub address: u64,
    /// In bytes; neither 0 nor past the end of the address space.
    pub size: u64,
    /// What the device may do.
    pub access: Access,
    /// How the memory is reached.
    pub backing: Backing,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawMap {
    argsz: U32,
    flags: U32,
    offset: U64,
    address: U64,
    size: U64,
}

const _: () = assert!(size_of::<RawMap>() == 32);

impl DmaMap {
    pub(super) fn decode(body: &[u8], descriptors: usize) -> Result<Self, DecodeError> {
        let (raw, _) = split::<RawMap>(body)?;
        let (argsz, flags, offset) = (raw.argsz.get(), raw.flags.get(), raw.offset.get());
        let (address, size) = (raw.address.get(), raw.size.get());
        check_argsz(argsz, 32)?;
        let access = match flags & (READ | WRITE) {
            0 => return Err(DecodeError::Flags { flags }),
            READ => Access::Read,
            WRITE => Access::Write,
            _ => Access::ReadWrite,
        };
        let backing = match (descriptors, flags & !(READ | WRITE)) {
            (0, 0) => Backing::Messages,
            (1, 0 | BY_MAPPING) => Backing::Mapping { offset },
            (1, BY_FILE) => Backing::File { offset },
            (0 | 1, _) => return Err(DecodeError::Flags { flags }),
            _ => return Err(DecodeError::Descriptors { descriptors, expected: 1 }),
        };
        check_range(address, size)?;
        Ok(Self { address, size, access, backing })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let access = match self.access {
            Access::Read => READ,
            Access::Write => WRITE,
            Access::ReadWrite => READ | WRITE,
        };
        // A mapping is what a descriptor means without the bit, which older servers refuse.
        let (mode, offset) = match self.backing {
            Backing::Messages => (0, 0),
            Backing::Mapping { offset } => (0, offset),
            Backing::File { offset } => (BY_FILE, offset),
        };
        let raw = RawMap {
            argsz: 32.into(),
            flags: (access | mode).into(),
            offset: offset.into(),
            address: self.address.into(),
            size: self.size.into(),
        };
        body.extend_from_slice(raw.as_bytes());
    }

    pub(super) fn descriptors(&self) -> usize {
        match self.backing {
            Backing::Messages => 0,
            Backing::Mapping { .. } | Backing::File { .. } => 1,
        }
    }
}

/// The bits that the kernel, QEMU and libvfio-user use; the specification has none.
const DIRTY_BITMAP: u32 = 1 << 0;
const ALL: u32 = 1 << 1;

/// DMA_UNMAP ("VFIO_USER_DMA_UNMAP"), and the reply to it, which repeats the command's 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaUnmap {
    /// The room that the sender has for a reply.
    pub argsz: u32,
    /// What is to be unmapped.
    pub target: UnmapTarget,
}

/// What a DMA_UNMAP is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmapTarget {
    /// One mapping, exactly.
    Range {
        /// Its first address.
        address: u64,
        /// In bytes.
        size: u64,
    },
    /// One mapping, and a bitmap of its pages that were written. We do not track them (no migration yet).
    RangeWithDirtyBitmap {
        /// Its first address.
        address: u64,
        /// In bytes.
        size: u64,
    },
    /// Every mapping.
    All,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawUnmap {
    argsz: U32,
    flags: U32,
    address: U64,
    size: U64,
}

const _: () = assert!(size_of::<RawUnmap>() == 24);

impl DmaUnmap {
    /// Unmaps `target`, without asking for anything back.
    pub fn new(target: UnmapTarget) -> Self {
        Self { argsz: 24, target }
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let (raw, _) = split::<RawUnmap>(body)?;
        let (argsz, flags) = (raw.argsz.get(), raw.flags.get());
        let (address, size) = (raw.address.get(), raw.size.get());
        check_argsz(argsz, 24)?;
        let target = match (flags, address, size) {
            (0, ..) => UnmapTarget::Range { address, size },
            (DIRTY_BITMAP, ..) => UnmapTarget::RangeWithDirtyBitmap { address, size },
            (ALL, 0, 0) => UnmapTarget::All,
            (ALL, ..) => return Err(DecodeError::Range { start: address, count: size }),
            _ => return Err(DecodeError::Flags { flags }),
        };
        Ok(Self { argsz, target })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let (flags, address, size) = match self.target {
            UnmapTarget::Range { address, size } => (0, address, size),
            UnmapTarget::RangeWithDirtyBitmap { address, size } => (DIRTY_BITMAP, address, size),
            UnmapTarget::All => (ALL, 0, 0),
        };
        let raw = RawUnmap {
            argsz: self.argsz.into(),
            flags: flags.into(),
            address: address.into(),
            size: size.into(),
        };
        body.extend_from_slice(raw.as_bytes());
    }
}

pub(super) fn check_argsz(argsz: u32, least: u32) -> Result<(), DecodeError> {
    if (least..=limits::ARGUMENT).contains(&argsz) {
        Ok(())
    } else {
        Err(DecodeError::ArgumentSize { argsz, least })
    }
}

fn check_range(start: u64, size: u64) -> Result<(), DecodeError> {
    match size.checked_sub(1).and_then(|length| start.checked_add(length)) {
        Some(_) => Ok(()),
        None => Err(DecodeError::Range { start, count: size }),
    }
}
