//! The thread that is the drive: it looks at doorbells, executes commands, and sleeps when there are none.
//!
//! It alone owns the controller. Everybody else writes registers and doorbells, which are memory, and wakes it;
//! or sends it an [`Order`].

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{hint, io};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use outboard_nvme::controller::Controller;
use outboard_vfio_user::device::Reply;
use outboard_vfio_user::server::Connection;

use super::bar0::Bar0;
use super::machine::Machine;
use super::mirror::Mirror;
use super::options::DoorbellMode;
use crate::disk::Backend;

/// How long the thread looks on after the last thing that happened, before it naps.
const LOOK: Duration = Duration::from_micros(200);
/// How long naps are short after the last thing that happened.
const ALERT: Duration = Duration::from_millis(10);
/// A short nap: the longest that a command waits while the drive is in use.
const SHORT_NAP: Duration = Duration::from_micros(50);
/// A long nap, where a store to mapped doorbells wakes nobody: the longest that the first command waits after a
/// pause, and what idling costs.
const LONG_NAP: Duration = Duration::from_millis(1);

/// What the drive's thread is told.
enum Order {
    Attach(Client),
    /// Answered when no memory of the client is in use but what is pinned by I/O under way.
    Detach(SyncSender<()>),
    /// Answered when what was written before has been looked at.
    Look(Reply<()>),
    /// Answered when no command is under way.
    Reset(Reply<()>),
    /// Answered when everything that was under way is done and flushed.
    Stop,
}

/// A client, and the BAR0 that it was given.
pub(super) struct Client {
    pub(super) connection: Arc<Connection>,
    pub(super) bar: Arc<Bar0>,
    /// If it may map the registers.
    pub(super) mirror: Option<Mirror>,
}

/// How the thread is woken.
struct Bell {
    /// Something was written since the thread looked last.
    rung: AtomicBool,
    asleep: AtomicBool,
    eventfd: EventFd,
}

impl Bell {
    /// Call it after what the thread is to see was written.
    #[inline]
    fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        // Either we see that it sleeps, or it sees that we rang when it looks a last time.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // A full counter wakes as well.
            let _ = self.eventfd.write(1);
        }
    }
}

/// The drive's thread, from outside.
pub(super) struct Worker {
    bell: Arc<Bell>,
    orders: Sender<Order>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    /// Starts it. `events` are descriptors that become readable when a disk has something to report.
    ///
    /// # Errors
    /// What eventfd(2) or the creation of a thread says.
    pub(super) fn start(
        controller: Controller<Machine, Backend<Machine>>,
        machine: Machine,
        events: Vec<OwnedFd>,
        doorbells: DoorbellMode,
    ) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let bell = Arc::new(Bell {
            rung: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            eventfd: EventFd::from_flags(flags)?,
        });
        let (orders, received) = channel();
        let drive = Drive {
            controller,
            machine,
            doorbells,
            events,
            bell: bell.clone(),
            orders: received,
            next_client: None,
            mirror: None,
            resets: Vec::new(),
        };
        let span = tracing::Span::current();
        let thread =
            thread::Builder::new().name("drive".into()).spawn(move || span.in_scope(|| drive.run()))?;
        Ok(Self { bell, orders, thread: Mutex::new(Some(thread)) })
    }

    /// Registers or doorbells were written.
    #[inline]
    pub(super) fn wake(&self) {
        self.bell.ring();
    }

    /// As [`Worker::wake`]; answers `reply` when the drive has acted upon what was written.
    pub(super) fn look(&self, reply: Reply<()>) {
        self.order(Order::Look(reply));
    }

    /// A client came.
    pub(super) fn attach(&self, client: Client) {
        self.order(Order::Attach(client));
    }

    /// The client went. When this returns its memory is used no more, but by I/O that was under way, which
    /// keeps it mapped.
    pub(super) fn detach(&self) {
        let (done, wait) = sync_channel(1);
        self.order(Order::Detach(done));
        // An error: the thread is gone, and so is its use of memory.
        let _ = wait.recv();
    }

    /// Answers `reply` when no command is under way any more. The registers were reset before.
    pub(super) fn reset(&self, reply: Reply<()>) {
        self.order(Order::Reset(reply));
    }

    /// Ends the thread, when all that is under way is done.
    pub(super) fn stop(&self) {
        self.order(Order::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the drive's thread panicked");
        }
    }

    fn order(&self, order: Order) {
        // It fails only when the thread is gone: then dropping the order answers it.
        let _ = self.orders.send(order);
        self.bell.ring();
    }
}

/// Where the thread is in its life.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Working,
    /// Told to stop; ends when nothing is under way.
    Stopping,
}

struct Drive {
    controller: Controller<Machine, Backend<Machine>>,
    machine: Machine,
    doorbells: DoorbellMode,
    events: Vec<OwnedFd>,
    bell: Arc<Bell>,
    orders: Receiver<Order>,
    /// A client that came while I/O of the one before was under way. It may use the registers, and the
    /// controller becomes ready when that I/O is over: its data must not land in the new client's memory.
    next_client: Option<Client>,
    /// The present client's registers, if it may map them.
    mirror: Option<Mirror>,
    /// Resets that wait for I/O under way.
    resets: Vec<Reply<()>>,
}

