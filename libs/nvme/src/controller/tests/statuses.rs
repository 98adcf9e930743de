//! Each command to a namespace under each condition: the status that the specification names.

use zerocopy::IntoBytes;

use super::machine::*;
use crate::Iova;
use crate::controller::{DiskError, Host, Options};
use crate::spec::{AdminOpcode, DataPointerType, DsmRange, EntryFlags, NvmOpcode, SglDescriptor, SglType};
use crate::spec::{Status, SubmissionEntry};

const BLOCKS: u64 = 2048;

/// What a command is like.
struct Kind {
    opcode: NvmOpcode,
    /// It moves as much data as its range has; none if it moves other data, or none.
    data: Data,
    /// It has a range of blocks.
    range: bool,
    writes: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    Blocks,
    Ranges,
    None,
}

const fn kind(opcode: NvmOpcode, data: Data, range: bool, writes: bool) -> Kind {
    Kind { opcode, data, range, writes }
}

const KINDS: [Kind; 8] = [
    kind(NvmOpcode::FLUSH, Data::None, false, false),
    kind(NvmOpcode::WRITE, Data::Blocks, true, true),
    kind(NvmOpcode::READ, Data::Blocks, true, false),
    kind(NvmOpcode::WRITE_UNCORRECTABLE, Data::None, true, true),
    kind(NvmOpcode::COMPARE, Data::Blocks, true, false),
    kind(NvmOpcode::WRITE_ZEROES, Data::None, true, true),
    kind(NvmOpcode::DATASET_MANAGEMENT, Data::Ranges, true, true),
    kind(NvmOpcode::VERIFY, Data::None, true, false),
];

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    Fused(u8),
    /// PSDT 11b.
    Pointer,
    Namespace(u32),
    /// The last block lies beyond the namespace.
    Range,
    /// The range wraps.
    Wrap,
    /// More data than MDTS.
    Length,
    ReadOnly,
    PrpOffset,
    /// Data out of reach.
    Reach,
    ShortSgl,
    SglType,
    Formatting,
    Disk(DiskError),
}

/// The status that is expected of it.
fn expected(kind: &Kind, fault: Fault) -> Result<u32, Status> {
    let data = kind.data != Data::None;
    let refused = |applies: bool, status| if applies { Err(status) } else { Ok(0) };
    match fault {
        Fault::None => Ok(0),
        Fault::Fused(_) | Fault::Pointer => Err(Status::INVALID_FIELD),
        Fault::Namespace(u32::MAX) if kind.opcode == NvmOpcode::FLUSH => Ok(0),
        Fault::Namespace(_) => Err(Status::INVALID_NAMESPACE),
        Fault::Range | Fault::Wrap => refused(kind.range, Status::LBA_OUT_OF_RANGE),
        Fault::Length => refused(kind.data == Data::Blocks, Status::INVALID_FIELD),
        Fault::ReadOnly => refused(kind.writes, Status::WRITE_PROTECTED),
        Fault::PrpOffset => refused(data, Status::INVALID_PRP_OFFSET),
        Fault::Reach => refused(data, Status::DATA_TRANSFER_ERROR),
        Fault::ShortSgl => refused(data, Status::INVALID_SGL_LENGTH),
        Fault::SglType => refused(data, Status::INVALID_SGL_TYPE),
        Fault::Formatting => Err(Status::FORMAT_IN_PROGRESS),
        // The controller keeps what Write Uncorrectable marks.
        Fault::Disk(_) if kind.opcode == NvmOpcode::WRITE_UNCORRECTABLE => Ok(0),
        Fault::Disk(error) => Err(error.into()),
    }
}

/// The command with its fault, on a machine that has it, too.
fn run(kind: &Kind, fault: Fault) -> Result<u32, Status> {
    let mut disk =
        RamDisk::new(BLOCKS, 9, if fault == Fault::Formatting { Pace::Later(0) } else { Pace::AtOnce });
    disk.geometry.read_only = fault == Fault::ReadOnly;
    if let Fault::Disk(error) = fault {
        disk.fail = Some(error);
    }
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 8);
    let pair = &mut pairs[0];
    if fault == Fault::Formatting {
        let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
        let opcode = AdminOpcode::FORMAT_NVM.0;
        machine.push(&mut admin, &SubmissionEntry { opcode, nsid: 1.into(), ..SubmissionEntry::default() });
        machine.poll();
    }
    let (lba, blocks) = match fault {
        Fault::Range => (BLOCKS - 1, 2),
        Fault::Wrap => (u64::MAX, 2),
        Fault::Length => (0, 1025),
        _ => (0, 2),
    };
    let mut entry = transfer(kind.opcode, lba, blocks, BUFFER_AT, 0);
    if kind.data == Data::Ranges {
        let range = DsmRange { attributes: 0.into(), blocks: blocks.into(), start: lba.into() };
        machine.host.write(Iova(BUFFER_AT), range.as_bytes()).unwrap();
        (entry.dword10, entry.dword11) = (0.into(), 4.into());
    }
    let sgl = |entry: SubmissionEntry, kind: SglType, length: u32| {
        let [prp1, prp2] = SglDescriptor::new(kind, BUFFER_AT, length).halves();
        let flags = EntryFlags::default().with_data_pointer_bits(DataPointerType::SGL.0);
        SubmissionEntry { flags, prp1, prp2, ..entry }
    };
    match fault {
        Fault::Fused(bits) => entry.flags = EntryFlags::default().with_fused(bits),
        Fault::Pointer => entry.flags = EntryFlags::default().with_data_pointer_bits(3),
        Fault::Namespace(nsid) => entry.nsid = nsid.into(),
        Fault::PrpOffset => entry.prp1 = (BUFFER_AT + 2).into(),
        Fault::Reach => entry.prp1 = (1 << 40).into(),
        Fault::ShortSgl => entry = sgl(entry, SglType::DATA_BLOCK, 15),
        Fault::SglType => entry = sgl(entry, SglType::KEYED_DATA_BLOCK, 1024),
        _ => {}
    }
    result(&machine.run(pair, entry))
}

#[test]
fn each_command_has_each_status() {
    let faults = [
        Fault::None,
        Fault::Fused(1),
        Fault::Fused(2),
        Fault::Fused(3),
        Fault::Pointer,
        Fault::Namespace(0),
        Fault::Namespace(2),
        Fault::Namespace(u32::MAX - 1),
        Fault::Namespace(u32::MAX),
        Fault::Range,
        Fault::Wrap,
        Fault::Length,
        Fault::ReadOnly,
        Fault::PrpOffset,
        Fault::Reach,
        Fault::ShortSgl,
        Fault::SglType,
        Fault::Formatting,
        Fault::Disk(DiskError::DataTransfer),
        Fault::Disk(DiskError::Read),
        Fault::Disk(DiskError::Write),
        Fault::Disk(DiskError::Mismatch),
        Fault::Disk(DiskError::Capacity),
        Fault::Disk(DiskError::Internal),
    ];
    for kind in &KINDS {
        for fault in faults {
            assert_eq!(run(kind, fault), expected(kind, fault), "{:?} with {fault:?}", kind.opcode);
        }
    }
}
