//! What the host was told is durable survives a power cut: Flush, FUA, and the write cache on and off, over a disk
//! that forgets what was not synced.

use proptest::prelude::*;

use super::machine::{BUFFER_AT, Machine, Pace, RamDisk, result, transfer};
use crate::controller::Options;
use crate::spec::{AdminOpcode, NvmOpcode, SubmissionEntry};

const BLOCKS: u64 = 32;
const FUA: u32 = 1 << 30;
/// Set Features, Volatile Write Cache.
const WRITE_CACHE: u32 = 0x06;

#[derive(Clone, Debug)]
enum Step {
    Write {
        lba: u64,
        blocks: u64,
        byte: u8,
        fua: bool,
    },
    Zero {
        lba: u64,
        blocks: u64,
        fua: bool,
    },
    Deallocate {
        lba: u64,
        blocks: u64,
    },
    Flush {
        all: bool,
    },
    Format,
    Cache(bool),
    /// A reset by CC.EN: it must not make anything that was promised undone.
    Reset,
    /// The power fails and comes back.
    Cut,
}

fn step() -> impl Strategy<Value = Step> {
    let extent = || (0..BLOCKS).prop_flat_map(|lba| (Just(lba), 1..=(BLOCKS - lba).min(8)));
    prop_oneof![
        6 => (extent(), 1_u8.., any::<bool>())
            .prop_map(|((lba, blocks), byte, fua)| Step::Write { lba, blocks, byte, fua }),
        2 => (extent(), any::<bool>()).prop_map(|((lba, blocks), fua)| Step::Zero { lba, blocks, fua }),
        1 => extent().prop_map(|(lba, blocks)| Step::Deallocate { lba, blocks }),
        2 => any::<bool>().prop_map(|all| Step::Flush { all }),
        1 => Just(Step::Format),
        1 => any::<bool>().prop_map(Step::Cache),
        1 => Just(Step::Reset),
        1 => Just(Step::Cut),
    ]
}

/// What a block held, in the order of time, and from which of these on it may be found after a power cut.
#[derive(Clone)]
struct Block {
    history: Vec<u8>,
    promised: usize,
}

impl Block {
    fn put(&mut self, byte: u8, durable: bool) {
        self.history.push(byte);
        if durable {
            self.promise();
        }
    }

    fn promise(&mut self) {
        self.promised = self.history.len() - 1;
    }
}

fn start(disk: RamDisk) -> (Machine, super::machine::Pair) {
    let (machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 8);
    (machine, pairs.remove(0))
}

proptest! {
    /// Fault 45: commands without data among those with.
    #[test]
    fn what_was_acknowledged_as_durable_survives(
        steps in prop::collection::vec(step(), 1..60), later in any::<bool>()
    ) {
        let pace = || if later { Pace::Later(1) } else { Pace::AtOnce };
        let (mut machine, mut pair) = start(RamDisk::new(BLOCKS, 9, pace()));
        let mut model = vec![Block { history: vec![0], promised: 0 }; BLOCKS as usize];
        let mut cached = true;
        for step in steps {
            let range = |lba: u64, blocks: u64| lba as usize..(lba + blocks) as usize;
            match step {
                Step::Write { lba, blocks, byte, fua } => {
                    let bytes = (blocks as usize) << 9;
                    machine.host.bytes[BUFFER_AT as usize..][..bytes].fill(byte);
                    let mut entry = transfer(NvmOpcode::WRITE, lba, blocks as u32, BUFFER_AT, 0);
                    entry.dword12 = (entry.dword12.get() | if fua { FUA } else { 0 }).into();
                    prop_assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
                    model[range(lba, blocks)].iter_mut().for_each(|block| block.put(byte, fua || !cached));
                }
                Step::Zero { lba, blocks, fua } => {
                    let mut entry = transfer(NvmOpcode::WRITE_ZEROES, lba, blocks as u32, 0, 0);
                    entry.dword12 = (entry.dword12.get() | if fua { FUA } else { 0 }).into();
                    prop_assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
                    model[range(lba, blocks)].iter_mut().for_each(|block| block.put(0, fua || !cached));
                }
                Step::Deallocate { lba, blocks } => {
                    let list = &mut machine.host.bytes[BUFFER_AT as usize..][..16];
                    list[4..8].copy_from_slice(&(blocks as u32).to_le_bytes());
                    list[8..].copy_from_slice(&lba.to_le_bytes());
                    let entry = SubmissionEntry {
                        opcode: NvmOpcode::DATASET_MANAGEMENT.0,
                        nsid: 1.into(),
                        prp1: BUFFER_AT.into(),
                        dword11: 4.into(),
                        ..SubmissionEntry::default()
                    };
                    prop_assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
                    model[range(lba, blocks)].iter_mut().for_each(|block| block.put(0, false));
                }
                Step::Flush { all } => {
                    let nsid = if all { u32::MAX } else { 1 }.into();
                    let entry = SubmissionEntry { opcode: NvmOpcode::FLUSH.0, nsid, ..SubmissionEntry::default() };
                    prop_assert_eq!(result(&machine.run(&mut pair, entry)), Ok(0));
                    model.iter_mut().for_each(Block::promise);
                }
                Step::Format => {
                    machine.admin(AdminOpcode::FORMAT_NVM, 1, 0, 0).unwrap();
                    model.iter_mut().for_each(|block| block.put(0, true));
                }
                Step::Cache(on) => {
                    machine.admin(AdminOpcode::SET_FEATURES, 0, WRITE_CACHE, on.into()).unwrap();
                    // Switched off, nothing may be in it any more. (A deallocation later is a hint still.)
                    if cached && !on {
                        model.iter_mut().for_each(Block::promise);
                    }
                    cached = on;
                }
                Step::Reset | Step::Cut => {
                    // Another controller on the same medium: a feature that is not saved is at its default again.
                    let disk = &mut machine.controller.disks.namespaces[0].disk;
                    if matches!(step, Step::Cut) {
                        disk.cut_power();
                        for (block, now) in model.iter_mut().zip(disk.data.chunks(512)) {
                            let allowed = &block.history[block.promised..];
                            prop_assert!(now.iter().all(|byte| *byte == now[0]) && allowed.contains(&now[0]));
                            *block = Block { history: vec![now[0]], promised: 0 };
                        }
                    }
                    let old = std::mem::replace(disk, RamDisk::new(BLOCKS, 9, pace()));
                    (machine, pair) = start(old);
                    cached = true;
                }
            }
            let disk = &machine.controller.disks.namespaces[0].disk;
            for (block, now) in model.iter().zip(disk.data.chunks(512)) {
                prop_assert!(now.iter().all(|byte| byte == block.history.last().unwrap()));
            }
        }
    }
}
