//! The driver against a device that lies: it never panics, every wait ends, and it never hands over a completion
//! of a command that is not outstanding.

use std::cell::RefCell;
use std::collections::HashSet;
use std::io;
use std::num::NonZeroU16;
use std::rc::Rc;
use std::time::{Duration, Instant};

use outboard_nvme::driver::{
    Block, Command, DataPointer, Doorbell, Drive, Error, Fragment, Memory, Options, Registers,
};
use outboard_nvme::spec::{
    AdminOpcode, AdminQueueAttributes, Capabilities, CompletionEntry, Configuration, ControllerStatus,
    CreateQueue, DOORBELLS, FeatureId, FeatureSelect, IdentifyController, LogPageId, OptionalAdminCommands,
    QueueEntrySizes, Register, ShutdownStatus, SmartLog, StatusField, SubmissionEntry,
};
use outboard_nvme::{Iova, Lba, Nsid};
use proptest::prelude::*;
use zerocopy::little_endian::U16;
use zerocopy::{FromZeros, IntoBytes};

use crate::machine::{Pages, Ram, Run};

/// A queue as the device knows it.
#[derive(Clone, Copy, Default)]
struct Queue {
    submission: u64,
    completion: u64,
    entries: u32,
    tail: u32,
    head: u32,
    completed: u32,
    phase: bool,
}

struct Liar {
    ram: Ram,
    random: u64,
    /// Out of 256: how often it tells the truth.
    honesty: u8,
    configuration: Configuration,
    attributes: AdminQueueAttributes,
    admin: (u64, u64),
    queues: [Queue; 4],
}

