//! Where a queue's doorbell is read: in the register, or in the shadow buffer that Doorbell Buffer Config names
//! (Base Specification 1.4, section 7.13).

use std::sync::atomic::{Ordering, fence};

use super::Host;
use super::queue::{CompletionQueue, SubmissionQueue};
use crate::spec::doorbell_index;
use crate::{Iova, QueueId};

/// The pages that the host gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shadow {
    /// The host writes its doorbells here.
    doorbells: Iova,
    /// The controller writes here which value it wants to hear of through a register.
    events: Iova,
}

/// The way to the doorbells. A reset forgets the shadow pages: they are no longer ours.
#[derive(Debug, Default)]
pub(super) struct Doorbells {
    shadow: Option<Shadow>,
}

/// The place of a doorbell in either page; strides are a dword: with others there are no shadow doorbells.
fn place(page: Iova, index: usize) -> Iova {
    Iova(page.0.wrapping_add((index as u64).wrapping_mul(4)))
}

impl Doorbells {
    pub(super) fn share(&mut self, doorbells: Iova, events: Iova) {
        self.shadow = Some(Shadow { doorbells, events });
    }

    pub(super) fn forget(&mut self) {
        self.shadow = None;
    }

    /// The admin queue keeps its registers (7.13: shadow doorbells are for I/O queues).
    #[inline]
    fn shadow(&self, queue: QueueId) -> Option<Shadow> {
        if queue.0 == 0 { None } else { self.shadow }
    }

    /// The tail of a submission queue. A shadow page that cannot be reached at the moment tells nothing: it may
    /// be back at the next look, and if not, the host resets the controller.
    #[inline]
    pub(super) fn tail<H: Host>(&self, host: &mut H, queue: QueueId) -> Option<u32> {
        self.load(host, queue, doorbell_index(queue, false))
    }

    /// The head of a completion queue.
    #[inline]
    pub(super) fn head<H: Host>(&self, host: &mut H, queue: QueueId) -> Option<u32> {
        self.load(host, queue, doorbell_index(queue, true))
    }

    #[inline]
    fn load<H: Host>(&self, host: &mut H, queue: QueueId, index: usize) -> Option<u32> {
        match self.shadow(queue) {
            None => Some(host.doorbell(index)),
            Some(shadow) => host.load(place(shadow.doorbells, index)).ok(),
        }
    }

    /// A doorbell starts at `value`: its queue was created, or moves to the shadow page.
    pub(super) fn start<H: Host>(&self, host: &mut H, queue: QueueId, completion: bool, value: u32) {
        let index = doorbell_index(queue, completion);
        match self.shadow(queue) {
            None => host.set_doorbell(index, value),
            Some(shadow) => {
                host.set_doorbell(index, 0);
                // An unreachable page: as in `tail`.
                let _ = host.store(place(shadow.doorbells, index), value);
                let _ = host.store(place(shadow.events, index), value);
            }
        }
    }

    /// Asks to hear through the register of the next submission after those that were seen.
    pub(super) fn arm_tail<H: Host>(&self, host: &mut H, id: QueueId, queue: &mut SubmissionQueue) {
        if self.arm(host, id, false, queue.tail(), queue.armed) {
            queue.armed = Some(queue.tail());
        }
    }

    /// Asks to hear through the register when the host consumes completions.
    pub(super) fn arm_head<H: Host>(&self, host: &mut H, id: QueueId, queue: &mut CompletionQueue) {
        if self.arm(host, id, true, queue.head(), queue.armed) {
            queue.armed = Some(queue.head());
        }
    }

    fn arm<H: Host>(
        &self,
        host: &mut H,
        queue: QueueId,
        completion: bool,
        value: u32,
        armed: Option<u32>,
    ) -> bool {
        let Some(shadow) = self.shadow(queue) else { return false };
        armed != Some(value)
            && host.store(place(shadow.events, doorbell_index(queue, completion)), value).is_ok()
    }

    /// Stands between arming and the look again: either the host sees the event index and rings, or we see
    /// its doorbell (propolis#1008).
    pub(super) fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
