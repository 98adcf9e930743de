//! A disk that is a file or a block device.
//!
//! `job` says which operations a command needs, `engine` executes them (`uring`, or `threads`), `lock` keeps
//! others away. O_DIRECT is used where the file allows it, straight into host memory where that suits it.

#![expect(unsafe_code, reason = "statx(2) and ioctl(2) have no safe wrapper")]

mod engine;
mod job;
mod lock;
mod pages;
mod threads;
mod uring;

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outboard_nvme::controller::{self, Geometry, Operation, Submission, Tag};

pub(super) use engine::Engine;
use engine::{Finished, Running, Slot};
use job::{Alignment, Job, Outcome};

use super::{DiskError, PinHost};

/// fallocate(2): deallocate, keep the size.
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// fallocate(2): zero, keep the size.
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// The most operations at an engine; commands beyond them wait and hold no memory.
const UNDER_WAY: usize = 256;

/// See the module.
pub struct File<H: PinHost> {
    /// Dropped first: it waits for the kernel, which uses the jobs' memory.
    running: Running,
    jobs: Vec<Option<Box<Job<H::Pin>>>>,
    free: Vec<u32>,
    waiting: VecDeque<Box<Job<H::Pin>>>,
    finished: Vec<Finished>,
    /// Commands that ended without the engine.
    over: Vec<(Tag, Result<(), controller::DiskError>)>,
    image: OwnedFd,
    geometry: Geometry,
    alignment: Alignment,
}

// SAFETY: the raw pointers in jobs point to memory that the jobs own or pin; the value is used by one thread at a
// time, whichever that is.
unsafe impl<H: PinHost> Send for File<H> where H::Pin: Send {}

impl<H: PinHost> File<H> {
    /// Opens and locks an image.
    ///
    /// # Errors
    /// [`DiskError`]
    pub(super) fn open(
        path: &Path,
        block_shift: u32,
        read_only: bool,
        engine: Option<Engine>,
    ) -> Result<Self, DiskError> {
        let path = path.to_path_buf();
        let explain = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => DiskError::Missing { path: path.clone() },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                DiskError::Permission { path: path.clone(), read_only }
            }
            io::ErrorKind::IsADirectory => DiskError::Kind { path: path.clone() },
            _ => DiskError::Other { path: path.clone(), source: error },
        };
        let kind = std::fs::metadata(&path).map_err(explain)?.file_type();
        // Looked at before opening: opening a pipe would wait, and a tape would rewind.
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind { path });
        }
        let file = OpenOptions::new().read(true).write(!read_only).custom_flags(libc::O_CLOEXEC).open(&path);
        let image = OwnedFd::from(file.map_err(explain)?);
        let size = size(&image, kind.is_block_device()).map_err(explain)?;
        let block = 1 << block_shift;
        if size == 0 || !size.is_multiple_of(block) {
            return Err(DiskError::Fraction { path, size, block });
        }
        lock::lock(&image, read_only).map_err(|error| match error {
            Errno::EAGAIN | Errno::EACCES => DiskError::Locked { path: path.clone(), read_only },
            error => explain(error.into()),
        })?;
        let alignment = go_direct(&image, block).unwrap_or(Alignment::NONE);
        tracing::info!(path = %path.display(), size, direct = alignment != Alignment::NONE, "image opened");
        let geometry = Geometry {
            block_shift,
            blocks: size >> block_shift,
            read_only,
            volatile_cache: true,
            // What a block device reads after a discard is its own affair.
            deallocates: kind.is_file(),
        };
        let running = image.try_clone().and_then(|image| Running::start(image, engine)).map_err(explain)?;
        Ok(Self {
            running,
            jobs: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            finished: Vec::new(),
            over: Vec::new(),
            image,
            geometry,
            alignment,
        })
    }

    #[cfg(test)]
    pub(super) fn is_direct(&self) -> bool {
        self.alignment != Alignment::NONE
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.running.event()
    }

    pub(super) fn submit(&mut self, host: &mut H, tag: Tag, operation: Operation<'_>) -> Submission {
        let job = Box::new(Job::new(tag, operation, self.geometry.block_shift));
        if self.waiting.is_empty() && self.under_way() < UNDER_WAY {
            self.start(host, job);
        } else {
            self.waiting.push_back(job);
        }
        Submission::Pending
    }

    pub(super) fn commit(&mut self) {
        self.running.commit();
    }

    pub(super) fn reap(&mut self, host: &mut H, done: &mut Vec<(Tag, Result<(), controller::DiskError>)>) {
        let mut finished = std::mem::take(&mut self.finished);
        self.running.reap(&mut finished);
        for Finished { slot, result } in finished.drain(..) {
            let Some(mut job) = self.take(slot) else { continue };
            match job.finish(host, result) {
                Outcome::Again => self.advance(job),
                Outcome::Over(outcome) => self.over.push((job.tag, outcome)),
            }
        }
        self.finished = finished;
        while self.under_way() < UNDER_WAY {
            let Some(job) = self.waiting.pop_front() else { break };
            self.start(host, job);
        }
        self.running.commit();
        done.append(&mut self.over);
    }

    fn under_way(&self) -> usize {
        self.jobs.len().saturating_sub(self.free.len())
    }

    fn start(&mut self, host: &mut H, mut job: Box<Job<H::Pin>>) {
        match job.begin(host, self.alignment) {
            Ok(()) => self.advance(job),
            Err(error) => self.over.push((job.tag, Err(error))),
        }
    }

    /// Hands the next operation of a job to the engine.
    fn advance(&mut self, mut job: Box<Job<H::Pin>>) {
        let Some(operation) = job.operation() else { return self.over.push((job.tag, Ok(()))) };
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.jobs.push(None);
                u32::try_from(self.jobs.len().saturating_sub(1)).unwrap_or(u32::MAX)
            }
        };
        if self.running.push(Slot(slot), operation) {
            if let Some(place) = self.jobs.get_mut(slot as usize) {
                *place = Some(job);
            }
        } else {
            // No room at the engine, which cannot be with at most UNDER_WAY of them; but it must not be lost.
            self.free.push(slot);
            self.waiting.push_front(job);
        }
    }

    fn take(&mut self, slot: Slot) -> Option<Box<Job<H::Pin>>> {
        let job = self.jobs.get_mut(slot.0 as usize)?.take()?;
        self.free.push(slot.0);
        Some(job)
    }
}

