//! Reads, writes and what else goes to namespaces.

use zerocopy::IntoBytes;

use super::machine::*;
use crate::Iova;
use crate::controller::{DiskError, Host, Options};
use crate::spec::{
    AdminOpcode, DataPointerType, EntryFlags, IdentifyController, NvmOpcode, SglDescriptor, SglType, Status,
    SubmissionEntry,
};

const BLOCKS: u64 = 1024;

fn with(disk: RamDisk) -> (Machine, Pair) {
    let (machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 64);
    (machine, pairs.remove(0))
}

fn ready(pace: Pace) -> (Machine, Pair) {
    with(RamDisk::new(BLOCKS, 9, pace))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 7 + index / 251) as u8).collect()
}

fn disk(machine: &mut Machine) -> &mut RamDisk {
    &mut machine.controller.disks.namespaces[0].disk
}

#[test]
fn what_was_written_by_a_prp_list_is_read_back() {
    for pace in [Pace::AtOnce, Pace::Later(1)] {
        let (mut machine, mut pair) = ready(pace);
        // 20 KiB from an offset: a first part page and a list of five.
        let list: Vec<u8> = (1..=5).flat_map(|page| (BUFFER_AT + page * 0x1000).to_le_bytes()).collect();
        machine.host.write(Iova(0xa000), &list).unwrap();
        let data = pattern(20 * 1024);
        machine.host.write(Iova(BUFFER_AT + 0x200), &data).unwrap();
        let write = transfer(NvmOpcode::WRITE, 8, 40, BUFFER_AT + 0x200, 0xa000);
        assert_eq!(result(&machine.run(&mut pair, write)), Ok(0));

        machine.host.slice(Iova(BUFFER_AT), 0x8000).unwrap().fill(0);
        let read = transfer(NvmOpcode::READ, 8, 40, BUFFER_AT + 0x200, 0xa000);
        assert_eq!(result(&machine.run(&mut pair, read)), Ok(0));
        assert_eq!(machine.host.slice(Iova(BUFFER_AT + 0x200), data.len()).unwrap(), data);
        let counters = machine.controller.counters();
        assert_eq!((counters.reads.get(), counters.bytes_read.get()), (1, 20 * 1024));
        assert_eq!((counters.writes.get(), counters.bytes_written.get()), (1, 20 * 1024));
        assert!(disk(&mut machine).commits > 0);
    }
}

/// The entry with its data described by an SGL.
fn by_sgl(entry: SubmissionEntry, kind: DataPointerType, sgl: SglDescriptor) -> SubmissionEntry {
    let [prp1, prp2] = sgl.halves();
    SubmissionEntry { flags: EntryFlags::default().with_data_pointer_bits(kind.0), prp1, prp2, ..entry }
}

#[test]
fn what_was_written_by_an_sgl_is_read_back() {
    for (pace, kind) in
        [(Pace::AtOnce, DataPointerType::SGL), (Pace::Later(1), DataPointerType::SGL_METADATA_SGL)]
    {
        let (mut machine, mut pair) = ready(pace);
        let data = pattern(4096);
        // In two pieces at odd addresses, and a bit bucket that means nothing in a write.
        machine.host.write(Iova(BUFFER_AT + 1), &data[..1111]).unwrap();
        machine.host.write(Iova(BUFFER_AT + 0x2003), &data[1111..]).unwrap();
        let list = [
            SglDescriptor::new(SglType::DATA_BLOCK, BUFFER_AT + 1, 1111),
            SglDescriptor::new(SglType::BIT_BUCKET, 0, 77),
            SglDescriptor::new(SglType::DATA_BLOCK, BUFFER_AT + 0x2003, 2985),
        ];
        machine.host.write(Iova(0xa008), list.as_bytes()).unwrap();
        let segment = SglDescriptor::new(SglType::LAST_SEGMENT, 0xa008, 48);
        let write = by_sgl(transfer(NvmOpcode::WRITE, 8, 8, 0, 0), kind, segment);
        assert_eq!(result(&machine.run(&mut pair, write)), Ok(0));
        assert!(disk(&mut machine).data[8 * 512..16 * 512] == data);

        // The same list drops 77 bytes of a read; it describes that much more than is needed.
        machine.host.slice(Iova(BUFFER_AT), 0x4000).unwrap().fill(0xee);
        let read = by_sgl(transfer(NvmOpcode::READ, 8, 8, 0, 0), kind, segment);
        assert_eq!(result(&machine.run(&mut pair, read)), Ok(0));
        let mut expected = vec![0xee; 0x4000];
        expected[1..1112].copy_from_slice(&data[..1111]);
        expected[0x2003..0x2003 + 2908].copy_from_slice(&data[1188..]);
        assert!(machine.host.slice(Iova(BUFFER_AT), 0x4000).unwrap() == expected);
        let counters = machine.controller.counters();
        assert_eq!((counters.errors.get(), counters.sgls.get()), (0, 2));
    }
}

