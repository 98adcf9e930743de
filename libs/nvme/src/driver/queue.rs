//! A pair of queues: submit, ring, poll.

use std::time::{Duration, Instant};

use zerocopy::IntoBytes;
use zerocopy::little_endian::U16;

use super::command::Command;
use super::device::{Block, Doorbell};
use super::error::{CommandError, Error, SubmitError};
use super::shadow::Shadow;
use super::slots::{CommandId, Slots};
use crate::QueueId;
use crate::spec::{CompletionEntry, StatusField, SubmissionEntry};

const SUBMISSION_SIZE: usize = size_of::<SubmissionEntry>();
const COMPLETION_SIZE: usize = size_of::<CompletionEntry>();

/// A completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which.
    pub id: CommandId,
    /// Its result: dword 0.
    pub result: u32,
    /// Its status.
    pub status: StatusField,
}

impl Completion {
    /// The result, or why the command failed.
    pub fn outcome(&self) -> Result<u32, CommandError> {
        let status = self.status.status();
        if status.is_success() {
            Ok(self.result)
        } else {
            Err(CommandError { status, do_not_retry: self.status.do_not_retry() })
        }
    }
}

/// A doorbell register and, perhaps, its shadow.
#[derive(Debug)]
pub(super) struct Bell<D, B> {
    pub(super) register: D,
    pub(super) shadow: Option<Shadow<B>>,
}

impl<D: Doorbell, B: Block> Bell<D, B> {
    #[inline]
    fn ring(&mut self, value: u16) -> Result<(), Error> {
        let value = u32::from(value);
        if self.shadow.as_mut().is_none_or(|shadow| shadow.update(value)) {
            self.register.ring(value)?;
        }
        Ok(())
    }
}

/// A submission queue and its completion queue, of one size. One command less than they have entries can be
/// outstanding, so that neither overflows.
#[derive(Debug)]
pub struct QueuePair<D, B> {
    id: QueueId,
    entries: u16,
    slots: Slots,
    submission: B,
    completion: B,
    tail_bell: Bell<D, B>,
    head_bell: Bell<D, B>,
    tail: u16,
    /// The tail that the drive was told.
    told: u16,
    head: u16,
    /// The phase tag of entries that are new in this pass.
    phase: bool,
}

impl<D: Doorbell, B: Block> QueuePair<D, B> {
    /// A pair of empty queues of `entries` (at least 2) in zeroed blocks.
    pub(super) fn new(id: QueueId, entries: u16, blocks: (B, B), bells: (Bell<D, B>, Bell<D, B>)) -> Self {
        let (submission, completion) = blocks;
        let (tail_bell, head_bell) = bells;
        Self {
            id,
            entries,
            slots: Slots::new(entries.saturating_sub(1)),
            submission,
            completion,
            tail_bell,
            head_bell,
            tail: 0,
            told: 0,
            head: 0,
            phase: true,
        }
    }

    /// Its identifier.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// How many commands can be outstanding.
    pub fn depth(&self) -> usize {
        self.slots.depth()
    }

    /// How many commands are outstanding.
    pub fn outstanding(&self) -> usize {
        self.slots.outstanding()
    }

    /// Queues a command. The drive is told of it by [`Self::ring`].
    // A command is then built in registers, not stored in pieces and loaded whole.
    #[inline(always)]
    pub fn submit(&mut self, command: &Command) -> Result<CommandId, SubmitError> {
        self.submit_entry(command.entry()?)
    }

    /// Queues a command of the caller's making, whose command identifier is filled in.
    #[inline(always)]
    pub fn submit_entry(&mut self, mut entry: SubmissionEntry) -> Result<CommandId, SubmitError> {
        let Some(id) = self.slots.take() else {
            return Err(SubmitError::Full { queue: self.id, depth: self.entries.saturating_sub(1) });
        };
        entry.command_id = U16::new(id.raw());
        self.submission.write(usize::from(self.tail).wrapping_mul(SUBMISSION_SIZE), entry.as_bytes());
        self.tail = self.after(self.tail);
        Ok(id)
    }

    /// Tells the drive of all commands queued since the last time.
    #[inline]
    pub fn ring(&mut self) -> Result<(), Error> {
        if self.told != self.tail {
            self.told = self.tail;
            self.tail_bell.ring(self.tail)?;
        }
        Ok(())
    }

    /// Hands over the commands that have been completed, and tells the drive so; gives their number.
    ///
    /// An [`Error::Forged`] completion ends the poll: those before it were handed over.
    #[inline]
    pub fn poll(&mut self, mut done: impl FnMut(Completion)) -> Result<usize, Error> {
        let mut count = 0usize;
        let mut outcome = Ok(());
        // A drive that completes without end is heard out once around the queue.
        while count < usize::from(self.entries) {
            let at = usize::from(self.head).wrapping_mul(COMPLETION_SIZE);
            let last = self.completion.load(at.wrapping_add(12));
            if (last & 1 << 16 != 0) != self.phase {
                break;
            }
            let queue = self.completion.load(at.wrapping_add(8));
            let entry = CompletionEntry::from_dwords([self.completion.load(at), 0, queue, last]);
            self.head = self.after(self.head);
            self.phase ^= self.head == 0;
            count = count.wrapping_add(1);

            let claimed = entry.submission_queue.get();
            let command = entry.command_id.get();
            let known = if claimed == self.id.0 { self.slots.release(command) } else { None };
            let Some(id) = known else {
                outcome = Err(Error::Forged { queue: self.id, claimed, command });
                break;
            };
            done(Completion { id, result: entry.result.get(), status: entry.status });
        }
        if count > 0 {
            self.head_bell.ring(self.head)?;
        }
        outcome.map(|()| count)
    }

    /// Runs one command on a queue where nothing else is outstanding, for `limit` at most; calls `pause` while
    /// it waits.
    pub fn execute(
        &mut self,
        entry: SubmissionEntry,
        limit: Duration,
        mut pause: impl FnMut(),
    ) -> Result<u32, Error> {
        let id = self.submit_entry(entry)?;
        self.ring()?;
        let start = Instant::now();
        loop {
            let mut completed = None;
            self.poll(|completion| {
                if completion.id == id {
                    completed = Some(completion);
                }
            })?;
            if let Some(completion) = completed {
                return Ok(completion.outcome()?);
            }
            if start.elapsed() > limit {
                return Err(Error::TimedOut { queue: self.id, command: id.raw(), limit });
            }
            pause();
        }
    }

    /// The index after `index`.
    #[inline]
    fn after(&self, index: u16) -> u16 {
        let next = index.wrapping_add(1);
        if next == self.entries { 0 } else { next }
    }
}