impl Drive {
    fn run(mut self) {
        // Naps of 50 µs would be 100 µs with the default slack.
        if let Err(error) = nix::sys::prctl::set_timerslack(1) {
            tracing::debug!(%error, "timer slack stays at its default");
        }
        let mut life = Life::Working;
        let mut quiet_since: Option<Instant> = None;
        loop {
            self.machine.refresh();
            let settled = self.settle();
            let mut progress = self.controller.poll(&mut self.machine);
            progress |= self.machine.raise_pending();
            progress |= self.mirror.as_mut().is_some_and(Mirror::look);
            if self.bell.rung.load(Ordering::Relaxed) && self.bell.rung.swap(false, Ordering::Acquire) {
                self.obey(&mut life);
                quiet_since = None;
                continue;
            }
            if settled || progress {
                quiet_since = None;
                continue;
            }
            if life == Life::Stopping && self.controller.is_quiet() {
                return;
            }
            let now = Instant::now();
            let quiet = now.saturating_duration_since(*quiet_since.get_or_insert(now));
            if quiet < LOOK && self.machine.is_attached() {
                // Others may need this core: with fewer cores than spinners they are what we wait for.
                if quiet < SHORT_NAP { hint::spin_loop() } else { thread::yield_now() }
            } else {
                self.sleep(quiet);
            }
        }
    }

    /// Does what waits for I/O under way to end; true if that was anything.
    fn settle(&mut self) -> bool {
        if self.next_client.is_some() && self.controller.in_flight() == 0 {
            if let Some(Client { connection, bar, mirror }) = self.next_client.take() {
                self.machine.attach(connection, bar);
                self.mirror = mirror;
            }
            return true;
        }
        if !self.resets.is_empty() && self.controller.is_quiet() {
            self.mirror.iter_mut().for_each(|mirror| {
                mirror.look();
            });
            self.resets.drain(..).for_each(|reply| reply.ok(()));
            return true;
        }
        false
    }

    fn obey(&mut self, life: &mut Life) {
        loop {
            match self.orders.try_recv() {
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) | Ok(Order::Stop) => return *life = Life::Stopping,
                Ok(Order::Attach(client)) => self.next_client = Some(client),
                Ok(Order::Detach(done)) => {
                    self.next_client = None;
                    // The registers were reset: the controller sees it and drops its queues.
                    self.controller.poll(&mut self.machine);
                    self.machine.detach();
                    self.mirror = None;
                    // An error: nobody waits any more.
                    let _ = done.send(());
                }
                Ok(Order::Look(reply)) => {
                    self.controller.poll(&mut self.machine);
                    reply.ok(());
                }
                Ok(Order::Reset(reply)) => self.resets.push(reply),
            }
        }
    }

    /// Sleeps until there may be something to do.
    fn sleep(&mut self, quiet: Duration) {
        // A guest that stores to mapped registers wakes nobody, not even when it enables the controller.
        let in_use = self.machine.is_attached() && (self.mirror.is_some() || !self.controller.is_quiet());
        let nap = match self.doorbells {
            _ if !in_use => None,
            // Also where doorbells are posted: asking a busy host to ring would cost a message for each batch.
            _ if quiet < ALERT => Some(SHORT_NAP),
            DoorbellMode::Mapped | DoorbellMode::WholeBar => Some(LONG_NAP),
            DoorbellMode::Posted => None,
        };
        self.bell.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let unarmed = nap.is_some() && self.doorbells == DoorbellMode::Posted;
        if self.bell.rung.load(Ordering::Relaxed) {
            // What was written is looked at first.
        } else if unarmed || self.controller.prepare_sleep(&mut self.machine) {
            self.machine.release();
            self.mirror.iter().for_each(Mirror::restore);
            // Interrupts that wait for more completions.
            let due = self.controller.deadline().map(|at| at.saturating_duration_since(Instant::now()));
            self.wait(nap.into_iter().chain(due).min());
        }
        self.bell.asleep.store(false, Ordering::Relaxed);
    }

    fn wait(&self, nap: Option<Duration>) {
        let mut descriptors = vec![PollFd::new(self.bell.eventfd.as_fd(), PollFlags::POLLIN)];
        descriptors.extend(self.events.iter().map(|event| PollFd::new(event.as_fd(), PollFlags::POLLIN)));
        match ppoll(&mut descriptors, nap.map(TimeSpec::from_duration), None) {
            Ok(0) | Err(Errno::EINTR) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "the drive cannot sleep");
                return thread::sleep(LONG_NAP);
            }
        }
        if descriptors.first().and_then(PollFd::any) == Some(true) {
            let _ = self.bell.eventfd.read();
        }
        for (descriptor, event) in descriptors.iter().skip(1).zip(&self.events) {
            if descriptor.any() == Some(true) {
                let _ = nix::unistd::read(event, &mut [0; 8]);
            }
        }
    }
}
