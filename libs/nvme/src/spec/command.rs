//! What commands carry in their dwords (4.2, 5, 6).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::{bit_fields, open_enum};

bit_fields! {
    /// Byte 1 of a submission entry: FUSE and PSDT (4.2, figure 104).
    EntryFlags(u8) {
        /// FUSE: 0 for a normal command, 1 and 2 for a fused pair's first and second.
        field fused / with_fused: u8 [1:0];
        /// PSDT: see [`DataPointerType`].
        field data_pointer_bits / with_data_pointer_bits: u8 [7:6];
    }
}

impl EntryFlags {
    /// PSDT.
    pub const fn data_pointer(self) -> DataPointerType {
        DataPointerType(self.data_pointer_bits())
    }
}

open_enum! {
    /// PSDT: how a command points to its data (4.2, figure 104).
    DataPointerType(u8) {
        /// PRP entries.
        PRP = 0,
        /// SGL; metadata in one buffer.
        SGL = 1,
        /// SGL; metadata in an SGL.
        SGL_METADATA_SGL = 2,
    }
}

bit_fields! {
    /// Dword 10 of the commands that create and delete queues (5.3, 5.4, 5.5, 5.6).
    CreateQueue(u32) {
        /// QID: the queue.
        field queue / with_queue: u16 [15:0];
        /// QSIZE: its entries less one; reserved in a deletion.
        field size / with_size: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 11 of Create I/O Completion Queue (5.3).
    CreateCompletionQueue(u32) {
        /// PC: physically contiguous.
        flag contiguous / with_contiguous [0];
        /// IEN: interrupts enabled.
        flag interrupts / with_interrupts [1];
        /// IV: interrupt vector.
        field vector / with_vector: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 11 of Create I/O Submission Queue (5.4).
    CreateSubmissionQueue(u32) {
        /// PC: physically contiguous.
        flag contiguous / with_contiguous [0];
        /// QPRIO: priority class under weighted round robin; 0 is urgent.
        field priority / with_priority: u8 [2:1];
        /// CQID: the completion queue.
        field completion_queue / with_completion_queue: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 10 of Abort (5.1).
    Abort(u32) {
        /// SQID: the submission queue.
        field submission_queue / with_submission_queue: u16 [15:0];
        /// CID: the command.
        field command_id / with_command_id: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 10 of Identify (5.15).
    Identify10(u32) {
        /// CNS: see [`Cns`](super::Cns).
        field cns / with_cns: u8 [7:0];
        /// CNTID: controller identifier.
        field controller / with_controller: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 10 of Get Features (5.9).
    GetFeatures(u32) {
        /// FID: see [`FeatureId`](super::FeatureId).
        field feature / with_feature: u8 [7:0];
        /// SEL: see [`FeatureSelect`](super::FeatureSelect).
        field select / with_select: u8 [10:8];
    }
}

bit_fields! {
    /// Dword 10 of Set Features (5.21).
    SetFeatures(u32) {
        /// FID: see [`FeatureId`](super::FeatureId).
        field feature / with_feature: u8 [7:0];
        /// SV: save the value.
        flag save / with_save [31];
    }
}

bit_fields! {
    /// Dword 10 of Get Log Page (5.14).
    GetLogPage10(u32) {
        /// LID: see [`LogPageId`](super::LogPageId).
        field page / with_page: u8 [7:0];
        /// LSP: log specific field.
        field specific / with_specific: u8 [11:8];
        /// RAE: retain the asynchronous event.
        flag retain_event / with_retain_event [15];
        /// NUMDL: low half of the number of dwords less one.
        field dwords_low / with_dwords_low: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 11 of Get Log Page (5.14).
    GetLogPage11(u32) {
        /// NUMDU: high half of the number of dwords less one.
        field dwords_high / with_dwords_high: u16 [15:0];
        /// Log specific identifier.
        field specific_id / with_specific_id: u16 [31:16];
    }
}

bit_fields! {
    /// Dword 12 of Read, Write, Write Zeroes, Compare and Verify (6.6, 6.9, 6.15, 6.16).
    ReadWrite12(u32) {
        /// NLB: blocks less one.
        field blocks / with_blocks: u16 [15:0];
        /// DTYPE: directive type (Write).
        field directive / with_directive: u8 [23:20];
        /// DEAC: the blocks may be deallocated (Write Zeroes).
        flag deallocate / with_deallocate [25];
        /// PRINFO: protection information field.
        field protection / with_protection: u8 [29:26];
        /// FUA: force unit access.
        flag force_unit_access / with_force_unit_access [30];
        /// LR: limited retry.
        flag limited_retry / with_limited_retry [31];
    }
}

bit_fields! {
    /// Dword 10 of Format NVM (5.23).
    FormatNvm(u32) {
        /// LBAF: the index of the LBA format.
        field lba_format / with_lba_format: u8 [3:0];
        /// MSET: metadata follow each block's data.
        flag extended_lba / with_extended_lba [4];
        /// PI: protection information type; 0 is none.
        field protection / with_protection: u8 [7:5];
        /// PIL: protection information is in the metadata's first bytes.
        flag protection_first / with_protection_first [8];
        /// SES: see [`SecureErase`].
        field erase_bits / with_erase_bits: u8 [11:9];
        /// LBAFU: the index's upper bits (2.0).
        field lba_format_upper / with_lba_format_upper: u8 [13:12];
    }
}

impl FormatNvm {
    /// SES.
    pub const fn erase(self) -> SecureErase {
        SecureErase(self.erase_bits())
    }
}

open_enum! {
    /// SES: secure erase settings (5.23).
    SecureErase(u8) {
        /// None is asked for.
        NONE = 0,
        /// The user data are erased.
        USER_DATA = 1,
        /// The key that the user data were encrypted with is erased.
        CRYPTOGRAPHIC = 2,
    }
}

bit_fields! {
    /// Dword 10 of Dataset Management (6.7).
    DsmCount(u32) {
        /// NR: ranges less one.
        field ranges / with_ranges: u8 [7:0];
    }
}

bit_fields! {
    /// Dword 11 of Dataset Management (6.7).
    DsmAttributes(u32) {
        /// IDR: will be read as a whole.
        flag integral_read / with_integral_read [0];
        /// IDW: will be written as a whole.
        flag integral_write / with_integral_write [1];
        /// AD: deallocate.
        flag deallocate / with_deallocate [2];
    }
}

/// A range of Dataset Management, 16 bytes (6.7.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DsmRange {
    /// Context attributes.
    pub attributes: U32,
    /// Length in logical blocks.
    pub blocks: U32,
    /// Starting LBA.
    pub start: U64,
}

const _: () = assert!(size_of::<DsmRange>() == 16);
