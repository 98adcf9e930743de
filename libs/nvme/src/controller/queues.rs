//! The queues that exist, how they come and go, and whom they interrupt.

use std::time::Instant;

use super::Host;
use super::completion::Failure;
use super::doorbells::Doorbells;
use super::features::Coalescing;
use super::health::Health;
use super::limits::WITHHOLD_POLLS;
use super::queue::{CompletionQueue, InvalidDoorbell, Signal, SubmissionQueue, SubmissionState};
use super::registers::AdminQueues;
use crate::spec::{Status, doorbell_index};
use crate::{Iova, QueueId};

/// A Create I/O Completion Queue, its fields decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NewCompletionQueue {
    pub(super) id: QueueId,
    pub(super) entries: u32,
    pub(super) base: Iova,
    pub(super) contiguous: bool,
    pub(super) interrupts: bool,
    pub(super) vector: u16,
}

/// A Create I/O Submission Queue, its fields decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NewSubmissionQueue {
    pub(super) id: QueueId,
    pub(super) entries: u32,
    pub(super) base: Iova,
    pub(super) contiguous: bool,
    pub(super) completion: QueueId,
}

/// What a queue may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueLimits {
    /// I/O queue pairs.
    pub(super) pairs: u16,
    /// Entries of a queue: MQES + 1.
    pub(super) entries: u32,
    /// Interrupt vectors.
    pub(super) vectors: u16,
}

pub(super) struct Queues {
    limits: QueueLimits,
    doorbells: Doorbells,
    submission: Vec<Option<SubmissionQueue>>,
    completion: Vec<Option<CompletionQueue>>,
    /// The I/O submission queues that exist.
    io: Vec<QueueId>,
    /// The completion queues that exist, the admin queue's too.
    interrupting: Vec<QueueId>,
    /// The level of the pin.
    line: bool,
    /// The next doorbell to look at for a queue that does not exist.
    scan: usize,
    /// When an interrupt that waits for more completions is due all the same.
    deadline: Option<Instant>,
}

const ADMIN: QueueId = QueueId(0);

impl Queues {
    pub(super) fn new(limits: QueueLimits) -> Self {
        let count = usize::from(limits.pairs).saturating_add(1);
        Self {
            limits,
            doorbells: Doorbells::default(),
            submission: std::iter::repeat_with(|| None).take(count).collect(),
            completion: std::iter::repeat_with(|| None).take(count).collect(),
            io: Vec::with_capacity(count),
            interrupting: Vec::with_capacity(count),
            line: false,
            scan: 0,
            deadline: None,
        }
    }

    /// The controller is enabled: the admin queues exist.
    pub(super) fn create_admin<H: Host>(&mut self, host: &mut H, admin: &AdminQueues) {
        self.clear(host);
        let completion = CompletionQueue::new(admin.completion, admin.completion_entries, Some(0));
        self.insert_completion(ADMIN, completion);
        let submission = SubmissionQueue::new(admin.submission, admin.submission_entries, ADMIN);
        self.insert_submission(ADMIN, submission);
    }

    /// Tears all queues down: from here on nothing is read from the host's memory or written to it.
    pub(super) fn clear<H: Host>(&mut self, host: &mut H) {
        self.doorbells.forget();
        self.submission.fill_with(|| None);
        self.completion.fill_with(|| None);
        self.io.clear();
        self.interrupting.clear();
        self.deadline = None;
        for index in 0..self.doorbell_count() {
            host.set_doorbell(index, 0);
        }
        if std::mem::take(&mut self.line) {
            host.interrupt_line(false);
        }
    }

    pub(super) fn submission(&self, id: QueueId) -> Option<&SubmissionQueue> {
        self.submission.get(usize::from(id.0))?.as_ref()
    }

    pub(super) fn submission_mut(&mut self, id: QueueId) -> Option<&mut SubmissionQueue> {
        self.submission.get_mut(usize::from(id.0))?.as_mut()
    }

    pub(super) fn completion_mut(&mut self, id: QueueId) -> Option<&mut CompletionQueue> {
        self.completion.get_mut(usize::from(id.0))?.as_mut()
    }

    /// The `turn`th I/O submission queue, if there are so many.
    pub(super) fn io_queue(&self, turn: usize) -> Option<QueueId> {
        self.io.get(turn).copied()
    }

    pub(super) fn io_queues(&self) -> usize {
        self.io.len()
    }

    /// Whether any I/O queue exists.
    pub(super) fn has_io_queues(&self) -> bool {
        self.interrupting.len() > 1
    }

