//! What carries operations to an image.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use super::buffers::Buffers;
use crate::disk::Extent;

/// One operation on an image. It owns its memory while it is under way.
pub(in crate::disk) enum ImageOp<P> {
    /// Reads at `offset`.
    Read {
        /// In bytes.
        offset: u64,
        /// Where to.
        buffers: Buffers<P>,
    },
    /// Writes at `offset`.
    Write {
        /// In bytes.
        offset: u64,
        /// Where from.
        buffers: Buffers<P>,
        /// Complete only when it is on stable storage (RWF_DSYNC).
        durable: bool,
    },
    /// Brings everything that was completed before onto stable storage (fdatasync).
    Sync,
    /// Gives the bytes back to the file system; they read as zeroes.
    Punch(Extent),
    /// Zeroes the bytes and keeps their space.
    Zero(Extent),
}

/// An operation that is over, given back.
pub(in crate::disk) struct Completion<P> {
    /// The place that it was pushed with.
    pub(super) place: usize,
    /// The operation.
    pub(super) op: ImageOp<P>,
    /// Bytes transferred, or 0 for what transfers none.
    pub(super) result: Result<usize, Errno>,
}

/// Carries operations to an image, in any order.
///
/// An engine that is dropped waits for what is under way, within a bound; past it, what the kernel may still use
/// stays allocated and pinned.
pub(in crate::disk) trait Engine<P> {
    /// Queues an operation. A `place` names at most one operation at a time and is below [`DEPTH`].
    ///
    /// [`DEPTH`]: crate::disk::limits::DEPTH
    fn push(&mut self, place: usize, op: ImageOp<P>);

    /// Starts what was queued.
    fn commit(&mut self);

    /// Appends the operations that are over.
    fn reap(&mut self, done: &mut Vec<Completion<P>>);

    /// Readable while [`Engine::reap`] has something to report.
    fn event(&self) -> Option<BorrowedFd<'_>>;
}
