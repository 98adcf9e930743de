//! Every crossing of the socket is counted.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::wire::CommandCode;

/// A number that any thread may raise and read.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Raises it.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Room for every command that the protocol has; the last slot is for what it does not have.
const SLOTS: usize = 20;

/// Messages by command. One instance may count for several sessions, and be read meanwhile.
#[derive(Debug, Default)]
pub struct Messages {
    commands: [Count; SLOTS],
}

impl Messages {
    /// Counts one message.
    pub fn count(&self, code: CommandCode) {
        let slot = usize::from(code.0).min(SLOTS.saturating_sub(1));
        if let Some(counter) = self.commands.get(slot) {
            counter.add(1);
        }
    }

    /// How many of one command there were.
    pub fn of(&self, code: CommandCode) -> u64 {
        let slot = usize::from(code.0).min(SLOTS.saturating_sub(1));
        self.commands.get(slot).map_or(0, Count::get)
    }

    /// How many there were.
    pub fn total(&self) -> u64 {
        self.commands.iter().map(Count::get).fold(0, u64::wrapping_add)
    }

    /// The specification's name of each command that there was, and how many.
    pub fn by_name(&self) -> Vec<(&'static str, u64)> {
        let count =
            |(code, counter): (u16, &Count)| (CommandCode(code).name().unwrap_or("UNKNOWN"), counter.get());
        (0_u16..).zip(&self.commands).map(count).filter(|&(_, count)| count > 0).collect()
    }
}
