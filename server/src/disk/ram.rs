//! The disk in anonymous memory.
#![expect(unsafe_code, reason = "maps memory, to give its pages back")]

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use outboard_nvme::Lba;
use outboard_nvme::controller::{DiskError, Geometry, Host, LbaRange, Operation, Segment};

use super::{Extent, lba_formats};

/// Below this, clearing costs less than giving pages back and faulting them in again.
const GIVE_BACK: usize = 64 << 10;

/// Keeps the blocks in anonymous memory; nothing outlives the server.
pub(super) struct RamDisk {
    geometry: Geometry,
    memory: Memory,
}

impl RamDisk {
    /// Reserves `size` bytes of zeroes. Pages are taken when they are first written.
    pub(super) fn new(block_shift: u32, size: u64, read_only: bool) -> Result<RamDisk, Errno> {
        let memory = usize::try_from(size).ok().and_then(NonZeroUsize::new).ok_or(Errno::ENOMEM)?;
        Ok(RamDisk {
            geometry: Geometry {
                block_shift,
                formats: lba_formats(9, size),
                blocks: size.checked_shr(block_shift).unwrap_or(0),
                read_only,
                volatile_cache: false,
                deallocates: true,
            },
            memory: Memory::new(memory)?,
        })
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Performs the operation: one copy for each segment.
    #[inline]
    pub(super) fn perform<H: Host>(
        &mut self,
        host: &mut H,
        operation: Operation<'_>,
    ) -> Result<(), DiskError> {
        let geometry = self.geometry;
        let extent = |range| Extent::new(&geometry, range).ok_or(DiskError::Internal);
        match operation {
            Operation::Read { range, data } => {
                let bytes = self.memory.slice(extent(range)?).ok_or(DiskError::Internal)?;
                scatter(host, data, bytes)
            }
            Operation::Write { range, data, durable: _ } => {
                let bytes = self.memory.slice(extent(range)?).ok_or(DiskError::Internal)?;
                gather(host, data, bytes)
            }
            Operation::Compare { range, data } => {
                let bytes = self.memory.slice(extent(range)?).ok_or(DiskError::Internal)?;
                compare(host, data, bytes)
            }
            // Memory that could not be read would have ended the server.
            Operation::Verify { .. } | Operation::Flush => Ok(()),
            Operation::WriteZeroes { range, .. } => {
                self.memory.clear(extent(range)?).ok_or(DiskError::Internal)
            }
            Operation::Format { block_shift } => {
                let whole = LbaRange { start: Lba(0), blocks: geometry.blocks };
                self.memory.clear(extent(whole)?).ok_or(DiskError::Internal)?;
                self.geometry = geometry.formatted(block_shift);
                Ok(())
            }
            Operation::Deallocate { ranges } => {
                for &range in ranges {
                    self.memory.clear(extent(range)?).ok_or(DiskError::Internal)?;
                }
                Ok(())
            }
        }
    }
}

/// Copies `bytes` to the host's segments.
#[inline]
pub(super) fn scatter<H: Host>(host: &mut H, data: &[Segment], mut bytes: &[u8]) -> Result<(), DiskError> {
    for segment in data {
        let (from, rest) = bytes.split_at_checked(segment.length).ok_or(DiskError::Internal)?;
        if let Some(iova) = segment.iova {
            host.write(iova, from).map_err(|_| DiskError::DataTransfer)?;
        }
        bytes = rest;
    }
    Ok(())
}

/// Copies the host's segments to `bytes`.
#[inline]
pub(super) fn gather<H: Host>(host: &mut H, data: &[Segment], mut bytes: &mut [u8]) -> Result<(), DiskError> {
    for segment in data {
        let (into, rest) = bytes.split_at_mut_checked(segment.length).ok_or(DiskError::Internal)?;
        host.read(segment.iova.ok_or(DiskError::Internal)?, into).map_err(|_| DiskError::DataTransfer)?;
        bytes = rest;
    }
    Ok(())
}

/// Whether the host's segments hold `bytes`.
pub(super) fn compare<H: Host>(host: &mut H, data: &[Segment], mut bytes: &[u8]) -> Result<(), DiskError> {
    let mut theirs = Vec::new();
    for segment in data {
        let (ours, rest) = bytes.split_at_checked(segment.length).ok_or(DiskError::Internal)?;
        theirs.resize(segment.length, 0);
        host.read(segment.iova.ok_or(DiskError::Internal)?, &mut theirs)
            .map_err(|_| DiskError::DataTransfer)?;
        if ours != theirs {
            return Err(DiskError::Mismatch);
        }
        bytes = rest;
    }
    Ok(())
}

/// A private anonymous mapping.
struct Memory {
    start: NonNull<c_void>,
    length: NonZeroUsize,
}

// SAFETY: the mapping belongs to this value alone and is reached only through it.
unsafe impl Send for Memory {}

impl Memory {
    fn new(length: NonZeroUsize) -> Result<Memory, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            mmap_anonymous(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
            )
        }?;
        let memory = Memory { start, length };
        // SAFETY: the whole mapping, which is ours; the advice does not change its content.
        if let Err(error) = unsafe { madvise(start, length.get(), MmapAdvise::MADV_HUGEPAGE) } {
            tracing::debug!(%error, "No huge pages for a ram namespace");
        }
        Ok(memory)
    }

    #[inline]
    fn slice(&mut self, extent: Extent) -> Option<&mut [u8]> {
        let offset = usize::try_from(extent.offset).ok()?;
        let length = usize::try_from(extent.length).ok()?;
        if offset.checked_add(length)? > self.length.get() {
            return None;
        }
        // SAFETY: the bytes lie in the mapping, are initialised (zeroes at first), and are borrowed from self,
        // the only way to them.
        Some(unsafe { std::slice::from_raw_parts_mut(self.start.cast::<u8>().add(offset).as_ptr(), length) })
    }

    /// Makes the bytes zeroes, and gives whole pages back to the system.
    fn clear(&mut self, extent: Extent) -> Option<()> {
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
            .ok()
            .flatten()
            .and_then(|size| usize::try_from(size).ok())?;
        let bytes = self.slice(extent)?;
        if bytes.len() < GIVE_BACK {
            bytes.fill(0);
            return Some(());
        }
        let head = bytes.as_ptr().align_offset(page).min(bytes.len());
        let (head, rest) = bytes.split_at_mut_checked(head)?;
        let tail = rest.len().checked_rem(page)?;
        let (pages, tail) = rest.split_at_mut_checked(rest.len().checked_sub(tail)?)?;
        head.fill(0);
        tail.fill(0);
        if let Some(start) = NonNull::new(pages.as_mut_ptr()) {
            // SAFETY: whole pages inside of the mapping, borrowed exclusively; private anonymous pages read as
            // zeroes afterwards.
            if unsafe { madvise(start.cast(), pages.len(), MmapAdvise::MADV_DONTNEED) }.is_err() {
                pages.fill(0);
            }
        }
        Some(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, and no borrow of it is left.
        if let Err(error) = unsafe { munmap(self.start, self.length.get()) } {
            tracing::warn!(%error, "The memory of a ram namespace was not given back");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use outboard_nvme::Iova;

    use super::super::test_host::{BASE, TestHost};
    use super::*;

    const MEGABYTE: usize = 1 << 20;

    /// Bytes of the memory that are taken: bit 63 of an entry of the page map (the kernel's pagemap.rst).
    fn resident(memory: &Memory) -> usize {
        let page = 4096;
        let mut entries = vec![0; memory.length.get() / page * 8];
        let first = memory.start.addr().get() / page * 8;
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        map.read_exact_at(&mut entries, first as u64).unwrap();
        entries.chunks(8).filter(|entry| entry[7] & 0x80 != 0).count() * page
    }

    #[test]
    fn memory_is_given_back() {
        let mut disk = RamDisk::new(9, 64 << 20, false).unwrap();
        let mut host = TestHost::new(MEGABYTE);
        let lbas = |start, blocks| LbaRange { start: Lba(start), blocks };
        let data = [Segment { iova: Some(Iova(BASE)), length: MEGABYTE }];
        host.fill(&data, &vec![1; MEGABYTE]);
        assert_eq!(resident(&disk.memory), 0);
        for megabyte in 0..64 {
            let range = lbas(megabyte << 11, 1 << 11);
            disk.perform(&mut host, Operation::Write { range, data: &data, durable: false }).unwrap();
        }
        assert_eq!(resident(&disk.memory), 64 * MEGABYTE);
        // From and to the middle of a page: these two stay.
        disk.perform(&mut host, Operation::Deallocate { ranges: &[lbas(1, (1 << 17) - 2)] }).unwrap();
        assert_eq!(resident(&disk.memory), 2 * 4096);
        disk.perform(&mut host, Operation::Read { range: lbas(0, 1 << 11), data: &data }).unwrap();
        let bytes = host.bytes(&data);
        assert!(bytes[..512] == [1; 512] && bytes[512..].iter().all(|&byte| byte == 0));
    }
}
