//! Physical Region Pages: how a command points to its data (4.3).

use super::device::Block;
use super::limits::PAGE_SIZE;
use crate::Iova;
use crate::spec::{DataPointerType, SglDescriptor};

const PAGE: u64 = PAGE_SIZE as u64;
/// PRP entries in a page of a list.
const LIST_ENTRIES: usize = PAGE_SIZE / 8;

/// A run of memory, contiguous to the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Its first byte.
    pub iova: Iova,
    /// Its length in bytes.
    pub length: usize,
}

/// Why fragments cannot be described by PRP entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrpError {
    /// There is no data.
    #[error("There is no data to point to")]
    Empty,
    /// A fragment in the middle begins or ends within a page, or the first is not aligned to 4 bytes.
    #[error("{length} bytes at {iova:#x} do not join at page boundaries", iova = fragment.iova.0, length = fragment.length)]
    Misaligned {
        /// The fragment.
        fragment: Fragment,
    },
    /// The list needs more pages than were given.
    #[error("{needed} bytes are needed for the PRP list, {given} are given")]
    ListTooSmall {
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
}

/// Where a command's data lies: PRP entries 1 and 2, or an SGL descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPointer {
    first: u64,
    second: u64,
    kind: DataPointerType,
}

impl DataPointer {
    /// No data.
    pub const NONE: Self = Self::prp(0, 0);

    const fn prp(first: u64, second: u64) -> Self {
        Self { first, second, kind: DataPointerType::PRP }
    }

    /// An SGL that begins with this descriptor.
    pub(super) const fn of_descriptor(descriptor: SglDescriptor) -> Self {
        let [first, second] = descriptor.halves();
        Self { first: first.get(), second: second.get(), kind: DataPointerType::SGL }
    }

    /// Describes `fragments`, in order. Three pages or more need a list, which is written to `list`; the drive
    /// reads it until the command is over.
    ///
    /// All fragments but the first begin at a page boundary, all but the last end at one.
    pub fn new<B: Block>(fragments: &[Fragment], list: Option<&B>) -> Result<Self, PrpError> {
        let total = count_pages(fragments)?;
        let mut pages = fragments.iter().flat_map(pages_of);
        let first = pages.next().ok_or(PrpError::Empty)?;
        if total <= 2 {
            return Ok(Self::prp(first, pages.next().unwrap_or(0)));
        }
        let entries = total.saturating_sub(1);
        let needed = list_pages(entries).saturating_mul(PAGE_SIZE);
        let given = list.map_or(0, Block::size);
        let Some(list) = list.filter(|_| needed <= given) else {
            return Err(PrpError::ListTooSmall { needed, given });
        };
        let mut left = entries;
        for page in (0..needed).step_by(PAGE_SIZE) {
            // The last entry of a full page points to the next one, unless it ends the list itself (4.3).
            let chained = left > LIST_ENTRIES;
            let here = if chained { LIST_ENTRIES.saturating_sub(1) } else { left };
            let mut offset = page;
            for entry in pages.by_ref().take(here) {
                list.write(offset, &entry.to_le_bytes());
                offset = offset.saturating_add(8);
            }
            if chained {
                let next = list.iova().0.wrapping_add(page as u64).wrapping_add(PAGE);
                list.write(offset, &next.to_le_bytes());
            }
            left = left.saturating_sub(here);
        }
        Ok(Self::prp(first, list.iova().0))
    }

    /// Which of the two it is (PSDT).
    pub fn kind(self) -> DataPointerType {
        self.kind
    }

    /// The SGL's first descriptor.
    #[cfg(test)]
    pub(super) fn descriptor(self) -> SglDescriptor {
        SglDescriptor::from_halves([self.first.into(), self.second.into()])
    }

    /// PRP entry 1, or the first half of the descriptor.
    pub fn first(self) -> u64 {
        self.first
    }

    /// PRP entry 2, or the second half of the descriptor.
    pub fn second(self) -> u64 {
        self.second
    }
}

/// The pages that fragments touch, if they join as PRP entries can tell.
fn count_pages(fragments: &[Fragment]) -> Result<usize, PrpError> {
    let last = fragments.len().saturating_sub(1);
    let mut pages = 0usize;
    for (index, &fragment) in fragments.iter().enumerate() {
        let Fragment { iova: Iova(start), length } = fragment;
        if length == 0 {
            return Err(PrpError::Empty);
        }
        let end = start.checked_add(length as u64);
        let begins = if index == 0 { start % 4 == 0 } else { start % PAGE == 0 };
        let ends = index == last || end.is_some_and(|end| end % PAGE == 0);
        if end.is_none() || !begins || !ends {
            return Err(PrpError::Misaligned { fragment });
        }
        pages = pages.saturating_add(pages_of(&fragment).count());
    }
    Ok(pages)
}

/// The PRP entries of a fragment: the first with its offset, the others at page boundaries.
fn pages_of(fragment: &Fragment) -> impl Iterator<Item = u64> + use<> {
    let start = fragment.iova.0;
    let end = start.saturating_add(fragment.length as u64);
    let second = (start & !(PAGE.wrapping_sub(1))).saturating_add(PAGE);
    std::iter::once(start).chain((second..end).step_by(PAGE_SIZE))
}

/// The pages of a list of `entries`.
fn list_pages(entries: usize) -> usize {
    // All pages but the last give one entry to the chain.
    entries.saturating_sub(1).div_ceil(LIST_ENTRIES.saturating_sub(1)).max(1)
}

#[cfg(test)]
pub(super) mod tests;
