//! Doorbell Buffer Config: doorbells in memory, and a controller that sleeps.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::machine::*;
use crate::Iova;
use crate::controller::{
    Controller, Disk, DiskError, DmaError, Geometry, Host, Operation, Options, Submission, Tag,
};
use crate::spec::{AdminOpcode, CompletionEntry, NvmOpcode, Register, Status, SubmissionEntry};

const SHADOW_AT: u64 = 0x4000;
const EVENTS_AT: u64 = 0x5000;

fn options() -> Options {
    Options { shadow_doorbells: true, ..Options::default() }
}

fn configure(machine: &mut Machine, doorbells: u64, events: u64) -> Result<u32, Status> {
    machine.run_admin(SubmissionEntry {
        opcode: AdminOpcode::DOORBELL_BUFFER_CONFIG.0,
        prp1: doorbells.into(),
        prp2: events.into(),
        ..SubmissionEntry::default()
    })
}

fn load(machine: &mut Machine, page: u64, index: u64) -> u32 {
    machine.host.load(Iova(page + index * 4)).unwrap()
}

/// Fault 49.
#[test]
fn io_queues_move_to_the_shadow_page_and_the_admin_queue_does_not() {
    let disk = RamDisk::new(64, 9, Pace::AtOnce);
    let (mut machine, mut pairs) = Machine::enabled(options(), vec![disk], 1, 8);
    let pair = &mut pairs[0];
    machine.run(pair, transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
    assert_eq!(configure(&mut machine, SHADOW_AT + 4, EVENTS_AT), Err(Status::INVALID_FIELD));
    assert_eq!(configure(&mut machine, SHADOW_AT, EVENTS_AT), Ok(0));
    assert_eq!([load(&mut machine, SHADOW_AT, 2), load(&mut machine, SHADOW_AT, 3)], [1, 1]);
    assert_eq!([load(&mut machine, SHADOW_AT, 0), load(&mut machine, SHADOW_AT, 1)], [0, 0]);

    // The register is not looked at any more, the page is.
    machine.push(pair, &transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
    machine.settle();
    assert_eq!(machine.controller.counters().reads.get(), 1);
    machine.host.store(Iova(SHADOW_AT + 8), pair.tail).unwrap();
    machine.settle();
    assert_eq!(machine.controller.counters().reads.get(), 2);

    // Before sleep the controller says from where on it wants to be rung.
    assert!(machine.controller.prepare_sleep(&mut machine.host));
    assert_eq!(load(&mut machine, EVENTS_AT, 2), pair.tail);
    // A queue created now starts at 0 in the page too.
    machine.host.store(Iova(SHADOW_AT + 16), 7).unwrap();
    machine.create_completion(2, 7, QUEUES_AT + 0x10000, 1).unwrap();
    machine.create_submission(2, 7, QUEUES_AT + 0x11000, 2).unwrap();
    assert_eq!(load(&mut machine, SHADOW_AT, 4), 0);
}

/// A VMM may take the pin to fall only when the host touches a register: QEMU without KVM.
#[test]
fn for_the_pin_every_consumed_completion_is_asked_for_before_the_interrupt() {
    let disk = RamDisk::new(64, 9, Pace::AtOnce);
    let (mut machine, mut pairs) = Machine::enabled(options(), vec![disk], 1, 8);
    let pair = &mut pairs[0];
    machine.host.pin = true;
    configure(&mut machine, SHADOW_AT, EVENTS_AT).unwrap();
    for round in 0..20 {
        machine.push(pair, &transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
        machine.host.store(Iova(SHADOW_AT + 8), pair.tail).unwrap();
        machine.settle();
        assert!(machine.host.line, "round {round}");
        assert_eq!(load(&mut machine, EVENTS_AT, 3), pair.head, "round {round}");
        machine.pop(pair).unwrap();
        machine.host.store(Iova(SHADOW_AT + 12), pair.head).unwrap();
        machine.settle();
        assert!(!machine.host.line, "round {round}");
    }
}

/// Fault 49.
#[test]
fn a_reset_forgets_the_pages() {
    for reset in 0..3 {
        let disk = RamDisk::new(64, 9, Pace::AtOnce);
        let (mut machine, _) = Machine::enabled(options(), vec![disk], 1, 8);
        configure(&mut machine, SHADOW_AT, EVENTS_AT).unwrap();
        match reset {
            0 => machine.controller.reset(&mut machine.host),
            1 => {
                let _ = machine.write32(Register::CC, 0);
            }
            _ => {
                let _ = machine.write32(Register::CC, 0);
                let _ = machine.write32(Register::CC, 1);
            }
        }
        machine.settle();
        machine.controller.reset(&mut machine.host);
        machine.settle();
        machine.host.slice(Iova(SHADOW_AT), 0x2000).unwrap().fill(0xcc);
        machine.enable();
        let mut pair = Pair::new(1, QUEUES_AT, 8);
        machine.create(&pair);
        for _ in 0..20 {
            machine.run(&mut pair, transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
            machine.controller.prepare_sleep(&mut machine.host);
        }
        assert!(machine.host.slice(Iova(SHADOW_AT), 0x2000).unwrap().iter().all(|byte| *byte == 0xcc));
    }
}

#[test]
fn a_page_out_of_reach_stops_the_queue_until_it_is_back() {
    let disk = RamDisk::new(64, 9, Pace::AtOnce);
    let (mut machine, mut pairs) = Machine::enabled(options(), vec![disk], 1, 8);
    let end = machine.host.bytes.len() as u64;
    configure(&mut machine, end, EVENTS_AT).unwrap();
    machine.push(&mut pairs[0], &transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
    machine.settle();
    assert!(machine.status().ready());
    assert_eq!(machine.controller.counters().reads.get(), 0);
    machine.host.bytes.resize(end as usize + 4096, 0);
    machine.host.store(Iova(end + 8), 1).unwrap();
    machine.settle();
    assert_eq!(machine.controller.counters().reads.get(), 1);
}

#[test]
fn without_the_option_the_command_does_not_exist() {
    let (mut machine, _) = Machine::enabled(Options::default(), vec![], 0, 2);
    assert_eq!(configure(&mut machine, SHADOW_AT, EVENTS_AT), Err(Status::INVALID_OPCODE));
}

/// Memory that two threads share, as a guest and its device do.
struct Shared {
    bytes: Vec<AtomicU8>,
    /// Dwords that are written whole: the shadow pages, by index from `SHADOW_AT`.
    dwords: Vec<AtomicU32>,
    /// Set with the last dword of each completion entry of the I/O queue.
    posted: Vec<AtomicU32>,
    doorbells: Vec<AtomicU32>,
    wake: (Mutex<bool>, Condvar),
    interrupts: (Mutex<u64>, Condvar),
    rings: AtomicU32,
}

#[derive(Clone)]
struct Remote(Arc<Shared>);

const ENTRIES: u32 = 8;
const SUBMISSION_AT: u64 = 0x8000;
const COMPLETION_AT: u64 = 0x9000;

impl Shared {
    fn set_wake(&self) {
        *self.wake.0.lock().unwrap() = true;
        self.wake.1.notify_one();
    }
    fn dword(&self, at: Iova) -> Option<&AtomicU32> {
        let index = at.0.checked_sub(SHADOW_AT)? / 4;
        self.dwords.get(index as usize)
    }
}

impl Host for Remote {
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        for (byte, from) in into.iter_mut().zip(&self.0.bytes[at.0 as usize..]) {
            *byte = from.load(Ordering::Relaxed);
        }
        Ok(())
    }
    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        for (to, byte) in self.0.bytes[at.0 as usize..].iter().zip(from) {
            to.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }
    fn load(&mut self, at: Iova) -> Result<u32, DmaError> {
        Ok(self.0.dword(at).unwrap().load(Ordering::Acquire))
    }
    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError> {
        self.0.dword(at).unwrap().store(value, Ordering::Release);
        Ok(())
    }
    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError> {
        match at.0.checked_sub(COMPLETION_AT) {
            Some(offset) => self.0.posted[offset as usize / 16].store(entry[3], Ordering::Release),
            None => self.write(at, zerocopy::IntoBytes::as_bytes(&entry))?,
        }
        Ok(())
    }
    fn doorbell(&mut self, index: usize) -> u32 {
        self.0.doorbells[index].load(Ordering::Acquire)
    }
    fn set_doorbell(&mut self, index: usize, value: u32) {
        self.0.doorbells[index].store(value, Ordering::Release);
    }
    fn interrupt(&mut self, _: u16) {
        *self.0.interrupts.0.lock().unwrap() += 1;
        self.0.interrupts.1.notify_one();
    }
    fn interrupt_line(&mut self, _: bool) {}
    fn pin_in_use(&self) -> bool {
        false
    }
}

/// A disk that moves nothing.
struct Null;

impl Disk<Remote> for Null {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_shift: 9,
            formats: &[9],
            blocks: 64,
            read_only: false,
            volatile_cache: false,
            deallocates: false,
        }
    }
    fn submit(&mut self, _: &mut Remote, _: Tag, _: Operation<'_>) -> Submission {
        Submission::Done(Ok(()))
    }
    fn commit(&mut self, _: &mut Remote) {}
    fn reap(&mut self, _: &mut Remote, _: &mut Vec<(Tag, Result<(), DiskError>)>) {}
}

/// The guest's half of Linux' `nvme_dbbuf_update_and_check_event`.
fn ring(shared: &Shared, index: u64, old: u32, new: u32) {
    shared.dword(Iova(SHADOW_AT + index * 4)).unwrap().store(new, Ordering::Release);
    std::sync::atomic::fence(Ordering::SeqCst);
    let event = shared.dword(Iova(EVENTS_AT + index * 4)).unwrap().load(Ordering::Acquire);
    let (event, old, new16) = (event as u16, old as u16, new as u16);
    if new16.wrapping_sub(event).wrapping_sub(1) < new16.wrapping_sub(old) {
        shared.rings.fetch_add(1, Ordering::Relaxed);
        shared.doorbells[index as usize].store(new, Ordering::Release);
        shared.set_wake();
    }
}

/// propolis#1008: a host that rings only when the event index says so, against a controller that sleeps
/// whenever it may. Nothing waits for a wake-up that does not come, in either direction.
#[test]
fn nothing_gets_stuck_between_a_host_and_a_controller_that_both_sleep() {
    const COMMANDS: u32 = 30_000;
    let shared = Arc::new(Shared {
        bytes: (0..0x1_0000).map(|_| AtomicU8::new(0)).collect(),
        dwords: (0..2048).map(|_| AtomicU32::new(0)).collect(),
        posted: (0..ENTRIES).map(|_| AtomicU32::new(0)).collect(),
        doorbells: (0..2 * 65).map(|_| AtomicU32::new(0)).collect(),
        wake: Default::default(),
        interrupts: Default::default(),
        rings: AtomicU32::new(0),
    });
    let mut host = Remote(Arc::clone(&shared));
    let mut controller = Controller::new(options(), vec![Null]).unwrap();
    let registers = controller.registers();
    let _ = registers.write(Register::AQA.0.into(), &(7_u32 << 16 | 7).to_le_bytes());
    let _ = registers.write(Register::ASQ.0.into(), &0x1000_u64.to_le_bytes());
    let _ = registers.write(Register::ACQ.0.into(), &0x2000_u64.to_le_bytes());
    let _ = registers.write(Register::CC.0.into(), &0x0046_0001_u32.to_le_bytes());
    let admin = [
        (AdminOpcode::DOORBELL_BUFFER_CONFIG, SHADOW_AT, EVENTS_AT, 0, 0),
        (AdminOpcode::CREATE_COMPLETION_QUEUE, COMPLETION_AT, 0, (ENTRIES - 1) << 16 | 1, 1 << 16 | 3),
        (AdminOpcode::CREATE_SUBMISSION_QUEUE, SUBMISSION_AT, 0, (ENTRIES - 1) << 16 | 1, 1 << 16 | 1),
    ];
    controller.poll(&mut host);
    for ((opcode, prp1, prp2, dword10, dword11), index) in admin.into_iter().zip(0_u32..) {
        let entry = SubmissionEntry {
            opcode: opcode.0,
            prp1: prp1.into(),
            prp2: prp2.into(),
            dword10: dword10.into(),
            dword11: dword11.into(),
            ..SubmissionEntry::default()
        };
        let at = Iova(0x1000 + u64::from(index) * 64);
        host.write(at, zerocopy::IntoBytes::as_bytes(&entry)).unwrap();
        host.set_doorbell(0, index + 1);
        controller.poll(&mut host);
        let mut status = [0; 2];
        host.read(Iova(0x2000 + u64::from(index) * 16 + 14), &mut status).unwrap();
        assert_eq!(status, [1, 0], "{opcode:?}");
    }

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut host = host;
            while !stop.load(Ordering::Acquire) {
                if controller.poll(&mut host) || !controller.prepare_sleep(&mut host) {
                    continue;
                }
                let mut woken = shared.wake.0.lock().unwrap();
                while !*woken && !stop.load(Ordering::Acquire) {
                    let (guard, timeout) =
                        shared.wake.1.wait_timeout(woken, Duration::from_secs(10)).unwrap();
                    woken = guard;
                    if timeout.timed_out() {
                        break;
                    }
                }
                *woken = false;
            }
        });
        let mut guest = Remote(Arc::clone(&shared));
        let read = SubmissionEntry { ..transfer(NvmOpcode::READ, 0, 1, 0xa000, 0) };
        let (mut sent, mut done) = (0_u32, 0_u32);
        let mut seen = 0_u64;
        while done < COMMANDS {
            let burst = (sent % 3) + 1;
            while sent < COMMANDS && sent - done < ENTRIES - 1 && (sent - done) < burst {
                let slot = sent % ENTRIES;
                let at = Iova(SUBMISSION_AT + u64::from(slot) * 64);
                guest.write(at, zerocopy::IntoBytes::as_bytes(&read)).unwrap();
                ring(&shared, 2, slot, (slot + 1) % ENTRIES);
                sent += 1;
            }
            let before = done;
            while done < sent {
                let word = shared.posted[(done % ENTRIES) as usize].load(Ordering::Acquire);
                let entry = CompletionEntry::from_dwords([0, 0, 0, word]);
                if entry.status.phase() == ((done / ENTRIES) % 2 == 1) {
                    break;
                }
                assert_eq!(result(&entry), Ok(0));
                done += 1;
            }
            if done != before {
                ring(&shared, 3, before % ENTRIES, done % ENTRIES);
                continue;
            }
            // Nothing to consume: sleep until an interrupt, as a driver does.
            let count = shared.interrupts.0.lock().unwrap();
            let (count, timeout) = shared
                .interrupts
                .1
                .wait_timeout_while(count, Duration::from_secs(5), |count| *count == seen)
                .unwrap();
            assert!(!timeout.timed_out(), "stuck at {done} of {sent}");
            seen = *count;
        }
        stop.store(true, Ordering::Release);
        shared.set_wake();
    });
    assert!(shared.rings.load(Ordering::Relaxed) > 0);
}
