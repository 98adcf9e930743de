//! Memory that two processes share: sealed memfds that we hand out, and mappings of what we are handed.

#![expect(unsafe_code, reason = "maps files into this process and hands out volatile views of them")]

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use vm_memory::VolatileSlice;

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
/// accesses tolerate that. It may also shrink a file that is not sealed: see [`crate::dma`].
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: NonZeroUsize,
}

// SAFETY: the mapping belongs to nobody's stack or thread, and every access to its bytes is volatile or atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` (a multiple of the page size).
    ///
    /// # Errors
    /// What mmap(2) says: EINVAL for a length of 0 or an offset off a page, EACCES where the descriptor does
    /// not allow the access.
    pub fn new(file: impl AsFd, offset: u64, length: usize, access: Access) -> io::Result<Self> {
        let length = NonZeroUsize::new(length).ok_or(io::ErrorKind::InvalidInput)?;
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: without MAP_FIXED the kernel chooses a free range, so no existing memory is touched.
        let start =
            unsafe { mmap(None, length, access.protection(), MapFlags::MAP_SHARED, file.as_fd(), offset)? };
        Ok(Self { start: start.cast(), length })
    }

    /// The mapped bytes.
    pub fn bytes(&self) -> VolatileSlice<'_> {
        // SAFETY: the range is mapped for as long as `self` lives, which the slice borrows.
        unsafe { VolatileSlice::new(self.start.as_ptr(), self.length.get()) }
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.length.get()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nothing borrows it any more.
        if let Err(error) = unsafe { munmap(self.start.cast(), self.length.get()) } {
            tracing::error!(%error, "munmap failed");
        }
    }
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
}
