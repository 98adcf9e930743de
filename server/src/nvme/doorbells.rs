//! The doorbell registers as memory: pages that clients map, or that only this process sees.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use outboard_vfio_user::memory::SharedMemory;
use vm_memory::Bytes;

/// Where the doorbells begin in BAR0, and in the file, whose offsets are those of the BAR.
pub(super) const OFFSET: usize = 4096;

/// An array of little-endian dwords, index 2y the tail of submission queue y, 2y+1 the head of completion queue
/// y (NVMe 1.4, 3.1.24). Whoever maps it may write anything at any time.
#[derive(Debug)]
pub(super) struct Doorbells {
    memory: SharedMemory,
}

impl Doorbells {
    /// Doorbells in `length` bytes, all 0.
    ///
    /// # Errors
    /// As [`SharedMemory::new`].
    pub(super) fn new(length: usize) -> io::Result<Self> {
        Ok(Self { memory: SharedMemory::new("outboard-doorbells", OFFSET.saturating_add(length))? })
    }

    /// The value of one; 0 beyond the end.
    #[inline]
    pub(super) fn load(&self, index: usize) -> u32 {
        let at = index.saturating_mul(4).saturating_add(OFFSET);
        u32::from_le(self.memory.bytes().load(at, Ordering::Acquire).unwrap_or(0))
    }

    /// Sets one; false beyond the end.
    #[inline]
    pub(super) fn store(&self, index: usize, value: u32) -> bool {
        let at = index.saturating_mul(4).saturating_add(OFFSET);
        self.memory.bytes().store(value.to_le(), at, Ordering::Release).is_ok()
    }
}

impl AsFd for Doorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}
