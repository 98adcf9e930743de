//! A host and a disk in memory, and the steps that a driver takes.

use std::collections::VecDeque;
use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use crate::Iova;
use crate::controller::{
    Controller, Disk, DiskError, DmaError, Effect, Geometry, Host, Operation, Options, Registers, Segment,
    Submission, Tag,
};
use crate::spec::{
    AdminOpcode, CompletionEntry, Configuration, ControllerStatus, NvmOpcode, Register, Status,
    SubmissionEntry,
};

/// Memory from address 0, doorbells, and what the controller raised.
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    pub(crate) doorbells: Vec<u32>,
    pub(crate) interrupts: Vec<u16>,
    pub(crate) line: bool,
    pub(crate) pin: bool,
    /// The host sees other bytes than the controller.
    pub(crate) private: bool,
}

impl Memory {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            bytes: vec![0; size],
            doorbells: vec![0; 2 * 65],
            interrupts: Vec::new(),
            line: false,
            pin: false,
            private: false,
        }
    }

    pub(crate) fn slice(&mut self, at: Iova, length: usize) -> Result<&mut [u8], DmaError> {
        let start = usize::try_from(at.0).map_err(|_| DmaError { iova: at, length })?;
        start
            .checked_add(length)
            .and_then(|end| self.bytes.get_mut(start..end))
            .ok_or(DmaError { iova: at, length })
    }
}

impl Host for Memory {
    fn confirm(&mut self, at: Iova, bytes: &[u8]) -> bool {
        assert_eq!(self.slice(at, bytes.len()).unwrap(), bytes, "asked of what was read");
        !self.private
    }
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        into.copy_from_slice(self.slice(at, into.len())?);
        Ok(())
    }
    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        self.slice(at, from.len())?.copy_from_slice(from);
        Ok(())
    }
    fn load(&mut self, at: Iova) -> Result<u32, DmaError> {
        assert_eq!(at.0 % 4, 0);
        Ok(u32::from_le_bytes(self.slice(at, 4)?.try_into().unwrap()))
    }
    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError> {
        assert_eq!(at.0 % 4, 0);
        self.write(at, &value.to_le_bytes())
    }
    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError> {
        self.write(at, entry.as_bytes())
    }
    fn doorbell(&mut self, index: usize) -> u32 {
        self.doorbells[index]
    }
    fn set_doorbell(&mut self, index: usize, value: u32) {
        self.doorbells[index] = value;
    }
    fn interrupt(&mut self, vector: u16) {
        self.interrupts.push(vector);
    }
    fn interrupt_line(&mut self, asserted: bool) {
        assert_ne!(self.line, asserted, "called when it changes");
        self.line = asserted;
    }
    fn pin_in_use(&self) -> bool {
        self.pin
    }
}

/// When a disk carries its operations out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// In `submit`.
    AtOnce,
    /// In `reap`, up to so many each time.
    Later(usize),
}

/// A disk in memory. A power cut takes what was not synced.
pub(crate) struct RamDisk {
    pub(crate) geometry: Geometry,
    pub(crate) data: Vec<u8>,
    pub(crate) durable: Vec<u8>,
    pub(crate) pace: Pace,
    pub(crate) waiting: VecDeque<(Tag, Later)>,
    pub(crate) commits: usize,
    pub(crate) fail: Option<DiskError>,
}

/// An operation with what it needs copied.
pub(crate) enum Later {
    Read { at: usize, data: Vec<Segment> },
    Write { at: usize, data: Vec<Segment>, durable: bool },
    Compare { at: usize, data: Vec<Segment> },
    Nothing,
    Flush,
    Zero { ranges: Vec<(usize, usize)>, durable: bool },
    Format { block_shift: u32 },
}

impl RamDisk {
    pub(crate) fn new(blocks: u64, block_shift: u32, pace: Pace) -> Self {
        let size = (blocks << block_shift) as usize;
        Self {
            geometry: Geometry {
                block_shift,
                formats: &[9, 12],
                blocks,
                read_only: false,
                volatile_cache: true,
                deallocates: true,
            },
            data: vec![0; size],
            durable: vec![0; size],
            pace,
            waiting: VecDeque::new(),
            commits: 0,
            fail: None,
        }
    }

