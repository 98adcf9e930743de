//! A submission queue and a completion queue: ring arithmetic without memory accesses (Base Specification 1.4,
//! section 4.1).

use std::time::Instant;

use super::features::Coalescing;
use crate::{Iova, QueueId};

#[cfg(test)]
mod tests;

/// A doorbell was rung with a value that its queue cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidDoorbell;

/// A ring's slot after `index`.
const fn next(index: u32, entries: u32) -> u32 {
    let next = index.wrapping_add(1);
    if next >= entries { 0 } else { next }
}

/// How far it is from `from` on to `to` around a ring; both are below `entries`.
const fn distance(from: u32, to: u32, entries: u32) -> u32 {
    if to >= from { to.wrapping_sub(from) } else { entries.wrapping_sub(from).wrapping_add(to) }
}

/// The address of a ring's slot.
fn slot(base: Iova, index: u32, size: u64) -> Iova {
    Iova(base.0.wrapping_add(u64::from(index).wrapping_mul(size)))
}

/// Whether commands are taken from a submission queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubmissionState {
    Live,
    /// No more; the admin command that deletes the queue completes when the last one has.
    Deleting {
        command: u16,
    },
}

/// A submission queue.
#[derive(Debug)]
pub(super) struct SubmissionQueue {
    pub(super) completion: QueueId,
    pub(super) state: SubmissionState,
    /// Commands taken and not completed.
    pub(super) in_flight: u32,
    /// The event index that was last stored, with shadow doorbells.
    pub(super) armed: Option<u32>,
    base: Iova,
    entries: u32,
    head: u32,
    tail: u32,
    /// The doorbell as it was last seen: a value is judged once.
    doorbell: u32,
}

impl SubmissionQueue {
    /// Of `entries` slots, 2 to 65536, at `base`.
    pub(super) fn new(base: Iova, entries: u32, completion: QueueId) -> Self {
        Self {
            completion,
            state: SubmissionState::Live,
            in_flight: 0,
            armed: None,
            base,
            entries,
            head: 0,
            tail: 0,
            doorbell: 0,
        }
    }

    /// Takes notice of the doorbell's value; true when it changed. An invalid one leaves the queue as it is.
    #[inline]
    pub(super) fn ring(&mut self, value: u32) -> Result<bool, InvalidDoorbell> {
        if value == self.doorbell {
            return Ok(false);
        }
        self.doorbell = value;
        if value >= self.entries {
            return Err(InvalidDoorbell);
        }
        self.tail = value;
        Ok(true)
    }

    /// Whether `value` is what was seen last.
    pub(super) fn has_seen(&self, value: u32) -> bool {
        self.doorbell == value
    }

    /// Submissions that were not taken.
    pub(super) fn pending(&self) -> u32 {
        match self.state {
            SubmissionState::Live => distance(self.head, self.tail, self.entries),
            SubmissionState::Deleting { .. } => 0,
        }
    }

    /// At most `most` pending submissions that lie in a row: where, and how many.
    pub(super) fn run(&self, most: u32) -> (Iova, u32) {
        let count = self.pending().min(self.entries.saturating_sub(self.head)).min(most);
        (slot(self.base, self.head, 64), count)
    }

    /// The host may reuse the next slot, whose command was taken.
    pub(super) fn take(&mut self) {
        self.head = next(self.head, self.entries);
        self.in_flight = self.in_flight.saturating_add(1);
    }

    /// SQHD: the head, as completions report it. Queues of 65536 entries have heads up to 0xffff.
    pub(super) fn head(&self) -> u16 {
        (self.head & 0xffff) as u16
    }

    /// The tail, as the host said.
    pub(super) fn tail(&self) -> u32 {
        self.tail
    }
}

