//! BAR0 as memory: the controller's registers in its first page, the doorbells in the pages after it, then the MSI-X
//! table and, a page further, its pending bits. Clients map some of it, all of it, or nothing.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use outboard_nvme::spec::doorbell_offset;
use outboard_pci::msix;
use outboard_vfio_user::memory::SharedMemory;
use vm_memory::{Bytes, VolatileMemory};

/// The unit of the layout and of what clients map. A client whose pages are larger needs the whole BAR.
pub(super) const PAGE: u64 = 4096;
/// Bytes of an MSI-X table entry, and where in it Vector Control is (PCI Local Bus 3.0, section 6.8.2.9).
const VECTOR: u64 = 16;
const VECTOR_CONTROL: u64 = 12;
const MASKED: u32 = 1;

/// Where things are in BAR0, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) doorbells: u64,
    pub(super) table: u64,
    pub(super) pending: u64,
    pub(super) size: u64,
    pub(super) vectors: u16,
    /// CAP.DSTRD: doorbells are `4 << stride` bytes apart.
    stride: u8,
}

impl Layout {
    /// `stride` is CAP.DSTRD, `least` the size below which the BAR does not get.
    pub(super) fn new(queue_pairs: u16, vectors: u16, stride: u8, least: u64) -> Self {
        let pages = |bytes: u64| bytes.next_multiple_of(PAGE);
        // Two a queue pair, the admin queues' included.
        let count = u64::from(queue_pairs).saturating_add(1).saturating_mul(2);
        let doorbells = pages(count.saturating_mul(doorbell_offset(1, stride).saturating_sub(PAGE)));
        let table = PAGE.saturating_add(doorbells);
        let pending = table.saturating_add(pages(u64::from(vectors).saturating_mul(VECTOR)));
        let size = pending.saturating_add(PAGE).max(least).next_power_of_two();
        Self { doorbells, table, pending, size, vectors, stride }
    }

