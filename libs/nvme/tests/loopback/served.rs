//! The driver and the controller understand each other.

use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use outboard_nvme::controller;
use outboard_nvme::driver::{
    Block, Command, CommandError, DataPointer, Drive, Error, Fragment, Memory as _, Namespace, Options,
    Registers as _,
};
use outboard_nvme::spec::{
    AdminOpcode, CommandsSupportedLog, CreateQueue, DataPointerType, DsmRange, ErrorLogEntry, FeatureId,
    FeatureSelect, FirmwareSlotLog, FormatNvm, LogPageId, NSID_ALL, SecureErase, SmartLog, Status,
    SubmissionEntry, Version,
};
use outboard_nvme::{Iova, Lba, Nsid};
use proptest::prelude::*;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use crate::disks::{Memory, Null, Pace};
use crate::machine::{Pages, Ram, Run};
use crate::plugged::{Doorbells, Stepped, SteppedDrive, Threaded};

const NSID: Nsid = Nsid(1);
const BLOCK: usize = 512;

fn plug<D: controller::Disk<crate::plugged::Slot>>(
    pages: usize,
    disk: D,
) -> (Stepped<D>, SteppedDrive<D>, Pages) {
    let ram = Ram::new(pages);
    let memory = Pages::new(ram.clone());
    let device = Stepped::new(&ram, controller::Options::default(), vec![disk]);
    let drive = Drive::enable(device.bar(), memory.clone(), Options::default()).unwrap();
    (device, drive, memory)
}

fn queues(count: u16) -> NonZeroU16 {
    NonZeroU16::new(count).unwrap()
}

/// The first page of a block.
fn page(block: &Run) -> DataPointer {
    DataPointer::new(&[Fragment { iova: block.iova(), length: 4096 }], None::<&Run>).unwrap()
}