#[test]
fn sgls_are_for_io_and_their_errors_are_told() {
    let (mut machine, mut pair) = ready(Pace::AtOnce);
    let short = SglDescriptor::new(SglType::DATA_BLOCK, BUFFER_AT, 511);
    let entry = by_sgl(transfer(NvmOpcode::READ, 0, 1, 0, 0), DataPointerType::SGL, short);
    let completion = machine.run(&mut pair, entry);
    assert_eq!(result(&completion), Err(Status::INVALID_SGL_LENGTH));
    assert!(completion.status.do_not_retry());

    // Ranges for a deallocation: Linux always maps a page for them.
    let page = SglDescriptor::new(SglType::DATA_BLOCK, BUFFER_AT, 4096);
    let mut entry = transfer(NvmOpcode::DATASET_MANAGEMENT, 0, 1, 0, 0);
    entry.dword11 = 4.into();
    let entry = by_sgl(entry, DataPointerType::SGL, page);
    assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));

    let identify =
        SubmissionEntry { opcode: AdminOpcode::IDENTIFY.0, dword10: 1.into(), ..Default::default() };
    let identify = SubmissionEntry { prp1: DATA_AT.into(), ..identify };
    assert_eq!(machine.run_admin(identify), Ok(0));
    let support = machine.data::<IdentifyController>().sgl_support;
    assert_eq!(support.bits(), 0xf_0001);
    for kind in [DataPointerType::SGL, DataPointerType::SGL_METADATA_SGL, DataPointerType(3)] {
        let page = SglDescriptor::new(SglType::DATA_BLOCK, DATA_AT, 4096);
        assert_eq!(machine.run_admin(by_sgl(identify, kind, page)), Err(Status::INVALID_FIELD));
    }
}

#[test]
fn ranges_are_checked_to_the_block() {
    let (mut machine, mut pair) = ready(Pace::AtOnce);
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES] {
        for (lba, blocks, expected) in [
            (BLOCKS - 1, 1, Ok(0)),
            (BLOCKS - 1, 2, Err(Status::LBA_OUT_OF_RANGE)),
            (BLOCKS, 1, Err(Status::LBA_OUT_OF_RANGE)),
            (u64::MAX, 1, Err(Status::LBA_OUT_OF_RANGE)),
            (u64::MAX, 8, Err(Status::LBA_OUT_OF_RANGE)),
        ] {
            let entry = transfer(opcode, lba, blocks, BUFFER_AT, 0);
            assert_eq!(result(&machine.run(&mut pair, entry)), expected, "{opcode:?} {lba} {blocks}");
        }
    }
}

