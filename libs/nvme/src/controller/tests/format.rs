//! Format NVM, over namespaces of different sizes and formats that share nothing.

use proptest::prelude::*;

use super::machine::*;
use crate::Iova;
use crate::controller::{DiskError, Options};
use crate::spec::{
    AdminOpcode, CommandsSupportedLog, FormatNvm, IdentifyController, IdentifyNamespace, LogPageId,
    NvmOpcode, Status, SubmissionEntry,
};

const ALL: u32 = u32::MAX;
/// Bytes of the namespaces, and log2 of their blocks at first.
const SHAPES: [(u64, u32); 3] = [(64 << 10, 9), (32 << 10, 12), (128 << 10, 9)];

fn disks(pace: Pace) -> Vec<RamDisk> {
    SHAPES.iter().map(|&(bytes, shift)| RamDisk::new(bytes >> shift, shift, pace)).collect()
}

fn start(pace: Pace) -> (Machine, Pair) {
    let (machine, mut pairs) = Machine::enabled(Options::default(), disks(pace), 1, 16);
    (machine, pairs.remove(0))
}

fn format_entry(nsid: u32, dword10: u32) -> SubmissionEntry {
    SubmissionEntry {
        opcode: AdminOpcode::FORMAT_NVM.0,
        nsid: nsid.into(),
        dword10: dword10.into(),
        ..SubmissionEntry::default()
    }
}

/// Formats to LBA format `index`.
fn format(machine: &mut Machine, nsid: u32, index: u32) -> Result<u32, Status> {
    machine.run_admin(format_entry(nsid, index))
}

fn identify(machine: &mut Machine, nsid: u32) -> IdentifyNamespace {
    machine.admin(AdminOpcode::IDENTIFY, nsid, 0, 0).unwrap();
    machine.data()
}

fn of(nsid: u32, entry: SubmissionEntry) -> SubmissionEntry {
    SubmissionEntry { nsid: nsid.into(), ..entry }
}

/// Lets the disks carry out so many operations each time they are asked.
fn set_pace(machine: &mut Machine, pace: Pace) {
    machine.controller.disks.namespaces.iter_mut().for_each(|namespace| namespace.disk.pace = pace);
}

#[test]
fn a_format_is_announced_and_seen_in_identify() {
    let (mut machine, _) = start(Pace::AtOnce);
    machine.admin(AdminOpcode::IDENTIFY, 0, 1, 0).unwrap();
    let controller = machine.data::<IdentifyController>();
    assert!(controller.admin_commands.format());
    // Each namespace by itself, no cryptographic erase.
    assert_eq!(controller.format_attributes.bits(), 0);
    machine
        .admin(AdminOpcode::GET_LOG_PAGE, 0, 1023 << 16 | u32::from(LogPageId::COMMANDS_SUPPORTED.0), 0)
        .unwrap();
    let effects = machine.data::<CommandsSupportedLog>().admin[0x80];
    assert!(effects.supported() && effects.data_change() && effects.namespace_change());

    let shape = |machine: &mut Machine, nsid| {
        let data = identify(machine, nsid);
        let shifts = [0, 1, 2].map(|index| data.lba_formats[index].data_shift());
        assert_eq!((shifts, data.formats), ([9, 12, 0], 1));
        (data.formatted.index(), data.size.get())
    };
    assert_eq!([1, 2, 3].map(|nsid| shape(&mut machine, nsid)), [(0, 128), (1, 8), (0, 256)]);
    assert_eq!(format(&mut machine, 1, 1), Ok(0));
    assert_eq!(format(&mut machine, 2, 0), Ok(0));
    assert_eq!([1, 2, 3].map(|nsid| shape(&mut machine, nsid)), [(1, 16), (0, 64), (0, 256)]);
}

