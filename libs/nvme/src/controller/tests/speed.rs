//! How fast the poll loop is: `cargo test --release -p outboard-nvme speed -- --ignored --nocapture`.

use std::time::Instant;

use super::machine::*;
use crate::Iova;
use crate::controller::{
    Controller, Disk, DiskError, DmaError, Geometry, Host, Operation, Options, Submission, Tag,
};
use crate::spec::{AdminOpcode, NvmOpcode, Register, SubmissionEntry};

/// A disk that moves nothing.
struct Null;

impl Disk<Memory> for Null {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_shift: 9,
            blocks: 1 << 30,
            read_only: false,
            volatile_cache: false,
            deallocates: false,
        }
    }
    fn submit(&mut self, _: &mut Memory, _: Tag, operation: Operation<'_>) -> Submission {
        std::hint::black_box(operation);
        Submission::Done(Ok(()))
    }
    fn commit(&mut self, _: &mut Memory) {}
    fn reap(&mut self, _: &mut Memory, _: &mut Vec<(Tag, Result<(), DiskError>)>) {}
}

#[test]
#[ignore = "a measurement"]
fn reads_of_a_null_disk() -> Result<(), DmaError> {
    const ENTRIES: u32 = 1024;
    let mut host = Memory::new(0x40_0000);
    let mut controller: Controller<Memory, Null> = Controller::new(Options::default(), vec![Null]).unwrap();
    let registers = controller.registers();
    let _ = registers.write(Register::AQA.0.into(), &(7_u32 << 16 | 7).to_le_bytes());
    let _ = registers.write(Register::ASQ.0.into(), &0x1000_u64.to_le_bytes());
    let _ = registers.write(Register::ACQ.0.into(), &0x2000_u64.to_le_bytes());
    let _ = registers.write(Register::CC.0.into(), &0x0046_0001_u32.to_le_bytes());
    controller.poll(&mut host);
    for (opcode, at, index) in [
        (AdminOpcode::CREATE_COMPLETION_QUEUE, 0x2_0000_u64, 0_u32),
        (AdminOpcode::CREATE_SUBMISSION_QUEUE, 0x1_0000, 1),
    ] {
        let entry = SubmissionEntry {
            opcode: opcode.0,
            prp1: at.into(),
            dword10: ((ENTRIES - 1) << 16 | 1).into(),
            dword11: (1 << 16 | 3).into(),
            ..SubmissionEntry::default()
        };
        host.write(Iova(0x1000 + u64::from(index) * 64), zerocopy::IntoBytes::as_bytes(&entry))?;
        host.doorbells[0] = index + 1;
        controller.poll(&mut host);
    }
    let entry = transfer(NvmOpcode::READ, 8, 8, BUFFER_AT, 0);
    for slot in 0..u64::from(ENTRIES) {
        host.write(Iova(0x1_0000 + slot * 64), zerocopy::IntoBytes::as_bytes(&entry))?;
    }
    for depth in [1, 32, 128] {
        let total = 8_000_000_u32;
        let start = Instant::now();
        let mut tail = host.doorbells[2];
        let mut sent = 0;
        while sent < total {
            tail = (tail + depth) % ENTRIES;
            host.doorbells[2] = tail;
            sent += depth;
            while host.doorbells[3] != tail {
                controller.poll(&mut host);
                // The driver consumes all that is there.
                host.doorbells[3] = (host.doorbells[3] + depth.min(32)) % ENTRIES;
            }
            host.interrupts.clear();
        }
        let rate = f64::from(sent) / start.elapsed().as_secs_f64();
        println!("figure null_read_depth_{depth} {rate:.0} IOPS");
    }
    assert!(controller.counters().reads.get() >= 24_000_000);
    assert_eq!(controller.counters().errors.get(), 0);
    Ok(())
}