/// Fault 38.
#[test]
fn nlb_ffff_is_65536_blocks() {
    let (mut machine, mut pair) = with(RamDisk::new(65536 + 16, 9, Pace::AtOnce));
    disk(&mut machine).data.fill(0xaa);
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
        let entry = transfer(opcode, 0, 65536, BUFFER_AT, 0);
        assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::INVALID_FIELD), "over MDTS");
    }
    let entry = transfer(NvmOpcode::WRITE_ZEROES, 8, 65536, 0, 0);
    assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
    let data = &disk(&mut machine).data;
    assert!(data[8 * 512..(8 + 65536) * 512].iter().all(|byte| *byte == 0));
    assert!(data[..8 * 512].iter().chain(&data[(8 + 65536) * 512..]).all(|byte| *byte == 0xaa));
}

#[test]
fn mdts_is_the_limit() {
    let (mut machine, mut pair) = with(RamDisk::new(4096, 9, Pace::AtOnce));
    // 512 KiB: 1024 blocks, by a list of 127 pages.
    let list: Vec<u8> = (1..=128).flat_map(|page| (BUFFER_AT + page * 0x1000).to_le_bytes()).collect();
    machine.host.write(Iova(0xa000), &list).unwrap();
    let entry = transfer(NvmOpcode::READ, 0, 1024, BUFFER_AT, 0xa000);
    assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
    let entry = transfer(NvmOpcode::READ, 0, 1025, BUFFER_AT, 0xa000);
    assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::INVALID_FIELD));
}

#[test]
fn what_is_not_supported_is_refused() {
    let (mut machine, mut pair) = ready(Pace::AtOnce);
    for flags in [0x01, 0x02, 0x03, 0x41, 0xc0] {
        let flags = EntryFlags::from_bits(flags);
        let entry = SubmissionEntry { flags, ..transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0) };
        assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::INVALID_FIELD));
    }
    for nsid in [0, 2, 0xffff_fffe, 0xffff_ffff] {
        let entry = SubmissionEntry { nsid: nsid.into(), ..transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0) };
        assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::INVALID_NAMESPACE));
    }
    for opcode in [NvmOpcode::RESERVATION_REPORT, NvmOpcode(0x80), NvmOpcode(0x7f)] {
        for nsid in [1, 9] {
            let entry = SubmissionEntry { nsid: nsid.into(), ..transfer(opcode, 0, 1, BUFFER_AT, 0) };
            assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::INVALID_OPCODE));
        }
    }
    assert_eq!(machine.controller.in_flight(), 0);
}

#[test]
fn a_read_only_namespace_is_read_and_flushed_only() {
    let mut disk = RamDisk::new(BLOCKS, 9, Pace::AtOnce);
    disk.geometry.read_only = true;
    let (mut machine, mut pair) = with(disk);
    let mut deallocate = transfer(NvmOpcode::DATASET_MANAGEMENT, 0, 1, BUFFER_AT, 0);
    deallocate.dword11 = 4.into();
    for entry in [
        transfer(NvmOpcode::WRITE, 0, 1, BUFFER_AT, 0),
        transfer(NvmOpcode::WRITE_ZEROES, 0, 1, 0, 0),
        deallocate,
    ] {
        assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::WRITE_PROTECTED));
    }
    for opcode in [NvmOpcode::READ, NvmOpcode::FLUSH] {
        assert_eq!(result(&machine.run(&mut pair, transfer(opcode, 0, 1, BUFFER_AT, 0))), Ok(0));
    }
}

