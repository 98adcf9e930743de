//! A disk in memory.

#![expect(unsafe_code, reason = "maps anonymous memory, with huge pages where the kernel has them")]

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::slice;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use outboard_nvme::controller::{Direction, DiskError, Geometry, Host, LbaRange, Operation, Segment};

const PAGE: usize = 4096;

/// See the module.
pub struct Ram {
    geometry: Geometry,
    memory: Memory,
}

/// Anonymous private memory, zero where nothing was written.
struct Memory {
    start: NonNull<u8>,
    length: NonZeroUsize,
}

// SAFETY: the memory belongs to the value alone; it is reached through `&self` and `&mut self` only.
unsafe impl Send for Memory {}

impl Memory {
    fn new(size: u64) -> io::Result<Self> {
        let length =
            usize::try_from(size).ok().and_then(NonZeroUsize::new).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses a free range.
        let start = unsafe { mmap_anonymous(None, length, protection, flags)? };
        // Random blocks of a large disk miss the TLB at 4 KiB a page; without huge pages it is only slower.
        // SAFETY: the range was just mapped.
        let _ = unsafe { madvise(start, length.get(), MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self { start: start.cast(), length })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for as long as `self` lives, private, and borrowed as `self` is.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length.get()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has it.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.length.get()) }
    }

    /// Makes bytes zero, giving whole pages back to the kernel.
    fn clear(&mut self, offset: usize, length: usize) {
        let end = offset.saturating_add(length).min(self.length.get());
        let first = offset.next_multiple_of(PAGE).min(end);
        let last = (end / PAGE).saturating_mul(PAGE).max(first);
        for range in [offset.min(first)..first, last..end] {
            if let Some(bytes) = self.bytes_mut().get_mut(range) {
                bytes.fill(0);
            }
        }
        if last > first {
            // SAFETY: whole pages inside of the mapping, of which nothing is borrowed.
            let dropped = unsafe {
                madvise(self.start.add(first).cast(), last.saturating_sub(first), MmapAdvise::MADV_DONTNEED)
            };
            if dropped.is_err()
                && let Some(bytes) = self.bytes_mut().get_mut(first..last)
            {
                bytes.fill(0);
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nothing borrows it any more.
        if let Err(error) = unsafe { munmap(self.start.cast(), self.length.get()) } {
            tracing::error!(%error, "munmap failed");
        }
    }
}

impl Ram {
    pub(super) fn new(geometry: Geometry) -> io::Result<Self> {
        Ok(Self { memory: Memory::new(geometry.blocks << geometry.block_shift)?, geometry })
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Where a range lies, in bytes.
    #[inline]
    fn place(&self, range: LbaRange) -> (usize, usize) {
        let bytes = |blocks: u64| usize::try_from(blocks << self.geometry.block_shift).unwrap_or(usize::MAX);
        (bytes(range.start.0), bytes(range.blocks))
    }

    #[inline]
    pub(super) fn execute<H: Host>(
        &mut self,
        host: &mut H,
        operation: Operation<'_>,
    ) -> Result<(), DiskError> {
        match operation {
            Operation::Read { range, data } => self.copy(host, range, data, Direction::ToHost),
            Operation::Write { range, data, .. } => self.copy(host, range, data, Direction::FromHost),
            Operation::Flush => Ok(()),
            Operation::WriteZeroes { range, .. } => {
                let (offset, length) = self.place(range);
                self.memory.clear(offset, length);
                Ok(())
            }
            Operation::Deallocate { ranges } => {
                for &range in ranges {
                    let (offset, length) = self.place(range);
                    self.memory.clear(offset, length);
                }
                Ok(())
            }
        }
    }

    #[inline]
    fn copy<H: Host>(
        &mut self,
        host: &mut H,
        range: LbaRange,
        data: &[Segment],
        direction: Direction,
    ) -> Result<(), DiskError> {
        let (mut offset, _) = self.place(range);
        for segment in data {
            let end = offset.saturating_add(segment.length);
            match direction {
                Direction::ToHost => {
                    let bytes = self.memory.bytes().get(offset..end).ok_or(DiskError::Internal)?;
                    host.write(segment.iova, bytes)
                }
                Direction::FromHost => {
                    let bytes = self.memory.bytes_mut().get_mut(offset..end).ok_or(DiskError::Internal)?;
                    host.read(segment.iova, bytes)
                }
            }
            .map_err(|_| DiskError::DataTransfer)?;
            offset = end;
        }
        Ok(())
    }
}
