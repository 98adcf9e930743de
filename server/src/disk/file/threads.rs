//! Operations through a pool of threads, for where io_uring is refused.

#![expect(unsafe_code, reason = "makes system calls on memory that the caller keeps in place")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;
use nix::libc;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::engine::{Finished, ImageOp, Slot, Vectors};

/// Blocking calls at a time: what one drive keeps a medium busy with.
const THREADS: usize = 8;
/// Operations taken before some must finish; the rest waits with its owner.
const ENTRIES: usize = 256;

/// An operation on its way to a thread.
struct Order(Slot, ImageOp);

// SAFETY: the memory behind its vectors is process-wide and stays in place until the operation is reported.
unsafe impl Send for Order {}

pub(super) struct Threads {
    orders: Option<Sender<Order>>,
    finished: Receiver<Finished>,
    event: Arc<EventFd>,
    under_way: usize,
    pool: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(super) fn start(image: Arc<OwnedFd>) -> io::Result<Self> {
        let (orders, queue) = channel::<Order>();
        let (report, finished) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let event = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let mut pool = Vec::with_capacity(THREADS);
        for _ in 0..THREADS {
            let (image, queue, report, event) = (image.clone(), queue.clone(), report.clone(), event.clone());
            let work = move || {
                loop {
                    let order = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Order(slot, op)) = order else { return };
                    let result = execute(&image, op);
                    if report.send(Finished { slot, result }).is_err() {
                        return;
                    }
                    // A full counter wakes as well.
                    let _ = event.write(1);
                }
            };
            pool.push(thread::Builder::new().name("disk".into()).spawn(work)?);
        }
        Ok(Self { orders: Some(orders), finished, event, under_way: 0, pool })
    }

    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    pub(super) fn push(&mut self, slot: Slot, op: ImageOp) -> bool {
        if self.under_way >= ENTRIES {
            return false;
        }
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(Order(slot, op)).is_ok());
        self.under_way = self.under_way.saturating_add(sent.into());
        sent
    }

    pub(super) fn reap(&mut self, finished: &mut Vec<Finished>) {
        for one in self.finished.try_iter() {
            self.under_way = self.under_way.saturating_sub(1);
            finished.push(one);
        }
    }
}

impl Drop for Threads {
    /// Threads may use memory that is about to be freed until they have ended.
    fn drop(&mut self) {
        self.orders = None;
        for thread in self.pool.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a disk's thread panicked");
            }
        }
    }
}

fn execute(image: &OwnedFd, op: ImageOp) -> i32 {
    let fd = image.as_raw_fd();
    let place = |offset: u64| i64::try_from(offset).unwrap_or(i64::MAX);
    let count = |vectors: Vectors| i32::try_from(vectors.count).unwrap_or(0);
    loop {
        // SAFETY: whoever ordered the operation keeps the vectors and their memory in place until it is reported.
        let result = unsafe {
            match op {
                ImageOp::Read { offset, into } => {
                    libc::preadv2(fd, into.first, count(into), place(offset), 0)
                }
                ImageOp::Write { offset, from, durable } => {
                    let flags = if durable { libc::RWF_DSYNC } else { 0 };
                    libc::pwritev2(fd, from.first, count(from), place(offset), flags)
                }
                ImageOp::Sync => libc::fdatasync(fd) as isize,
                ImageOp::Punch { offset, length } => {
                    libc::fallocate(fd, super::PUNCH, place(offset), place(length)) as isize
                }
                ImageOp::Zero { offset, length } => {
                    libc::fallocate(fd, super::ZERO, place(offset), place(length)) as isize
                }
            }
        };
        match Errno::result(result) {
            Ok(done) => return i32::try_from(done).unwrap_or(i32::MAX),
            Err(Errno::EINTR) => {}
            Err(error) => return (error as i32).saturating_neg(),
        }
    }
}
