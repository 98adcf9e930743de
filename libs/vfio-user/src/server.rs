//! Serves a device to one client: the session with its I/O.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::counters::Messages;
use crate::device::Device;
use crate::dma::{self, DmaError, Iova, View};
use crate::irq::Interrupts;
use crate::limits;
use crate::session::server::{DmaId, Request, Session, SessionError, Ticket};
use crate::transport::{Outbox, Received, Socket};
use crate::wire::{DmaAccess, DmaWrite, Reply as WireReply};

mod execute;

/// Why serving a client ended before it left.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// What the client sent, or what the device did not answer.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The socket, or what the session waits with.
    #[error("The client's socket failed")]
    Socket(#[from] std::io::Error),
}

impl From<Errno> for ServeError {
    fn from(errno: Errno) -> Self {
        Self::Socket(errno.into())
    }
}

/// What there was to receive.
enum Arrival {
    Something,
    Nothing,
    /// The client has left.
    End,
}

/// A client, as its device sees it: memory to reach and interrupts to raise. Any thread may use it.
pub struct Connection {
    session: Mutex<Session>,
    socket: Socket,
    /// Wakes the session's thread.
    wake: EventFd,
    thread: ThreadId,
    /// A reply to one of our DMA messages came, or none will come any more.
    dma_over: Condvar,
    memory: Arc<dma::Table<dma::Region>>,
    interrupts: Interrupts,
    messages: Arc<Messages>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Connection {
    /// The interrupts that the client listens to.
    pub fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// A thread's way into the client's memory.
    pub fn view(self: &Arc<Self>) -> View {
        View::new(self.memory.clone(), self.clone())
    }

    /// What the client has mapped.
    pub fn memory(&self) -> &Arc<dma::Table<dma::Region>> {
        &self.memory
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a command and sends what can be sent at once, on whichever thread this is: that saves the client
    /// a wake-up of the session's thread.
    fn finish(&self, ticket: Ticket, answer: Result<(WireReply<'_>, Vec<OwnedFd>), Errno>) {
        let mut session = self.session();
        if session.finish(ticket, answer) {
            self.flush(&mut session);
            if thread::current().id() != self.thread {
                self.wake();
            }
        }
    }

    fn wake(&self) {
        // A full counter wakes as well.
        let _ = self.wake.write(1);
    }

    /// Sends until the socket is full; the session's thread goes on when it has room. A broken socket shows
    /// when that thread reads from it.
    fn flush(&self, session: &mut Session) {
        if let Err(error) = session.output().flush(&self.socket) {
            tracing::debug!(%error, "the client does not take its replies");
            *session.output() = Outbox::new();
        }
    }

    /// Sends one DMA message and waits for its reply.
    fn dma_message(
        &self,
        start: impl FnOnce(&mut Session) -> Result<DmaId, Errno>,
    ) -> Result<Vec<u8>, Errno> {
        let mut session = self.session();
        let id = start(&mut session)?;
        self.flush(&mut session);
        if !session.output().is_empty() && thread::current().id() != self.thread {
            self.wake();
        }
        let deadline = Instant::now().checked_add(limits::REPLY).ok_or(Errno::ETIMEDOUT)?;
        loop {
            if let Some(outcome) = session.dma_outcome(id) {
                return outcome;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!("the client left a DMA message unanswered");
                // The session cannot go on: a late reply would meet memory that was given away.
                session.end();
                self.wake();
                return Err(Errno::ETIMEDOUT);
            }
            if thread::current().id() == self.thread {
                // A device that needs memory inside of a command: this thread is the one that reads the socket.
                drop(session);
                if !matches!(self.receive(), Ok(Arrival::Something | Arrival::Nothing)) {
                    self.session().end();
                }
                let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
                if self.session().dma_under_way(id) && self.wait(timeout).is_err() {
                    self.session().end();
                }
                session = self.session();
            } else {
                session = self.dma_over.wait_timeout(session, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Takes what the socket has, if there is room for it.
    fn receive(&self) -> Result<Arrival, ServeError> {
        if !self.session().hungry() {
            return Ok(Arrival::Nothing);
        }
        let mut buffer = [0_u8; 16 << 10];
        match self.socket.receive(&mut buffer)? {
            Received::Data { length, descriptors } => {
                let bytes = buffer.get(..length).unwrap_or_default();
                let result = self.session().receive(bytes, descriptors, Instant::now());
                self.dma_over.notify_all();
                result?;
                Ok(Arrival::Something)
            }
            Received::WouldBlock => Ok(Arrival::Nothing),
            Received::Closed => Ok(Arrival::End),
        }
    }

    /// Sleeps until there may be something to do, or the client has left while nothing more may be read.
    fn wait(&self, timeout: PollTimeout) -> Result<(), Errno> {
        let mut events = PollFlags::empty();
        {
            let mut session = self.session();
            events.set(PollFlags::POLLIN, session.hungry());
            events.set(PollFlags::POLLOUT, !session.output().is_empty());
        }
        self.interrupts.with_unmask_descriptor(|unmask| {
            let mut descriptors = vec![
                PollFd::new(self.socket.as_fd(), events),
                PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
            ];
            descriptors.extend(unmask.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)));
            match poll(&mut descriptors, timeout) {
                Err(Errno::EINTR) => return Ok(()),
                result => result?,
            };
            let happened =
                |at: usize| descriptors.get(at).and_then(PollFd::revents).unwrap_or(PollFlags::empty());
            if happened(1).contains(PollFlags::POLLIN) {
                let _ = self.wake.read();
            }
            if happened(2).contains(PollFlags::POLLIN) {
                self.interrupts.unmasked();
            }
            if happened(0).intersects(PollFlags::POLLHUP | PollFlags::POLLERR)
                && !events.contains(PollFlags::POLLIN)
            {
                return Err(Errno::ECONNRESET);
            }
            Ok(())
        })
    }

    /// Ends everything that waits for the client.
    fn close(&self) {
        self.session().end();
        self.dma_over.notify_all();
        self.interrupts.close();
    }
}

impl dma::Messages for Connection {
    fn read(&self, from: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        let limit = self.session().dma_limit();
        let refused = DmaError::Refused { iova: from, length: into.len() };
        let mut address = from.0;
        for chunk in into.chunks_mut(limit as usize) {
            let count = u32::try_from(chunk.len()).map_err(|_| refused)?;
            let data = self
                .dma_message(|session| session.dma_read(DmaAccess { address, count }))
                .map_err(|_| refused)?;
            if data.len() != chunk.len() {
                return Err(refused);
            }
            chunk.copy_from_slice(&data);
            address = address.wrapping_add(u64::from(count));
        }
        Ok(())
    }

    fn write(&self, to: Iova, from: &[u8]) -> Result<(), DmaError> {
        let limit = self.session().dma_limit();
        let mut address = to.0;
        for data in from.chunks(limit as usize) {
            self.dma_message(|session| session.dma_write(DmaWrite { address, data }))
                .map_err(|_| DmaError::Refused { iova: to, length: from.len() })?;
            address = address.wrapping_add(data.len() as u64);
        }
        Ok(())
    }
}

/// Serves `device` to the client at the other end of `stream` until it leaves. Blocks; to end it from elsewhere,
/// shut the stream down. When it returns, the device has let go of the client.
///
/// # Errors
/// [`ServeError`] when the session ended for another reason than the client's leaving.
pub fn serve(stream: UnixStream, device: &dyn Device, messages: &Arc<Messages>) -> Result<(), ServeError> {
    let counts: Vec<u32> = device.description().irqs.iter().map(|irq| irq.count).collect();
    let connection = Arc::new(Connection {
        session: Mutex::new(Session::new()),
        socket: Socket::new(stream)?,
        wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        thread: thread::current().id(),
        dma_over: Condvar::new(),
        memory: Arc::new(dma::Table::new(limits::DMA_MAPS as usize)),
        interrupts: Interrupts::new(&counts),
        messages: messages.clone(),
    });
    device.attach(&connection);
    let result = run(&connection, device);
    connection.flush(&mut connection.session());
    connection.close();
    connection.socket.shut_down();
    device.detach();
    connection.memory.clear();
    result
}

fn run(connection: &Arc<Connection>, device: &dyn Device) -> Result<(), ServeError> {
    let mut look_until = Instant::now();
    loop {
        while let Some(request) = connection.next_request()? {
            execute::execute(connection, device, request);
        }
        connection.flush(&mut connection.session());
        let now = Instant::now();
        match connection.receive()? {
            Arrival::Something => {
                look_until = now.checked_add(limits::LOOK).unwrap_or(now);
                continue;
            }
            Arrival::Nothing => {}
            Arrival::End => return Ok(()),
        }
        let deadline = {
            let mut session = connection.session();
            session.expire(now)?;
            session.deadline()
        };
        let timeout = if now < look_until {
            PollTimeout::ZERO
        } else {
            deadline.map_or(PollTimeout::NONE, |deadline| {
                // Rounded up, so that the deadline is past when the time is over.
                let left = deadline.saturating_duration_since(now).saturating_add(limits::POLL_GRAIN);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            })
        };
        match connection.wait(timeout) {
            Err(Errno::ECONNRESET) => return Ok(()),
            result => result?,
        }
    }
}

impl Connection {
    fn next_request(&self) -> Result<Option<Request>, SessionError> {
        let request = self.session().next_request()?;
        if let Some(request) = &request {
            self.messages.count(request.code());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests;
