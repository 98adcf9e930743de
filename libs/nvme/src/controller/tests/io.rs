//! Reads, writes and what else goes to namespaces.

use super::machine::*;
use crate::Iova;
use crate::controller::{DiskError, Host, Options};
use crate::spec::{NvmOpcode, Status, SubmissionEntry};

const BLOCKS: u64 = 1024;

fn ready(pace: Pace) -> (Machine, Pair) {
    let disk = RamDisk::new(BLOCKS, 9, pace);
    let (machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 64);
    (machine, pairs.remove(0))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 7 + index / 251) as u8).collect()
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
    }
}