    /// Create I/O Completion Queue (5.3).
    pub(super) fn create_completion<H: Host>(
        &mut self,
        host: &mut H,
        new: &NewCompletionQueue,
    ) -> Result<(), Failure> {
        self.check_new(new.id, new.entries, new.base, new.contiguous)?;
        if self.completion_mut(new.id).is_some() {
            return Err(Status::INVALID_QUEUE_ID.into());
        }
        if new.vector >= self.limits.vectors {
            return Err(Status::INVALID_INTERRUPT_VECTOR.into());
        }
        self.doorbells.start(host, new.id, true, 0);
        let vector = new.interrupts.then_some(new.vector);
        self.insert_completion(new.id, CompletionQueue::new(new.base, new.entries, vector));
        Ok(())
    }

    /// Create I/O Submission Queue (5.4).
    pub(super) fn create_submission<H: Host>(
        &mut self,
        host: &mut H,
        new: &NewSubmissionQueue,
    ) -> Result<(), Failure> {
        self.check_new(new.id, new.entries, new.base, new.contiguous)?;
        if self.submission(new.id).is_some() {
            return Err(Status::INVALID_QUEUE_ID.into());
        }
        if new.completion == ADMIN {
            return Err(Failure::at(Status::INVALID_QUEUE_ID, 46, 0));
        }
        if self.completion_mut(new.completion).is_none() {
            return Err(Status::INVALID_COMPLETION_QUEUE.into());
        }
        self.doorbells.start(host, new.id, false, 0);
        self.insert_submission(new.id, SubmissionQueue::new(new.base, new.entries, new.completion));
        Ok(())
    }

    fn check_new(&self, id: QueueId, entries: u32, base: Iova, contiguous: bool) -> Result<(), Failure> {
        if id == ADMIN || id.0 > self.limits.pairs {
            Err(Status::INVALID_QUEUE_ID.into())
        } else if entries < 2 || entries > self.limits.entries {
            Err(Status::INVALID_QUEUE_SIZE.into())
        } else if !contiguous {
            // CAP.CQR is set.
            Err(Failure::at(Status::INVALID_FIELD, 44, 0))
        } else if base.0 & 0xfff != 0 {
            Err(Status::INVALID_PRP_OFFSET.into())
        } else {
            Ok(())
        }
    }