/// What the host was told about its completions.
///
/// A host that consumes completions moves the queue's head; until it does, another interrupt would tell it
/// nothing that the last one did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// The host consumed all that it was told of.
    Quiet,
    /// There are completions that no interrupt announced, and none is awaiting the host.
    Due,
    /// An interrupt was sent and the head did not move since.
    Sent,
    /// As [`Signal::Sent`], but completions were added since, this many polls ago.
    Withheld { polls: u32 },
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    /// The vector, when interrupts are enabled.
    pub(super) vector: Option<u16>,
    pub(super) signal: Signal,
    /// Completions added since the last interrupt.
    pub(super) gathered: u32,
    /// Since when an interrupt waits for more completions.
    pub(super) gathering: Option<Instant>,
    /// Submission queues that complete here.
    pub(super) users: u32,
    /// The event index that was last stored, with shadow doorbells.
    pub(super) armed: Option<u32>,
    base: Iova,
    entries: u32,
    head: u32,
    tail: u32,
    phase: bool,
    /// Slots promised to commands that were taken.
    reserved: u32,
    doorbell: u32,
}

impl CompletionQueue {
    /// Of `entries` slots, 2 to 65536, at `base`.
    pub(super) fn new(base: Iova, entries: u32, vector: Option<u16>) -> Self {
        Self {
            vector,
            signal: Signal::Quiet,
            gathered: 0,
            gathering: None,
            users: 0,
            armed: None,
            base,
            entries,
            head: 0,
            tail: 0,
            phase: true,
            reserved: 0,
            doorbell: 0,
        }
    }

    /// Takes notice of the doorbell's value; true when it changed. The head moves over posted entries only.
    #[inline]
    pub(super) fn ring(&mut self, value: u32) -> Result<bool, InvalidDoorbell> {
        if value == self.doorbell {
            return Ok(false);
        }
        self.doorbell = value;
        if value >= self.entries || distance(self.head, value, self.entries) > self.used() {
            return Err(InvalidDoorbell);
        }
        self.head = value;
        if self.signal != Signal::Quiet {
            self.signal = if self.used() == 0 { Signal::Quiet } else { Signal::Due };
            if self.signal == Signal::Quiet {
                self.gathered = 0;
                self.gathering = None;
            }
        }
        Ok(true)
    }

    /// Whether `value` is what was seen last.
    pub(super) fn has_seen(&self, value: u32) -> bool {
        self.doorbell == value
    }

    /// Entries that the host did not consume.
    pub(super) fn used(&self) -> u32 {
        distance(self.head, self.tail, self.entries)
    }

    /// Slots that may still be promised: a ring keeps one slot empty.
    pub(super) fn room(&self) -> u32 {
        self.entries.saturating_sub(1).saturating_sub(self.used()).saturating_sub(self.reserved)
    }

    /// Promises a slot; the caller has seen that there is room.
    pub(super) fn reserve(&mut self) {
        self.reserved = self.reserved.saturating_add(1);
    }

    /// Gives a promised slot back unused: an Asynchronous Event Request parks.
    pub(super) fn release(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// Turns a promised slot into an entry to be written: where, and with which phase tag.
    pub(super) fn push(&mut self) -> (Iova, bool) {
        let entry = (slot(self.base, self.tail, 16), self.phase);
        self.reserved = self.reserved.saturating_sub(1);
        self.tail = next(self.tail, self.entries);
        self.phase ^= self.tail == 0;
        self.gathered = self.gathered.saturating_add(1);
        self.signal = match self.signal {
            Signal::Quiet | Signal::Due => Signal::Due,
            Signal::Sent => Signal::Withheld { polls: 0 },
            withheld @ Signal::Withheld { .. } => withheld,
        };
        entry
    }

    /// The head, as the host said.
    pub(super) fn head(&self) -> u32 {
        self.head
    }

    /// An interrupt is due, but completions are gathered first: until when it may wait, if it may.
    pub(super) fn gather(&mut self, coalescing: &Coalescing<'_>) -> Option<Instant> {
        if self.gathered >= coalescing.completions {
            return None;
        }
        let now = Instant::now();
        let deadline = self.gathering.get_or_insert(now).checked_add(coalescing.time)?;
        (now < deadline).then_some(deadline)
    }

    /// An interrupt tells of all completions.
    pub(super) fn announce(&mut self) {
        self.signal = Signal::Sent;
        self.gathered = 0;
        self.gathering = None;
    }
}
