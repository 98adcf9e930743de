//! Which commands are outstanding.

/// Names an outstanding command of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommandId {
    slot: u16,
    raw: u16,
}

impl CommandId {
    /// Its slot, below the queue's depth: no two outstanding commands of a queue share one.
    pub fn slot(self) -> usize {
        usize::from(self.slot)
    }

    /// The command identifier on the wire.
    pub fn raw(self) -> u16 {
        self.raw
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Outstanding,
}

/// The command identifier that a slot has now, or will have next.
#[derive(Clone, Copy, Debug)]
struct Slot {
    raw: u16,
    state: State,
}

/// The slots of a queue. A command identifier is its slot in the low bits and a sequence above, which changes
/// with each use, so that a completion that is told twice or made up is caught.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Box<[Slot]>,
    /// Free slots; the last is used next, it is the warmest.
    free: Vec<u16>,
    /// Where the sequence begins.
    sequence: u32,
}

impl Slots {
    /// `depth` free slots.
    pub(super) fn new(depth: u16) -> Self {
        let slots = (0..depth).map(|raw| Slot { raw, state: State::Free }).collect();
        let free = (0..depth).rev().collect();
        Self { slots, free, sequence: u16::BITS.saturating_sub(depth.saturating_sub(1).leading_zeros()) }
    }

    /// How many commands can be outstanding.
    pub(super) fn depth(&self) -> usize {
        self.slots.len()
    }

    /// How many commands are outstanding.
    pub(super) fn outstanding(&self) -> usize {
        self.slots.len().saturating_sub(self.free.len())
    }

    /// Takes a slot.
    #[inline]
    pub(super) fn take(&mut self) -> Option<CommandId> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.state = State::Outstanding;
        Some(CommandId { slot: index, raw: slot.raw })
    }

    /// Frees the slot of a completed command, if it is outstanding.
    #[inline]
    pub(super) fn release(&mut self, raw: u16) -> Option<CommandId> {
        let mask = 1u16.checked_shl(self.sequence).map_or(u16::MAX, |bit| bit.wrapping_sub(1));
        let index = raw & mask;
        let slot = self.slots.get_mut(usize::from(index))?;
        if slot.raw != raw || slot.state != State::Outstanding {
            return None;
        }
        slot.raw = raw.wrapping_add(1u16.checked_shl(self.sequence).unwrap_or(0));
        slot.state = State::Free;
        self.free.push(index);
        Some(CommandId { slot: index, raw })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a set of what is outstanding.
        #[test]
        fn only_outstanding_commands_are_released(
            depth in 1u16..=4096,
            actions in prop::collection::vec(prop_oneof![Just(None), any::<u16>().prop_map(Some)], 0..400),
            honest: bool,
        ) {
            let mut slots = Slots::new(depth);
            let mut outstanding = Vec::<u16>::new();
            for action in actions {
                match action {
                    None => match slots.take() {
                        Some(id) => {
                            prop_assert!(id.slot() < usize::from(depth));
                            prop_assert!(!outstanding.contains(&id.raw()));
                            outstanding.push(id.raw());
                        }
                        None => prop_assert_eq!(outstanding.len(), usize::from(depth)),
                    },
                    Some(raw) => {
                        let raw = match outstanding.len() {
                            0 => raw,
                            count if honest => outstanding[usize::from(raw) % count],
                            _ => raw,
                        };
                        let known = outstanding.iter().position(|&other| other == raw);
                        prop_assert_eq!(slots.release(raw).map(CommandId::raw), known.map(|at| outstanding[at]));
                        if let Some(at) = known {
                            outstanding.swap_remove(at);
                            prop_assert_eq!(slots.release(raw), None);
                        }
                    }
                }
                prop_assert_eq!(slots.outstanding(), outstanding.len());
                let taken: HashSet<u16> = outstanding.iter().copied().collect();
                prop_assert_eq!(taken.len(), outstanding.len());
            }
        }
    }

    #[test]
    fn a_stale_completion_is_caught() {
        let mut slots = Slots::new(127);
        let first = slots.take().unwrap();
        assert!(slots.release(first.raw()).is_some());
        let second = slots.take().unwrap();
        assert_eq!(first.slot(), second.slot());
        assert_eq!(slots.release(first.raw()), None);
        assert!(slots.release(second.raw()).is_some());
    }
}