    /// The part that a byte belongs to, and where in the part it is.
    pub(super) fn part(&self, offset: u64) -> (Part, u64) {
        let from = |start: u64| offset.saturating_sub(start);
        if offset >= self.pending {
            (Part::Pending, from(self.pending))
        } else if offset >= self.table {
            (Part::Table, from(self.table))
        } else if offset >= PAGE {
            (Part::Doorbells, from(PAGE))
        } else {
            (Part::Registers, offset)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Registers,
    Doorbells,
    Table,
    Pending,
}

/// One client's BAR0. Whoever has mapped it may write anything at any time, also after it has left: the next
/// client gets another.
#[derive(Debug)]
pub(super) struct Bar0 {
    memory: SharedMemory,
    file: Arc<OwnedFd>,
    layout: Layout,
}

impl Bar0 {
    /// Doorbells at 0, all vectors masked, nothing pending.
    ///
    /// # Errors
    /// As [`SharedMemory::new`].
    pub(super) fn new(layout: Layout) -> io::Result<Self> {
        let memory = SharedMemory::new("outboard-bar0", usize::try_from(layout.size).unwrap_or(usize::MAX))?;
        let file = Arc::new(memory.as_fd().try_clone_to_owned()?);
        let bar = Self { memory, file, layout };
        bar.reset_vectors();
        Ok(bar)
    }

    /// What clients map; its offsets are those of the BAR.
    pub(super) fn file(&self) -> Arc<OwnedFd> {
        self.file.clone()
    }

    /// Does something with the aligned dword at `offset`, if there is one.
    #[inline]
    fn dword<T>(&self, offset: u64, access: impl FnOnce(&AtomicU32) -> T) -> Option<T> {
        self.memory.bytes().get_atomic_ref(usize::try_from(offset).ok()?).ok().map(access)
    }

    /// The aligned dword at `offset`; 0 beyond the end.
    #[inline]
    pub(super) fn load(&self, offset: u64) -> u32 {
        self.dword(offset, |dword| u32::from_le(dword.load(Ordering::Acquire))).unwrap_or(0)
    }

    #[inline]
    fn store(&self, offset: u64, value: u32) -> bool {
        self.dword(offset, |dword| dword.store(value.to_le(), Ordering::Release)).is_some()
    }

    /// The doorbell at `index`, 2y the tail of submission queue y, 2y+1 the head of completion queue y (NVMe 1.4,
    /// 3.1.24); 0 beyond the end.
    #[inline]
    pub(super) fn doorbell(&self, index: usize) -> u32 {
        self.doorbell_at(index).map_or(0, |at| self.load(at))
    }

    /// Sets a doorbell; false beyond the end.
    #[inline]
    pub(super) fn set_doorbell(&self, index: usize, value: u32) -> bool {
        self.doorbell_at(index).is_some_and(|at| self.store(at, value))
    }

    #[inline]
    fn doorbell_at(&self, index: usize) -> Option<u64> {
        Some(doorbell_offset(index, self.layout.stride)).filter(|at| *at < self.layout.table)
    }

    /// Exchanges the dword at `offset` for `new` if it still is `old`.
    pub(super) fn replace(&self, offset: u64, old: u32, new: u32) -> bool {
        self.dword(offset, |dword| {
            dword.compare_exchange(old.to_le(), new.to_le(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
        .unwrap_or(false)
    }

    /// Writes bytes as a guest would that has it mapped: aligned dwords in one store each.
    pub(super) fn write(&self, offset: u64, from: &[u8]) {
        let mut at = offset;
        for chunk in split(offset, from) {
            let stored =
                <[u8; 4]>::try_from(chunk).is_ok_and(|bytes| self.store(at, u32::from_le_bytes(bytes)));
            if !stored {
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                // The access was checked against the region's size.
                let _ = self.memory.bytes().write_slice(chunk, at);
            }
            at = at.saturating_add(chunk.len() as u64);
        }
    }

    /// Reads bytes as they are.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) {
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        if self.memory.bytes().read_slice(into, at).is_err() {
            into.fill(0);
        }
    }

    /// Writes to the MSI-X table, `offset` bytes from its start. Of Vector Control only the mask is kept.
    pub(super) fn write_table(&self, offset: u64, from: &[u8]) {
        let end = u64::from(self.layout.vectors).saturating_mul(VECTOR);
        for (at, byte) in (offset..end).zip(from) {
            let byte = msix::kept(at, *byte);
            let at = usize::try_from(self.layout.table.saturating_add(at)).unwrap_or(usize::MAX);
            // The table lies inside of the memory.
            let _ = self.memory.bytes().store(byte, at, Ordering::Release);
        }
    }

    /// The MSI-X table and its pending bits after a function reset.
    pub(super) fn reset_vectors(&self) {
        for vector in 0..u64::from(self.layout.vectors) {
            let entry = self.layout.table.saturating_add(vector.saturating_mul(VECTOR));
            for (offset, value) in [(0, 0), (4, 0), (8, 0), (VECTOR_CONTROL, MASKED)] {
                self.store(entry.saturating_add(offset), value);
            }
        }
        self.pending_dwords().for_each(|at| {
            self.store(at, 0);
        });
    }

    /// Whether the guest masks a vector in the table. An entry without a Message Address says nothing: nobody has
    /// programmed it, because the VMM emulates the table in front of this memory, where it stays as after a reset.
    #[inline]
    pub(super) fn is_masked(&self, vector: u16) -> bool {
        let entry = self.layout.table.saturating_add(u64::from(vector).saturating_mul(VECTOR));
        self.load(entry.saturating_add(VECTOR_CONTROL)) & MASKED != 0
            && (self.load(entry) != 0 || self.load(entry.saturating_add(4)) != 0)
    }

    /// Where the pending bits are, 32 in each.
    #[inline]
    fn pending_dwords(&self) -> impl Iterator<Item = u64> + use<> {
        let start = self.layout.pending;
        (0..u64::from(self.layout.vectors).div_ceil(32))
            .map(move |index| start.saturating_add(index.saturating_mul(4)))
    }

    /// The vectors whose pending bit is set.
    #[inline]
    pub(super) fn pending(&self) -> impl Iterator<Item = u16> {
        let dwords = (0_u16..).step_by(32).zip(self.pending_dwords());
        dwords.map(|(first, at)| (first, self.load(at))).filter(|(_, bits)| *bits != 0).flat_map(
            |(first, bits)| {
                (first..).zip(0..32).filter_map(move |(vector, bit)| (bits >> bit & 1 != 0).then_some(vector))
            },
        )
    }

    /// Sets or clears a pending bit; whether that changed it.
    pub(super) fn set_pending(&self, vector: u16, pending: bool) -> bool {
        let bit = 1_u32.wrapping_shl(vector.into());
        let Some(at) = self.pending_dwords().nth(usize::from(vector / 32)) else { return false };
        let before = self.dword(at, |dword| match pending {
            true => dword.fetch_or(bit.to_le(), Ordering::AcqRel),
            false => dword.fetch_and(!bit.to_le(), Ordering::AcqRel),
        });
        before.is_some_and(|before| (u32::from_le(before) & bit != 0) != pending)
    }
}

/// The parts of an access that lie in one dword each.
fn split(offset: u64, mut from: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut room = 4_usize.saturating_sub((offset & 3) as usize);
    std::iter::from_fn(move || {
        let (chunk, rest) = from.split_at(room.min(from.len()));
        (room, from) = (4, rest);
        (!chunk.is_empty()).then_some(chunk)
    })
}

#[cfg(test)]
mod tests;