    /// Delete I/O Completion Queue (5.5).
    pub(super) fn delete_completion<H: Host>(&mut self, host: &mut H, id: QueueId) -> Result<(), Status> {
        match self.completion_mut(id) {
            Some(queue) if id != ADMIN => {
                if queue.users != 0 {
                    return Err(Status::INVALID_QUEUE_DELETION);
                }
            }
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        if let Some(place) = self.completion.get_mut(usize::from(id.0)) {
            *place = None;
        }
        self.interrupting.retain(|queue| *queue != id);
        host.set_doorbell(doorbell_index(id, true), 0);
        Ok(())
    }

    /// Delete I/O Submission Queue (5.6), by admin command `command`. Commands that were taken complete
    /// first, the others are dropped; true when the queue is gone already.
    pub(super) fn delete_submission<H: Host>(
        &mut self,
        host: &mut H,
        id: QueueId,
        command: u16,
    ) -> Result<bool, Status> {
        match self.submission_mut(id) {
            Some(queue) if id != ADMIN && queue.state == SubmissionState::Live => {
                if queue.in_flight != 0 {
                    queue.state = SubmissionState::Deleting { command };
                    return Ok(false);
                }
            }
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        self.remove_submission(host, id);
        Ok(true)
    }

    fn insert_submission(&mut self, id: QueueId, queue: SubmissionQueue) {
        if let Some(completion) = self.completion_mut(queue.completion) {
            completion.users = completion.users.saturating_add(1);
        }
        if let Some(place) = self.submission.get_mut(usize::from(id.0)) {
            *place = Some(queue);
        }
        if id != ADMIN {
            self.io.push(id);
        }
    }

    fn insert_completion(&mut self, id: QueueId, queue: CompletionQueue) {
        if let Some(place) = self.completion.get_mut(usize::from(id.0)) {
            *place = Some(queue);
        }
        self.interrupting.push(id);
    }

    pub(super) fn remove_submission<H: Host>(&mut self, host: &mut H, id: QueueId) {
        let removed = self.submission.get_mut(usize::from(id.0)).and_then(Option::take);
        if let Some(completion) = removed.and_then(|queue| self.completion_mut(queue.completion)) {
            completion.users = completion.users.saturating_sub(1);
        }
        self.io.retain(|queue| *queue != id);
        host.set_doorbell(doorbell_index(id, false), 0);
    }

    /// Doorbell Buffer Config (5.7): the doorbells of I/O queues move to the page at `doorbells`.
    pub(super) fn share_doorbells<H: Host>(
        &mut self,
        host: &mut H,
        health: &mut Health,
        doorbells: Iova,
        events: Iova,
    ) {
        for id in (1..=self.limits.pairs).map(QueueId) {
            note(health, self.look_at_tail(host, id));
            note(health, self.look_at_head(host, id));
        }
        self.doorbells.share(doorbells, events);
        for id in (1..=self.limits.pairs).map(QueueId) {
            if let Some(queue) = self.submission.get_mut(usize::from(id.0)).and_then(Option::as_mut) {
                queue.armed = None;
                self.doorbells.start(host, id, false, queue.tail());
            }
            if let Some(queue) = self.completion.get_mut(usize::from(id.0)).and_then(Option::as_mut) {
                queue.armed = None;
                self.doorbells.start(host, id, true, queue.head());
            }
        }
    }

    #[inline]
    fn look_at_tail<H: Host>(&mut self, host: &mut H, id: QueueId) -> Result<bool, InvalidDoorbell> {
        let Some(queue) = self.submission.get_mut(usize::from(id.0)).and_then(Option::as_mut) else {
            return Ok(false);
        };
        self.doorbells.tail(host, id).map_or(Ok(false), |value| queue.ring(value))
    }

    #[inline]
    fn look_at_head<H: Host>(&mut self, host: &mut H, id: QueueId) -> Result<bool, InvalidDoorbell> {
        let Some(queue) = self.completion.get_mut(usize::from(id.0)).and_then(Option::as_mut) else {
            return Ok(false);
        };
        self.doorbells.head(host, id).map_or(Ok(false), |value| queue.ring(value))
    }

    /// Looks at the doorbells of a submission queue; gives how many of its commands may be taken now: they are
    /// there and their completions have room.
    #[inline]
    pub(super) fn takeable<H: Host>(
        &mut self,
        host: &mut H,
        health: &mut Health,
        id: QueueId,
        most: u32,
    ) -> u32 {
        note(health, self.look_at_tail(host, id));
        let Some(queue) = self.submission(id) else { return 0 };
        let (completion, wanted) = (queue.completion, queue.pending().min(most));
        if wanted == 0 {
            return 0;
        }
        let room = self.completion_mut(completion).map_or(0, |queue| queue.room());
        if room >= wanted {
            return wanted;
        }
        note(health, self.look_at_head(host, completion));
        self.completion_mut(completion).map_or(0, |queue| queue.room()).min(wanted)
    }

    /// Whether any queue has commands that may be taken; `slots`: the disks have room for more.
    pub(super) fn any_takeable<H: Host>(&mut self, host: &mut H, health: &mut Health, slots: bool) -> bool {
        slots && (0..=self.limits.pairs).any(|id| self.takeable(host, health, QueueId(id), 1) != 0)
    }

    /// The next command of a queue is taken: its completion's slot is reserved.
    #[inline]
    pub(super) fn take(&mut self, id: QueueId) {
        let Some(queue) = self.submission_mut(id) else { return };
        queue.take();
        let completion = queue.completion;
        if let Some(queue) = self.completion_mut(completion) {
            queue.reserve();
        }
    }

    /// A command that was taken waits for something other than a disk: it needs no slot until then.
    pub(super) fn park(&mut self) {
        if let Some(queue) = self.submission_mut(ADMIN) {
            queue.in_flight = queue.in_flight.saturating_sub(1);
        }
        if let Some(queue) = self.completion_mut(ADMIN) {
            queue.release();
        }
    }

    /// A parked command goes on, if there is room for its completion.
    pub(super) fn unpark(&mut self) -> bool {
        let Some(queue) = self.completion_mut(ADMIN) else { return false };
        if queue.room() == 0 {
            return false;
        }
        queue.reserve();
        if let Some(queue) = self.submission_mut(ADMIN) {
            queue.in_flight = queue.in_flight.saturating_add(1);
        }
        true
    }

    /// Whether the admin completion queue has room, after a look at its head.
    pub(super) fn has_admin_room<H: Host>(&mut self, host: &mut H, health: &mut Health) -> bool {
        note(health, self.look_at_head(host, ADMIN));
        self.completion_mut(ADMIN).is_some_and(|queue| queue.room() != 0)
    }

    /// When an interrupt is due that waits for more completions, if one does.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Raises the interrupts that are due at the end of a poll, and sets the pin.
    pub(super) fn signal<H: Host>(
        &mut self,
        host: &mut H,
        health: &mut Health,
        mask: u32,
        patience: Patience,
        coalescing: Option<Coalescing<'_>>,
    ) {
        let pin = host.pin_in_use();
        let mut first: Option<Instant> = None;
        let mut asserted = false;
        for turn in 0..self.interrupting.len() {
            let Some(id) = self.interrupting.get(turn).copied() else { break };
            let Some(queue) = self.completion_mut(id) else { continue };
            let watched = matches!(queue.signal, Signal::Withheld { .. }) || (pin && queue.used() != 0);
            if watched {
                note(health, self.look_at_head(host, id));
            }
            let Some(queue) = self.completion.get_mut(usize::from(id.0)).and_then(Option::as_mut) else {
                continue;
            };
            let Some(vector) = queue.vector else { continue };
            if pin && queue.used() != 0 {
                // Before the interrupt, not before sleep: a VMM may take the pin to fall only when a register is
                // touched.
                self.doorbells.arm_head(host, id, queue);
            }
            if let Signal::Withheld { polls } = queue.signal {
                if polls == 0 {
                    health.counters.interrupts_withheld.add(1);
                }
                queue.signal = if patience == Patience::None || polls >= WITHHOLD_POLLS {
                    Signal::Due
                } else {
                    Signal::Withheld { polls: polls.saturating_add(1) }
                };
            }
            let mut gathering = false;
            if queue.signal == Signal::Due {
                // The admin queue's interrupts do not wait (5.21.1.8).
                if let Some(coalescing) = coalescing
                    && id != ADMIN
                    && coalescing.covers(vector)
                    && let Some(deadline) = queue.gather(&coalescing)
                {
                    gathering = true;
                    first = Some(first.map_or(deadline, |first| first.min(deadline)));
                } else {
                    queue.announce();
                    host.interrupt(vector);
                    health.counters.interrupts.add(1);
                }
            }
            // Without MSI the pin is vector 0's (3.1.3).
            asserted |=
                !gathering && queue.used() != 0 && mask & 1_u32.checked_shl(vector.into()).unwrap_or(0) == 0;
        }
        self.deadline = first;
        asserted &= pin;
        if asserted != self.line {
            self.line = asserted;
            host.interrupt_line(asserted);
        }
    }

    /// Before sleep: asks to hear of what would otherwise only be polled for, then looks again. True when
    /// nothing came meanwhile.
    pub(super) fn arm<H: Host>(&mut self, host: &mut H) -> bool {
        let pin = host.pin_in_use();
        for id in (0..=self.limits.pairs).map(QueueId) {
            if let Some(queue) = self.submission.get_mut(usize::from(id.0)).and_then(Option::as_mut) {
                self.doorbells.arm_tail(host, id, queue);
            }
            if let Some(queue) = self.completion.get_mut(usize::from(id.0)).and_then(Option::as_mut)
                && (queue.room() == 0 || (pin && queue.used() != 0))
            {
                self.doorbells.arm_head(host, id, queue);
            }
        }
        self.doorbells.fence();
        for id in (0..=self.limits.pairs).map(QueueId) {
            if let Some(queue) = self.submission(id)
                && self.doorbells.tail(host, id).is_some_and(|tail| !queue.has_seen(tail))
            {
                return false;
            }
            if let Some(queue) = self.completion.get(usize::from(id.0)).and_then(Option::as_ref)
                && (queue.room() == 0 || (pin && queue.used() != 0))
                && self.doorbells.head(host, id).is_some_and(|head| !queue.has_seen(head))
            {
                return false;
            }
        }
        true
    }

    /// Looks at one doorbell, at the next one in the next call: if its queue does not exist, no one may have
    /// rung it (5.2.1). A poll that has nothing else to do affords one look.
    pub(super) fn find_stray_doorbell<H: Host>(&mut self, host: &mut H, health: &mut Health) {
        self.scan = if self.scan < self.doorbell_count() { self.scan } else { 0 };
        let (queue, completion) = (self.scan / 2, !self.scan.is_multiple_of(2));
        let exists = match completion {
            false => self.submission.get(queue).is_some_and(Option::is_some),
            true => self.completion.get(queue).is_some_and(Option::is_some),
        };
        if !exists && host.doorbell(self.scan) != 0 {
            host.set_doorbell(self.scan, 0);
            health.record_stray_doorbell(self.scan);
        }
        self.scan = self.scan.saturating_add(1);
    }

    /// Looks at all of them, before a sleep.
    pub(super) fn find_stray_doorbells<H: Host>(&mut self, host: &mut H, health: &mut Health) {
        for _ in 0..self.doorbell_count() {
            self.find_stray_doorbell(host, health);
        }
    }

    fn doorbell_count(&self) -> usize {
        self.submission.len().saturating_mul(2)
    }
}

/// How long an interrupt may be withheld.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Some polls.
    Polls,
    /// Not at all: the controller goes to sleep.
    None,
}

/// Counts a look at a doorbell; an invalid value becomes an event (5.2.1).
#[inline]
fn note(health: &mut Health, look: Result<bool, InvalidDoorbell>) {
    match look {
        Ok(false) => {}
        Ok(true) => health.counters.doorbells.add(1),
        Err(InvalidDoorbell) => health.record_doorbell_value(),
    }
}