fn status(outcome: Result<u32, Error>) -> Status {
    match outcome {
        Ok(_) => Status::SUCCESS,
        Err(Error::Command(CommandError { status, .. })) => status,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_drive_tells_what_it_is() {
    let (_, mut drive, _) = plug(64, Null(4096));
    let data = drive.controller();
    assert!(data.serial.starts_with(b"OUTBOARD0001 "));
    assert_eq!((data.version, data.namespaces.get()), (Version::V1_4, 1));
    assert_eq!(drive.max_transfer(), 512 << 10);
    assert_eq!(drive.max_queue_entries(), 1024);
    assert_eq!(drive.namespaces().unwrap(), [NSID]);
    assert_eq!(drive.namespace(NSID).unwrap(), Namespace { nsid: NSID, blocks: 4096, block_shift: 9 });
    assert!(matches!(drive.namespace(Nsid(2)), Err(Error::Namespace { blocks: 0, .. } | Error::Command(_))));
    let cache = FeatureId::VOLATILE_WRITE_CACHE;
    assert_eq!(drive.feature(cache, FeatureSelect::CURRENT).unwrap(), 1);
    drive.set_feature(cache, 0).unwrap();
    assert_eq!(drive.feature(cache, FeatureSelect::CURRENT).unwrap(), 0);
    assert_eq!(drive.feature(cache, FeatureSelect::DEFAULT).unwrap(), 1);
    let smart: SmartLog = drive.log_page(LogPageId::SMART).unwrap();
    assert!((273..350).contains(&smart.temperature.get()));
    let slots: FirmwareSlotLog = drive.log_page(LogPageId::FIRMWARE_SLOT).unwrap();
    assert_eq!(slots.active.current(), 1);
    let _: ErrorLogEntry = drive.log_page(LogPageId::ERROR_INFORMATION).unwrap();
    let effects: Result<CommandsSupportedLog, Error> = drive.log_page(LogPageId::COMMANDS_SUPPORTED);
    if drive.controller().log_page_attributes.commands_supported() {
        assert!(effects.unwrap().io[2].supported());
    } else {
        assert_eq!(status(effects.map(|_| 0)), Status::INVALID_LOG_PAGE);
    }
}

#[test]
fn commands_that_a_drive_refuses() {
    let (_, mut drive, _) = plug(64, Null(4096));
    let opcode = SubmissionEntry { opcode: 0xc5, ..SubmissionEntry::default() };
    assert_eq!(status(drive.execute(opcode)), Status::INVALID_OPCODE);
    assert_eq!(drive.request_queues(queues(3)).unwrap(), 3);
    let create = |queue, size| SubmissionEntry {
        opcode: AdminOpcode::CREATE_SUBMISSION_QUEUE.0,
        dword10: U32::new(CreateQueue::default().with_queue(queue).with_size(size).bits()),
        dword11: U32::new(1 << 16 | 1),
        ..SubmissionEntry::default()
    };
    assert_eq!(status(drive.execute(create(1, 7))), Status::INVALID_COMPLETION_QUEUE);
    assert_eq!(status(drive.execute(create(0, 7))), Status::INVALID_QUEUE_ID);
    let delete = SubmissionEntry { opcode: AdminOpcode::DELETE_COMPLETION_QUEUE.0, ..create(2, 0) };
    assert_eq!(status(drive.execute(delete)), Status::INVALID_QUEUE_ID);

    let mut queue = drive.create_queue_pair(2).unwrap();
    let delete = SubmissionEntry { opcode: AdminOpcode::DELETE_COMPLETION_QUEUE.0, ..create(1, 0) };
    assert_eq!(status(drive.execute(delete)), Status::INVALID_QUEUE_DELETION);

    let block = drive.memory().allocate(4096).unwrap();
    let (data, limit) = (page(&block), Duration::from_secs(5));
    let mut run = |command: Command| {
        let entry = command.entry().unwrap();
        status(queue.execute(entry, limit, || drive.registers().pause()))
    };
    let read = |nsid, start, blocks| Command::Read { nsid, start: Lba(start), blocks, data };
    assert_eq!(run(read(NSID, 4088, 8)), Status::SUCCESS);
    assert_eq!(run(read(NSID, 4089, 8)), Status::LBA_OUT_OF_RANGE);
    assert_eq!(run(read(NSID, u64::MAX, 2)), Status::LBA_OUT_OF_RANGE);
    assert_eq!(run(read(Nsid(2), 0, 8)), Status::INVALID_NAMESPACE);
    assert_eq!(run(read(NSID, 0, 1025)), Status::INVALID_FIELD);
    assert_eq!(run(Command::Flush { nsid: NSID }), Status::SUCCESS);
    let outside = [Fragment { iova: Iova(0x10_0000), length: 4096 }];
    let data = DataPointer::new(&outside, None::<&Run>).unwrap();
    let zeroes =
        Command::WriteZeroes { nsid: NSID, start: Lba(0), blocks: 65536, deallocate: true, durable: true };
    assert_eq!(run(zeroes), Status::LBA_OUT_OF_RANGE);
    assert_eq!(run(Command::Deallocate { nsid: NSID, ranges: 256, data }), Status::DATA_TRANSFER_ERROR);
}

/// Every queue size that the drive offers, filled to the brim, around its end.
#[test]
fn queues_of_all_sizes() {
    let (device, mut drive, memory) = plug(64, Null(4096));
    drive.request_queues(queues(1)).unwrap();
    let idle = memory.used();
    let block = drive.memory().allocate(4096).unwrap();
    let data = page(&block);
    let max = drive.max_queue_entries();
    for entries in 2..=max {
        let mut queue = drive.create_queue_pair(entries).unwrap();
        let mut completed = 0;
        for _ in 0..2 {
            let mut submitted = 0;
            while let Ok(id) = queue.submit(&Command::Read { nsid: NSID, start: Lba(1), blocks: 8, data }) {
                assert!(id.slot() < queue.depth());
                submitted += 1;
            }
            assert_eq!(submitted, usize::from(entries) - 1);
            queue.ring().unwrap();
            while queue.outstanding() > 0 {
                assert!(device.step(), "the controller is idle with {} outstanding", queue.outstanding());
                completed += queue.poll(|done| assert_eq!(done.outcome(), Ok(0))).unwrap();
            }
        }
        assert_eq!(completed, 2 * (usize::from(entries) - 1));
        drive.delete_queue_pair(queue).unwrap();
    }
    assert!(matches!(drive.create_queue_pair(max + 1), Err(Error::QueueSize { .. })));
    drop(block);
    assert_eq!(memory.used(), idle);
}

/// All queue pairs at once, with commands under way while others come and go.
#[test]
fn many_queues() {
    let (device, mut drive, _) = plug(512, Memory::new(64, Pace::Late(1)));
    let count = drive.request_queues(queues(200)).unwrap();
    assert_eq!(count, 64);
    let block = drive.memory().allocate(4096).unwrap();
    let data = page(&block);
    let mut pairs: Vec<_> = (0..count).map(|at| drive.create_queue_pair(2 + at).unwrap()).collect();
    assert!(matches!(drive.create_queue_pair(2), Err(Error::NoQueueLeft(64))));
    for round in 0..4 {
        let mut expected = 0;
        for queue in &mut pairs {
            while queue
                .submit(&Command::Write { nsid: NSID, start: Lba(0), blocks: 8, data, durable: false })
                .is_ok()
            {
                expected += 1;
            }
            queue.ring().unwrap();
        }
        // A queue that is deleted under load takes its commands with it.
        let mut victim = pairs.swap_remove(round * 7);
        device.step();
        let told = victim.poll(|_| {}).unwrap();
        expected -= victim.outstanding() + told;
        let entries = victim.depth() as u16 + 1;
        drive.delete_queue_pair(victim).unwrap();

        let mut completed = 0;
        let start = Instant::now();
        while completed < expected {
            device.step();
            for queue in &mut pairs {
                completed += queue.poll(|done| assert_eq!(done.outcome(), Ok(0))).unwrap();
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{completed} of {expected}");
        }
        pairs.push(drive.create_queue_pair(entries).unwrap());
    }
}

/// A drive that is disabled under load keeps no memory and can be enabled again.
#[test]
fn disabled_under_load() {
    let (device, mut drive, memory) = plug(64, Memory::new(64, Pace::Late(2)));
    for _ in 0..20 {
        drive.request_queues(queues(1)).unwrap();
        let block = drive.memory().allocate(4096).unwrap();
        let data = page(&block);
        let mut queue = drive.create_queue_pair(40).unwrap();
        while queue.submit(&Command::Read { nsid: NSID, start: Lba(0), blocks: 8, data }).is_ok() {}
        queue.ring().unwrap();
        device.step();
        drive.shutdown().unwrap();
        let (bar, pages) = drive.disable().unwrap();
        assert_eq!(device.in_flight(), 0);
        drop((queue, block));
        assert_eq!(memory.used(), 0);
        drive = Drive::enable(bar, pages, Options::default()).unwrap();
    }
}

const BLOCKS: usize = 1024;
/// Blocks that a command of a sequence may touch: commands that are under way together do not overlap.
const STRIPE: usize = 128;

#[derive(Clone, Debug)]
enum Action {
    Write {
        offset: usize,
        durable: bool,
    },
    Read {
        offset: usize,
    },
    /// With what the blocks hold, or with a byte of it changed.
    Compare {
        offset: usize,
        changed: bool,
    },
    Verify,
    Uncorrectable,
    Zero {
        deallocate: bool,
    },
    Deallocate {
        second: usize,
    },
    Flush,
    Outside,
}

#[derive(Clone, Debug)]
struct Step {
    action: Action,
    start: usize,
    blocks: usize,
    seed: u8,
    queue: usize,
    /// Lengths of the first pieces of an SGL; none: PRP entries.
    cuts: Option<Vec<usize>>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let offset = (0..1024usize).prop_map(|dword| dword * 4);
    let action = prop_oneof![
        4 => (offset.clone(), any::<bool>()).prop_map(|(offset, durable)| Action::Write { offset, durable }),
        4 => offset.clone().prop_map(|offset| Action::Read { offset }),
        2 => (offset, any::<bool>()).prop_map(|(offset, changed)| Action::Compare { offset, changed }),
        1 => Just(Action::Verify),
        1 => Just(Action::Uncorrectable),
        1 => any::<bool>().prop_map(|deallocate| Action::Zero { deallocate }),
        1 => (0..16usize).prop_map(|second| Action::Deallocate { second }),
        1 => Just(Action::Flush),
        1 => Just(Action::Outside),
    ];
    let cuts = prop::option::of(prop::collection::vec(1..3000usize, 0..12));
    let step = (action, 0..STRIPE - 64, 1..=64usize, any::<u8>(), 0..3usize, cuts).prop_map(
        |(action, start, blocks, seed, queue, cuts)| Step { action, start, blocks, seed, queue, cuts },
    );
    prop::collection::vec(step, 1..80)
}

/// A command under way: what it does to the model, or what it must read.
struct Pending {
    stripe: usize,
    step: Step,
    data: Buffer,
    expected: Status,
    _list: Run,
}

/// Memory for a command's data.
struct Buffer {
    block: Run,
    /// Offsets in the block, with lengths.
    pieces: Vec<(usize, usize)>,
    kind: DataPointerType,
}

impl Buffer {
    /// For PRP entries: it begins within a page, and the first page is the last of the block.
    fn by_pages(memory: &mut Pages, offset: usize, length: usize) -> Self {
        let pages = (offset + length).div_ceil(4096);
        let block = memory.allocate(pages * 4096).unwrap();
        let first = length.min(4096 - offset);
        let mut pieces = vec![((pages - 1) * 4096 + offset, first)];
        if length > first {
            pieces.push((0, length - first));
        }
        Self { block, pieces, kind: DataPointerType::PRP }
    }

    /// For an SGL: pieces of any length, the last one first in the block, three bytes between them.
    fn by_cuts(memory: &mut Pages, offset: usize, mut length: usize, cuts: &[usize]) -> Self {
        let mut at = offset + length + 3 * cuts.len();
        let block = memory.allocate(at).unwrap();
        let mut pieces = Vec::new();
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let cut = cut.min(length);
            at -= cut;
            pieces.push((at, cut));
            length -= cut;
            if length == 0 {
                break;
            }
            at -= 3;
        }
        Self { block, pieces, kind: DataPointerType::SGL }
    }

    fn pointer(&self, list: &Run) -> DataPointer {
        let iova = |offset: usize| Iova(self.block.iova().0 + offset as u64);
        let fragments: Vec<_> =
            self.pieces.iter().map(|&(offset, length)| Fragment { iova: iova(offset), length }).collect();
        match self.kind {
            DataPointerType::PRP => DataPointer::new(&fragments, Some(list)).unwrap(),
            _ => DataPointer::sgl(&fragments, Some(list)).unwrap(),
        }
    }

    fn write(&self, mut from: &[u8]) {
        for &(offset, length) in &self.pieces {
            let (here, rest) = from.split_at(length);
            self.block.write(offset, here);
            from = rest;
        }
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(offset, length) in &self.pieces {
            let at = bytes.len();
            bytes.resize(at + length, 0);
            self.block.read(offset, &mut bytes[at..]);
        }
        bytes
    }
}

fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4) as u8 ^ (at / BLOCK) as u8 ^ seed).collect()
}