impl<H: PinHost> Drop for File<H> {
    /// What was written is made durable when the server ends.
    fn drop(&mut self) {
        while self.under_way() > 0 {
            let mut finished = std::mem::take(&mut self.finished);
            self.running.reap(&mut finished);
            for Finished { slot, .. } in finished.drain(..) {
                self.take(slot);
            }
            self.finished = finished;
            let mut descriptors = [PollFd::new(self.running.event(), PollFlags::POLLIN)];
            // In steps, in case that an event was taken before.
            if self.under_way() > 0 && poll(&mut descriptors, PollTimeout::from(10_u8)).is_err() {
                break;
            }
        }
        if !self.geometry.read_only
            && let Err(error) = nix::unistd::fdatasync(&self.image)
        {
            tracing::error!(%error, "the image could not be flushed at the end");
        }
        lock::unlock(&self.image);
    }
}

nix::ioctl_read!(
    /// BLKGETSIZE64: the size of a block device in bytes.
    block_device_size, 0x12, 114, u64
);

fn size(image: &OwnedFd, block_device: bool) -> io::Result<u64> {
    if block_device {
        let mut size = 0;
        // SAFETY: BLKGETSIZE64 writes one u64. (Its number says size_t, which is the same here.)
        unsafe { block_device_size(image.as_raw_fd(), &raw mut size)? };
        return Ok(size);
    }
    let stat = nix::sys::stat::fstat(image)?;
    u64::try_from(stat.st_size).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Switches O_DIRECT on, if the file allows it for blocks of this size.
fn go_direct(image: &OwnedFd, block: u64) -> Option<Alignment> {
    let alignment = direct_alignment(image.as_fd())?;
    if !block.is_multiple_of(alignment.offset as u64) {
        return None;
    }
    let flags = OFlag::from_bits_retain(fcntl(image, FcntlArg::F_GETFL).ok()?);
    fcntl(image, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)).ok()?;
    Some(alignment)
}

/// What the file demands of O_DIRECT; `None` where it does not do it, or does not say (before Linux 6.1).
fn direct_alignment(image: BorrowedFd<'_>) -> Option<Alignment> {
    // SAFETY: statx is a C structure of integers, for which zero is valid.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH means the descriptor itself; `stat` has room for the answer.
    let result = unsafe {
        libc::statx(image.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat)
    };
    if result != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
    (memory.is_power_of_two() && offset.is_power_of_two()).then_some(Alignment { memory, offset })
}

#[cfg(test)]
mod tests;