    fn copy(&self, operation: Operation<'_>) -> Later {
        let byte = |block: u64| (block << self.geometry.block_shift) as usize;
        match operation {
            Operation::Read { range, data } => {
                assert_eq!(data.iter().map(|s| s.length).sum::<usize>(), byte(range.blocks));
                Later::Read { at: byte(range.start.0), data: data.to_vec() }
            }
            Operation::Write { range, data, durable } => {
                assert_eq!(data.iter().map(|s| s.length).sum::<usize>(), byte(range.blocks));
                Later::Write { at: byte(range.start.0), data: data.to_vec(), durable }
            }
            Operation::Compare { range, data } => {
                assert_eq!(data.iter().map(|s| s.length).sum::<usize>(), byte(range.blocks));
                Later::Compare { at: byte(range.start.0), data: data.to_vec() }
            }
            Operation::Verify { .. } => Later::Nothing,
            Operation::Flush => Later::Flush,
            Operation::WriteZeroes { range, durable, .. } => {
                Later::Zero { ranges: vec![(byte(range.start.0), byte(range.blocks))], durable }
            }
            Operation::Format { block_shift } => Later::Format { block_shift },
            Operation::Deallocate { ranges } => Later::Zero {
                ranges: ranges.iter().map(|r| (byte(r.start.0), byte(r.blocks))).collect(),
                durable: false,
            },
        }
    }

    fn carry_out(&mut self, host: &mut Memory, operation: Later) -> Result<(), DiskError> {
        if let Some(error) = self.fail {
            return Err(error);
        }
        match operation {
            Later::Read { mut at, data } => {
                for segment in data {
                    if let Some(iova) = segment.iova {
                        host.write(iova, &self.data[at..at + segment.length])
                            .map_err(|_| DiskError::DataTransfer)?;
                    }
                    at += segment.length;
                }
            }
            Later::Write { at: start, data, durable } => {
                let mut at = start;
                for segment in data {
                    host.read(segment.iova.unwrap(), &mut self.data[at..at + segment.length])
                        .map_err(|_| DiskError::DataTransfer)?;
                    at += segment.length;
                }
                if durable {
                    self.durable[start..at].copy_from_slice(&self.data[start..at]);
                }
            }
            Later::Compare { mut at, data } => {
                for segment in data {
                    let held = &self.data[at..at + segment.length];
                    let theirs = host.slice(segment.iova.unwrap(), segment.length);
                    if theirs.map_err(|_| DiskError::DataTransfer)? != held {
                        return Err(DiskError::Mismatch);
                    }
                    at += segment.length;
                }
            }
            Later::Nothing => {}
            Later::Flush => self.durable.copy_from_slice(&self.data),
            Later::Format { block_shift } => {
                self.data.fill(0);
                self.durable.fill(0);
                self.geometry = self.geometry.formatted(block_shift);
            }
            Later::Zero { ranges, durable } => {
                for (at, length) in ranges {
                    self.data[at..at + length].fill(0);
                    if durable {
                        self.durable[at..at + length].fill(0);
                    }
                }
            }
        }
        Ok(())
    }

    /// The power fails: what was not synced is gone, and so is what was under way.
    pub(crate) fn cut_power(&mut self) {
        self.waiting.clear();
        self.data.copy_from_slice(&self.durable);
    }
}

impl Disk<Memory> for RamDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn submit(&mut self, host: &mut Memory, tag: Tag, operation: Operation<'_>) -> Submission {
        let operation = self.copy(operation);
        match self.pace {
            Pace::AtOnce => Submission::Done(self.carry_out(host, operation)),
            Pace::Later(_) => {
                assert!(self.waiting.iter().all(|(other, _)| *other != tag), "a tag is used twice");
                self.waiting.push_back((tag, operation));
                Submission::Pending
            }
        }
    }
    fn commit(&mut self, _: &mut Memory) {
        self.commits += 1;
    }
    fn reap(&mut self, host: &mut Memory, done: &mut Vec<(Tag, Result<(), DiskError>)>) {
        let Pace::Later(most) = self.pace else { return };
        for _ in 0..most {
            let Some((tag, operation)) = self.waiting.pop_front() else { break };
            done.push((tag, self.carry_out(host, operation)));
        }
    }
}

/// The driver's side of a queue pair.
pub(crate) struct Pair {
    pub(crate) id: u16,
    pub(crate) completion_id: u16,
    pub(crate) submission: u64,
    pub(crate) completion: u64,
    pub(crate) entries: u32,
    pub(crate) tail: u32,
    pub(crate) head: u32,
    pub(crate) phase: bool,
}