fn play(steps: Vec<Step>, pace: Pace, entries: [u16; 3], shadow: bool) {
    let ram = Ram::new(256);
    let memory = Pages::new(ram.clone());
    // One block more than the model: the last is broken.
    let disk = Memory::new(BLOCKS + 1, pace);
    let options = controller::Options { shadow_doorbells: shadow, ..Default::default() };
    let device = Stepped::new(&ram, options, vec![disk]);
    let mut drive = Drive::enable(device.bar(), memory, Options::default()).unwrap();
    drive.request_queues(queues(3)).unwrap();
    if shadow {
        drive.use_shadow_doorbells().unwrap();
    }
    let mut pairs = entries.map(|entries| drive.create_queue_pair(entries).unwrap());
    let mut model = vec![0u8; BLOCKS * BLOCK];
    // By Write Uncorrectable.
    let mut marked = vec![false; BLOCKS];
    let mut pending: Vec<(usize, outboard_nvme::driver::CommandId, Pending)> = Vec::new();
    let mut free: Vec<usize> = (0..BLOCKS / STRIPE).collect();
    let mut steps = steps.into_iter().peekable();
    let mut idle = 0;
    while steps.peek().is_some() || !pending.is_empty() {
        while let Some(step) = steps.peek()
            && let Some(&stripe) = free.last()
        {
            let queue = &mut pairs[step.queue];
            let length = step.blocks * BLOCK;
            let offset = match step.action {
                Action::Write { offset, .. } | Action::Read { offset } | Action::Compare { offset, .. } => {
                    offset
                }
                _ => 0,
            };
            let bytes = match step.action {
                Action::Deallocate { .. } => 2 * size_of::<DsmRange>(),
                _ => length,
            };
            let data = match &step.cuts {
                None => Buffer::by_pages(drive.memory(), offset, bytes),
                Some(cuts) => Buffer::by_cuts(drive.memory(), offset + 1, bytes, cuts),
            };
            let list = drive.memory().allocate(4096).unwrap();
            let pointer = data.pointer(&list);
            let start = Lba((stripe * STRIPE + step.start) as u64);
            let blocks = step.blocks as u32;
            // No other command of this stripe is under way: what it will find is known.
            let range = stripe * STRIPE + step.start..stripe * STRIPE + step.start + step.blocks;
            let held = &model[range.start * BLOCK..range.end * BLOCK];
            let broken = marked[range].contains(&true);
            let expected = match step.action {
                Action::Outside => Status::LBA_OUT_OF_RANGE,
                Action::Read { .. } | Action::Compare { .. } | Action::Verify if broken => {
                    Status::UNRECOVERED_READ_ERROR
                }
                Action::Compare { changed: true, .. } => Status::COMPARE_FAILURE,
                _ => Status::SUCCESS,
            };
            let command = match step.action {
                Action::Write { durable, .. } => {
                    data.write(&pattern(step.seed, length));
                    Command::Write { nsid: NSID, start, blocks, data: pointer, durable }
                }
                Action::Read { .. } => Command::Read { nsid: NSID, start, blocks, data: pointer },
                Action::Compare { changed, .. } => {
                    let mut theirs = held.to_vec();
                    theirs[usize::from(step.seed) * length / 256] ^= u8::from(changed);
                    data.write(&theirs);
                    Command::Compare { nsid: NSID, start, blocks, data: pointer }
                }
                Action::Verify => Command::Verify { nsid: NSID, start, blocks },
                Action::Uncorrectable => Command::WriteUncorrectable { nsid: NSID, start, blocks },
                Action::Zero { deallocate } => {
                    Command::WriteZeroes { nsid: NSID, start, blocks, deallocate, durable: false }
                }
                Action::Deallocate { second } => {
                    let range = |start: u64, blocks: u32| DsmRange {
                        attributes: U32::new(0),
                        blocks: U32::new(blocks),
                        start: start.into(),
                    };
                    let ranges = [range(start.0, blocks), range((stripe * STRIPE + second) as u64, 3)];
                    data.write(ranges.as_bytes());
                    Command::Deallocate { nsid: NSID, ranges: 2, data: pointer }
                }
                Action::Flush => Command::Flush { nsid: NSID },
                Action::Outside => {
                    Command::Read { nsid: NSID, start: Lba(BLOCKS as u64 + 1), blocks, data: pointer }
                }
            };
            let Ok(id) = queue.submit(&command) else { break };
            let step = steps.next().unwrap();
            free.pop();
            pending.push((step.queue, id, Pending { stripe, step, data, expected, _list: list }));
        }
        for queue in &mut pairs {
            queue.ring().unwrap();
        }
        device.step();
        idle += 1;
        for (number, queue) in pairs.iter_mut().enumerate() {
            queue
                .poll(|done| {
                    idle = 0;
                    let at =
                        pending.iter().position(|(queue, id, _)| (*queue, *id) == (number, done.id)).unwrap();
                    let (_, _, Pending { stripe, step, data, expected, .. }) = pending.swap_remove(at);
                    let first = stripe * STRIPE + step.start;
                    let marks = &mut marked[first..first + step.blocks];
                    let bytes = &mut model[(stripe * STRIPE + step.start) * BLOCK..][..step.blocks * BLOCK];
                    assert_eq!(done.status.status(), expected, "{step:?}");
                    match step.action {
                        Action::Write { .. } => {
                            bytes.copy_from_slice(&pattern(step.seed, bytes.len()));
                            marks.fill(false);
                        }
                        Action::Uncorrectable => marks.fill(true),
                        Action::Read { .. } if expected.is_success() => {
                            assert!(data.read() == bytes, "{step:?} read something else than was written");
                        }
                        Action::Zero { .. } => {
                            bytes.fill(0);
                            marks.fill(false);
                        }
                        Action::Deallocate { second } => {
                            bytes.fill(0);
                            model[(stripe * STRIPE + second) * BLOCK..][..3 * BLOCK].fill(0);
                        }
                        Action::Read { .. }
                        | Action::Compare { .. }
                        | Action::Verify
                        | Action::Flush
                        | Action::Outside => {}
                    }
                    free.insert(0, stripe);
                })
                .unwrap();
        }
        assert!(idle < 1000, "{} commands are never completed", pending.len());
    }
    let (_, pages) = drive.disable().unwrap();
    drop(pairs);
    assert_eq!(pages.used(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random commands on three queues against a plain array of bytes.
    #[test]
    fn sequences(
        steps in steps(),
        late in prop::option::of(any::<u64>()),
        entries in prop::array::uniform3(2u16..12),
        shadow: bool,
    ) {
        play(steps, late.map_or(Pace::AtOnce, Pace::Late), entries, shadow);
    }
}

/// The driver formats two namespaces to what only one of them was.
#[test]
fn a_drive_is_formatted() {
    let ram = Ram::new(64);
    let disks = [64, 128].map(|blocks| Memory::new(blocks, Pace::Late(4))).into();
    let device = Stepped::new(&ram, controller::Options::default(), disks);
    let mut drive = Drive::enable(device.bar(), Pages::new(ram), Options::default()).unwrap();
    drive.request_queues(queues(1)).unwrap();
    let mut queue = drive.create_queue_pair(4).unwrap();
    let block = drive.memory().allocate(4096).unwrap();
    let data = page(&block);
    let mut run = |drive: &mut SteppedDrive<Memory>, command: Command| {
        let entry = command.entry().unwrap();
        queue.execute(entry, Duration::from_secs(5), || drive.registers().pause())
    };
    block.write(0, &pattern(9, 4096));
    for nsid in [Nsid(1), Nsid(2)] {
        run(&mut drive, Command::Write { nsid, start: Lba(8), blocks: 8, data, durable: true }).unwrap();
    }
    let pages = FormatNvm::default().with_lba_format(1).with_erase_bits(SecureErase::USER_DATA.0);
    drive.format(Nsid(2), pages).unwrap();
    drive.format(NSID_ALL, pages).unwrap();
    for (nsid, blocks) in [(Nsid(1), 8), (Nsid(2), 16)] {
        assert_eq!(drive.namespace(nsid).unwrap(), Namespace { nsid, blocks, block_shift: 12 });
        run(&mut drive, Command::Read { nsid, start: Lba(1), blocks: 1, data }).unwrap();
        let mut found = [1; 4096];
        block.read(0, &mut found);
        assert_eq!(found, [0; 4096]);
    }
    let wrong = drive.format(Nsid(1), FormatNvm::default().with_lba_format(2));
    assert_eq!(status(wrong.map(|()| 0)), Status::INVALID_FORMAT);
}

/// A broken block is the host's to know.
#[test]
fn errors_of_the_medium() {
    let (_, mut drive, _) = plug(64, Memory::new(64, Pace::Late(3)));
    drive.request_queues(queues(1)).unwrap();
    let mut queue = drive.create_queue_pair(4).unwrap();
    let block = drive.memory().allocate(4096).unwrap();
    let (data, limit) = (page(&block), Duration::from_secs(5));
    let range = |write| match write {
        true => Command::Write { nsid: NSID, start: Lba(60), blocks: 4, data, durable: true },
        false => Command::Read { nsid: NSID, start: Lba(60), blocks: 4, data },
    };
    for (write, expected) in [(false, Status::UNRECOVERED_READ_ERROR), (true, Status::WRITE_FAULT)] {
        let entry = range(write).entry().unwrap();
        assert_eq!(status(queue.execute(entry, limit, || drive.registers().pause())), expected);
    }
    let log: ErrorLogEntry = drive.log_page(LogPageId::ERROR_INFORMATION).unwrap();
    assert_eq!((log.status.status(), log.lba.get(), log.nsid.get()), (Status::WRITE_FAULT, 60, 1));
    let smart: SmartLog = drive.log_page(LogPageId::SMART).unwrap();
    assert_eq!((smart.error_log_entries.get(), smart.media_errors.get()), (2, 2));
}

/// Driver and controller in threads of their own: written, read back, compared.
fn threads(doorbells: Doorbells, entries: u16, rounds: usize) -> (u64, u64) {
    let ram = Ram::new(512);
    let memory = Pages::new(ram.clone());
    let disk = Memory::new(64 * 8 + 1, Pace::AtOnce);
    let (_worker, bar) = Threaded::start(&ram, controller::Options::default(), doorbells, vec![disk]);
    let rung = bar.rung();
    let mut drive = Drive::enable(bar, memory, Options::default()).unwrap();
    drive.request_queues(queues(1)).unwrap();
    if doorbells == Doorbells::Posted {
        drive.use_shadow_doorbells().unwrap();
    }
    let mut queue = drive.create_queue_pair(entries).unwrap();
    let depth = queue.depth().min(64);
    let blocks: Vec<_> = (0..depth).map(|_| drive.memory().allocate(4096).unwrap()).collect();
    let before = rung.load(std::sync::atomic::Ordering::Relaxed);
    let mut ios = 0;
    for round in 0..rounds {
        for write in [true, false] {
            for (at, block) in blocks.iter().enumerate() {
                let (start, data) = (Lba(at as u64 * 8), page(block));
                let command = if write {
                    block.write(0, &pattern((round + at) as u8, 4096));
                    Command::Write { nsid: NSID, start, blocks: 8, data, durable: false }
                } else {
                    block.write(0, &[0xee; 4096]);
                    Command::Read { nsid: NSID, start, blocks: 8, data }
                };
                queue.submit(&command).unwrap();
                // Rung one by one: the controller falls asleep as often as it can.
                queue.ring().unwrap();
                ios += 1;
            }
            let start = Instant::now();
            while queue.outstanding() > 0 {
                if queue.poll(|done| assert_eq!(done.outcome(), Ok(0))).unwrap() == 0 {
                    assert!(start.elapsed() < Duration::from_secs(10), "a doorbell was lost");
                    std::thread::yield_now();
                }
            }
        }
        for (at, block) in blocks.iter().enumerate() {
            let mut found = [0; 4096];
            block.read(0, &mut found);
            assert!(found[..] == pattern((round + at) as u8, 4096)[..], "block {at} of round {round}");
        }
    }
    (rung.load(std::sync::atomic::Ordering::Relaxed) - before, ios)
}

/// Fault 42: the entry is read after the doorbell.
#[test]
fn threads_with_polled_doorbells() {
    for entries in [2, 3, 65] {
        threads(Doorbells::Polled, entries, 20);
    }
}

/// A controller that sleeps misses no doorbell, however the two race.
#[test]
fn threads_with_posted_doorbells() {
    for (entries, rounds) in [(2, 400), (3, 400), (65, 20)] {
        let (rung, ios) = threads(Doorbells::Posted, entries, rounds);
        assert!(rung <= 2 * ios, "{rung} doorbells for {ios} I/Os");
    }
}