#[test]
fn the_disks_errors_have_a_status_each() {
    for pace in [Pace::AtOnce, Pace::Later(1)] {
        let (mut machine, mut pair) = ready(pace);
        for (error, status) in [
            (DiskError::DataTransfer, Status::DATA_TRANSFER_ERROR),
            (DiskError::Read, Status::UNRECOVERED_READ_ERROR),
            (DiskError::Write, Status::WRITE_FAULT),
            (DiskError::Capacity, Status::CAPACITY_EXCEEDED),
            (DiskError::Internal, Status::INTERNAL_ERROR),
        ] {
            disk(&mut machine).fail = Some(error);
            let completion = machine.run(&mut pair, transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
            assert_eq!(result(&completion), Err(status));
            assert!(!completion.status.do_not_retry());
        }
    }
}

#[test]
fn dataset_management_deallocates_all_its_ranges_or_none() {
    let (mut machine, mut pair) = ready(Pace::AtOnce);
    let ranges = |machine: &mut Machine, ranges: &[(u64, u32)]| {
        let bytes: Vec<u8> = ranges
            .iter()
            .flat_map(|(start, blocks)| {
                [[0; 4], blocks.to_le_bytes()].concat().into_iter().chain(start.to_le_bytes())
            })
            .collect();
        machine.host.write(Iova(BUFFER_AT + 0x800), &bytes).unwrap();
        let mut entry = transfer(NvmOpcode::DATASET_MANAGEMENT, 0, 1, BUFFER_AT + 0x800, BUFFER_AT + 0x1000);
        entry.dword10 = (ranges.len() as u32 - 1).into();
        entry.dword11 = 4.into();
        entry
    };
    disk(&mut machine).data.fill(0xaa);
    // 256 ranges cross a page.
    let many: Vec<(u64, u32)> = (0..256).map(|index| (index * 4, 2)).collect();
    let entry = ranges(&mut machine, &many);
    assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
    let zeroed = |block: u64| block % 4 < 2;
    for (block, bytes) in (0..).zip(disk(&mut machine).data.chunks(512)) {
        assert!(bytes.iter().all(|byte| *byte == if zeroed(block) { 0 } else { 0xaa }), "{block}");
    }

    disk(&mut machine).data.fill(0xaa);
    for wrong in [(BLOCKS, 1), (u64::MAX, u32::MAX), (BLOCKS - 1, 2)] {
        let entry = ranges(&mut machine, &[(0, 1), wrong]);
        assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::LBA_OUT_OF_RANGE));
    }
    let empty = ranges(&mut machine, &[(BLOCKS, 0)]);
    assert_eq!(result(&machine.run(&mut pair, empty)), Ok(0));
    // Hints alone change nothing.
    let mut hint = ranges(&mut machine, &[(0, 1)]);
    hint.dword11 = 3.into();
    assert_eq!(result(&machine.run(&mut pair, hint)), Ok(0));
    assert!(disk(&mut machine).data.iter().all(|byte| *byte == 0xaa));
    assert_eq!(machine.controller.counters().dataset_management.get(), 3);
}

#[test]
fn flush_of_all_namespaces_waits_for_all_disks() {
    let disks = vec![
        RamDisk::new(16, 9, Pace::Later(1)),
        RamDisk::new(16, 12, Pace::AtOnce),
        RamDisk::new(16, 9, Pace::Later(1)),
    ];
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), disks, 1, 8);
    for namespace in &mut machine.controller.disks.namespaces {
        namespace.disk.data.fill(0xaa);
    }
    let mut flush = SubmissionEntry { opcode: NvmOpcode::FLUSH.0, ..SubmissionEntry::default() };
    flush.nsid = u32::MAX.into();
    assert_eq!(result(&machine.run(&mut pairs[0], flush)), Ok(0));
    for namespace in &machine.controller.disks.namespaces {
        assert!(namespace.disk.durable.iter().all(|byte| *byte == 0xaa));
    }
    machine.controller.disks.namespaces[2].disk.fail = Some(DiskError::Write);
    assert_eq!(result(&machine.run(&mut pairs[0], flush)), Err(Status::WRITE_FAULT));
    assert_eq!(machine.controller.in_flight(), 0);
}

#[test]
fn data_out_of_reach_is_a_data_transfer_error() {
    let (mut machine, mut pair) = ready(Pace::AtOnce);
    for prp1 in [1 << 40, u64::MAX - 3, 0x40_0000] {
        let entry = transfer(NvmOpcode::READ, 0, 1, prp1, BUFFER_AT);
        assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::DATA_TRANSFER_ERROR));
    }
}