impl Liar {
    /// The next random number (SplitMix64).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn honest(&mut self) -> bool {
        (self.random() as u8) < self.honesty || self.honesty == 255
    }

    /// The truth, or whatever.
    fn answer(&mut self, truth: u64) -> u64 {
        match self.honest() {
            true => truth,
            false if self.random().is_multiple_of(4) => u64::MAX,
            false => self.random(),
        }
    }

    fn read(&mut self, register: Register) -> u64 {
        let truth = match register {
            Register::CAP => Capabilities::default()
                .with_max_queue_entries(63)
                .with_nvm_command_set(true)
                .with_timeout(255)
                .bits(),
            Register::CC => self.configuration.bits().into(),
            Register::CSTS => ControllerStatus::default()
                .with_ready(self.configuration.enable())
                .with_shutdown(match self.configuration.shutdown_bits() {
                    0 => ShutdownStatus::NONE,
                    _ => ShutdownStatus::COMPLETE,
                })
                .bits()
                .into(),
            _ => 0,
        };
        self.answer(truth)
    }

    fn write(&mut self, register: Register, value: u64) {
        match register {
            Register::AQA => self.attributes = AdminQueueAttributes::from_bits(value as u32),
            Register::ASQ => self.admin.0 = value,
            Register::ACQ => self.admin.1 = value,
            Register::CC => {
                self.configuration = Configuration::from_bits(value as u32);
                self.queues = Default::default();
                self.queues[0] = Queue {
                    submission: self.admin.0,
                    completion: self.admin.1,
                    entries: u32::from(self.attributes.submission_size()) + 1,
                    phase: true,
                    ..Queue::default()
                };
            }
            _ => {}
        }
    }

    fn ring(&mut self, offset: u64, value: u32) {
        let index = (offset - u64::from(DOORBELLS)) / 4;
        if index.is_multiple_of(2)
            && let Some(queue) = self.queues.get_mut(index as usize / 2)
        {
            queue.tail = value;
        }
        self.step();
    }

    /// Serves or betrays each queue once.
    fn step(&mut self) {
        for index in 0..self.queues.len() {
            let queue = self.queues[index];
            if queue.entries == 0 || queue.completion == 0 {
                continue;
            }
            if !self.honest() {
                self.betray(index);
            } else if queue.head != queue.tail && queue.tail < queue.entries {
                self.serve(index);
            }
        }
    }

    fn serve(&mut self, index: usize) {
        let queue = self.queues[index];
        let mut entry = SubmissionEntry::default();
        if self.ram.read(Iova(queue.submission + u64::from(queue.head) * 64), entry.as_mut_bytes()).is_none()
        {
            return;
        }
        self.queues[index].head = (queue.head + 1) % queue.entries;
        let mut result = 0;
        if index == 0 {
            result = self.administrate(&entry);
        }
        let done = CompletionEntry {
            result: (self.answer(result) as u32).into(),
            submission_queue: U16::new(index as u16),
            command_id: entry.command_id,
            ..CompletionEntry::default()
        };
        self.complete(index, done);
    }

    fn administrate(&mut self, entry: &SubmissionEntry) -> u64 {
        let create = CreateQueue::from_bits(entry.dword10.get());
        // Queues that it does not have fall on its last one.
        let chosen = usize::from(create.queue()).clamp(1, self.queues.len() - 1);
        let page = Iova(entry.prp1.get());
        match AdminOpcode(entry.opcode) {
            AdminOpcode::CREATE_COMPLETION_QUEUE => self.queues[chosen].completion = page.0,
            AdminOpcode::CREATE_SUBMISSION_QUEUE => {
                let completion = self.queues[chosen].completion;
                let (submission, entries) = (page.0, u32::from(create.size()) + 1);
                self.queues[chosen] =
                    Queue { submission, completion, entries, phase: true, ..Queue::default() };
            }
            AdminOpcode::DELETE_SUBMISSION_QUEUE => self.queues[chosen] = Queue::default(),
            AdminOpcode::IDENTIFY => {
                let mut data = IdentifyController::new_zeroed();
                data.admin_commands = OptionalAdminCommands::default().with_doorbell_buffer(true);
                data.submission_entry = QueueEntrySizes::from_bits(0x66);
                data.max_transfer = self.random() as u8;
                data.rtd3_entry = (self.random() as u32).into();
                if !self.honest() {
                    data.as_mut_bytes().fill_with(|| self.random() as u8);
                }
                let _ = self.ram.write(page, data.as_bytes());
            }
            AdminOpcode::GET_LOG_PAGE => {
                let junk: Vec<u8> = (0..512).map(|_| self.random() as u8).collect();
                let _ = self.ram.write(page, &junk);
            }
            AdminOpcode::SET_FEATURES => return 0x0003_0003,
            _ => {}
        }
        0
    }

    fn complete(&mut self, index: usize, entry: CompletionEntry) {
        let queue = &mut self.queues[index];
        if queue.entries == 0 {
            return;
        }
        let at = Iova(queue.completion + u64::from(queue.completed) * 16);
        let status = StatusField::from_bits(entry.status.bits()).with_phase(queue.phase);
        queue.completed = (queue.completed + 1) % queue.entries;
        queue.phase ^= queue.completed == 0;
        let _ = self.ram.publish(at, CompletionEntry { status, ..entry }.dwords());
    }

    fn betray(&mut self, index: usize) {
        let queue = self.queues[index];
        let wild = CompletionEntry::from_dwords([0; 4].map(|_: u32| self.random() as u32));
        match self.random() % 5 {
            // Nonsense; sometimes of the right queue, with a small identifier.
            0 => self.complete(index, wild),
            1 => {
                let command_id = U16::new(wild.command_id.get() % 64);
                self.complete(
                    index,
                    CompletionEntry { submission_queue: U16::new(index as u16), command_id, ..wild },
                );
            }
            // The whole completion queue at once.
            2 => {
                for at in 0..queue.entries {
                    let entry = [0; 4].map(|_: u32| self.random() as u32);
                    let _ = self.ram.publish(Iova(queue.completion + u64::from(at) * 16), entry);
                }
            }
            // An entry, twice.
            3 => {
                self.serve(index);
                let last = queue.completed;
                let at = Iova(queue.completion + u64::from(last) * 16);
                let entry = [0, 4, 8, 12].map(|byte| self.ram.load(Iova(at.0 + byte)).unwrap_or(0));
                self.complete(index, CompletionEntry::from_dwords(entry));
            }
            // Silence.
            _ => {}
        }
    }
}

#[derive(Clone)]
struct Wire(Rc<RefCell<Liar>>);

struct Bell(Wire, u64);

impl Doorbell for Bell {
    fn ring(&mut self, value: u32) -> io::Result<()> {
        self.0.0.borrow_mut().ring(self.1, value);
        Ok(())
    }
}

