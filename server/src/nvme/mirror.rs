//! The registers as memory, for clients that have mapped the whole of BAR0: what the guest stores is found by looking.
//!
//! Memory tells no more than that a value is another than it was. So INTMC reads as 0, or a write of what it shows
//! would not be seen; and EN that falls and rises between two looks has not fallen (a driver waits for RDY to follow,
//! 3.1.5).

use std::sync::Arc;

use outboard_nvme::controller::{Effect, Registers, Snapshot};
use outboard_nvme::spec::Register;

use super::bar0::{Bar0, PAGE};

/// The registers up to ACQ, and what follows them up to the end of a cache line: one look at one line.
const DWORDS: usize = 16;
const CC: usize = Register::CC.0 as usize / 4;
const INTMC: usize = Register::INTMC.0 as usize / 4;

/// Keeps the first page of a BAR and the registers alike.
pub(super) struct Mirror {
    bar: Arc<Bar0>,
    registers: Arc<Registers>,
    /// What the memory held when it was looked at or written last.
    shown: [u32; DWORDS],
    /// What the registers held then.
    snapshot: Snapshot,
}

fn offset(index: usize) -> u64 {
    (index as u64).saturating_mul(4)
}

impl Mirror {
    /// Fills the page, before a client can see it.
    pub(super) fn new(bar: Arc<Bar0>, registers: Arc<Registers>) -> Self {
        let snapshot = registers.snapshot();
        let mut mirror = Self { bar, registers, shown: [0; DWORDS], snapshot };
        mirror.show();
        mirror
    }

    /// Takes what the guest stored and shows what there is; true if the guest stored anything.
    #[inline]
    pub(super) fn look(&mut self) -> bool {
        // CC first: what the driver wrote before it, AQA above all, is seen by the loads that follow.
        let control = self.bar.load(offset(CC));
        let stored = control != self.shown[CC]
            || self.shown.iter().enumerate().any(|(index, shown)| self.bar.load(offset(index)) != *shown);
        if stored {
            self.take(control);
        }
        if stored || self.snapshot != self.registers.snapshot() {
            self.snapshot = self.registers.snapshot();
            self.show();
        }
        stored
    }

    #[cold]
    fn take(&mut self, control: u32) {
        let others = (0..DWORDS).filter(|index| *index != CC);
        let others: Vec<(usize, u32)> = others.map(|index| (index, self.bar.load(offset(index)))).collect();
        for (index, value) in others.into_iter().chain([(CC, control)]) {
            if let Some(shown) = self.shown.get_mut(index).filter(|shown| **shown != value) {
                *shown = value;
                // Who looks needs not be woken.
                let (Effect::None | Effect::Wake) = self.registers.write(offset(index), &value.to_le_bytes());
            }
        }
    }

    /// Where the guest stores at the same time, its value stays and is taken at the next look.
    #[cold]
    fn show(&mut self) {
        for (index, shown) in self.shown.iter_mut().enumerate() {
            let mut bytes = [0; 4];
            self.registers.read(offset(index), &mut bytes);
            let value = if index == INTMC { 0 } else { u32::from_le_bytes(bytes) };
            if *shown != value && self.bar.replace(offset(index), *shown, value) {
                *shown = value;
            }
        }
    }

    /// Undoes what was scribbled over the rest of the page, where there is nothing to write. Before a sleep.
    pub(super) fn restore(&self) {
        for at in (offset(DWORDS)..PAGE).step_by(4) {
            let value = self.bar.load(at);
            if value != 0 {
                self.bar.replace(at, value, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests;
