//! What a disk promised to be durable survives a power cut.
//!
//! The medium here is a model that keeps what was written in a volatile cache, gives it up only when it is told
//! to, and otherwise writes it back, or not, in any order. It stands where io_uring stands, so that the code under
//! test is what plans the operations of the real thing. It also is as bad as a kernel may be: it transfers less
//! than it was asked for, says "again", completes in any order.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use nix::errno::Errno;
use outboard_nvme::controller::{DiskError, Geometry, LbaRange, Operation, Segment, Submission, Tag};
use outboard_nvme::{Iova, Lba};
use proptest::prelude::*;

use super::FileDisk;
use super::buffers::{Alignment, Buffers};
use super::engine::{Completion, Engine, ImageOp};
use super::plan::{Cache, Support, Traits};
use crate::disk::Extent;
use crate::disk::test_host::{BASE, TestHost, TestPin};

const BLOCK: usize = 512;
const BLOCKS: u64 = 24;

/// A block's content in short: every block under test is filled with one byte.
type Content = u8;

/// The medium: what is on it, and what is only in its cache, oldest first.
struct Medium {
    stable: Vec<Content>,
    cached: BTreeMap<u64, Vec<Content>>,
}

impl Medium {
    fn read(&self, block: u64) -> Content {
        let cached = self.cached.get(&block).and_then(|values| values.last());
        cached.copied().unwrap_or(self.stable[block as usize])
    }

    fn write(&mut self, block: u64, content: Content) {
        self.cached.entry(block).or_default().push(content);
    }

    fn sync(&mut self) {
        for (block, values) in std::mem::take(&mut self.cached) {
            self.stable[block as usize] = *values.last().unwrap();
        }
    }

    fn sync_block(&mut self, block: u64) {
        if let Some(values) = self.cached.remove(&block) {
            self.stable[block as usize] = *values.last().unwrap();
        }
    }

    /// The lights go out: of each block some state since the last sync is on the medium.
    fn cut(&mut self, dice: &mut Dice) {
        for (block, values) in std::mem::take(&mut self.cached) {
            let kept = dice.roll(values.len() + 1);
            if kept > 0 {
                self.stable[block as usize] = values[kept - 1];
            }
        }
    }
}

/// Xorshift: the engine's choices, from the test's seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

/// The engine on the model.
struct Model {
    medium: Rc<RefCell<Medium>>,
    dice: Dice,
    pushed: Vec<(usize, ImageOp<TestPin>)>,
    done: Vec<Completion<TestPin>>,
    /// Errors for the next operations, in order.
    failures: Rc<RefCell<VecDeque<Errno>>>,
    zero_range: Support,
}

impl Model {
    fn execute(&mut self, op: &mut ImageOp<TestPin>) -> Result<usize, Errno> {
        if let Some(errno) = self.failures.borrow_mut().pop_front() {
            return Err(errno);
        }
        if self.dice.roll(8) == 0 {
            return Err(if self.dice.roll(2) == 0 { Errno::EINTR } else { Errno::EAGAIN });
        }
        let mut medium = self.medium.borrow_mut();
        let blocks = |extent: &Extent| {
            let (start, end) = (extent.offset / BLOCK as u64, extent.end() / BLOCK as u64);
            assert!(extent.length > 0 && extent.offset.is_multiple_of(BLOCK as u64) && end <= BLOCKS);
            start..end
        };
        match op {
            ImageOp::Read { offset, buffers } => {
                let length = some_of(&mut self.dice, buffers);
                let at = position(buffers);
                let extent = Extent { offset: *offset, length: length as u64 };
                let bytes = &mut buffers.bounce().unwrap()[at..at + length];
                for (block, bytes) in blocks(&extent).zip(bytes.chunks_mut(BLOCK)) {
                    bytes.fill(medium.read(block));
                }
                Ok(length)
            }
            ImageOp::Write { offset, buffers, durable } => {
                let length = some_of(&mut self.dice, buffers);
                let at = position(buffers);
                let extent = Extent { offset: *offset, length: length as u64 };
                for (index, block) in blocks(&extent).enumerate() {
                    // Without a bounce buffer it is zeroes.
                    let content = buffers.bounce().map_or(0, |bytes| bytes[at + index * BLOCK]);
                    medium.write(block, content);
                    if *durable {
                        medium.sync_block(block);
                    }
                }
                Ok(length)
            }
            ImageOp::Sync => {
                medium.sync();
                Ok(0)
            }
            ImageOp::Zero(_) if self.zero_range == Support::Absent => Err(Errno::EOPNOTSUPP),
            ImageOp::Zero(extent) | ImageOp::Punch(extent) => {
                blocks(extent).for_each(|block| medium.write(block, 0));
                Ok(0)
            }
        }
    }
}

