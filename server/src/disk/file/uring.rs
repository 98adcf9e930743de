//! Operations through io_uring: one system call per batch, none to learn of completions.

#![expect(unsafe_code, reason = "hands memory to the kernel for longer than a call")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use nix::errno::Errno;
use nix::libc;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::engine::{Finished, ImageOp, Slot};

/// Entries of the submission ring; the completion ring has twice as many.
pub(super) const ENTRIES: u32 = 256;

/// The image is the ring's only registered file.
const IMAGE: Fixed = Fixed(0);

pub(super) struct Uring {
    ring: IoUring,
    event: EventFd,
    /// Operations in the ring: what the kernel uses memory for.
    under_way: u32,
    _image: Arc<OwnedFd>,
}

impl Uring {
    pub(super) fn new(image: Arc<OwnedFd>) -> io::Result<Self> {
        let ring = IoUring::builder().setup_r_disabled().build(ENTRIES)?;
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let submitter = ring.submitter();
        submitter.register_files(&[image.as_raw_fd()])?;
        submitter.register_eventfd(event.as_raw_fd())?;
        // What a bug or an intruder may do with this ring is what it is for, on this file.
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_op(opcode::Fallocate::CODE),
            Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()),
        ])?;
        submitter.register_enable_rings()?;
        Ok(Self { ring, event, under_way: 0, _image: image })
    }

    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    pub(super) fn push(&mut self, slot: Slot, op: ImageOp) -> bool {
        if self.under_way >= ENTRIES {
            return false;
        }
        let entry = match op {
            ImageOp::Read { offset, into } => {
                opcode::Readv::new(IMAGE, into.first, into.count).offset(offset).build()
            }
            ImageOp::Write { offset, from, durable } => opcode::Writev::new(IMAGE, from.first, from.count)
                .offset(offset)
                .rw_flags(if durable { libc::RWF_DSYNC } else { 0 })
                .build(),
            ImageOp::Sync => opcode::Fsync::new(IMAGE).flags(FsyncFlags::DATASYNC).build(),
            ImageOp::Punch { offset, length } => fallocate(offset, length, super::PUNCH),
            ImageOp::Zero { offset, length } => fallocate(offset, length, super::ZERO),
        }
        .user_data(slot.0.into());
        // SAFETY: the slot keeps the vectors and the memory that they name in place until the operation is
        // reported; this ring is dropped only after all were (see Drop).
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        self.under_way = self.under_way.saturating_add(pushed.into());
        pushed
    }

    pub(super) fn commit(&mut self) {
        if self.ring.submission().is_empty() {
            return;
        }
        match self.ring.submit() {
            Ok(_) => {}
            // Completions wait to be taken, or memory is short: the next commit tries again.
            Err(error)
                if [libc::EINTR, libc::EBUSY, libc::EAGAIN]
                    .contains(&error.raw_os_error().unwrap_or_default()) => {}
            Err(error) => tracing::error!(%error, "io_uring does not take operations"),
        }
    }

    pub(super) fn reap(&mut self, finished: &mut Vec<Finished>) {
        // What an interrupted commit left behind.
        self.commit();
        for entry in self.ring.completion() {
            self.under_way = self.under_way.saturating_sub(1);
            let slot = Slot(u32::try_from(entry.user_data()).unwrap_or(u32::MAX));
            finished.push(Finished { slot, result: entry.result() });
        }
    }
}

fn fallocate(offset: u64, length: u64, mode: i32) -> squeue::Entry {
    opcode::Fallocate::new(IMAGE, length).offset(offset).mode(mode).build()
}

impl Drop for Uring {
    /// The kernel may write to memory that is about to be freed until the last operation is over.
    fn drop(&mut self) {
        while self.under_way > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => {}
                Err(error) => return tracing::error!(%error, "io_uring cannot be waited for"),
            }
            self.reap(&mut Vec::new());
        }
    }
}