#[test]
fn every_refusal_has_its_status() {
    let (mut machine, _) = start(Pace::AtOnce);
    let with = |format: FormatNvm| format.bits();
    let none = FormatNvm::default();
    for (nsid, dword10, expected) in [
        (1, 2, Status::INVALID_FORMAT),
        (ALL, 15, Status::INVALID_FORMAT),
        (1, with(none.with_lba_format_upper(1)), Status::INVALID_FORMAT),
        (1, with(none.with_extended_lba(true)), Status::INVALID_FORMAT),
        (1, with(none.with_protection(1)), Status::INVALID_FORMAT),
        (1, with(none.with_erase_bits(2)), Status::INVALID_FIELD),
        (1, with(none.with_erase_bits(7)), Status::INVALID_FIELD),
        (0, 0, Status::INVALID_NAMESPACE),
        (4, 0, Status::INVALID_NAMESPACE),
        (ALL - 1, 0, Status::INVALID_NAMESPACE),
    ] {
        assert_eq!(machine.run_admin(format_entry(nsid, dword10)), Err(expected), "{nsid} {dword10:#x}");
    }
    // One that cannot be written keeps them all.
    let mut disks = disks(Pace::AtOnce);
    disks[1].geometry.read_only = true;
    disks[0].data.fill(7);
    let (mut machine, _) = Machine::enabled(Options::default(), disks, 0, 2);
    for nsid in [2, ALL] {
        assert_eq!(format(&mut machine, nsid, 0), Err(Status::WRITE_PROTECTED));
    }
    assert!(machine.controller.disks.namespaces[0].disk.data.iter().all(|byte| *byte == 7));
    assert_eq!(format(&mut machine, 1, 0), Ok(0));
    // A disk that is of one format only.
    let mut disk = RamDisk::new(16, 12, Pace::AtOnce);
    disk.geometry.formats = &[12];
    let (mut machine, _) = Machine::enabled(Options::default(), vec![disk], 0, 2);
    assert_eq!(format(&mut machine, 1, 1), Err(Status::INVALID_FORMAT));
    assert_eq!(format(&mut machine, 1, 0), Ok(0));
    // The disk fails: the status is its own, and commands are taken again.
    machine.controller.disks.namespaces[0].disk.fail = Some(DiskError::Write);
    assert_eq!(format(&mut machine, 1, 0), Err(Status::WRITE_FAULT));
    machine.controller.disks.namespaces[0].disk.fail = None;
    assert_eq!(format(&mut machine, 1, 0), Ok(0));
}

#[test]
fn commands_before_a_format_end_first_and_those_after_it_are_refused() {
    let (mut machine, mut pair) = start(Pace::Later(0));
    machine.host.bytes[BUFFER_AT as usize..][..4096].fill(7);
    let write = transfer(NvmOpcode::WRITE, 0, 8, BUFFER_AT, 0);
    machine.push(&mut pair, &write);
    machine.poll();
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    // A second one finds the first.
    machine.push(&mut admin, &format_entry(1, 1));
    machine.push(&mut admin, &format_entry(ALL, 1));
    (0..5).for_each(|_| {
        machine.poll();
    });
    let refused = machine.pop(&mut admin).unwrap();
    assert_eq!(result(&refused), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(machine.controller.disks.namespaces[0].disk.waiting.len(), 1, "only the write");

    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::FLUSH, NvmOpcode::VERIFY] {
        machine.push(&mut pair, &transfer(opcode, 0, 8, BUFFER_AT, 0));
        machine.poll();
        let completion = machine.pop(&mut pair).unwrap();
        assert_eq!(result(&completion), Err(Status::FORMAT_IN_PROGRESS));
        assert!(!completion.status.do_not_retry());
    }
    // Another namespace is none the wiser.
    machine.controller.disks.namespaces[1].disk.pace = Pace::AtOnce;
    machine.push(&mut pair, &of(2, transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0)));
    machine.poll();
    assert_eq!(result(&machine.pop(&mut pair).unwrap()), Ok(0));

    assert!(machine.pop(&mut pair).is_none() && machine.pop(&mut admin).is_none());
    machine.controller.disks.namespaces[0].disk.pace = Pace::Later(1);
    machine.settle();
    assert_eq!(result(&machine.pop(&mut pair).unwrap()), Ok(0), "the write");
    assert_eq!(result(&machine.pop(&mut admin).unwrap()), Ok(0), "the format");
    machine.admin = admin;
    let disk = &machine.controller.disks.namespaces[0].disk;
    assert!(disk.data.iter().chain(&disk.durable).all(|byte| *byte == 0));
    assert_eq!(identify(&mut machine, 1).size.get(), 16);
}

#[test]
fn a_reset_takes_back_a_format_that_has_not_begun_and_waits_for_one_that_has() {
    for begun in [false, true] {
        let (mut machine, mut pair) = start(Pace::AtOnce);
        machine.host.bytes[BUFFER_AT as usize..][..4096].fill(7);
        let write = transfer(NvmOpcode::WRITE, 0, 8, BUFFER_AT, 0);
        assert_eq!(result(&machine.run(&mut pair, write)), Ok(0));
        set_pace(&mut machine, Pace::Later(0));
        if !begun {
            machine.push(&mut pair, &transfer(NvmOpcode::READ, 0, 8, BUFFER_AT + 0x1000, 0));
            machine.poll();
        }
        let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
        machine.push(&mut admin, &format_entry(1, 1));
        machine.poll();
        assert_eq!(machine.controller.in_flight(), 1);
        machine.controller.reset(&mut machine.host);
        assert!(!machine.controller.is_quiet());
        set_pace(&mut machine, Pace::Later(1));
        machine.settle();
        assert!(machine.controller.is_quiet());
        machine.enable();
        let (size, byte) = if begun { (16, 0) } else { (128, 7) };
        assert_eq!(identify(&mut machine, 1).size.get(), size);
        assert_eq!(machine.controller.disks.namespaces[0].disk.data[0], byte);
        // Either way it takes commands.
        let mut pair = Pair::new(1, QUEUES_AT, 8);
        machine.create(&pair);
        let read = transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0);
        assert_eq!(result(&machine.run(&mut pair, read)), Ok(0));
    }
}

