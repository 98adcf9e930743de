//! Power cuts: what the host was told is durable is there afterwards.

use std::collections::HashMap;

use proptest::prelude::*;

use super::machine::*;
use crate::controller::Options;
use crate::spec::{AdminOpcode, FeatureId, NvmOpcode, SubmissionEntry};

const BLOCKS: u64 = 8;

#[derive(Clone, Copy, Debug)]
enum Step {
    Write { lba: u64, value: u8, fua: bool },
    Zero { lba: u64, fua: bool },
    Flush { all: bool },
    Cache(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..BLOCKS, 1_u8.., any::<bool>()).prop_map(|(lba, value, fua)| Step::Write { lba, value, fua }),
        2 => (0..BLOCKS, any::<bool>()).prop_map(|(lba, fua)| Step::Zero { lba, fua }),
        1 => any::<bool>().prop_map(|all| Step::Flush { all }),
        1 => any::<bool>().prop_map(Step::Cache),
    ]
}

/// What a block may hold after a power cut: what was last made durable, or anything written since.
#[derive(Clone, Debug)]
struct Possible(Vec<u8>);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_was_acknowledged_as_durable_survives(
        steps in prop::collection::vec(step(), 1..60),
        at_once: bool,
        shut_down: bool,
    ) {
        let pace = if at_once { Pace::AtOnce } else { Pace::Later(1) };
        let disk = RamDisk::new(BLOCKS, 9, pace);
        let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 8);
        let pair = &mut pairs[0];
        let mut blocks: HashMap<u64, Possible> = (0..BLOCKS).map(|lba| (lba, Possible(vec![0]))).collect();
        let settle = |blocks: &mut HashMap<u64, Possible>| {
            for Possible(values) in blocks.values_mut() {
                values.drain(..values.len() - 1);
            }
        };
        let mut cache = true;
        for step in steps {
            let (entry, change) = match step {
                Step::Write { lba, value, fua } => {
                    machine.host.bytes[BUFFER_AT as usize..][..512].fill(value);
                    let mut entry = transfer(NvmOpcode::WRITE, lba, 1, BUFFER_AT, 0);
                    entry.dword12 = (u32::from(fua) << 30).into();
                    (entry, Some((lba, value, fua)))
                }
                Step::Zero { lba, fua } => {
                    let mut entry = transfer(NvmOpcode::WRITE_ZEROES, lba, 1, 0, 0);
                    entry.dword12 = (u32::from(fua) << 30).into();
                    (entry, Some((lba, 0, fua)))
                }
                Step::Flush { all } => {
                    let nsid = if all { u32::MAX } else { 1 };
                    (SubmissionEntry { nsid: nsid.into(), ..transfer(NvmOpcode::FLUSH, 0, 1, 0, 0) }, None)
                }
                Step::Cache(on) => {
                    let feature = FeatureId::VOLATILE_WRITE_CACHE.0.into();
                    machine.admin(AdminOpcode::SET_FEATURES, 0, feature, on.into()).unwrap();
                    if !on {
                        settle(&mut blocks);
                    }
                    cache = on;
                    continue;
                }
            };
            prop_assert_eq!(result(&machine.run(pair, entry)), Ok(0));
            match change {
                Some((lba, value, fua)) => {
                    let Possible(values) = blocks.get_mut(&lba).unwrap();
                    if fua || !cache {
                        values.clear();
                    }
                    values.push(value);
                }
                None => settle(&mut blocks),
            }
        }
        if shut_down {
            let configuration = Machine::configuration().with_enable(true).with_shutdown_bits(1);
            let _ = machine.write32(crate::spec::Register::CC, configuration.bits());
            machine.settle();
            settle(&mut blocks);
        }
        let disk = &mut machine.controller.disks.namespaces[0].disk;
        disk.cut_power();
        for (lba, Possible(values)) in blocks {
            let block = &disk.data[lba as usize * 512..][..512];
            prop_assert!(block.iter().all(|byte| *byte == block[0]));
            prop_assert!(values.contains(&block[0]), "block {} holds {}, not one of {:?}", lba, block[0], values);
        }
    }
}
