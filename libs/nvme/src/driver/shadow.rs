//! Shadow doorbells (5.7 Doorbell Buffer Config, 7.13).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::device::Block;

/// The two pages that driver and drive share: the doorbells' values, and how far the drive has looked.
#[derive(Debug)]
pub(super) struct ShadowPages<B> {
    pub(super) doorbells: B,
    pub(super) events: B,
}

/// One doorbell's place in the shadow pages.
#[derive(Debug)]
pub(super) struct Shadow<B> {
    pages: Arc<ShadowPages<B>>,
    offset: usize,
    value: u32,
}

impl<B: Block> Shadow<B> {
    /// The doorbell at `offset` bytes in the pages, whose value is 0.
    pub(super) fn new(pages: Arc<ShadowPages<B>>, offset: usize) -> Self {
        pages.doorbells.store(offset, 0);
        pages.events.store(offset, 0);
        Self { pages, offset, value: 0 }
    }

    /// Writes the doorbell's value; tells whether the register must be written too.
    pub(super) fn update(&mut self, value: u32) -> bool {
        let old = std::mem::replace(&mut self.value, value);
        self.pages.doorbells.store(self.offset, value);
        // The drive writes its event index, then looks at the doorbell once more; the other way round here.
        // Without the fences both could miss.
        fence(Ordering::SeqCst);
        passed(self.pages.events.load(self.offset), value, old)
    }
}

/// Whether a doorbell that went from `old` to `new` went past `event`; all are 16-bit numbers that wrap.
fn passed(event: u32, new: u32, old: u32) -> bool {
    let distance = |from: u32| new.wrapping_sub(from) & 0xffff;
    distance(event.wrapping_add(1)) < distance(old)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_event_is_passed_when_it_lies_between(old: u16, steps in 0u16..=u16::MAX, ahead: u16) {
            let (new, event) = (old.wrapping_add(steps), old.wrapping_add(ahead));
            prop_assert_eq!(passed(event.into(), new.into(), old.into()), ahead < steps);
        }
    }
}
