//! Memory that two processes share: sealed memfds that we hand out, and mappings of what we are handed.

#![expect(unsafe_code, reason = "maps files into this process and hands out volatile views of them")]

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::statfs::{HUGETLBFS_MAGIC, fstatfs};
use nix::unistd::{SysconfVar, sysconf};
use vm_memory::VolatileSlice;

use crate::limits;
use guard::{Alarm, Guard};

pub mod guard;

/// How a piece of memory may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads only.
    Read,
    /// Stores only.
    Write,
    /// Loads and stores.
    ReadWrite,
}

impl Access {
    /// Whether loads are allowed.
    pub fn reads(self) -> bool {
        self != Self::Write
    }

    /// Whether stores are allowed.
    pub fn writes(self) -> bool {
        self != Self::Read
    }

    fn protection(self) -> ProtFlags {
        match self {
            Self::Read => ProtFlags::PROT_READ,
            // A store-only mapping does not exist on x86; the DMA table keeps it from being read.
            Self::Write | Self::ReadWrite => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        }
    }
}

/// A shared mapping of a file, unmapped when dropped.
///
/// The other side may change the bytes at any time, so they are reached only through [`VolatileSlice`], whose
/// accesses tolerate that. It may also shrink a file that is not sealed: see [`guard`].
#[derive(Debug)]
pub struct Mapping {
    /// What the kernel has mapped: whole pages.
    pages: NonNull<u8>,
    pages_length: NonZeroUsize,
    /// Where in them the bytes that were asked for begin.
    skip: usize,
    length: NonZeroUsize,
    guard: Option<Guard>,
}

// SAFETY: the mapping belongs to nobody's stack or thread, and every access to its bytes is volatile or atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` (a multiple of 4 KiB, even where the file's pages are bigger:
    /// QEMU maps what lies around the legacy hole of its huge pages).
    ///
    /// # Errors
    /// What mmap(2) says: EINVAL for a length of 0 or an offset off a page, EACCES where the descriptor does
    /// not allow the access.
    pub fn new(file: impl AsFd, offset: u64, length: usize, access: Access) -> io::Result<Self> {
        let length = NonZeroUsize::new(length).ok_or(Errno::EINVAL)?;
        if offset.checked_rem(limits::PAGE_SIZES) != Some(0) {
            return Err(Errno::EINVAL.into());
        }
        let page = page_size(file.as_fd())?;
        let skip = offset.checked_rem(page).ok_or(Errno::EINVAL)?;
        let start = i64::try_from(offset.saturating_sub(skip)).map_err(|_| Errno::EINVAL)?;
        let (page, skip) = (usize::try_from(page), usize::try_from(skip));
        let (page, skip) = (page.map_err(|_| Errno::EINVAL)?, skip.map_err(|_| Errno::EINVAL)?);
        let pages_length = skip
            .checked_add(length.get())
            .and_then(|end| end.checked_next_multiple_of(page))
            .and_then(NonZeroUsize::new)
            .ok_or(Errno::ENOMEM)?;
        // SAFETY: without MAP_FIXED the kernel chooses a free range, so no existing memory is touched.
        let pages = unsafe {
            mmap(None, pages_length, access.protection(), MapFlags::MAP_SHARED, file.as_fd(), start)?
        };
        Ok(Self { pages: pages.cast(), pages_length, skip, length, guard: None })
    }

    /// Like [`Mapping::new`], for a file that a peer may shrink: losing the memory rings `alarm`, if the program
    /// has called [`guard::install`].
    ///
    /// # Errors
    /// As [`Mapping::new`], and a [`guard::ShareError`] when the alarm watches as many as are left to others
    /// ([`limits::WATCHED_MAPPINGS`]).
    pub fn watched(
        file: impl AsFd,
        offset: u64,
        length: usize,
        access: Access,
        alarm: Arc<Alarm>,
    ) -> io::Result<Self> {
        let mut mapping = Self::new(file, offset, length, access)?;
        let start = mapping.pages.as_ptr().addr();
        mapping.guard = Some(Guard::new(start, mapping.pages_length.get(), alarm)?);
        Ok(mapping)
    }

    /// The mapped bytes.
    pub fn bytes(&self) -> VolatileSlice<'_> {
        // SAFETY: the range lies in the mapped pages, which live for as long as `self`, which the slice borrows.
        unsafe { VolatileSlice::new(self.pages.as_ptr().add(self.skip), self.length.get()) }
    }

    /// Whether the memory is gone: what was read of it lately may be zeros that nobody wrote.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.length.get()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The range may be somebody else's as soon as it is unmapped.
        drop(self.guard.take());
        // SAFETY: the range was mapped by `new` and nothing borrows it any more.
        if let Err(error) = unsafe { munmap(self.pages.cast(), self.pages_length.get()) } {
            tracing::error!(%error, "munmap failed");
        }
    }
}

