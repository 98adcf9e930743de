//! Queue entries (4.2, 4.6).

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::command::EntryFlags;
use super::sgl::SglDescriptor;
use super::status::StatusField;

/// Submission queue entry, 64 bytes (4.2).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SubmissionEntry {
    /// OPC: an [`AdminOpcode`](super::AdminOpcode) or an [`NvmOpcode`](super::NvmOpcode).
    pub opcode: u8,
    /// FUSE and PSDT.
    pub flags: EntryFlags,
    /// CID: command identifier.
    pub command_id: U16,
    /// NSID: namespace identifier.
    pub nsid: U32,
    /// Dwords 2 and 3, reserved.
    pub reserved: [U32; 2],
    /// MPTR: metadata pointer.
    pub metadata: U64,
    /// DPTR: PRP entry 1 (or the SGL's first half).
    pub prp1: U64,
    /// DPTR: PRP entry 2.
    pub prp2: U64,
    /// Command dword 10.
    pub dword10: U32,
    /// Command dword 11.
    pub dword11: U32,
    /// Command dword 12.
    pub dword12: U32,
    /// Command dword 13.
    pub dword13: U32,
    /// Command dword 14.
    pub dword14: U32,
    /// Command dword 15.
    pub dword15: U32,
}

impl SubmissionEntry {
    /// Dwords 10 and 11 as the number that they form in I/O commands: the starting LBA.
    pub const fn starting_lba(&self) -> u64 {
        (self.dword11.get() as u64) << 32 | self.dword10.get() as u64
    }

    /// DPTR as an SGL descriptor.
    pub const fn sgl(&self) -> SglDescriptor {
        SglDescriptor::from_halves([self.prp1, self.prp2])
    }

    /// Sets dwords 10 and 11 to a starting LBA.
    pub const fn set_starting_lba(&mut self, lba: u64) {
        self.dword10 = U32::new(super::bits::low::u32(lba));
        self.dword11 = U32::new(super::bits::low::u32(lba >> 32));
    }
}

const _: () = {
    assert!(size_of::<SubmissionEntry>() == 64);
    assert!(offset_of!(SubmissionEntry, nsid) == 4);
    assert!(offset_of!(SubmissionEntry, metadata) == 16);
    assert!(offset_of!(SubmissionEntry, prp1) == 24);
    assert!(offset_of!(SubmissionEntry, prp2) == 32);
    assert!(offset_of!(SubmissionEntry, dword10) == 40);
};

/// Completion queue entry, 16 bytes (4.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CompletionEntry {
    /// Dword 0: the command's result.
    pub result: U32,
    /// Dword 1, reserved.
    pub reserved: U32,
    /// SQHD: where the submission queue's head was.
    pub submission_head: U16,
    /// SQID: which submission queue the command came from.
    pub submission_queue: U16,
    /// CID: command identifier.
    pub command_id: U16,
    /// The phase tag and the status.
    pub status: StatusField,
}

impl CompletionEntry {
    /// The entry's four dwords, as numbers.
    pub const fn dwords(&self) -> [u32; 4] {
        [
            self.result.get(),
            self.reserved.get(),
            (self.submission_queue.get() as u32) << 16 | self.submission_head.get() as u32,
            (self.status.bits() as u32) << 16 | self.command_id.get() as u32,
        ]
    }

    /// The entry of four dwords.
    pub const fn from_dwords(dwords: [u32; 4]) -> Self {
        const fn half(dword: u32) -> u16 {
            super::bits::low::u16(dword as u64)
        }
        let [result, reserved, queue, status] = dwords;
        Self {
            result: U32::new(result),
            reserved: U32::new(reserved),
            submission_head: U16::new(half(queue)),
            submission_queue: U16::new(half(queue >> 16)),
            command_id: U16::new(half(status)),
            status: StatusField::from_bits(half(status >> 16)),
        }
    }
}

const _: () = {
    assert!(size_of::<CompletionEntry>() == 16);
    assert!(offset_of!(CompletionEntry, submission_head) == 8);
    assert!(offset_of!(CompletionEntry, command_id) == 12);
    assert!(offset_of!(CompletionEntry, status) == 14);
};
