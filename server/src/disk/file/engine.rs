//! What executes operations on an image: io_uring, or threads where io_uring is refused.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::libc::iovec;

use super::threads::Threads;
use super::uring::Uring;

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// The kernel's rings.
    IoUring,
    /// A pool of threads.
    Threads,
}

/// Names an operation under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(pub(super) u32);

/// Memory of an operation: it stays where it is until the operation is reported, which the owner of the slot
/// sees to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vectors {
    pub(super) first: *const iovec,
    pub(super) count: u32,
}

/// One system call's worth of work on an image; offsets and lengths in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum ImageOp {
    /// preadv2(2)
    Read { offset: u64, into: Vectors },
    /// pwritev2(2), with RWF_DSYNC if it has to be durable.
    Write { offset: u64, from: Vectors, durable: bool },
    /// fdatasync(2)
    Sync,
    /// fallocate(2): the range reads as zeroes, and its blocks are given back.
    Punch { offset: u64, length: u64 },
    /// fallocate(2): the range reads as zeroes.
    Zero { offset: u64, length: u64 },
}

/// A finished operation: what the system call returned, or -errno.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub(super) slot: Slot,
    pub(super) result: i32,
}

/// The engine of one image.
pub(super) enum Running {
    IoUring(Box<Uring>),
    Threads(Threads),
}

impl Running {
    /// The engine that was asked for, or the best that there is.
    pub(super) fn start(image: OwnedFd, engine: Option<Engine>) -> io::Result<Self> {
        let image = Arc::new(image);
        match engine {
            Some(Engine::Threads) => Ok(Self::Threads(Threads::start(image)?)),
            Some(Engine::IoUring) => Ok(Self::IoUring(Box::new(Uring::new(image)?))),
            None => match Uring::new(image.clone()) {
                Ok(uring) => Ok(Self::IoUring(Box::new(uring))),
                Err(error) => {
                    tracing::warn!(%error, "io_uring is refused here; using threads");
                    Ok(Self::Threads(Threads::start(image)?))
                }
            },
        }
    }

    /// Queues an operation; false if there is no room before the next commit.
    pub(super) fn push(&mut self, slot: Slot, op: ImageOp) -> bool {
        match self {
            Self::IoUring(uring) => uring.push(slot, op),
            Self::Threads(threads) => threads.push(slot, op),
        }
    }

    /// Starts what was queued.
    pub(super) fn commit(&mut self) {
        if let Self::IoUring(uring) = self {
            uring.commit();
        }
    }

    /// What has finished since the last call.
    pub(super) fn reap(&mut self, finished: &mut Vec<Finished>) {
        match self {
            Self::IoUring(uring) => uring.reap(finished),
            Self::Threads(threads) => threads.reap(finished),
        }
    }

    /// Readable when something has finished.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        match self {
            Self::IoUring(uring) => uring.event().as_fd(),
            Self::Threads(threads) => threads.event().as_fd(),
        }
    }
}
