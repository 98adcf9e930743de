//! Jobs over an image that loses power: what was promised to be durable is there afterwards.

use nix::errno::Errno;
use outboard_nvme::controller::{LbaRange, Segment};
use outboard_nvme::{Iova, Lba};
use proptest::prelude::*;

use super::engine::{ImageOp, Vectors};
use super::*;
use crate::disk::tests::{TestHost, TestPin};

const BLOCKS: usize = 64;
const BLOCK: usize = 512;

/// An image on a medium with a cache. What is in the cache only is gone when the power is.
struct Image {
    cached: Vec<u8>,
    durable: Vec<u8>,
    /// Operations that this file system does not have.
    without: Vec<i32>,
    /// The most bytes that a read or write does at once: short ones are resumed.
    piece: usize,
}

impl Image {
    fn execute(&mut self, op: ImageOp) -> i32 {
        match op {
            ImageOp::Read { offset, into } => self.transfer(offset, into, |image, memory| {
                memory.copy_from_slice(image);
            }),
            ImageOp::Write { offset, from, durable } => {
                let count = self.transfer(offset, from, |image, memory| image.copy_from_slice(memory));
                if durable {
                    let range = offset as usize..offset as usize + count as usize;
                    self.durable[range.clone()].copy_from_slice(&self.cached[range]);
                }
                count
            }
            ImageOp::Sync => {
                self.durable.copy_from_slice(&self.cached);
                0
            }
            ImageOp::Punch { offset, length } => self.clear(PUNCH, offset, length),
            ImageOp::Zero { offset, length } => self.clear(ZERO, offset, length),
        }
    }

    fn clear(&mut self, mode: i32, offset: u64, length: u64) -> i32 {
        if self.without.contains(&mode) {
            return -(Errno::EOPNOTSUPP as i32);
        }
        self.cached[offset as usize..(offset + length) as usize].fill(0);
        0
    }

    fn transfer(&mut self, offset: u64, vectors: Vectors, copy: impl Fn(&mut [u8], &mut [u8])) -> i32 {
        let mut at = offset as usize;
        let mut left = self.piece;
        // SAFETY: the job keeps its vectors and their memory until it is told the result.
        let vectors = unsafe { std::slice::from_raw_parts(vectors.first, vectors.count as usize) };
        for vector in vectors {
            let count = vector.iov_len.min(left);
            // SAFETY: as above.
            let memory = unsafe { std::slice::from_raw_parts_mut(vector.iov_base.cast::<u8>(), count) };
            copy(&mut self.cached[at..at + count], memory);
            at += count;
            left -= count;
        }
        (at - offset as usize) as i32
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { start: usize, blocks: usize, byte: u8, durable: bool, by_messages: bool },
    Zero { start: usize, blocks: usize, deallocate: bool, durable: bool },
    Deallocate { start: usize, blocks: usize },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let extent = || (0..BLOCKS).prop_flat_map(|start| (Just(start), 1..=(BLOCKS - start).min(8)));
    prop_oneof![
        4 => (extent(), 1_u8.., any::<bool>(), any::<bool>()).prop_map(
            |((start, blocks), byte, durable, by_messages)| Step::Write { start, blocks, byte, durable, by_messages }
        ),
        2 => (extent(), any::<bool>(), any::<bool>()).prop_map(|((start, blocks), deallocate, durable)| {
            Step::Zero { start, blocks, deallocate, durable }
        }),
        1 => extent().prop_map(|(start, blocks)| Step::Deallocate { start, blocks }),
        2 => Just(Step::Flush),
    ]
}

fn range(start: usize, blocks: usize) -> LbaRange {
    LbaRange { start: Lba(start as u64), blocks: blocks as u64 }
}

/// Runs a job to its end, as the disk does.
fn run(host: &mut TestHost, image: &mut Image, operation: Operation<'_>) {
    let mut job = Job::<TestPin>::new(Tag(0), operation, 9);
    job.begin(host, Alignment { memory: 512, offset: 512 }).unwrap();
    while let Some(operation) = job.operation() {
        let result = image.execute(operation);
        match job.finish(host, result) {
            Outcome::Again => {}
            Outcome::Over(outcome) => return assert_eq!(outcome, Ok(())),
        }
    }
}

proptest! {
    /// After a power cut a block has the content that was last promised to be durable, or a later one.
    #[test]
    fn what_was_promised_survives_a_power_cut(
        steps in prop::collection::vec(step(), 1..40),
        without in prop::sample::subsequence(vec![PUNCH, ZERO], 0..=2),
        pieces in 1_usize..9,
    ) {
        let mut host = TestHost::new();
        let bytes = vec![0; BLOCKS * BLOCK];
        let mut image = Image { cached: bytes.clone(), durable: bytes.clone(), without, piece: pieces * BLOCK };
        // What each block holds, and since when it was promised to survive: contents in the order of time.
        let mut history: Vec<Vec<u8>> = vec![vec![0]; BLOCKS];
        let mut promised = vec![0_usize; BLOCKS];
        for step in steps {
            match step {
                Step::Write { start, blocks, byte, durable, by_messages } => {
                    let iova = Iova(if by_messages { 768 << 10 } else { 0x1000 });
                    let data = [Segment { iova, length: blocks * BLOCK }];
                    crate::disk::PinHost::pin(&mut host, Iova(0), 1, controller::Direction::ToHost).unwrap();
                    controller::Host::write(&mut host, iova, &vec![byte; blocks * BLOCK]).unwrap();
                    run(&mut host, &mut image, Operation::Write { range: range(start, blocks), data: &data, durable });
                    for block in start..start + blocks {
                        history[block].push(byte);
                        if durable {
                            promised[block] = history[block].len() - 1;
                        }
                    }
                }
                Step::Zero { start, blocks, deallocate, durable } => {
                    let range = range(start, blocks);
                    run(&mut host, &mut image, Operation::WriteZeroes { range, deallocate, durable });
                    for block in start..start + blocks {
                        history[block].push(0);
                        if durable {
                            promised[block] = history[block].len() - 1;
                        }
                    }
                }
                Step::Deallocate { start, blocks } => {
                    let before = image.cached.clone();
                    run(&mut host, &mut image, Operation::Deallocate { ranges: &[range(start, blocks)] });
                    // A hint: where the image cannot take it, the content stays.
                    if image.cached != before || !image.without.contains(&PUNCH) {
                        (start..start + blocks).for_each(|block| history[block].push(0));
                    }
                }
                Step::Flush => {
                    run(&mut host, &mut image, Operation::Flush);
                    for block in 0..BLOCKS {
                        promised[block] = history[block].len() - 1;
                    }
                }
            }
            for block in 0..BLOCKS {
                let now = &image.cached[block * BLOCK..(block + 1) * BLOCK];
                prop_assert!(now.iter().all(|byte| byte == history[block].last().unwrap()));
                // The power may be cut after any step.
                let survived = image.durable[block * BLOCK];
                prop_assert!(
                    history[block][promised[block]..].contains(&survived),
                    "block {} holds {} after a power cut", block, survived
                );
            }
        }
    }
}
