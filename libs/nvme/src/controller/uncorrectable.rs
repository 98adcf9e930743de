//! Blocks that Write Uncorrectable made unreadable, until they are written (Base Specification 1.4, section 6.14).
//! Resets change nothing; whoever made the controller anew begins without any.

use std::collections::BTreeMap;

use super::LbaRange;
use super::limits::MAX_UNCORRECTABLE_PARTS;
use crate::spec::Status;

#[cfg(test)]
mod tests;

/// A bit for each of 4096 blocks.
type Part = [u64; 64];

/// The blocks of a namespace that are marked. Clearing needs no memory, so that it never fails.
#[derive(Debug, Default)]
pub(super) struct Uncorrectable(BTreeMap<u64, Box<Part>>);

impl Uncorrectable {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Marks a range, or nothing.
    ///
    /// # Errors
    /// Capacity Exceeded: marks lie in too many parts of the namespace.
    pub(super) fn mark(&mut self, range: LbaRange) -> Result<(), Status> {
        let (mut last, mut parts) = (None, self.0.len());
        for (part, ..) in words(range) {
            if last != Some(part) && !self.0.contains_key(&part) {
                parts = parts.saturating_add(1);
            }
            last = Some(part);
        }
        if parts > MAX_UNCORRECTABLE_PARTS {
            return Err(Status::CAPACITY_EXCEEDED);
        }
        for (part, word, mask) in words(range) {
            let part = self.0.entry(part).or_insert_with(|| Box::new([0; 64]));
            if let Some(word) = part.get_mut(word) {
                *word |= mask;
            }
        }
        Ok(())
    }

    /// The range was written.
    pub(super) fn clear(&mut self, range: LbaRange) {
        for (part, word, mask) in words(range) {
            let Some(bits) = self.0.get_mut(&part) else { continue };
            if let Some(word) = bits.get_mut(word) {
                *word &= !mask;
            }
            if bits.iter().all(|word| *word == 0) {
                self.0.remove(&part);
            }
        }
    }

    /// Whether the range can be read.
    ///
    /// # Errors
    /// Unrecovered Read Error: a block of it is marked.
    #[inline]
    pub(super) fn check(&self, range: LbaRange) -> Result<(), Status> {
        let marked = |(part, word, mask): (u64, usize, u64)| {
            self.0.get(&part).and_then(|bits| bits.get(word)).is_some_and(|bits| bits & mask != 0)
        };
        if !self.is_empty() && words(range).any(marked) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        Ok(())
    }
}

/// The words that a range touches: the part, the word in it, the bits in that.
fn words(range: LbaRange) -> impl Iterator<Item = (u64, usize, u64)> {
    let (start, end) = (range.start.0, range.start.0.saturating_add(range.blocks));
    (start / 64..end.div_ceil(64)).map(move |word| {
        let first = word.saturating_mul(64);
        let low = start.saturating_sub(first).min(63);
        let high = end.saturating_sub(first).min(64);
        let mask = u64::MAX >> 64_u64.saturating_sub(high).min(63) & u64::MAX << low;
        (word / 64, (word % 64) as usize, mask)
    })
}
