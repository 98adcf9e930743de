//! The engine on io_uring.
#![expect(unsafe_code, reason = "hands memory to the kernel")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, register::Restriction};
use nix::errno::Errno;
use nix::fcntl::FallocateFlags;
use nix::libc::RWF_DSYNC;

use super::engine::{Completion, Engine, ImageOp};
use super::image::Image;
use crate::disk::limits::{DEPTH, DRAIN};

/// The image, the only file that the ring knows.
const IMAGE: Fixed = Fixed(0);

/// What the ring may do, and nothing else, even if the memory that it shares with the kernel is corrupted.
const OPCODES: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// Carries operations by io_uring: one system call per commit, none to reap, beyond those that the kernel asks
/// for (IORING_SQ_TASKRUN: a completion waits for this thread to pass through the kernel).
pub(in crate::disk) struct Uring<P> {
    ring: IoUring,
    /// Operations that the kernel has, by place.
    under_way: Vec<Option<ImageOp<P>>>,
    count: usize,
    /// Pushed since the last submission.
    unsubmitted: bool,
    /// Dropped, and so unlocked, when nothing is under way.
    image: Arc<Image>,
}

impl<P> Uring<P> {
    /// A ring on `image`. Fails if the kernel refuses (ENOSYS, EPERM, ENOMEM).
    pub(super) fn new(image: &Arc<Image>) -> io::Result<Uring<P>> {
        let mut ring = build()?;
        let submitter = ring.submitter();
        submitter.register_files(&[image.as_fd().as_raw_fd()])?;
        let mut restrictions: Vec<Restriction> = OPCODES.into_iter().map(Restriction::sqe_op).collect();
        restrictions.push(Restriction::sqe_flags_required(Flags::FIXED_FILE.bits()));
        submitter.register_restrictions(&mut restrictions)?;
        submitter.register_enable_rings()?;
        drop(ring.submission());
        let under_way = (0..DEPTH).map(|_| None).collect();
        Ok(Uring { ring, under_way, count: 0, unsubmitted: false, image: Arc::clone(image) })
    }

    fn submit(&mut self) {
        match self.ring.submit() {
            Ok(_) => self.unsubmitted = !self.ring.submission().is_empty(),
            // EAGAIN, EBUSY, EINTR: the entries stay in the ring for the next attempt.
            Err(error) => {
                tracing::debug!(%error, "io_uring_enter is to be repeated");
                self.unsubmitted = true;
            }
        }
    }
}

/// A disabled ring, with completions that do not interrupt the polling thread where the kernel knows that (5.19).
fn build() -> io::Result<IoUring> {
    let depth = u32::from(DEPTH);
    IoUring::builder()
        .dontfork()
        .setup_r_disabled()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(depth)
        .or_else(|_| IoUring::builder().dontfork().setup_r_disabled().build(depth))
}

/// The ring's entry for an operation. It points into the operation's buffers.
fn entry<P>(op: &ImageOp<P>) -> Entry {
    let fallocate = |extent: &crate::disk::Extent, mode: FallocateFlags| {
        let mode = (mode | FallocateFlags::FALLOC_FL_KEEP_SIZE).bits();
        opcode::Fallocate::new(IMAGE, extent.length).offset(extent.offset).mode(mode).build()
    };
    // Lengths: a command's data is far below 4 GiB, and a shorter transfer would be resumed.
    let length = |length: usize| u32::try_from(length).unwrap_or(1 << 30);
    match op {
        ImageOp::Read { offset, buffers } => match buffers.vectors() {
            [one] => {
                opcode::Read::new(IMAGE, one.iov_base.cast(), length(one.iov_len)).offset(*offset).build()
            }
            many => opcode::Readv::new(IMAGE, many.as_ptr(), length(many.len())).offset(*offset).build(),
        },
        ImageOp::Write { offset, buffers, durable } => {
            let flags = if *durable { RWF_DSYNC } else { 0 };
            match buffers.vectors() {
                [one] => opcode::Write::new(IMAGE, one.iov_base.cast(), length(one.iov_len))
                    .offset(*offset)
                    .rw_flags(flags)
                    .build(),
                many => opcode::Writev::new(IMAGE, many.as_ptr(), length(many.len()))
                    .offset(*offset)
                    .rw_flags(flags)
                    .build(),
            }
        }
        ImageOp::Sync => opcode::Fsync::new(IMAGE).flags(FsyncFlags::DATASYNC).build(),
        ImageOp::Punch(extent) => fallocate(extent, FallocateFlags::FALLOC_FL_PUNCH_HOLE),
        ImageOp::Zero(extent) => fallocate(extent, FallocateFlags::FALLOC_FL_ZERO_RANGE),
    }
}

impl<P> Engine<P> for Uring<P> {
    fn push(&mut self, place: usize, op: ImageOp<P>) {
        let entry = entry(&op).user_data(place as u64);
        let Some(slot) = self.under_way.get_mut(place) else { return };
        debug_assert!(slot.is_none());
        *slot = Some(op);
        self.count = self.count.saturating_add(1);
        self.unsubmitted = true;
        // SAFETY: the vectors and the memory behind them belong to `op`, which stays in `under_way` until its
        // completion was reaped (see also Drop). Moving `op` does not move its vectors, which are on the heap.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // Only possible while the kernel refuses submissions: the queue has a place for each operation.
            self.submit();
        }
    }

    fn commit(&mut self) {
        if self.unsubmitted {
            self.submit();
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion<P>>) {
        if self.count == 0 {
            return;
        }
        if self.unsubmitted || self.ring.submission().taskrun() {
            self.submit();
        }
        for entry in self.ring.completion() {
            let Ok(place) = usize::try_from(entry.user_data()) else { continue };
            let Some(op) = self.under_way.get_mut(place).and_then(Option::take) else { continue };
            self.count = self.count.saturating_sub(1);
            let result = usize::try_from(entry.result())
                .map_err(|_| Errno::from_raw(entry.result().checked_neg().unwrap_or(0)));
            done.push(Completion { place, op, result });
        }
    }

    /// The ring itself: readable while its completion queue holds something.
    fn event(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring's descriptor is open as long as the ring, which is borrowed.
        Some(unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) })
    }
}

impl<P> Drop for Uring<P> {
    fn drop(&mut self) {
        let until = Instant::now().checked_add(DRAIN);
        let mut done = Vec::new();
        let second = Timespec::new().sec(1);
        while self.count > 0 && until.is_some_and(|until| Instant::now() < until) {
            // An error (ETIME, EINTR) is a reason to look again.
            let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&second));
            self.reap(&mut done);
            done.clear();
        }
        if self.count > 0 {
            tracing::error!(
                operations = self.count,
                "An image does not finish: its buffers stay allocated, and it stays locked"
            );
            std::mem::forget(std::mem::take(&mut self.under_way));
            std::mem::forget(Arc::clone(&self.image));
        }
    }
}