impl Pair {
    pub(crate) fn new(id: u16, at: u64, entries: u32) -> Self {
        let completion = at + (u64::from(entries) * 64).next_multiple_of(4096);
        Self { id, completion_id: id, submission: at, completion, entries, tail: 0, head: 0, phase: true }
    }
}

/// A controller, its host, and a driver for them.
pub(crate) struct Machine {
    pub(crate) host: Memory,
    pub(crate) controller: Controller<Memory, RamDisk>,
    pub(crate) registers: Arc<Registers>,
    pub(crate) admin: Pair,
    next_command: u16,
}

pub(crate) const ADMIN_AT: u64 = 0x1000;
/// Two pages for the data of admin commands.
pub(crate) const DATA_AT: u64 = 0x8000;
pub(crate) const QUEUES_AT: u64 = 0x1_0000;
pub(crate) const BUFFER_AT: u64 = 0x10_0000;

impl Machine {
    /// Disabled.
    pub(crate) fn new(options: Options, disks: Vec<RamDisk>) -> Self {
        let controller = Controller::new(options, disks).unwrap();
        Self {
            host: Memory::new(0x40_0000),
            registers: controller.registers(),
            controller,
            admin: Pair::new(0, ADMIN_AT, 32),
            next_command: 1,
        }
    }

    /// Enabled, with I/O queue pairs 1 to `pairs` of `entries`.
    pub(crate) fn enabled(
        options: Options,
        disks: Vec<RamDisk>,
        pairs: u16,
        entries: u32,
    ) -> (Self, Vec<Pair>) {
        let mut machine = Self::new(options, disks);
        machine.enable();
        let pairs = (1..=pairs)
            .map(|id| {
                let pair = Pair::new(id, QUEUES_AT + u64::from(id - 1) * 0x8000, entries);
                machine.create(&pair);
                pair
            })
            .collect();
        (machine, pairs)
    }

    pub(crate) fn read32(&self, register: Register) -> u32 {
        let mut bytes = [0; 4];
        self.registers.read(register.0.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn write32(&self, register: Register, value: u32) -> Effect {
        self.registers.write(register.0.into(), &value.to_le_bytes())
    }

    pub(crate) fn status(&self) -> ControllerStatus {
        ControllerStatus::from_bits(self.read32(Register::CSTS))
    }

    pub(crate) fn configuration() -> Configuration {
        Configuration::default().with_submission_entry(6).with_completion_entry(4)
    }

    pub(crate) fn enable(&mut self) {
        self.admin = Pair::new(0, ADMIN_AT, 32);
        let end = self.admin.completion as usize + 32 * 16;
        self.host.bytes[ADMIN_AT as usize..end].fill(0);
        let _ = self.write32(Register::AQA, 31 << 16 | 31);
        let _ = self.registers.write(Register::ASQ.0.into(), &self.admin.submission.to_le_bytes());
        let _ = self.registers.write(Register::ACQ.0.into(), &self.admin.completion.to_le_bytes());
        let effect = self.write32(Register::CC, Self::configuration().with_enable(true).bits());
        assert_eq!(effect, Effect::Wake);
        self.controller.poll(&mut self.host);
        assert_eq!(self.status(), ControllerStatus::default().with_ready(true));
    }

    pub(crate) fn poll(&mut self) -> bool {
        self.controller.poll(&mut self.host)
    }

    pub(crate) fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.poll() && self.controller.in_flight() == 0 {
                return;
            }
        }
        panic!("the controller does not come to rest");
    }

    pub(crate) fn command_id(&mut self) -> u16 {
        self.next_command = self.next_command.wrapping_add(1);
        self.next_command
    }

    /// Puts an entry in a queue and rings.
    pub(crate) fn push(&mut self, pair: &mut Pair, entry: &SubmissionEntry) {
        let at = Iova(pair.submission + u64::from(pair.tail) * 64);
        self.host.write(at, entry.as_bytes()).unwrap();
        pair.tail = (pair.tail + 1) % pair.entries;
        self.host.doorbells[usize::from(pair.id) * 2] = pair.tail;
    }

