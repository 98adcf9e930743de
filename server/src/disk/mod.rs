//! The storage of the software drive's namespaces.
//!
//! A [`NamespaceSpec`] is what the user wrote (`file:disk.img,block-size=4096`); opening it gives a [`Backend`],
//! which the controller uses as its [`Disk`]:
//!
//! * `null:SIZE` moves no data and completes at once: what is measured with it is everything else.
//! * `ram:SIZE` keeps the blocks in anonymous memory of the server.
//! * `file:PATH` keeps them in an image file or on a block device, through io_uring, or a pool of threads where
//!   io_uring is refused; straight between the medium and guest memory wherever the host can pin it.
//!
//! What it does not do: it knows no image format (every image is raw), so that a Format NVM lasts as long as the
//! server and the block size of the next start is the one that is written there; it never grows or truncates an image,
//! and it orders nothing: two overlapping operations in flight land in any order, as NVMe allows.

mod file;
mod limits;
mod null;
mod ram;
mod spec;

#[cfg(test)]
mod test_host;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use outboard_nvme::Iova;
use outboard_nvme::controller::{
    Direction, Disk, DiskError, Geometry, Host, LbaRange, Operation, Submission, Tag,
};
use vm_memory::VolatileSlice;

pub use file::{EngineKind, OpenError};
pub use spec::{NamespaceSpec, Source, SpecError};

use file::{FileDisk, Threads, Uring};
use null::NullDisk;
use ram::RamDisk;

/// A run of host memory, mapped into this process, at the same place, until this is dropped.
///
/// The kernel reads and writes it meanwhile, so nothing else may refer to it but volatile slices. (Its file may
/// shrink: the kernel then answers EFAULT.)
pub trait PinnedBytes: Send + 'static {
    /// The bytes; none if they are not mapped after all.
    fn bytes(&self) -> Option<VolatileSlice<'_>>;
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

/// The storage of one namespace.
///
/// It may be built on one thread and moved to the worker that uses it. Dropping it waits for what is in flight,
/// within a bound, makes it durable and unlocks the image.
pub struct Backend<H: PinHost>(Storage<H::Pin>);

/// The kinds of storage; chosen by `match`, so that the hot path calls nothing through a pointer.
#[expect(clippy::large_enum_variant, reason = "one for each namespace, and a box costs every call a load")]
enum Storage<P> {
    Null(NullDisk),
    Ram(RamDisk),
    Uring(FileDisk<P, Uring<P>>),
    Threads(FileDisk<P, Threads<P>>),
}

impl<H: PinHost> Backend<H> {
    /// A descriptor that is readable (POLLIN, level-triggered) while [`Disk::reap`] has something to report;
    /// none if operations are always over when `submit` returns.
    ///
    /// A worker that wants to sleep calls `commit`, then `reap`, and if that reported nothing polls this
    /// descriptor. It needs no arming: what completes between the reap and the poll leaves it readable. Only
    /// `reap` makes it unreadable; nobody else reads from it.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Storage::Null(_) | Storage::Ram(_) => None,
            Storage::Uring(disk) => disk.event(),
            Storage::Threads(disk) => disk.event(),
        }
    }

    /// Operations that were taken and not yet reported. A drain is over when it is 0.
    pub fn in_flight(&self) -> usize {
        match &self.0 {
            Storage::Null(_) | Storage::Ram(_) => 0,
            Storage::Uring(disk) => disk.in_flight(),
            Storage::Threads(disk) => disk.in_flight(),
        }
    }
}

impl<H: PinHost> Disk<H> for Backend<H> {
    fn geometry(&self) -> Geometry {
        match &self.0 {
            Storage::Null(disk) => disk.geometry(),
            Storage::Ram(disk) => disk.geometry(),
            Storage::Uring(disk) => disk.geometry(),
            Storage::Threads(disk) => disk.geometry(),
        }
    }

    #[inline]
    fn submit(&mut self, host: &mut H, tag: Tag, operation: Operation<'_>) -> Submission {
        match &mut self.0 {
            Storage::Null(disk) => disk.submit(operation),
            Storage::Ram(disk) => Submission::Done(disk.perform(host, operation)),
            Storage::Uring(disk) => disk.submit(host, tag, operation),
            Storage::Threads(disk) => disk.submit(host, tag, operation),
        }
    }

    #[inline]
    fn commit(&mut self, _host: &mut H) {
        match &mut self.0 {
            Storage::Null(_) | Storage::Ram(_) => {}
            Storage::Uring(disk) => disk.commit(),
            Storage::Threads(disk) => disk.commit(),
        }
    }

    #[inline]
    fn reap(&mut self, host: &mut H, done: &mut Vec<(Tag, Result<(), DiskError>)>) {
        match &mut self.0 {
            Storage::Null(_) | Storage::Ram(_) => {}
            Storage::Uring(disk) => disk.reap(host, done),
            Storage::Threads(disk) => disk.reap(host, done),
        }
    }
}

/// The LBA sizes, as shifts, that `size` bytes can have on a medium whose own blocks are `smallest`.
fn lba_formats(smallest: u32, size: u64) -> &'static [u32] {
    match (smallest <= 9, size.is_multiple_of(4096)) {
        (true, true) => &[9, 12],
        (true, false) => &[9],
        (false, _) => &[12],
    }
}

/// A run of bytes on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    /// The first byte.
    offset: u64,
    /// How many.
    length: u64,
}

impl Extent {
    /// The bytes of `range`; none if they do not lie on a disk of this geometry.
    fn new(geometry: &Geometry, range: LbaRange) -> Option<Extent> {
        let end = range.start.0.checked_add(range.blocks)?;
        if end > geometry.blocks {
            return None;
        }
        Some(Extent {
            offset: range.start.0.checked_shl(geometry.block_shift)?,
            length: range.blocks.checked_shl(geometry.block_shift)?,
        })
    }

    /// The first byte behind it.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// What is left of it behind its first `length` bytes.
    fn after(&self, length: u64) -> Extent {
        let length = length.min(self.length);
        Extent { offset: self.offset.saturating_add(length), length: self.length.saturating_sub(length) }
    }

    /// Its beginning, at most `length` bytes.
    fn first(&self, length: u64) -> Extent {
        Extent { offset: self.offset, length: self.length.min(length) }
    }
}
