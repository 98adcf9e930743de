//! What a device has: DEVICE_GET_INFO, DEVICE_GET_REGION_INFO, DEVICE_GET_REGION_IO_FDS.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::dma::check_argsz;
use super::{DecodeError, ReplyError, field, split};

/// A question about one region or interrupt type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// The room that the client has for the answer, in bytes.
    pub argsz: u32,
    /// Which region or interrupt type.
    pub index: u32,
}

macro_rules! flags {
    ($(#[$doc:meta])* $name:ident { $($(#[$bit_doc:meta])* $bit:ident = $value:expr),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub u32);

        impl $name {
            $($(#[$bit_doc])* pub const $bit: Self = Self($value);)*

            /// Whether all of `other`'s bits are set.
            pub fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The bits of both.
            #[must_use]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// The bits that `other` does not have.
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }
    };
}
pub(super) use flags;

flags! {
    /// What kind of device it is.
    DeviceFlags {
        /// DEVICE_RESET works.
        RESET = 1 << 0,
        /// It is a PCI device.
        PCI = 1 << 1,
    }
}

/// The reply to DEVICE_GET_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// What kind of device it is.
    pub flags: DeviceFlags,
    /// How many regions it has.
    pub regions: u32,
    /// How many interrupt types it has.
    pub interrupts: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawDeviceInfo {
    argsz: U32,
    flags: U32,
    regions: U32,
    interrupts: U32,
}

const _: () = assert!(size_of::<RawDeviceInfo>() == 16);

/// The room that a client says it has for a [`DeviceInfo`].
pub(super) fn decode_get_info(body: &[u8]) -> Result<u32, DecodeError> {
    let argsz = split::<RawDeviceInfo>(body)?.0.argsz.get();
    check_argsz(argsz, 16)?;
    Ok(argsz)
}

pub(super) fn encode_get_info(argsz: u32, body: &mut Vec<u8>) {
    body.extend_from_slice(&argsz.to_le_bytes());
    body.extend_from_slice(&[0; 12]);
}

impl DeviceInfo {
    pub(super) fn decode(body: &[u8]) -> Result<Self, ReplyError> {
        let (raw, _) = split::<RawDeviceInfo>(body)?;
        Ok(Self {
            flags: DeviceFlags(raw.flags.get()),
            regions: raw.regions.get(),
            interrupts: raw.interrupts.get(),
        })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let raw = RawDeviceInfo {
            argsz: 16.into(),
            flags: self.flags.0.into(),
            regions: self.regions.into(),
            interrupts: self.interrupts.into(),
        };
        body.extend_from_slice(raw.as_bytes());
    }
}

flags! {
    /// What can be done with a region. Whether it has capabilities is told by the capabilities.
    RegionFlags {
        /// It can be read.
        READ = 1 << 0,
        /// It can be written.
        WRITE = 1 << 1,
        /// It can be mapped: a descriptor comes with the reply.
        MMAP = 1 << 2,
    }
}

/// "There are capabilities"; never in a [`RegionInfo`], which has them.
const CAPABILITIES: RegionFlags = RegionFlags(1 << 3);

/// The reply to DEVICE_GET_REGION_INFO.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionInfo {
    /// Which region.
    pub index: u32,
    /// What can be done with it.
    pub flags: RegionFlags,
    /// In bytes; 0 for a region that the device does not have.
    pub size: u64,
    /// Where the region begins in the file whose descriptor comes with the reply.
    pub file_offset: u64,
    /// In the order of the chain.
    pub capabilities: Vec<RegionCapability>,
}

/// What else there is to say of a region (`vfio_info_cap_header`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionCapability {
    /// Only these parts can be mapped; their offsets are from the start of the region.
    SparseMmap(Vec<SparseArea>),
    /// A region that is none of PCI's.
    Type {
        /// Its type.
        kind: u32,
        /// Its subtype.
        subtype: u32,
    },
    /// The pages that hold the MSI-X table may be mapped.
    MsixMappable,
    /// One that we do not know; its content is lost.
    Unknown {
        /// Its number.
        id: u16,
    },
}

/// A part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseArea {
    /// From the start of the region, in bytes.
    pub offset: u64,
    /// In bytes.
    pub size: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawRegionInfo {
    argsz: U32,
    flags: U32,
    index: U32,
    capabilities: U32,
    size: U64,
    offset: U64,
}

const _: () = assert!(size_of::<RawRegionInfo>() == 32);

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawCapability {
    id: U16,
    version: U16,
    next: U32,
}

const _: () = assert!(size_of::<RawCapability>() == 8);

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawArea {
    offset: U64,
    size: U64,
}

const _: () = assert!(size_of::<RawArea>() == 16);

const SPARSE_MMAP: u16 = 1;
const TYPE: u16 = 2;
const MSIX_MAPPABLE: u16 = 3;

pub(super) fn decode_region_query(body: &[u8]) -> Result<Query, DecodeError> {
    let (raw, _) = split::<RawRegionInfo>(body)?;
    let argsz = raw.argsz.get();
    check_argsz(argsz, 32)?;
    Ok(Query { argsz, index: raw.index.get() })
}

pub(super) fn encode_region_query(query: Query, body: &mut Vec<u8>) {
    RegionInfo { index: query.index, ..RegionInfo::default() }.encode(query.argsz, body);
}

impl RegionInfo {
    /// The parts that can be mapped, if it is not the whole.
    pub fn areas(&self) -> Option<&[SparseArea]> {
        self.capabilities.iter().find_map(|capability| match capability {
            RegionCapability::SparseMmap(areas) => Some(areas.as_slice()),
            _ => None,
        })
    }

    /// The bytes that all of it takes: the `argsz` that a client needs.
    pub fn encoded_size(&self) -> u32 {
        let capabilities = self.capabilities.iter().map(RegionCapability::encoded_size);
        field(capabilities.fold(size_of::<RawRegionInfo>(), usize::saturating_add))
    }

    pub(super) fn encode(&self, argsz: u32, body: &mut Vec<u8>) {
        let start = body.len();
        let (flag, first) =
            if self.capabilities.is_empty() { (RegionFlags(0), 0) } else { (CAPABILITIES, 32) };
        let raw = RawRegionInfo {
            argsz: argsz.into(),
            flags: self.flags.without(CAPABILITIES).union(flag).0.into(),
            index: self.index.into(),
            capabilities: first.into(),
            size: self.size.into(),
            offset: self.file_offset.into(),
        };
        body.extend_from_slice(raw.as_bytes());
        let mut capabilities = self.capabilities.iter().peekable();
        while let Some(capability) = capabilities.next() {
            let end = body.len().saturating_sub(start).saturating_add(capability.encoded_size());
            let next = if capabilities.peek().is_some() { field(end) } else { 0 };
            capability.encode(next, body);
        }
    }

    /// The information, and the `argsz` that all of it needs.
    pub(super) fn decode(body: &[u8]) -> Result<(Self, u32), ReplyError> {
        let (raw, rest) = split::<RawRegionInfo>(body)?;
        let flags = RegionFlags(raw.flags.get());
        let mut info = Self {
            index: raw.index.get(),
            flags: flags.without(CAPABILITIES),
            size: raw.size.get(),
            file_offset: raw.offset.get(),
            capabilities: Vec::new(),
        };
        // rust-vmm's server tells of capabilities also where it did not send them.
        if flags.contains(CAPABILITIES) && !rest.is_empty() {
            info.capabilities = decode_chain(body, raw.capabilities.get())?;
        }
        Ok((info, raw.argsz.get()))
    }
}

/// Follows the chain from `offset`. Each step must lead forward, so that it ends.
fn decode_chain(body: &[u8], mut offset: u32) -> Result<Vec<RegionCapability>, ReplyError> {
    let mut capabilities = Vec::new();
    let mut free = size_of::<RawRegionInfo>();
    while offset != 0 {
        let wrong = ReplyError::CapabilityChain { offset, length: body.len() };
        let start = usize::try_from(offset).map_err(|_| wrong.clone())?;
        if start < free {
            return Err(wrong);
        }
        let (header, content) = body
            .get(start..)
            .and_then(|bytes| RawCapability::read_from_prefix(bytes).ok())
            .ok_or(wrong.clone())?;
        capabilities.push(RegionCapability::decode(header.id.get(), content).ok_or(wrong)?);
        free = start.saturating_add(size_of::<RawCapability>());
        offset = header.next.get();
    }
    Ok(capabilities)
}

impl RegionCapability {
    fn encoded_size(&self) -> usize {
        let content = match self {
            Self::SparseMmap(areas) => areas.len().saturating_mul(size_of::<RawArea>()).saturating_add(8),
            Self::Type { .. } => 8,
            Self::MsixMappable | Self::Unknown { .. } => 0,
        };
        content.saturating_add(size_of::<RawCapability>())
    }

    fn encode(&self, next: u32, body: &mut Vec<u8>) {
        let id = match self {
            Self::SparseMmap(_) => SPARSE_MMAP,
            Self::Type { .. } => TYPE,
            Self::MsixMappable => MSIX_MAPPABLE,
            Self::Unknown { id } => *id,
        };
        body.extend_from_slice(
            RawCapability { id: id.into(), version: 1.into(), next: next.into() }.as_bytes(),
        );
        match self {
            Self::SparseMmap(areas) => {
                body.extend_from_slice(&field(areas.len()).to_le_bytes());
                body.extend_from_slice(&[0; 4]);
                for area in areas {
                    let raw = RawArea { offset: area.offset.into(), size: area.size.into() };
                    body.extend_from_slice(raw.as_bytes());
                }
            }
            Self::Type { kind, subtype } => {
                body.extend_from_slice(&kind.to_le_bytes());
                body.extend_from_slice(&subtype.to_le_bytes());
            }
            Self::MsixMappable | Self::Unknown { .. } => {}
        }
    }

    /// `None` if the content is cut short.
    fn decode(id: u16, content: &[u8]) -> Option<Self> {
        Some(match id {
            SPARSE_MMAP => {
                let ([count, _reserved], rest) = <[U32; 2]>::read_from_prefix(content).ok()?;
                let count = usize::try_from(count.get()).ok()?;
                let (areas, _) = <[RawArea]>::ref_from_prefix_with_elems(rest, count).ok()?;
                let areas =
                    areas.iter().map(|raw| SparseArea { offset: raw.offset.get(), size: raw.size.get() });
                Self::SparseMmap(areas.collect())
            }
            TYPE => {
                let ([kind, subtype], _) = <[U32; 2]>::read_from_prefix(content).ok()?;
                Self::Type { kind: kind.get(), subtype: subtype.get() }
            }
            MSIX_MAPPABLE => Self::MsixMappable,
            _ => Self::Unknown { id },
        })
    }
}

/// What a descriptor of a sub-region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFdKind(pub u32);

impl IoFdKind {
    /// Written to by KVM when the guest stores to the sub-region.
    pub const IOEVENTFD: Self = Self(0);
    /// Carries the guest's accesses (never merged into Linux).
    pub const IOREGIONFD: Self = Self(1);
    /// libvfio-user's: an ioeventfd that also keeps the value. Needs a patched KVM.
    pub const IOEVENTFD_SHADOW: Self = Self(2);
}

/// A part of a region that the client may serve by a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFd {
    /// From the start of the region, in bytes.
    pub offset: u64,
    /// In bytes.
    pub size: u64,
    /// Which of the reply's descriptors it is; several may share one.
    pub descriptor: u32,
    /// What the descriptor is.
    pub kind: IoFdKind,
    /// KVM's flags: 1 only the value `datum` counts, 2 port I/O.
    pub flags: u32,
    /// The value that an ioeventfd waits for; an ioregionfd's user data.
    pub datum: u64,
    /// Where a shadow ioeventfd keeps the value. Only libvfio-user's longer entries have room for it; ours do not.
    pub shadow: Option<Shadow>,
}

