//! Compare, Verify and Write Uncorrectable on two namespaces that have nothing in common, against a model.

use super::machine::*;
use crate::Iova;
use crate::controller::{DiskError, Host, Options};
use crate::spec::{
    AdminOpcode, CommandsSupportedLog, IdentifyController, LogPageId, NvmOpcode, SmartLog, Status,
    SubmissionEntry,
};
use proptest::prelude::*;

/// Blocks and log2 of their size, by namespace.
const SHAPES: [(u64, u32); 2] = [(64, 9), (16, 12)];

#[derive(Clone, Debug)]
enum Step {
    Write(u8),
    Zero,
    Read,
    Compare(u8),
    Verify,
    Uncorrectable,
    Deallocate,
    Flush,
    Reset,
}

/// A step, its namespace's index, first block and number of blocks.
fn step() -> impl Strategy<Value = (Step, usize, u64, u64)> {
    let step = prop_oneof![
        4 => (1_u8..4).prop_map(Step::Write),
        2 => Just(Step::Zero),
        3 => Just(Step::Read),
        4 => (0_u8..4).prop_map(Step::Compare),
        3 => Just(Step::Verify),
        4 => Just(Step::Uncorrectable),
        1 => Just(Step::Deallocate),
        1 => Just(Step::Flush),
        1 => Just(Step::Reset),
    ];
    // Some ranges end beyond the namespace.
    (step, 0..SHAPES.len()).prop_flat_map(|(step, namespace)| {
        let (blocks, _) = SHAPES[namespace];
        (Just(step), Just(namespace), 0..blocks, 1_u64..8)
    })
}

fn disks(pace: Pace) -> Vec<RamDisk> {
    SHAPES.iter().map(|&(blocks, shift)| RamDisk::new(blocks, shift, pace)).collect()
}

fn start(pace: Pace) -> (Machine, Pair) {
    let (machine, mut pairs) = Machine::enabled(Options::default(), disks(pace), 1, 8);
    (machine, pairs.remove(0))
}

fn smart(machine: &mut Machine) -> SmartLog {
    machine.admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 127 << 16 | u32::from(LogPageId::SMART.0), 0).unwrap();
    machine.data()
}

proptest! {
    #[test]
    fn commands_agree_with_a_model(steps in prop::collection::vec(step(), 1..80), later: bool) {
        let (mut machine, mut pair) = start(if later { Pace::Later(1) } else { Pace::AtOnce });
        // What each block holds; none if it cannot be read.
        let mut model = SHAPES.map(|(blocks, _)| vec![Some(0_u8); blocks as usize]);
        let (mut media_errors, mut reads) = (0_u128, 0_u128);
        for (step, namespace, lba, blocks) in steps {
            let (size, shift) = SHAPES[namespace];
            let bytes = (blocks as usize) << shift;
            // Two pages and more need a list.
            let list: Vec<u8> = (1..16_u64).flat_map(|page| (BUFFER_AT + page * 0x1000).to_le_bytes()).collect();
            machine.host.write(Iova(0xa000), &list).unwrap();
            let second = if bytes > 8192 { 0xa000 } else { BUFFER_AT + 0x1000 };
            let entry = |opcode: NvmOpcode| SubmissionEntry {
                nsid: (namespace as u32 + 1).into(),
                ..transfer(opcode, lba, blocks as u32, BUFFER_AT, second)
            };
            let inside = lba + blocks <= size;
            let range = lba as usize..(lba + blocks).min(size) as usize;
            let held = &mut model[namespace][range];
            let readable = held.iter().all(Option::is_some);
            let buffer = BUFFER_AT as usize..BUFFER_AT as usize + bytes;
            let (sent, expected) = match step {
                Step::Reset => {
                    machine.controller.reset(&mut machine.host);
                    machine.settle();
                    machine.enable();
                    pair = Pair::new(1, QUEUES_AT, 8);
                    machine.create(&pair);
                    continue;
                }
                Step::Flush => (entry(NvmOpcode::FLUSH), Ok(0)),
                _ if !inside => {
                    let opcode = match step {
                        Step::Write(_) => NvmOpcode::WRITE,
                        Step::Zero => NvmOpcode::WRITE_ZEROES,
                        Step::Compare(_) => NvmOpcode::COMPARE,
                        Step::Verify => NvmOpcode::VERIFY,
                        Step::Uncorrectable => NvmOpcode::WRITE_UNCORRECTABLE,
                        _ => NvmOpcode::READ,
                    };
                    (entry(opcode), Err(Status::LBA_OUT_OF_RANGE))
                }
                Step::Write(byte) => {
                    machine.host.bytes[buffer.clone()].fill(byte);
                    held.fill(Some(byte));
                    (entry(NvmOpcode::WRITE), Ok(0))
                }
                Step::Zero => {
                    held.fill(Some(0));
                    (entry(NvmOpcode::WRITE_ZEROES), Ok(0))
                }
                Step::Uncorrectable => {
                    held.fill(None);
                    (entry(NvmOpcode::WRITE_UNCORRECTABLE), Ok(0))
                }
                Step::Deallocate => {
                    // What is marked stays: only a write ends that (6.14).
                    held.iter_mut().for_each(|block| *block = block.map(|_| 0));
                    let range = [0, blocks as u32].map(u32::to_le_bytes).concat();
                    machine.host.write(Iova(BUFFER_AT), &[&range[..], &lba.to_le_bytes()].concat()).unwrap();
                    let mut entry = entry(NvmOpcode::DATASET_MANAGEMENT);
                    (entry.dword10, entry.dword11) = (0.into(), 4.into());
                    (entry, Ok(0))
                }
                Step::Compare(byte) => {
                    machine.host.bytes[buffer.clone()].fill(byte);
                    let expected = match () {
                        () if !readable => Err(Status::UNRECOVERED_READ_ERROR),
                        () if held.iter().all(|block| *block == Some(byte)) => Ok(0),
                        () => Err(Status::COMPARE_FAILURE),
                    };
                    (entry(NvmOpcode::COMPARE), expected)
                }
                Step::Read | Step::Verify => {
                    machine.host.bytes[buffer.clone()].fill(0xee);
                    let opcode = if matches!(step, Step::Read) { NvmOpcode::READ } else { NvmOpcode::VERIFY };
                    (entry(opcode), if readable { Ok(0) } else { Err(Status::UNRECOVERED_READ_ERROR) })
                }
            };
            let held = held.to_vec();
            prop_assert_eq!(result(&machine.run(&mut pair, sent)), expected);
            if expected == Err(Status::UNRECOVERED_READ_ERROR) {
                media_errors += 1;
            }
            let reading = matches!(step, Step::Read | Step::Compare(_) | Step::Verify);
            reads += u128::from(reading && expected.is_ok());
            if matches!(step, Step::Read) && expected.is_ok() {
                for (block, bytes) in held.iter().zip(machine.host.bytes[buffer].chunks(1 << shift)) {
                    prop_assert!(bytes.iter().all(|byte| Some(*byte) == *block));
                }
            } else if reading && !matches!(step, Step::Compare(_)) && inside {
                prop_assert!(machine.host.bytes[buffer].iter().all(|byte| *byte == 0xee));
            }
        }
        let smart = smart(&mut machine);
        prop_assert_eq!((smart.media_errors.get(), smart.host_reads.get()), (media_errors, reads));
    }
}

