//! Scatter gather lists (4.4).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::{bit_fields, open_enum};

/// SGL descriptor, 16 bytes (4.4, figure 115): of a data block, a bit bucket, a segment or the last segment.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SglDescriptor {
    /// Where the data or the segment begins; reserved in a bit bucket.
    pub address: U64,
    /// Bytes of data, or of the segment's descriptors.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Type and subtype.
    pub identifier: SglIdentifier,
}

const _: () = assert!(size_of::<SglDescriptor>() == 16);

impl SglDescriptor {
    /// A descriptor of subtype address.
    pub const fn new(kind: SglType, address: u64, length: u32) -> Self {
        Self {
            address: U64::new(address),
            length: U32::new(length),
            reserved: [0; 3],
            identifier: SglIdentifier::from_bits(0).with_kind_bits(kind.0),
        }
    }

    /// From the two halves of a command's data pointer.
    pub const fn from_halves(halves: [U64; 2]) -> Self {
        zerocopy::transmute!(halves)
    }

    /// As the two halves of a command's data pointer.
    pub const fn halves(self) -> [U64; 2] {
        zerocopy::transmute!(self)
    }
}

bit_fields! {
    /// SGL identifier: the last byte of a descriptor (4.4, figure 116).
    SglIdentifier(u8) {
        /// Subtype: see [`SglSubtype`].
        field subtype_bits / with_subtype_bits: u8 [3:0];
        /// Type: see [`SglType`].
        field kind_bits / with_kind_bits: u8 [7:4];
    }
}

impl SglIdentifier {
    /// The descriptor's type.
    pub const fn kind(self) -> SglType {
        SglType(self.kind_bits())
    }

    /// Its subtype.
    pub const fn subtype(self) -> SglSubtype {
        SglSubtype(self.subtype_bits())
    }
}

open_enum! {
    /// SGL descriptor type (4.4, figure 117).
    SglType(u8) {
        /// A run of data.
        DATA_BLOCK = 0x0,
        /// Data of the drive that is dropped.
        BIT_BUCKET = 0x1,
        /// The next segment, which is not the last.
        SEGMENT = 0x2,
        /// The last segment.
        LAST_SEGMENT = 0x3,
        /// A run of data under a key (fabrics).
        KEYED_DATA_BLOCK = 0x4,
        /// Data that the transport knows where to find (fabrics).
        TRANSPORT_DATA_BLOCK = 0x5,
        /// Vendor specific.
        VENDOR = 0xf,
    }
}

open_enum! {
    /// SGL descriptor subtype (4.4, figure 118).
    SglSubtype(u8) {
        /// The address is one of memory.
        ADDRESS = 0x0,
        /// The address is an offset.
        OFFSET = 0x1,
        /// The transport's.
        TRANSPORT = 0xa,
    }
}

bit_fields! {
    /// SGLS of Identify Controller (figure 247).
    SglSupport(u32) {
        /// 0: no SGLs in NVM commands; 1: of any alignment; 2: of dwords.
        field support / with_support: u8 [1:0];
        /// Keyed Data Block.
        flag keyed / with_keyed [2];
        /// Bit Bucket.
        flag bit_bucket / with_bit_bucket [16];
        /// MPTR may point to a buffer of any alignment.
        flag byte_metadata / with_byte_metadata [17];
        /// The SGL may be longer than the data.
        flag excess_length / with_excess_length [18];
        /// MPTR may point to an SGL descriptor.
        flag metadata_sgl / with_metadata_sgl [19];
        /// Subtype offset.
        flag offset / with_offset [20];
        /// Transport Data Block.
        flag transport / with_transport [21];
    }
}