/// What mmap and munmap of a file count in: the page, or the huge page.
fn page_size(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    let system = fstatfs(file)?;
    if system.filesystem_type() == HUGETLBFS_MAGIC {
        return u64::try_from(system.block_size()).map_err(|_| Errno::EINVAL);
    }
    sysconf(SysconfVar::PAGE_SIZE)?.and_then(|size| u64::try_from(size).ok()).ok_or(Errno::EINVAL)
}

/// Memory of ours that a peer may map: a memfd whose size is sealed, so that no peer can shrink it under us.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    mapping: Mapping,
}

impl SharedMemory {
    /// `length` zero bytes; `name` shows up in /proc/PID/maps.
    ///
    /// # Errors
    /// What memfd_create(2), ftruncate(2) or mmap(2) says.
    pub fn new(name: &str, length: usize) -> io::Result<Self> {
        let file = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        nix::unistd::ftruncate(&file, i64::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?)?;
        fcntl(
            &file,
            FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL),
        )?;
        let mapping = Mapping::new(&file, 0, length, Access::ReadWrite)?;
        Ok(Self { file, mapping })
    }

    /// The bytes.
    pub fn bytes(&self) -> VolatileSlice<'_> {
        self.mapping.bytes()
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use vm_memory::{Bytes, VolatileMemory};

    use super::*;

    #[test]
    fn a_second_mapping_sees_the_first_ones_stores() {
        let memory = SharedMemory::new("test", 8192).unwrap();
        let other = Mapping::new(&memory, 4096, 4096, Access::Read).unwrap();
        memory.bytes().store(0x1234_5678_u32, 4096 + 8, Ordering::Release).unwrap();
        assert_eq!(other.bytes().load::<u32>(8, Ordering::Acquire).unwrap(), 0x1234_5678);
        assert!(other.bytes().get_slice(4096, 1).is_err());
    }

    #[test]
    fn nobody_can_change_its_size() {
        let memory = SharedMemory::new("test", 4096).unwrap();
        assert_eq!(nix::unistd::ftruncate(&memory, 0), Err(nix::Error::EPERM));
        assert_eq!(nix::unistd::ftruncate(&memory, 8192), Err(nix::Error::EPERM));
    }

    #[test]
    fn nothing_and_misaligned_offsets_are_errors() {
        let memory = SharedMemory::new("test", 4096).unwrap();
        assert!(Mapping::new(&memory, 0, 0, Access::Read).is_err());
        assert!(Mapping::new(&memory, 1, 16, Access::Read).is_err());
    }

    /// QEMU maps the parts of its huge pages around the legacy hole. Needs a free huge page or two
    /// (vm.nr_hugepages); says so and passes where there are none.
    #[test]
    fn parts_of_huge_pages_are_mapped_and_unmapped() {
        const NAME: &str = "huge-parts";
        let file = memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB).unwrap();
        nix::unistd::ftruncate(&file, 4 << 20).unwrap();
        let low = match Mapping::new(&file, 0, 0xa_0000, Access::ReadWrite) {
            Err(error) if error.raw_os_error() == Some(Errno::ENOMEM as i32) => {
                return eprintln!("skipped: no huge pages");
            }
            result => result.unwrap(),
        };
        let high = Mapping::new(&file, 0xc_0000, (4 << 20) - 0xc_0000, Access::ReadWrite).unwrap();
        let whole = Mapping::new(&file, 0, 4 << 20, Access::Read).unwrap();
        low.bytes().store(1_u32, 0x9_fffc, Ordering::Relaxed).unwrap();
        high.bytes().store(2_u32, 0, Ordering::Relaxed).unwrap();
        assert_eq!(whole.bytes().load::<u32>(0x9_fffc, Ordering::Relaxed).unwrap(), 1);
        assert_eq!(whole.bytes().load::<u32>(0xc_0000, Ordering::Relaxed).unwrap(), 2);
        drop((low, high, whole));
        assert!(!std::fs::read_to_string("/proc/self/maps").unwrap().contains(NAME));
    }
}
