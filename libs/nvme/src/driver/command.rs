//! I/O commands.

use zerocopy::little_endian::{U32, U64};

use super::error::SubmitError;
use super::limits::{MAX_BLOCKS, MAX_DSM_RANGES};
use super::prp::DataPointer;
use crate::spec::{DsmAttributes, EntryFlags, NvmOpcode, ReadWrite12, SubmissionEntry};
use crate::{Lba, Nsid};

/// A command to an I/O queue (6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Drive to memory.
    Read {
        /// The namespace.
        nsid: Nsid,
        /// The first block.
        start: Lba,
        /// How many, 1 to 65536.
        blocks: u32,
        /// Where to.
        data: DataPointer,
    },
    /// Memory to drive.
    Write {
        /// The namespace.
        nsid: Nsid,
        /// The first block.
        start: Lba,
        /// How many, 1 to 65536.
        blocks: u32,
        /// Where from.
        data: DataPointer,
        /// Complete it only when it is durable (FUA).
        durable: bool,
    },
    /// Fail with Compare Failure unless the blocks hold this data.
    Compare {
        /// The namespace.
        nsid: Nsid,
        /// The first block.
        start: Lba,
        /// How many, 1 to 65536.
        blocks: u32,
        /// What they should hold.
        data: DataPointer,
    },
    /// Read blocks and tell whether that is possible.
    Verify {
        /// The namespace.
        nsid: Nsid,
        /// The first block.
        start: Lba,
        /// How many, 1 to 65536.
        blocks: u32,
    },
    /// Make blocks unreadable until they are written.
    WriteUncorrectable {
        /// The namespace.
        nsid: Nsid,
        /// The first block.
        start: Lba,
        /// How many, 1 to 65536.
        blocks: u32,
    },
    /// Make durable what was completed before.
    Flush {
        /// The namespace.
        nsid: Nsid,
    },
    /// Make blocks read as zeroes.
    WriteZeroes {
        /// The namespace.
        nsid: Nsid,
        /// The first block.
        start: Lba,
        /// How many, 1 to 65536.
        blocks: u32,
        /// They may be deallocated (DEAC).
        deallocate: bool,
        /// Complete it only when it is durable (FUA).
        durable: bool,
    },
    /// Give blocks back: Dataset Management with AD.
    Deallocate {
        /// The namespace.
        nsid: Nsid,
        /// How many [`DsmRange`](crate::spec::DsmRange)s, 1 to 256.
        ranges: u32,
        /// Where they lie.
        data: DataPointer,
    },
}

impl Command {
    /// The submission entry, without its command identifier.
    #[inline(always)]
    pub fn entry(&self) -> Result<SubmissionEntry, SubmitError> {
        let entry = |opcode: NvmOpcode, nsid: Nsid, data: DataPointer| SubmissionEntry {
            opcode: opcode.0,
            flags: EntryFlags::default().with_data_pointer_bits(data.kind().0),
            nsid: U32::new(nsid.0),
            prp1: U64::new(data.first()),
            prp2: U64::new(data.second()),
            ..SubmissionEntry::default()
        };
        let range = |mut entry: SubmissionEntry, start: Lba, blocks: u32, flags: ReadWrite12| {
            entry.set_starting_lba(start.0);
            entry.dword12 = U32::new(flags.with_blocks(zero_based(blocks, MAX_BLOCKS)?).bits());
            Some(entry)
        };
        let flags = ReadWrite12::default();
        match *self {
            Self::Read { nsid, start, blocks, data } => {
                range(entry(NvmOpcode::READ, nsid, data), start, blocks, flags)
                    .ok_or(SubmitError::Blocks(blocks))
            }
            Self::Write { nsid, start, blocks, data, durable } => {
                let flags = flags.with_force_unit_access(durable);
                range(entry(NvmOpcode::WRITE, nsid, data), start, blocks, flags)
                    .ok_or(SubmitError::Blocks(blocks))
            }
            Self::Compare { nsid, start, blocks, data } => {
                range(entry(NvmOpcode::COMPARE, nsid, data), start, blocks, flags)
                    .ok_or(SubmitError::Blocks(blocks))
            }
            Self::Verify { nsid, start, blocks } => {
                range(entry(NvmOpcode::VERIFY, nsid, DataPointer::NONE), start, blocks, flags)
                    .ok_or(SubmitError::Blocks(blocks))
            }
            Self::WriteUncorrectable { nsid, start, blocks } => {
                range(entry(NvmOpcode::WRITE_UNCORRECTABLE, nsid, DataPointer::NONE), start, blocks, flags)
                    .ok_or(SubmitError::Blocks(blocks))
            }
            Self::Flush { nsid } => Ok(entry(NvmOpcode::FLUSH, nsid, DataPointer::NONE)),
            Self::WriteZeroes { nsid, start, blocks, deallocate, durable } => {
                let flags = flags.with_force_unit_access(durable).with_deallocate(deallocate);
                range(entry(NvmOpcode::WRITE_ZEROES, nsid, DataPointer::NONE), start, blocks, flags)
                    .ok_or(SubmitError::Blocks(blocks))
            }
            Self::Deallocate { nsid, ranges, data } => {
                let count = zero_based(ranges, MAX_DSM_RANGES).ok_or(SubmitError::Ranges(ranges))?;
                Ok(SubmissionEntry {
                    dword10: U32::new(u32::from(count)),
                    dword11: U32::new(DsmAttributes::default().with_deallocate(true).bits()),
                    ..entry(NvmOpcode::DATASET_MANAGEMENT, nsid, data)
                })
            }
        }
    }
}

/// A count of 1 to `max` as the zero-based number of the specification.
fn zero_based(count: u32, max: u32) -> Option<u16> {
    if count > max {
        return None;
    }
    u16::try_from(count.checked_sub(1)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NSID: Nsid = Nsid(7);

    #[test]
    fn entries() {
        let data = DataPointer::NONE;
        let write =
            Command::Write { nsid: NSID, start: Lba(0x1_2345_6789), blocks: 65536, data, durable: true };
        let entry = write.entry().unwrap();
        assert_eq!((entry.opcode, entry.nsid.get(), entry.starting_lba()), (1, 7, 0x1_2345_6789));
        assert_eq!(entry.dword12.get(), 1 << 30 | 0xffff);

        let zeroes =
            Command::WriteZeroes { nsid: NSID, start: Lba(1), blocks: 1, deallocate: true, durable: false };
        assert_eq!(zeroes.entry().unwrap().dword12.get(), 1 << 25);

        let trim = Command::Deallocate { nsid: NSID, ranges: 256, data }.entry().unwrap();
        assert_eq!((trim.dword10.get(), trim.dword11.get()), (255, 4));
    }

    #[test]
    fn counts_outside_the_specification() {
        let data = DataPointer::NONE;
        for blocks in [0, 65537, u32::MAX] {
            let read = Command::Read { nsid: NSID, start: Lba(0), blocks, data };
            assert_eq!(read.entry(), Err(SubmitError::Blocks(blocks)));
        }
        for ranges in [0, 257] {
            let trim = Command::Deallocate { nsid: NSID, ranges, data };
            assert_eq!(trim.entry(), Err(SubmitError::Ranges(ranges)));
        }
    }
}