#[test]
fn a_changed_shape_is_reported_and_listed_until_it_is_read() {
    let (mut machine, _) = start(Pace::Later(1));
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    let request = |machine: &mut Machine, admin: &mut Pair| {
        let opcode = AdminOpcode::ASYNC_EVENT_REQUEST.0;
        machine.push(admin, &SubmissionEntry { opcode, ..SubmissionEntry::default() });
        machine.settle();
    };
    let list = |machine: &mut Machine, retain: bool| {
        let dword10 = 1023 << 16 | u32::from(retain) << 15 | u32::from(LogPageId::CHANGED_NAMESPACES.0);
        machine.admin(AdminOpcode::GET_LOG_PAGE, ALL, dword10, 0).unwrap();
        machine.data::<[[u8; 4]; 1024]>().map(u32::from_le_bytes)[..4].to_vec()
    };
    machine.admin = admin;
    // Namespace Attribute Notices.
    assert_eq!(machine.admin(AdminOpcode::SET_FEATURES, 0, 0x0b, 1 << 8), Ok(0));
    admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    request(&mut machine, &mut admin);
    machine.push(&mut admin, &format_entry(3, 1));
    machine.settle();
    let results = [machine.pop(&mut admin).unwrap(), machine.pop(&mut admin).unwrap()].map(|c| result(&c));
    // A notice: see log page 4.
    assert!(results.contains(&Ok(0x04_0002)) && results.contains(&Ok(0)), "{results:?}");
    // The same shape again is no change; a further one is not reported before the list was read.
    request(&mut machine, &mut admin);
    for (nsid, index) in [(2, 1), (1, 1)] {
        machine.push(&mut admin, &format_entry(nsid, index));
        machine.settle();
        assert_eq!(result(&machine.pop(&mut admin).unwrap()), Ok(0));
        assert!(machine.pop(&mut admin).is_none());
    }
    machine.admin = admin;
    assert_eq!(list(&mut machine, true), [1, 3, 0, 0]);
    // Read for good, the second event is told, too.
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    let dword10 = 1023 << 16 | u32::from(LogPageId::CHANGED_NAMESPACES.0);
    let read = SubmissionEntry {
        opcode: AdminOpcode::GET_LOG_PAGE.0,
        nsid: ALL.into(),
        prp1: DATA_AT.into(),
        dword10: dword10.into(),
        ..SubmissionEntry::default()
    };
    machine.push(&mut admin, &read);
    machine.settle();
    let results = [machine.pop(&mut admin).unwrap(), machine.pop(&mut admin).unwrap()].map(|c| result(&c));
    assert!(results.contains(&Ok(0x04_0002)) && results.contains(&Ok(0)), "{results:?}");
    machine.admin = admin;
    assert_eq!(list(&mut machine, false), [0, 0, 0, 0]);
}

/// What is acknowledged as cached must be durable when the cache is off.
#[test]
fn switching_the_write_cache_off_waits_for_writes_under_way() {
    let (mut machine, mut pair) = start(Pace::Later(0));
    machine.host.bytes[BUFFER_AT as usize..][..512].fill(7);
    machine.push(&mut pair, &transfer(NvmOpcode::WRITE, 3, 1, BUFFER_AT, 0));
    machine.poll();
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    let off = SubmissionEntry {
        opcode: AdminOpcode::SET_FEATURES.0,
        dword10: 0x06.into(),
        ..SubmissionEntry::default()
    };
    machine.push(&mut admin, &off);
    machine.poll();
    // A write that comes later is durable by itself, and nobody waits for it.
    machine.push(&mut pair, &transfer(NvmOpcode::WRITE, 4, 1, BUFFER_AT, 0));
    machine.poll();
    assert_eq!(machine.controller.disks.namespaces[0].disk.waiting.len(), 2, "no flush yet");
    let mut written = false;
    for namespace in &mut machine.controller.disks.namespaces {
        namespace.disk.pace = Pace::Later(1);
    }
    for _ in 0..20 {
        machine.poll();
        written |= machine.pop(&mut pair).is_some();
        if let Some(completion) = machine.pop(&mut admin) {
            assert!(written && result(&completion) == Ok(0));
            let durable = &machine.controller.disks.namespaces[0].disk.durable;
            assert!(durable[3 * 512..4 * 512].iter().all(|byte| *byte == 7));
            return;
        }
    }
    panic!("the feature is never set");
}