/// How much of a transfer is done this time.
fn some_of(dice: &mut Dice, buffers: &Buffers<TestPin>) -> usize {
    let blocks = buffers.left() / BLOCK;
    if dice.roll(3) == 0 { (dice.roll(blocks) + 1) * BLOCK } else { buffers.left() }
}

/// Where in the bounce buffer the rest of a transfer begins.
fn position(buffers: &mut Buffers<TestPin>) -> usize {
    let next = buffers.vectors()[0].iov_base.addr();
    buffers.bounce().map_or(0, |bounce| next - bounce.as_ptr().addr())
}

impl Engine<TestPin> for Model {
    fn push(&mut self, place: usize, op: ImageOp<TestPin>) {
        self.pushed.push((place, op));
    }

    fn commit(&mut self) {}

    /// Executes some of what was pushed, and reports some of what was executed, in any order.
    fn reap(&mut self, done: &mut Vec<Completion<TestPin>>) {
        for _ in 0..self.dice.roll(self.pushed.len() + 1) {
            let index = self.dice.roll(self.pushed.len());
            let (place, mut op) = self.pushed.swap_remove(index);
            let result = self.execute(&mut op);
            self.done.push(Completion { place, op, result });
        }
        for _ in 0..self.dice.roll(self.done.len() + 1) {
            let index = self.dice.roll(self.done.len());
            done.push(self.done.swap_remove(index));
        }
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A disk on the model, the host, and the handles to pull its plug.
struct Bench {
    disk: FileDisk<TestPin, Model>,
    host: TestHost,
    medium: Rc<RefCell<Medium>>,
    failures: Rc<RefCell<VecDeque<Errno>>>,
    dice: Dice,
}

impl Bench {
    fn new(seed: u64, zero_range: Support) -> Bench {
        let medium =
            Rc::new(RefCell::new(Medium { stable: vec![0; BLOCKS as usize], cached: BTreeMap::new() }));
        let failures = Rc::new(RefCell::new(VecDeque::new()));
        let engine = Model {
            medium: Rc::clone(&medium),
            dice: Dice(seed | 1),
            pushed: Vec::new(),
            done: Vec::new(),
            failures: Rc::clone(&failures),
            zero_range,
        };
        let geometry = Geometry {
            block_shift: 9,
            formats: &[9, 12],
            blocks: BLOCKS,
            read_only: false,
            volatile_cache: true,
            deallocates: true,
        };
        let traits = Traits { alignment: Alignment::Any, zero_range: Support::Present, cache: Cache::Sound };
        // Data always bounces, so that the model can look at it.
        let size = 1 << 20;
        Bench {
            disk: FileDisk::new(geometry, traits, engine),
            host: TestHost::new(size).unpinnable(BASE..BASE + size as u64),
            medium,
            failures,
            dice: Dice(seed.rotate_left(32) | 1),
        }
    }

    fn reap(&mut self) -> Vec<(Tag, Result<(), DiskError>)> {
        let mut done = Vec::new();
        self.disk.commit();
        self.disk.reap(&mut self.host, &mut done);
        done
    }

    /// Performs one operation.
    fn perform(&mut self, operation: Operation<'_>) -> Result<(), DiskError> {
        match self.disk.submit(&mut self.host, Tag(1), operation) {
            Submission::Done(result) => result,
            Submission::Pending => loop {
                if let Some((_, result)) = self.reap().pop() {
                    return result;
                }
            },
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        start: u64,
        blocks: u64,
        durable: bool,
    },
    Zero {
        start: u64,
        blocks: u64,
        deallocate: bool,
        durable: bool,
    },
    Deallocate {
        start: u64,
        blocks: u64,
    },
    /// Nothing else may be under way, as the controller sees to.
    Format,
    Flush,
    Read {
        start: u64,
        blocks: u64,
    },
    /// Looks for completions.
    Reap,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BLOCKS).prop_flat_map(|start| (Just(start), 1..=(BLOCKS - start).min(9)));
    prop_oneof![
        4 => (range(), prop::bool::weighted(0.3))
            .prop_map(|((start, blocks), durable)| Step::Write { start, blocks, durable }),
        1 => (range(), any::<bool>(), any::<bool>()).prop_map(|((start, blocks), deallocate, durable)| {
            Step::Zero { start, blocks, deallocate, durable }
        }),
        1 => range().prop_map(|(start, blocks)| Step::Deallocate { start, blocks }),
        1 => Just(Step::Format),
        2 => Just(Step::Flush),
        1 => range().prop_map(|(start, blocks)| Step::Read { start, blocks }),
        6 => Just(Step::Reap),
    ]
}

/// What a block was made to hold, oldest first; and how many of these are acknowledged, or durable.
#[derive(Clone, Default)]
struct History {
    contents: Vec<Content>,
    acknowledged: usize,
    durable: usize,
}

/// What a command in flight promises when it is acknowledged.
struct Promise {
    range: std::ops::Range<u64>,
    kind: Kind,
}

enum Kind {
    Change {
        durable: bool,
    },
    /// Of each block, how much was acknowledged when the flush was submitted.
    Flush(Vec<usize>),
    Read(Vec<Segment>),
}

fn check(steps: &[Step], seed: u64, zero_range: Support) {
    let mut bench = Bench::new(seed, zero_range);
    let mut histories = vec![History { contents: vec![0], acknowledged: 1, durable: 1 }; BLOCKS as usize];
    let mut in_flight: BTreeMap<u32, Promise> = BTreeMap::new();
    let mut content: Content = 0;

    for (index, step) in steps.iter().enumerate() {
        let (start, blocks) = match *step {
            Step::Write { start, blocks, .. }
            | Step::Zero { start, blocks, .. }
            | Step::Deallocate { start, blocks }
            | Step::Read { start, blocks } => (start, blocks),
            Step::Format => (0, BLOCKS),
            Step::Flush | Step::Reap => (0, 0),
        };
        let range = start..start + blocks;
        // What overlaps lands in any order; a careful host waits.
        while matches!(step, Step::Reap)
            || in_flight.values().any(|other| other.range.start < range.end && range.start < other.range.end)
        {
            for (tag, result) in bench.reap() {
                assert_eq!(result, Ok(()));
                acknowledge(&mut bench.host, &mut histories, in_flight.remove(&tag.0).unwrap());
            }
            if matches!(step, Step::Reap) {
                break;
            }
        }
        if matches!(step, Step::Reap) {
            continue;
        }
        let lbas = LbaRange { start: Lba(start), blocks };
        let length = blocks as usize * BLOCK;
        let area = BASE + (index * 8192) as u64;
        let data = [Segment { iova: Some(Iova(area)), length }];
        let (operation, kind, change) = match *step {
            Step::Write { durable, .. } => {
                content = content.wrapping_add(1).max(1);
                bench.host.fill(&data, &vec![content; length]);
                let operation = Operation::Write { range: lbas, data: &data, durable };
                (operation, Kind::Change { durable }, Some(content))
            }
            Step::Zero { deallocate, durable, .. } => {
                let operation = Operation::WriteZeroes { range: lbas, deallocate, durable };
                (operation, Kind::Change { durable }, Some(0))
            }
            Step::Deallocate { .. } => {
                let operation = Operation::Deallocate { ranges: std::slice::from_ref(&lbas) };
                (operation, Kind::Change { durable: false }, Some(0))
            }
            Step::Format => (Operation::Format { block_shift: 9 }, Kind::Change { durable: true }, Some(0)),
            Step::Read { .. } => {
                (Operation::Read { range: lbas, data: &data }, Kind::Read(data.to_vec()), None)
            }
            Step::Flush => {
                let acknowledged = histories.iter().map(|history| history.acknowledged).collect();
                (Operation::Flush, Kind::Flush(acknowledged), None)
            }
            Step::Reap => unreachable!(),
        };
        if let Some(content) = change {
            histories[start as usize..range.end as usize]
                .iter_mut()
                .for_each(|history| history.contents.push(content));
        }
        assert_eq!(bench.disk.submit(&mut bench.host, Tag(index as u32), operation), Submission::Pending);
        in_flight.insert(index as u32, Promise { range, kind });
    }

    let mut medium = bench.medium.borrow_mut();
    medium.cut(&mut bench.dice);
    for (block, history) in histories.iter().enumerate() {
        let possible = &history.contents[history.durable - 1..];
        let found = medium.stable[block];
        assert!(possible.contains(&found), "block {block} holds {found}, possible is {possible:?}");
    }
}

fn acknowledge(host: &mut TestHost, histories: &mut [History], promise: Promise) {
    let blocks = promise.range.start as usize..promise.range.end as usize;
    match promise.kind {
        Kind::Change { durable } => {
            for history in &mut histories[blocks] {
                history.acknowledged = history.contents.len();
                if durable {
                    history.durable = history.contents.len();
                }
            }
        }
        Kind::Flush(acknowledged) => {
            for (history, acknowledged) in histories.iter_mut().zip(acknowledged) {
                history.durable = history.durable.max(acknowledged);
            }
        }
        Kind::Read(data) => {
            let bytes = host.bytes(&data);
            for (history, bytes) in histories[blocks].iter().zip(bytes.chunks(BLOCK)) {
                assert!(bytes.iter().all(|byte| byte == history.contents.last().unwrap()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn what_was_promised_survives(
        steps in prop::collection::vec(step(), 1..80),
        seed in any::<u64>(),
        zeroes in any::<bool>(),
    ) {
        check(&steps, seed, if zeroes { Support::Present } else { Support::Absent });
    }
}

const ONE: LbaRange = LbaRange { start: Lba(3), blocks: 1 };

fn one() -> [Segment; 1] {
    [Segment { iova: Some(Iova(BASE)), length: BLOCK }]
}

#[test]
fn after_a_failed_sync_no_later_one_is_believed() {
    let data = one();
    let write = |durable| Operation::Write { range: ONE, data: &data, durable };
    for first in [Operation::Flush, write(true)] {
        let mut bench = Bench::new(5, Support::Present);
        assert_eq!(bench.perform(Operation::Flush), Ok(()));
        bench.failures.borrow_mut().push_back(Errno::EIO);
        assert_eq!(bench.perform(first), Err(DiskError::Write));
        assert_eq!(bench.perform(Operation::Flush), Err(DiskError::Write));
        assert_eq!(bench.perform(write(true)), Err(DiskError::Write));
        let zeroes = Operation::WriteZeroes { range: ONE, deallocate: true, durable: true };
        assert_eq!(bench.perform(zeroes), Err(DiskError::Write));
        assert_eq!(bench.perform(write(false)), Ok(()));
        assert_eq!(bench.perform(Operation::Read { range: ONE, data: &data }), Ok(()));
    }
}

#[test]
fn errors_of_the_kernel_have_their_meaning() {
    let data = one();
    let read = Operation::Read { range: ONE, data: &data };
    let compare = Operation::Compare { range: ONE, data: &data };
    let verify = Operation::Verify { range: ONE };
    let write = Operation::Write { range: ONE, data: &data, durable: false };
    let deallocate = Operation::Deallocate { ranges: &[ONE] };
    for (operation, errno, error) in [
        (read, Errno::EIO, DiskError::Read),
        (read, Errno::EFAULT, DiskError::DataTransfer),
        (read, Errno::ENOMEM, DiskError::Internal),
        (compare, Errno::EIO, DiskError::Read),
        (verify, Errno::EIO, DiskError::Read),
        (write, Errno::EIO, DiskError::Write),
        (write, Errno::EFAULT, DiskError::DataTransfer),
        (write, Errno::ENOSPC, DiskError::Capacity),
        (write, Errno::EDQUOT, DiskError::Capacity),
        (deallocate, Errno::EIO, DiskError::Write),
        (Operation::Flush, Errno::EIO, DiskError::Write),
        (Operation::Flush, Errno::ENOSPC, DiskError::Capacity),
    ] {
        let mut bench = Bench::new(9, Support::Present);
        bench.failures.borrow_mut().push_back(errno);
        assert_eq!(bench.perform(operation), Err(error), "{errno}");
    }
}

#[test]
fn a_kernel_that_always_says_again_is_an_error_at_last() {
    let mut bench = Bench::new(3, Support::Present);
    bench.failures.borrow_mut().extend(std::iter::repeat_n(Errno::EAGAIN, 10_000));
    assert_eq!(bench.perform(Operation::Flush), Err(DiskError::Internal));
}