#[test]
fn the_commands_are_announced() {
    let (mut machine, _) = start(Pace::AtOnce);
    machine.admin(AdminOpcode::IDENTIFY, 0, 1, 0).unwrap();
    let commands = machine.data::<IdentifyController>().nvm_commands;
    assert!(commands.compare() && commands.verify() && commands.write_uncorrectable());
    machine
        .admin(AdminOpcode::GET_LOG_PAGE, 0, 1023 << 16 | u32::from(LogPageId::COMMANDS_SUPPORTED.0), 0)
        .unwrap();
    let log: CommandsSupportedLog = machine.data();
    for (opcode, changes) in
        [(NvmOpcode::COMPARE, false), (NvmOpcode::VERIFY, false), (NvmOpcode::WRITE_UNCORRECTABLE, true)]
    {
        let effects = log.io[usize::from(opcode.0)];
        assert!(effects.supported() && effects.data_change() == changes);
    }
}

#[test]
fn what_cannot_be_compared_or_written_has_its_status() {
    let (mut machine, mut pair) = start(Pace::Later(1));
    // MDTS limits what moves data, and nothing else.
    let entry = |opcode, blocks| transfer(opcode, 0, blocks, BUFFER_AT, 0);
    assert_eq!(result(&machine.run(&mut pair, entry(NvmOpcode::COMPARE, 1025))), Err(Status::INVALID_FIELD));
    for opcode in [NvmOpcode::VERIFY, NvmOpcode::WRITE_UNCORRECTABLE] {
        assert_eq!(result(&machine.run(&mut pair, entry(opcode, 65536))), Err(Status::LBA_OUT_OF_RANGE));
        for nsid in [0, 3, u32::MAX] {
            let entry = SubmissionEntry { nsid: nsid.into(), ..entry(opcode, 1) };
            assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::INVALID_NAMESPACE));
        }
    }
    let far = transfer(NvmOpcode::COMPARE, 0, 1, 1 << 40, 0);
    assert_eq!(result(&machine.run(&mut pair, far)), Err(Status::DATA_TRANSFER_ERROR));

    // A write that fails leaves a block as it was: marked.
    assert_eq!(result(&machine.run(&mut pair, entry(NvmOpcode::WRITE_UNCORRECTABLE, 1))), Ok(0));
    let fail = |machine: &mut Machine, error| machine.controller.disks.namespaces[0].disk.fail = error;
    fail(&mut machine, Some(DiskError::Write));
    assert_eq!(result(&machine.run(&mut pair, entry(NvmOpcode::WRITE, 1))), Err(Status::WRITE_FAULT));
    fail(&mut machine, None);
    assert_eq!(
        result(&machine.run(&mut pair, entry(NvmOpcode::READ, 1))),
        Err(Status::UNRECOVERED_READ_ERROR)
    );
    // The medium's own errors count like the marks.
    fail(&mut machine, Some(DiskError::Read));
    let entry = transfer(NvmOpcode::VERIFY, 8, 1, 0, 0);
    assert_eq!(result(&machine.run(&mut pair, entry)), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(smart(&mut machine).media_errors.get(), 3);

    let mut disks = disks(Pace::AtOnce);
    disks[0].geometry.read_only = true;
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), disks, 1, 8);
    for (opcode, expected) in [
        (NvmOpcode::WRITE_UNCORRECTABLE, Err(Status::WRITE_PROTECTED)),
        (NvmOpcode::COMPARE, Ok(0)),
        (NvmOpcode::VERIFY, Ok(0)),
    ] {
        let entry = transfer(opcode, 0, 1, BUFFER_AT, 0);
        assert_eq!(result(&machine.run(&mut pairs[0], entry)), expected);
    }
}
