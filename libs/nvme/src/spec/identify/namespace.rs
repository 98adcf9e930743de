//! Identify Namespace (5.15.2.1).

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::SIZE;
use crate::spec::bits::bit_fields;

/// Identify Namespace data structure, 4096 bytes (5.15.2.1, figure 245).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// NSZE: size in blocks; 0 is an inactive namespace.
    pub size: U64,
    /// NCAP: blocks that may be allocated.
    pub capacity: U64,
    /// NUSE: blocks that are allocated.
    pub utilization: U64,
    /// NSFEAT: features.
    pub features: NamespaceFeatures,
    /// NLBAF: LBA formats less one.
    pub formats: u8,
    /// FLBAS: the format in use.
    pub formatted: FormattedLbaSize,
    /// MC: metadata capabilities.
    pub metadata: u8,
    /// DPC: end-to-end data protection capabilities.
    pub protection: u8,
    /// DPS: end-to-end data protection settings.
    pub protection_settings: u8,
    /// NMIC: multi-path I/O and sharing capabilities.
    pub multi_path: u8,
    /// RESCAP: reservation capabilities.
    pub reservations: u8,
    /// FPI: format progress indicator.
    pub format_progress: u8,
    /// DLFEAT: deallocate logical block features.
    pub deallocate: DeallocateFeatures,
    /// NAWUN: atomic write unit normal, in blocks less one.
    pub atomic_write_normal: U16,
    /// NAWUPF: atomic write unit power fail, in blocks less one.
    pub atomic_write_power_fail: U16,
    /// NACWU: atomic compare and write unit, in blocks less one.
    pub atomic_compare_write: U16,
    /// NABSN: atomic boundary size normal, in blocks less one.
    pub atomic_boundary_normal: U16,
    /// NABO: atomic boundary offset, in blocks.
    pub atomic_boundary_offset: U16,
    /// NABSPF: atomic boundary size power fail, in blocks less one.
    pub atomic_boundary_power_fail: U16,
    /// NOIOB: optimal I/O boundary, in blocks; 0 is none.
    pub optimal_io_boundary: U16,
    /// NVMCAP: NVM capacity in bytes.
    pub nvm_capacity: U128,
    /// NPWG: preferred write granularity, in blocks less one.
    pub write_granularity: U16,
    /// NPWA: preferred write alignment, in blocks less one.
    pub write_alignment: U16,
    /// NPDG: preferred deallocate granularity, in blocks less one.
    pub deallocate_granularity: U16,
    /// NPDA: preferred deallocate alignment, in blocks less one.
    pub deallocate_alignment: U16,
    /// NOWS: optimal write size, in blocks less one.
    pub optimal_write: U16,
    /// Reserved.
    pub reserved74: [u8; 18],
    /// ANAGRPID: ANA group identifier.
    pub ana_group: U32,
    /// Reserved.
    pub reserved96: [u8; 3],
    /// NSATTR: attributes; bit 0: write protected.
    pub attributes: u8,
    /// NVMSETID: NVM set identifier.
    pub nvm_set: U16,
    /// ENDGID: endurance group identifier.
    pub endurance_group: U16,
    /// NGUID: globally unique identifier, big-endian.
    pub nguid: [u8; 16],
    /// EUI64: IEEE extended unique identifier, big-endian.
    pub eui64: [u8; 8],
    /// LBAF0 to LBAF15: LBA formats.
    pub lba_formats: [LbaFormat; 16],
    /// Reserved.
    pub reserved192: [u8; 192],
    /// Vendor specific.
    pub vendor_specific: [u8; 3712],
}

impl IdentifyNamespace {
    /// All zeroes: an inactive namespace.
    pub fn zeroed() -> Self {
        Self::new_zeroed()
    }

    /// The LBA format in use.
    pub fn lba_format(&self) -> LbaFormat {
        self.lba_formats.get(usize::from(self.formatted.index())).copied().unwrap_or_default()
    }
}

const _: () = {
    assert!(size_of::<IdentifyNamespace>() == SIZE);
    assert!(offset_of!(IdentifyNamespace, deallocate) == 33);
    assert!(offset_of!(IdentifyNamespace, nvm_capacity) == 48);
    assert!(offset_of!(IdentifyNamespace, ana_group) == 92);
    assert!(offset_of!(IdentifyNamespace, attributes) == 99);
    assert!(offset_of!(IdentifyNamespace, nguid) == 104);
    assert!(offset_of!(IdentifyNamespace, lba_formats) == 128);
    assert!(offset_of!(IdentifyNamespace, vendor_specific) == 384);
};

bit_fields! {
    /// NSFEAT (figure 245).
    NamespaceFeatures(u8) {
        /// Thin provisioning.
        flag thin_provisioning / with_thin_provisioning [0];
        /// NAWUN, NAWUPF and NACWU are the namespace's own.
        flag atomics / with_atomics [1];
        /// Deallocated or unwritten block error.
        flag deallocated_error / with_deallocated_error [2];
        /// NGUID and EUI64 are never reused.
        flag ids_never_reused / with_ids_never_reused [3];
        /// NPWG, NPWA, NPDG, NPDA and NOWS are defined.
        flag optimal_io / with_optimal_io [4];
    }
}

bit_fields! {
    /// FLBAS (figure 245).
    FormattedLbaSize(u8) {
        /// The index of the LBA format in use.
        field index / with_index: u8 [3:0];
        /// Metadata follows each block's data.
        flag extended_lba / with_extended_lba [4];
    }
}

bit_fields! {
    /// DLFEAT (figure 245).
    DeallocateFeatures(u8) {
        /// What a deallocated block reads as: 0 not said, 1 zeroes, 2 ones.
        field reads_as / with_reads_as: u8 [2:0];
        /// Write Zeroes may deallocate.
        flag write_zeroes / with_write_zeroes [3];
        /// A deallocated block's guard is its CRC.
        flag guard_crc / with_guard_crc [4];
    }
}

bit_fields! {
    /// LBA format, 4 bytes (figure 246).
    LbaFormat(u32) {
        /// MS: metadata bytes per block.
        field metadata / with_metadata: u16 [15:0];
        /// LBADS: log2 of the block's size in bytes; below 9 the format is unused.
        field data_shift / with_data_shift: u8 [23:16];
        /// RP: relative performance, 0 is best.
        field performance / with_performance: u8 [25:24];
    }
}
