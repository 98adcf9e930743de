//! Physical Region Pages: where a command's data lies (Base Specification 1.4, section 4.3).

use super::limits::PAGE_SIZE;
use super::{Host, Segment};
use crate::Iova;
use crate::spec::Status;

#[cfg(test)]
mod tests;

const ENTRY_SIZE: usize = 8;

/// The two PRP fields of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DataPointer {
    pub(super) prp1: u64,
    pub(super) prp2: u64,
}

/// Turns data pointers into segments; its buffers are reused from command to command.
pub(super) struct Walker {
    segments: Vec<Segment>,
    list: Box<[u8; PAGE_SIZE]>,
}

impl Walker {
    /// `most` bytes are the longest transfer to expect.
    pub(super) fn new(most: usize) -> Self {
        let pages = most.div_ceil(PAGE_SIZE).saturating_add(1);
        Self { segments: Vec::with_capacity(pages), list: Box::new([0; PAGE_SIZE]) }
    }

    /// The segments of `length` bytes at `pointer`, contiguous ones merged; they sum up to `length`. The caller
    /// has bounded `length` by MDTS, which bounds the walk: each list page but the first holds at least 511
    /// data entries.
    ///
    /// # Errors
    /// PRP Offset Invalid for an entry that is not aligned as section 4.3 asks; Data Transfer Error for a list
    /// that cannot be read.
    pub(super) fn walk<H: Host>(
        &mut self,
        host: &mut H,
        pointer: DataPointer,
        length: usize,
    ) -> Result<&[Segment], Status> {
        self.segments.clear();
        if length == 0 {
            return Ok(&self.segments);
        }
        // The first entry alone may have an offset; it counts dwords.
        if pointer.prp1 & 3 != 0 {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        let first = length.min(room_in_page(pointer.prp1));
        self.push(pointer.prp1, first);
        let rest = length.saturating_sub(first);
        if rest == 0 {
            Ok(&self.segments)
        } else if rest <= PAGE_SIZE {
            self.push_page(pointer.prp2, rest)?;
            Ok(&self.segments)
        } else {
            self.walk_list(host, pointer.prp2, rest)?;
            Ok(&self.segments)
        }
    }

    fn walk_list<H: Host>(&mut self, host: &mut H, mut list: u64, mut rest: usize) -> Result<(), Status> {
        if !list.is_multiple_of(ENTRY_SIZE as u64) {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        loop {
            let wanted = rest.div_ceil(PAGE_SIZE);
            let held = room_in_page(list) / ENTRY_SIZE;
            let read = wanted.min(held);
            // The last entry of a list page is a link only if more entries follow than it can hold.
            let linked = wanted > held;

            let bytes = self.list.get_mut(..read.saturating_mul(ENTRY_SIZE)).unwrap_or_default();
            host.read(Iova(list), bytes).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            let data = if linked { read.saturating_sub(1) } else { read };
            for index in 0..data {
                let length = rest.min(PAGE_SIZE);
                self.push_page(self.entry(index), length)?;
                rest = rest.saturating_sub(length);
            }
            if !linked {
                return Ok(());
            }
            list = self.entry(data);
            if !list.is_multiple_of(PAGE_SIZE as u64) {
                return Err(Status::INVALID_PRP_OFFSET);
            }
        }
    }

    fn entry(&self, index: usize) -> u64 {
        self.list.as_chunks().0.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    fn push_page(&mut self, entry: u64, length: usize) -> Result<(), Status> {
        if !entry.is_multiple_of(PAGE_SIZE as u64) {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        self.push(entry, length);
        Ok(())
    }

    fn push(&mut self, at: u64, length: usize) {
        if let Some(last) = self.segments.last_mut()
            && last.iova.0.checked_add(last.length as u64) == Some(at)
        {
            last.length = last.length.saturating_add(length);
        } else {
            self.segments.push(Segment { iova: Iova(at), length });
        }
    }
}

/// The bytes from `at` to the end of its page.
fn room_in_page(at: u64) -> usize {
    PAGE_SIZE.saturating_sub((at & 0xfff) as usize)
}
