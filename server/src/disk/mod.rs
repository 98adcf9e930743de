//! The storage of the software drive.
//!
//! * `null` moves no data, for measuring the rest;
//! * `ram` is memory that is lost when the server ends;
//! * `file` is an image or a block device.
//!
//! A disk is used by the drive's thread alone, and none of its calls waits for a medium.

mod file;
mod null;
mod ram;
mod spec;

use std::os::fd::BorrowedFd;

use outboard_nvme::Iova;
use outboard_nvme::controller::{self, Direction, Disk, Geometry, Host, Operation, Submission, Tag};
use vm_memory::VolatileSlice;

use file::File;
use null::Null;
use ram::Ram;
pub use spec::{DiskError, NamespaceSpec, SpecError};

/// Host memory that stays mapped until this is dropped.
pub trait PinnedBytes {
    /// The bytes; `None` if they are not mapped after all.
    fn bytes(&self) -> Option<VolatileSlice<'_>>;
}

/// A host whose memory can be handed to the kernel.
pub trait PinHost: Host {
    /// Memory that is pinned.
    type Pin: PinnedBytes;

    /// Pins `length` bytes; `None` if they are not mapped here in one piece (memory that is reached by messages,
    /// a range over two mappings), and then [`Host::read`] and [`Host::write`] may still reach them.
    fn pin(&mut self, at: Iova, length: usize, direction: Direction) -> Option<Self::Pin>;
}

/// Any disk.
pub enum Backend<H: PinHost> {
    /// Moves no data.
    Null(Null),
    /// In memory.
    Ram(Ram),
    /// An image or a block device.
    File(Box<File<H>>),
}

impl<H: PinHost> Backend<H> {
    /// What becomes readable when there is something to reap, for disks that finish later.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Null(_) | Self::Ram(_) => None,
            Self::File(file) => Some(file.event()),
        }
    }
}

impl<H: PinHost> Disk<H> for Backend<H> {
    fn geometry(&self) -> Geometry {
        match self {
            Self::Null(disk) => disk.geometry(),
            Self::Ram(disk) => disk.geometry(),
            Self::File(disk) => disk.geometry(),
        }
    }

    #[inline]
    fn submit(&mut self, host: &mut H, tag: Tag, operation: Operation<'_>) -> Submission {
        match self {
            Self::Null(_) => Submission::Done(Ok(())),
            Self::Ram(disk) => Submission::Done(disk.execute(host, operation)),
            Self::File(disk) => disk.submit(host, tag, operation),
        }
    }

    fn commit(&mut self, _host: &mut H) {
        if let Self::File(disk) = self {
            disk.commit();
        }
    }

    fn reap(&mut self, host: &mut H, done: &mut Vec<(Tag, Result<(), controller::DiskError>)>) {
        if let Self::File(disk) = self {
            disk.reap(host, done);
        }
    }
}

#[cfg(test)]
mod tests;