impl Registers for Wire {
    type Doorbell = Bell;

    fn read32(&mut self, register: Register) -> io::Result<u32> {
        Ok(self.0.borrow_mut().read(register) as u32)
    }
    fn read64(&mut self, register: Register) -> io::Result<u64> {
        Ok(self.0.borrow_mut().read(register))
    }
    fn write32(&mut self, register: Register, value: u32) -> io::Result<()> {
        self.0.borrow_mut().write(register, value.into());
        Ok(())
    }
    fn write64(&mut self, register: Register, value: u64) -> io::Result<()> {
        self.0.borrow_mut().write(register, value);
        Ok(())
    }
    fn doorbell(&mut self, offset: u64) -> io::Result<Bell> {
        Ok(Bell(self.clone(), offset))
    }
    fn pause(&mut self) {
        self.0.borrow_mut().step();
    }
}

/// How far a run came.
#[derive(Debug, Default)]
struct Reached {
    enabled: bool,
    completions: usize,
}

const PATIENCE: Duration = Duration::from_micros(300);

/// Uses the drive in every way; errors are expected, and what they leave is used on.
fn use_drive(seed: u64, honesty: u8) -> Result<Reached, Error> {
    let ram = Ram::new(64);
    let pages = Pages::new(ram.clone());
    let liar = Liar {
        ram,
        random: seed,
        honesty,
        configuration: Configuration::default(),
        attributes: AdminQueueAttributes::default(),
        admin: (0, 0),
        queues: Default::default(),
    };
    let wire = Wire(Rc::new(RefCell::new(liar)));
    let options = Options { admin_timeout: PATIENCE, ready_timeout: PATIENCE };
    let mut reached = Reached::default();
    let mut drive = Drive::enable(wire.clone(), pages, options)?;
    reached.enabled = true;

    assert!(drive.max_transfer() > 0);
    let _ = drive.namespaces();
    let _ = drive.namespace(Nsid(1));
    let _ = drive.log_page::<SmartLog>(LogPageId::SMART);
    let _ = drive.feature(FeatureId::VOLATILE_WRITE_CACHE, FeatureSelect::CURRENT);
    let _ = drive.request_queues(NonZeroU16::new(3).unwrap());
    if seed.is_multiple_of(2) {
        let _ = drive.use_shadow_doorbells();
    }
    let entries = 2 + (seed / 2 % 62) as u16;
    if let Ok(mut queue) = drive.create_queue_pair(entries) {
        let mut data = drive.memory().clone();
        let block = data.allocate(4096)?;
        let pointer =
            DataPointer::new(&[Fragment { iova: block.iova(), length: 4096 }], None::<&Run>).unwrap();
        let mut outstanding = HashSet::new();
        for _ in 0..300 {
            while queue.outstanding() < queue.depth() {
                let read = Command::Read { nsid: Nsid(1), start: Lba(0), blocks: 8, data: pointer };
                let id = queue.submit(&read).unwrap();
                assert!(id.slot() < queue.depth());
                assert!(outstanding.insert(id));
            }
            queue.ring()?;
            wire.0.borrow_mut().step();
            let handed = queue.poll(|completion| {
                assert!(outstanding.remove(&completion.id), "{completion:?} is not outstanding");
                reached.completions += 1;
            });
            match handed {
                Ok(count) => assert!(count <= usize::from(entries)),
                Err(Error::Forged { .. }) => {}
                Err(other) => panic!("{other}"),
            }
            assert_eq!(queue.outstanding(), outstanding.len());
        }
        let _ = drive.delete_queue_pair(queue);
    }
    let _ = drive.shutdown();
    let _ = drive.disable();
    Ok(reached)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_lying_device_neither_panics_nor_hangs_the_driver(seed: u64, honesty in 100u8..=255) {
        let start = Instant::now();
        let _ = use_drive(seed, honesty);
        // Some 20 waits of 0.3 ms; the rest is for a machine that is busy.
        prop_assert!(start.elapsed() < Duration::from_secs(20));
    }
}

/// The liar can tell the truth: the property above reaches what it means to.
#[test]
fn an_honest_liar_is_served() {
    let reached = use_drive(1, 255).unwrap();
    assert!(reached.enabled && reached.completions >= 300, "{reached:?}");
}