    /// Takes the next completion, if there is one.
    pub(crate) fn pop(&mut self, pair: &mut Pair) -> Option<CompletionEntry> {
        let at = Iova(pair.completion + u64::from(pair.head) * 16);
        let entry = CompletionEntry::read_from_bytes(self.host.slice(at, 16).unwrap()).unwrap();
        if entry.status.phase() != pair.phase {
            return None;
        }
        pair.head = (pair.head + 1) % pair.entries;
        pair.phase ^= pair.head == 0;
        self.host.doorbells[usize::from(pair.completion_id) * 2 + 1] = pair.head;
        Some(entry)
    }

    /// Runs one command to its end on a queue that has no other.
    pub(crate) fn run(&mut self, pair: &mut Pair, mut entry: SubmissionEntry) -> CompletionEntry {
        let command = self.command_id();
        entry.command_id = command.into();
        self.push(pair, &entry);
        for _ in 0..1000 {
            self.poll();
            if let Some(completion) = self.pop(pair) {
                assert_eq!(completion.command_id.get(), command);
                assert_eq!(completion.submission_queue.get(), pair.id);
                assert_eq!(u32::from(completion.submission_head.get()), pair.tail);
                return completion;
            }
        }
        panic!("{entry:?} does not complete");
    }

    /// Runs an admin command; its data is at `DATA_AT`.
    pub(crate) fn admin(
        &mut self,
        opcode: AdminOpcode,
        nsid: u32,
        dword10: u32,
        dword11: u32,
    ) -> Result<u32, Status> {
        self.run_admin(SubmissionEntry {
            opcode: opcode.0,
            nsid: nsid.into(),
            prp1: DATA_AT.into(),
            prp2: (DATA_AT + 0x1000).into(),
            dword10: dword10.into(),
            dword11: dword11.into(),
            ..SubmissionEntry::default()
        })
    }

    pub(crate) fn run_admin(&mut self, entry: SubmissionEntry) -> Result<u32, Status> {
        let mut admin = std::mem::replace(&mut self.admin, Pair::new(0, 0, 2));
        let completion = self.run(&mut admin, entry);
        self.admin = admin;
        result(&completion)
    }

    pub(crate) fn create_completion(
        &mut self,
        id: u16,
        size: u32,
        at: u64,
        flags: u32,
    ) -> Result<u32, Status> {
        self.run_admin(SubmissionEntry {
            opcode: AdminOpcode::CREATE_COMPLETION_QUEUE.0,
            prp1: at.into(),
            dword10: (size << 16 | u32::from(id)).into(),
            dword11: flags.into(),
            ..SubmissionEntry::default()
        })
    }

    pub(crate) fn create_submission(
        &mut self,
        id: u16,
        size: u32,
        at: u64,
        completion: u16,
    ) -> Result<u32, Status> {
        self.run_admin(SubmissionEntry {
            opcode: AdminOpcode::CREATE_SUBMISSION_QUEUE.0,
            prp1: at.into(),
            dword10: (size << 16 | u32::from(id)).into(),
            dword11: (u32::from(completion) << 16 | 1).into(),
            ..SubmissionEntry::default()
        })
    }

    /// Creates a pair's queues; the completion queue's vector is its identifier.
    pub(crate) fn create(&mut self, pair: &Pair) {
        let end = (pair.completion + u64::from(pair.entries) * 16) as usize;
        self.host.bytes[pair.submission as usize..end].fill(0);
        let flags = u32::from(pair.id) << 16 | 0b11;
        self.create_completion(pair.id, pair.entries - 1, pair.completion, flags).unwrap();
        self.create_submission(pair.id, pair.entries - 1, pair.submission, pair.id).unwrap();
    }

    /// Reads a structure that an admin command left at `DATA_AT`.
    pub(crate) fn data<T: FromBytes>(&mut self) -> T {
        T::read_from_bytes(self.host.slice(Iova(DATA_AT), size_of::<T>()).unwrap()).unwrap()
    }
}

pub(crate) fn result(completion: &CompletionEntry) -> Result<u32, Status> {
    let status = completion.status.status();
    if status.is_success() { Ok(completion.result.get()) } else { Err(status) }
}

/// A command that moves data; `blocks` counts from 1.
pub(crate) fn transfer(opcode: NvmOpcode, lba: u64, blocks: u32, prp1: u64, prp2: u64) -> SubmissionEntry {
    let mut entry = SubmissionEntry {
        opcode: opcode.0,
        nsid: 1.into(),
        prp1: prp1.into(),
        prp2: prp2.into(),
        dword12: (blocks - 1).into(),
        ..SubmissionEntry::default()
    };
    entry.set_starting_lba(lba);
    entry
}