/// Where a shadow ioeventfd keeps what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shadow {
    /// Which of the reply's descriptors is the memory.
    pub descriptor: u32,
    /// Where in it, in bytes.
    pub offset: u64,
}

/// The reply to DEVICE_GET_REGION_IO_FDS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IoFds {
    /// Which region.
    pub index: u32,
    /// How many sub-regions there are; all of them are in `entries`, or none if the client had no room.
    pub count: u32,
    /// The sub-regions.
    pub entries: Vec<IoFd>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawIoFds {
    argsz: U32,
    flags: U32,
    index: U32,
    count: U32,
}

const _: () = assert!(size_of::<RawIoFds>() == 16);

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawIoFd {
    offset: U64,
    size: U64,
    descriptor: U32,
    kind: U32,
    flags: U32,
    reserved: U32,
    datum: U64,
}

const _: () = assert!(size_of::<RawIoFd>() == 40);

/// libvfio-user's entry (`vfio_user_sub_region_ioeventfd`): longer by where a shadow ioeventfd keeps its value.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawLongIoFd {
    offset: U64,
    size: U64,
    descriptor: U32,
    kind: U32,
    flags: U32,
    shadow_descriptor: U32,
    shadow_offset: U64,
    datum: U64,
}

const _: () = assert!(size_of::<RawLongIoFd>() == 48);

