//! Scatter gather lists: how a command of an I/O queue points to data in runs of any length (4.4).

use zerocopy::IntoBytes;

use super::device::Block;
use super::limits::PAGE_SIZE;
use super::prp::{DataPointer, Fragment};
use crate::Iova;
use crate::spec::{SglDescriptor, SglType};

const DESCRIPTOR: usize = size_of::<SglDescriptor>();
/// Descriptors in a page of a list.
const PAGE_DESCRIPTORS: usize = PAGE_SIZE / DESCRIPTOR;

/// Why fragments cannot be described by an SGL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SglError {
    /// There is no data.
    #[error("There is no data to point to")]
    Empty,
    /// A fragment is longer than a descriptor can say, or ends beyond the address space.
    #[error("{length} bytes at {iova:#x} do not fit in a descriptor", iova = fragment.iova.0, length = fragment.length)]
    TooLong {
        /// The fragment.
        fragment: Fragment,
    },
    /// The list needs more pages than were given.
    #[error("{needed} bytes are needed for the SGL, {given} are given")]
    ListTooSmall {
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
}

impl DataPointer {
    /// Describes `fragments`, in order, for a drive that supports SGLs (SGLS of Identify Controller, which also
    /// says how they must be aligned). Two or more need a list, which is written to `list`; the drive reads it
    /// until the command is over.
    pub fn sgl<B: Block>(fragments: &[Fragment], list: Option<&B>) -> Result<Self, SglError> {
        if let [fragment] = fragments {
            return Ok(Self::of_descriptor(data(fragment)?));
        }
        let mut left = fragments.len();
        // All pages but the last give one descriptor to the chain.
        let pages = left.checked_sub(1).ok_or(SglError::Empty)?.div_ceil(PAGE_DESCRIPTORS.saturating_sub(1));
        let needed = pages.saturating_mul(PAGE_SIZE);
        let given = list.map_or(0, Block::size);
        let Some(list) = list.filter(|_| needed <= given) else {
            return Err(SglError::ListTooSmall { needed, given });
        };
        let first = link(list.iova(), left);
        let mut fragments = fragments.iter();
        for page in (0..needed).step_by(PAGE_SIZE) {
            let chained = left > PAGE_DESCRIPTORS;
            let here = if chained { PAGE_DESCRIPTORS.saturating_sub(1) } else { left };
            left = left.saturating_sub(here);
            let mut offset = page;
            for fragment in fragments.by_ref().take(here) {
                list.write(offset, data(fragment)?.as_bytes());
                offset = offset.saturating_add(DESCRIPTOR);
            }
            if chained {
                let next = list.iova().0.wrapping_add(page as u64).wrapping_add(PAGE_SIZE as u64);
                list.write(offset, link(Iova(next), left).as_bytes());
            }
        }
        Ok(Self::of_descriptor(first))
    }
}

/// The descriptor of a fragment.
fn data(fragment: &Fragment) -> Result<SglDescriptor, SglError> {
    let Fragment { iova: Iova(start), length } = *fragment;
    let too_long = SglError::TooLong { fragment: *fragment };
    if length == 0 {
        return Err(SglError::Empty);
    }
    start.checked_add(length as u64).ok_or(too_long)?;
    Ok(SglDescriptor::new(SglType::DATA_BLOCK, start, u32::try_from(length).map_err(|_| too_long)?))
}

/// The descriptor of a page of the list, when `left` fragments are in it and behind it.
fn link(at: Iova, left: usize) -> SglDescriptor {
    let kind = if left > PAGE_DESCRIPTORS { SglType::SEGMENT } else { SglType::LAST_SEGMENT };
    // At most a page.
    let size = left.min(PAGE_DESCRIPTORS).saturating_mul(DESCRIPTOR);
    SglDescriptor::new(kind, at.0, u32::try_from(size).unwrap_or(0))
}

#[cfg(test)]
mod tests;
