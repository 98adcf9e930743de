//! The engine on a pool of threads, where io_uring is refused.
#![expect(unsafe_code, reason = "hands memory to the kernel")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc::{RWF_DSYNC, c_int, iovec, preadv2, pwritev2};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::fdatasync;

use super::engine::{Completion, Engine, ImageOp};
use super::image::Image;
use crate::disk::Extent;
use crate::disk::limits::{DRAIN, THREADS};

/// Carries operations by system calls on threads of its own.
pub(in crate::disk) struct Threads<P> {
    pool: Arc<Pool<P>>,
    /// Pushed, not yet committed.
    pushed: Vec<(usize, ImageOp<P>)>,
    /// Committed, not yet reaped.
    under_way: usize,
    threads: Vec<JoinHandle<()>>,
}

/// What the threads share.
struct Pool<P> {
    image: Arc<Image>,
    queue: Mutex<Queue<P>>,
    /// Work came, or the end.
    work: Condvar,
    /// A thread has become idle.
    idle: Condvar,
    /// Counts completions.
    event: EventFd,
}

struct Queue<P> {
    state: State,
    todo: VecDeque<(usize, ImageOp<P>)>,
    done: Vec<Completion<P>>,
    busy: usize,
}

enum State {
    Open,
    Closed,
}

impl<P: Send + 'static> Threads<P> {
    /// Starts the pool. Fails if the system has no threads or descriptors left.
    pub(super) fn new(image: &Arc<Image>) -> io::Result<Threads<P>> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let queue = Queue { state: State::Open, todo: VecDeque::new(), done: Vec::new(), busy: 0 };
        let pool = Arc::new(Pool {
            image: Arc::clone(image),
            queue: Mutex::new(queue),
            work: Condvar::new(),
            idle: Condvar::new(),
            event,
        });
        // From here on, dropping it ends the threads that were started.
        let mut threads = Threads { pool, pushed: Vec::new(), under_way: 0, threads: Vec::new() };
        for index in 0..THREADS {
            let pool = Arc::clone(&threads.pool);
            let thread = thread::Builder::new().name(format!("image-{index}"));
            threads.threads.push(thread.spawn(move || pool.serve())?);
        }
        Ok(threads)
    }
}

impl<P> Pool<P> {
    /// No code that can panic runs under the lock, so that a poisoned one is as good as any.
    fn lock(&self) -> MutexGuard<'_, Queue<P>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life.
    fn serve(&self) {
        let mut queue = self.lock();
        loop {
            if let Some((place, op)) = queue.todo.pop_front() {
                queue.busy = queue.busy.saturating_add(1);
                drop(queue);
                let result = execute(&self.image, &op);
                queue = self.lock();
                queue.busy = queue.busy.saturating_sub(1);
                queue.done.push(Completion { place, op, result });
                self.idle.notify_all();
                // Fails only when 2^64 completions are pending: then it is readable anyway.
                let _ = self.event.write(1);
            } else {
                match queue.state {
                    State::Closed => return,
                    State::Open => queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            }
        }
    }
}

/// Performs one operation, blocking.
fn execute<P>(image: &Image, op: &ImageOp<P>) -> Result<usize, Errno> {
    let count = |vectors: &[iovec]| c_int::try_from(vectors.len()).unwrap_or(c_int::MAX);
    let position = |offset: u64| i64::try_from(offset).map_err(|_| Errno::EFBIG);
    let transferred =
        |result: isize| Errno::result(result).map(|count| usize::try_from(count).unwrap_or_default());
    let allocate = |extent: &Extent, mode: FallocateFlags| {
        let mode = mode | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(image, mode, position(extent.offset)?, position(extent.length)?).map(|()| 0)
    };
    match op {
        ImageOp::Read { offset, buffers } => {
            let (vectors, offset) = (buffers.vectors(), position(*offset)?);
            // SAFETY: `op` is borrowed for the whole call and keeps the vectors and their memory, which may be
            // written in a read.
            transferred(unsafe {
                preadv2(image.as_fd().as_raw_fd(), vectors.as_ptr(), count(vectors), offset, 0)
            })
        }
        ImageOp::Write { offset, buffers, durable } => {
            let (vectors, offset) = (buffers.vectors(), position(*offset)?);
            let flags = if *durable { RWF_DSYNC } else { 0 };
            // SAFETY: as above; a write only reads the memory.
            transferred(unsafe {
                pwritev2(image.as_fd().as_raw_fd(), vectors.as_ptr(), count(vectors), offset, flags)
            })
        }
        ImageOp::Sync => fdatasync(image).map(|()| 0),
        ImageOp::Punch(extent) => allocate(extent, FallocateFlags::FALLOC_FL_PUNCH_HOLE),
        ImageOp::Zero(extent) => allocate(extent, FallocateFlags::FALLOC_FL_ZERO_RANGE),
    }
}

impl<P> Engine<P> for Threads<P> {
    fn push(&mut self, place: usize, op: ImageOp<P>) {
        self.pushed.push((place, op));
    }

    fn commit(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        self.under_way = self.under_way.saturating_add(self.pushed.len());
        self.pool.lock().todo.extend(self.pushed.drain(..));
        self.pool.work.notify_all();
    }

    fn reap(&mut self, done: &mut Vec<Completion<P>>) {
        if self.under_way == 0 {
            return;
        }
        let mut queue = self.pool.lock();
        if queue.done.is_empty() {
            return;
        }
        self.under_way = self.under_way.saturating_sub(queue.done.len());
        done.append(&mut queue.done);
        // Under the lock, so that no completion's signal is swallowed.
        let _ = self.pool.event.read();
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pool.event.as_fd())
    }
}

impl<P> Drop for Threads<P> {
    fn drop(&mut self) {
        let mut queue = self.pool.lock();
        queue.state = State::Closed;
        self.pool.work.notify_all();
        // A thread that hangs in the kernel keeps its operation, and so the operation's memory, by itself.
        let waited =
            self.pool.idle.wait_timeout_while(queue, DRAIN, |queue| queue.busy > 0 || !queue.todo.is_empty());
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        queue.todo.clear();
        let busy = queue.busy;
        drop(queue);
        if busy == 0 {
            // They are about to end; the image is unlocked when they have.
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        } else {
            tracing::error!(
                operations = busy,
                "An image does not finish: its buffers stay allocated, and it stays locked"
            );
        }
    }
}