pub(super) fn decode_io_fds_query(body: &[u8]) -> Result<Query, DecodeError> {
    let (raw, _) = split::<RawIoFds>(body)?;
    let (argsz, flags, count) = (raw.argsz.get(), raw.flags.get(), raw.count.get());
    check_argsz(argsz, 16)?;
    if flags != 0 {
        return Err(DecodeError::Flags { flags });
    }
    if count != 0 {
        return Err(DecodeError::Range { start: 0, count: count.into() });
    }
    Ok(Query { argsz, index: raw.index.get() })
}

pub(super) fn encode_io_fds_query(query: Query, body: &mut Vec<u8>) {
    let raw =
        RawIoFds { argsz: query.argsz.into(), flags: 0.into(), index: query.index.into(), count: 0.into() };
    body.extend_from_slice(raw.as_bytes());
}

impl IoFds {
    /// All of a region's sub-regions.
    pub fn new(index: u32, entries: Vec<IoFd>) -> Self {
        Self { index, count: field(entries.len()), entries }
    }

    /// The bytes that a reply with all of them takes: the `argsz` that a client needs.
    pub fn encoded_size(&self) -> u32 {
        self.count.saturating_mul(field(size_of::<RawIoFd>())).saturating_add(field(size_of::<RawIoFds>()))
    }

