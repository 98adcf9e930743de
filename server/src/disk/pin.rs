//! Host memory that stays where it is while the medium reads or writes it.
#![expect(unsafe_code, reason = "an unsafe trait: kernels write through the pointers that it gives")]

use outboard_nvme::Iova;
use outboard_nvme::controller::{Direction, Host};

/// A run of host memory, mapped into this process for as long as this value lives.
///
/// # Safety
/// From `as_ptr` on, `length` bytes are mapped, at the same place until the value is dropped, and no Rust
/// reference points to them. They are readable, and also writable if they were pinned with
/// [`Direction::ToHost`]. (The mapping's file may shrink: the kernel then answers EFAULT.)
pub unsafe trait PinnedBytes: Send + 'static {
    /// The first byte.
    fn as_ptr(&self) -> *mut u8;

    /// How many bytes.
    fn length(&self) -> usize;
}

/// A host whose memory may be lent to the kernel for an operation.
pub trait PinHost: Host {
    /// Keeps one run of memory mapped. An operation in flight keeps its pins until the kernel is done with them,
    /// even if the disk is dropped before.
    type Pin: PinnedBytes;

    /// Pins `length` bytes from `at`; none if they are not mapped directly, or not in one piece, or not
    /// accessible in this direction. The data then goes through [`Host::read`] and [`Host::write`].
    fn pin(&mut self, at: Iova, length: usize, direction: Direction) -> Option<Self::Pin>;
}
