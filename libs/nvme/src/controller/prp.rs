//! Physical Region Pages: a command's data by pages (Base Specification 1.4, section 4.3).

use super::Host;
use super::data::Walker;
use super::limits::PAGE_SIZE;
use crate::Iova;
use crate::spec::Status;

#[cfg(test)]
mod tests;

const ENTRY_SIZE: usize = 8;

impl Walker {
    /// The segments of `length` bytes, at least one, at PRP entries `first` and `second`. The caller has bounded
    /// `length` by MDTS, which bounds the walk: each list page but the first holds at least 511 data entries.
    ///
    /// # Errors
    /// PRP Offset Invalid for an entry that is not aligned as section 4.3 asks; Data Transfer Error for a list
    /// that cannot be read.
    pub(super) fn walk_prps<H: Host>(
        &mut self,
        host: &mut H,
        first: u64,
        second: u64,
        length: usize,
    ) -> Result<(), Status> {
        // The first entry alone may have an offset; it counts dwords.
        if first & 3 != 0 {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        let now = length.min(room_in_page(first));
        self.push(Iova(first), now);
        match length.saturating_sub(now) {
            0 => Ok(()),
            rest if rest <= PAGE_SIZE => self.push_page(second, rest),
            rest => self.walk_list(host, second, rest),
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

            let bytes = self.page.get_mut(..read.saturating_mul(ENTRY_SIZE)).unwrap_or_default();
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
        self.page.as_chunks().0.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    fn push_page(&mut self, entry: u64, length: usize) -> Result<(), Status> {
        if !entry.is_multiple_of(PAGE_SIZE as u64) {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        self.push(Iova(entry), length);
        Ok(())
    }
}

/// The bytes from `at` to the end of its page.
fn room_in_page(at: u64) -> usize {
    PAGE_SIZE.saturating_sub((at & 0xfff) as usize)
}
