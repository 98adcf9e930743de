//! The commands under way at the disks, by tag.

use super::completion::Origin;
use super::{DiskError, Tag};

/// Who waits for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A command of the host.
    Command { origin: Origin, work: Work },
    /// The controller, which flushes as it shuts down.
    Shutdown,
}

/// What a command does, for the counters and for the status that its failure gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Read {
        bytes: u64,
    },
    Write {
        bytes: u64,
    },
    Compare {
        bytes: u64,
    },
    Verify {
        bytes: u64,
    },
    WriteUncorrectable,
    Flush,
    WriteZeroes {
        bytes: u64,
    },
    Deallocate,
    /// Format NVM.
    Format,
    /// Set Features turned the write cache off: what it held is flushed first.
    CacheOff,
}

impl Work {
    /// The bytes of the namespace that it writes.
    pub(super) fn written(self) -> Option<u64> {
        match self {
            Self::Write { bytes } | Self::WriteZeroes { bytes } => Some(bytes),
            _ => None,
        }
    }
}

#[derive(Clone, Copy)]
struct Slot {
    /// Part of the tag: a tag that a disk reports twice finds nothing.
    sequence: u16,
    /// Operations (one a disk) that are not over; 0 when the slot is free.
    parts: u32,
    failure: Option<DiskError>,
    owner: Owner,
    era: Era,
    next_free: u16,
}

/// Which of two eras a command was taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Era {
    Even,
    Odd,
}

impl Era {
    fn other(self) -> Self {
        match self {
            Self::Even => Self::Odd,
            Self::Odd => Self::Even,
        }
    }
}

/// A slab of fixed size; takes and frees in constant time and never allocates.
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: u16,
    era: Era,
    /// Commands under way, by era.
    even: usize,
    odd: usize,
}

const NONE: u16 = u16::MAX;

impl Slots {
    pub(super) fn new(capacity: u16) -> Self {
        let slots = (1..=capacity)
            .map(|next| Slot {
                sequence: 0,
                parts: 0,
                failure: None,
                owner: Owner::Shutdown,
                era: Era::Even,
                next_free: if next == capacity { NONE } else { next },
            })
            .collect();
        Self { slots, free: if capacity == 0 { NONE } else { 0 }, era: Era::Even, even: 0, odd: 0 }
    }

    /// How many commands are under way.
    pub(super) fn in_flight(&self) -> usize {
        self.even.saturating_add(self.odd)
    }

    /// How many more may start.
    pub(super) fn available(&self) -> usize {
        self.slots.len().saturating_sub(self.in_flight())
    }

    /// The tag that the next [`Slots::take`] occupies. An operation that is done at once never takes it.
    pub(super) fn next_tag(&self) -> Option<Tag> {
        let slot = self.slots.get(usize::from(self.free))?;
        Some(Tag(u32::from(slot.sequence) << 16 | u32::from(self.free)))
    }

    /// Occupies the slot of [`Slots::next_tag`] for `parts` operations, at least one; `failure` is what an
    /// operation that ended at once reported.
    pub(super) fn take(&mut self, owner: Owner, parts: u32, failure: Option<DiskError>) {
        if let Some(slot) = self.slots.get_mut(usize::from(self.free)) {
            self.free = slot.next_free;
            *slot = Slot { sequence: slot.sequence, parts, failure, owner, era: self.era, next_free: NONE };
            let count = self.count(self.era);
            *count = count.saturating_add(1);
        }
    }

    /// What is taken from here on belongs to a new era. Nothing may be left of the one before the present.
    pub(super) fn begin_era(&mut self) {
        self.era = self.era.other();
    }

    /// How many commands of the eras before this one are under way.
    pub(super) fn of_earlier_eras(&self) -> usize {
        match self.era {
            Era::Even => self.odd,
            Era::Odd => self.even,
        }
    }

    fn count(&mut self, era: Era) -> &mut usize {
        match era {
            Era::Even => &mut self.even,
            Era::Odd => &mut self.odd,
        }
    }

    /// Notes that an operation is over. When it was the last one of its tag, gives the owner and the result.
    pub(super) fn finish(
        &mut self,
        tag: Tag,
        result: Result<(), DiskError>,
    ) -> Option<(Owner, Result<(), DiskError>)> {
        let index = (tag.0 & 0xffff) as u16;
        let slot = self.slots.get_mut(usize::from(index))?;
        if slot.parts == 0 || u32::from(slot.sequence) != tag.0 >> 16 {
            return None;
        }
        slot.failure = slot.failure.or(result.err());
        slot.parts = slot.parts.saturating_sub(1);
        if slot.parts != 0 {
            return None;
        }
        slot.sequence = slot.sequence.wrapping_add(1);
        slot.next_free = self.free;
        self.free = index;
        let (era, owner, failure) = (slot.era, slot.owner, slot.failure);
        let count = self.count(era);
        *count = count.saturating_sub(1);
        Some((owner, failure.map_or(Ok(()), Err)))
    }
}