    pub(super) fn encode(&self, argsz: u32, body: &mut Vec<u8>) {
        let raw = RawIoFds {
            argsz: argsz.into(),
            flags: 0.into(),
            index: self.index.into(),
            count: self.count.into(),
        };
        body.extend_from_slice(raw.as_bytes());
        for entry in &self.entries {
            let raw = RawIoFd {
                offset: entry.offset.into(),
                size: entry.size.into(),
                descriptor: entry.descriptor.into(),
                kind: entry.kind.0.into(),
                flags: entry.flags.into(),
                reserved: 0.into(),
                datum: entry.datum.into(),
            };
            body.extend_from_slice(raw.as_bytes());
        }
    }

    /// The list, and the `argsz` that all of it needs.
    pub(super) fn decode(body: &[u8]) -> Result<(Self, u32), ReplyError> {
        let (raw, list) = split::<RawIoFds>(body)?;
        let count = raw.count.get();
        let wrong = ReplyError::IoFds { length: list.len(), count };
        let entries = if list.is_empty() {
            Vec::new()
        } else {
            let count = usize::try_from(count).map_err(|_| wrong.clone())?;
            let stride = list.len().checked_div(count).ok_or(wrong.clone())?;
            if stride.checked_mul(count) != Some(list.len()) {
                return Err(wrong);
            }
            let decode = match stride {
                _ if stride == size_of::<RawIoFd>() => IoFd::decode,
                _ if stride == size_of::<RawLongIoFd>() => IoFd::decode_long,
                _ => return Err(wrong),
            };
            list.chunks_exact(stride).map(decode).collect::<Option<_>>().ok_or(wrong)?
        };
        Ok((Self { index: raw.index.get(), count, entries }, raw.argsz.get()))
    }
}

impl IoFd {
    fn decode(entry: &[u8]) -> Option<Self> {
        let raw = RawIoFd::read_from_bytes(entry).ok()?;
        Some(Self {
            offset: raw.offset.get(),
            size: raw.size.get(),
            descriptor: raw.descriptor.get(),
            kind: IoFdKind(raw.kind.get()),
            flags: raw.flags.get(),
            datum: raw.datum.get(),
            shadow: None,
        })
    }

    fn decode_long(entry: &[u8]) -> Option<Self> {
        let raw = RawLongIoFd::read_from_bytes(entry).ok()?;
        let kind = IoFdKind(raw.kind.get());
        // The other kinds have zeros there.
        let shadow = (kind == IoFdKind::IOEVENTFD_SHADOW)
            .then(|| Shadow { descriptor: raw.shadow_descriptor.get(), offset: raw.shadow_offset.get() });
        Some(Self {
            offset: raw.offset.get(),
            size: raw.size.get(),
            descriptor: raw.descriptor.get(),
            kind,
            flags: raw.flags.get(),
            datum: raw.datum.get(),
            shadow,
        })
    }
}