#[derive(Clone, Debug)]
enum Step {
    Write { start: u64, pages: u64, byte: u8 },
    Read { start: u64, pages: u64 },
    Uncorrectable { start: u64, pages: u64 },
    Format { index: u32, all: bool, erase: u32 },
    FlushAll,
    Reset,
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    (0..SHAPES.len()).prop_flat_map(|namespace| {
        let pages = SHAPES[namespace].0 >> 12;
        let range = move || (0..pages).prop_flat_map(move |start| (Just(start), 1..=(pages - start).min(2)));
        let step = prop_oneof![
            5 => (range(), 1_u8..).prop_map(|((start, pages), byte)| Step::Write { start, pages, byte }),
            5 => range().prop_map(|(start, pages)| Step::Read { start, pages }),
            1 => range().prop_map(|(start, pages)| Step::Uncorrectable { start, pages }),
            1 => (0_u32..3, prop::bool::weighted(0.2), 0_u32..2)
                .prop_map(|(index, all, erase)| Step::Format { index, all, erase }),
            1 => Just(Step::FlushAll),
            1 => Just(Step::Reset),
        ];
        (Just(namespace), step)
    })
}

proptest! {
    /// Against an array of pages for each namespace: what one does is nothing to the others, and no page reads
    /// what it held before a format.
    #[test]
    fn namespaces_are_independent(steps in prop::collection::vec(step(), 1..80), later: bool) {
        let (mut machine, mut pair) = start(if later { Pace::Later(1) } else { Pace::AtOnce });
        let mut model = SHAPES.map(|(bytes, _)| vec![Some(0_u8); bytes as usize >> 12]);
        let mut shifts = SHAPES.map(|(_, shift)| shift);
        for (namespace, step) in steps {
            let nsid = namespace as u32 + 1;
            let shift = shifts[namespace];
            let entry = |opcode, start: u64, pages: u64| {
                let (lba, blocks) = (start << (12 - shift), pages << (12 - shift));
                of(nsid, transfer(opcode, lba, blocks as u32, BUFFER_AT, BUFFER_AT + 0x1000))
            };
            let range = |start: u64, pages: u64| start as usize..(start + pages) as usize;
            match step {
                Step::Write { start, pages, byte } => {
                    machine.host.bytes[BUFFER_AT as usize..][..(pages as usize) << 12].fill(byte);
                    let entry = entry(NvmOpcode::WRITE, start, pages);
                    prop_assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
                    model[namespace][range(start, pages)].fill(Some(byte));
                }
                Step::Uncorrectable { start, pages } => {
                    let entry = entry(NvmOpcode::WRITE_UNCORRECTABLE, start, pages);
                    prop_assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
                    model[namespace][range(start, pages)].fill(None);
                }
                Step::Read { start, pages } => {
                    let got = result(&machine.run(&mut pair, entry(NvmOpcode::READ, start, pages)));
                    let held = &model[namespace][range(start, pages)];
                    if held.iter().any(Option::is_none) {
                        prop_assert_eq!(got, Err(Status::UNRECOVERED_READ_ERROR));
                        continue;
                    }
                    prop_assert_eq!(got, Ok(0));
                    let bytes = machine.host.slice(Iova(BUFFER_AT), (pages as usize) << 12).unwrap();
                    for (page, held) in bytes.chunks(4096).zip(held) {
                        prop_assert!(page.iter().all(|byte| Some(*byte) == *held));
                    }
                }
                Step::Format { index, all, erase } => {
                    let expected = if index < 2 { Ok(0) } else { Err(Status::INVALID_FORMAT) };
                    let entry = format_entry(if all { ALL } else { nsid }, index | erase << 9);
                    prop_assert_eq!(machine.run_admin(entry), expected);
                    for (other, pages) in model.iter_mut().enumerate() {
                        if expected.is_ok() && (all || other == namespace) {
                            pages.fill(Some(0));
                            shifts[other] = [9, 12][index as usize];
                        }
                    }
                }
                Step::FlushAll => {
                    let flush = of(ALL, transfer(NvmOpcode::FLUSH, 0, 1, 0, 0));
                    prop_assert_eq!(result(&machine.run(&mut pair, flush)), Ok(0));
                    for namespace in &machine.controller.disks.namespaces {
                        prop_assert!(namespace.disk.durable == namespace.disk.data);
                    }
                }
                Step::Reset => {
                    machine.controller.reset(&mut machine.host);
                    machine.settle();
                    machine.enable();
                    pair = Pair::new(1, QUEUES_AT, 16);
                    machine.create(&pair);
                }
            }
            let sizes = [1, 2, 3].map(|nsid| identify(&mut machine, nsid).size.get());
            let expected = std::array::from_fn(|other| SHAPES[other].0 >> shifts[other]);
            prop_assert_eq!(sizes, expected);
        }
    }
}
