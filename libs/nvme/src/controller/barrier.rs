//! Admin commands that wait until what was started before them is over.

use std::collections::VecDeque;

use super::completion::Origin;
use super::io::Progress;
use super::slots::{Owner, Work};
use super::{Controller, Disk, Host};

/// What is to be done when nothing of before is under way any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// The write cache was switched off: no write may stay in it that was acknowledged as cached.
    Flush,
    /// The namespaces of the command get this LBA format.
    Format { index: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has not begun to wait: another one does.
    Queued,
    /// For the commands that were under way when it began.
    Waiting,
}

/// The commands that wait, the oldest first. They are no more than the admin queue's.
#[derive(Debug, Default)]
pub(super) struct Barriers(VecDeque<(Origin, Then, State)>);

impl Barriers {
    pub(super) fn push(&mut self, origin: Origin, then: Then) {
        self.0.push_back((origin, then, State::Queued));
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<H: Host, D: Disk<H>> Controller<H, D> {
    /// Goes on with the commands whose wait is over; true if there was any.
    #[inline]
    pub(super) fn pass_barriers(&mut self, host: &mut H) -> bool {
        let mut progress = false;
        while let Some((origin, then)) = self.next_passed() {
            progress = true;
            let outcome = match then {
                Then::Flush => self.disks.flush_all(host, Owner::Command { origin, work: Work::CacheOff }),
                Then::Format { index } => self.disks.format(host, origin, index),
            };
            let result = match outcome {
                Ok(Progress::Pending) => continue,
                Ok(Progress::Done) => Ok(0),
                Err(status) => Err(status),
            };
            self.report_changes();
            self.health.counters.admin.add(1);
            if let Err(error) = self.queues.complete(host, &mut self.health, origin, result) {
                self.fail(host, &error);
            }
        }
        progress
    }

    fn next_passed(&mut self) -> Option<(Origin, Then)> {
        let (origin, then, state) = self.barriers.0.front_mut()?;
        let slots = &mut self.disks.slots;
        if *state == State::Queued {
            slots.begin_era();
            *state = State::Waiting;
        }
        if slots.of_earlier_eras() != 0 || slots.available() == 0 {
            return None;
        }
        let passed = (*origin, *then);
        self.barriers.0.pop_front();
        Some(passed)
    }

    /// The queues are gone, and those who wait with them.
    pub(super) fn drop_barriers(&mut self) {
        for (origin, then, _) in self.barriers.0.drain(..) {
            if matches!(then, Then::Format { .. }) {
                self.disks.cancel_format(origin.nsid);
            }
        }
    }
}
