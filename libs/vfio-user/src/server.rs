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
use crate::transport::{Received, Socket, TransportError};
use crate::wire::{DmaAccess, DmaWrite, Reply as WireReply};

mod execute;

/// Why serving a client ended before it left.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// What the client sent, or what the device did not answer.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The socket.
    #[error("The client's socket failed")]
    Transport(#[from] TransportError),
    /// A system call.
    #[error("A system call of the session failed")]
    System(#[from] Errno),
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
    fn finish(&self, ticket: Ticket, answer: Result<(WireReply<'_>, Vec<Arc<OwnedFd>>), Errno>) {
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
        while let Some(message) = session.output().front_mut() {
            match message.send(&self.socket) {
                Ok(true) => _ = session.output().pop_front(),
                Ok(false) => return,
                Err(error) => {
                    tracing::debug!(%error, "the client does not take its replies");
                    return session.output().clear();
                }
            }
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
                if self.receive().is_err() {
                    self.session().end();
                }
                let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
                self.wait(timeout).ok();
                session = self.session();
            } else {
                session =
                    self.dma_over.wait_timeout(session, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Takes what the socket has. True: there was something.
    fn receive(&self) -> Result<bool, ServeError> {
        let mut buffer = [0_u8; 8192];
        let mut descriptors = Vec::new();
        match self.socket.receive(&mut buffer, &mut descriptors)? {
            Received::Bytes(count) => {
                let mut session = self.session();
                let result =
                    session.receive(buffer.get(..count).unwrap_or_default(), descriptors, Instant::now());
                self.dma_over.notify_all();
                result?;
                Ok(true)
            }
            Received::WouldBlock => Ok(false),
            Received::End => Err(TransportError::Closed.into()),
        }
    }

    /// Sleeps until there is something to do. True: there is; false: the time is over.
    fn wait(&self, timeout: PollTimeout) -> Result<bool, Errno> {
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
            let count = match poll(&mut descriptors, timeout) {
                Err(Errno::EINTR) => 0,
                result => result?,
            };
            let ready = |at: usize| descriptors.get(at).and_then(PollFd::any).unwrap_or(false);
            if ready(1) {
                let _ = self.wake.read();
            }
            if ready(2) {
                self.interrupts.unmasked();
            }
            Ok(count > 0)
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
    device.detach();
    connection.memory.clear();
    match result {
        Err(ServeError::Transport(TransportError::Closed)) => Ok(()),
        other => other,
    }
}

fn run(connection: &Arc<Connection>, device: &dyn Device) -> Result<(), ServeError> {
    // How long to look before sleeping: a wake-up across cores costs more than the work (reference: 75 us
    // against 6 us for a register read).
    let mut look_until = Instant::now();
    loop {
        while let Some(request) = next_request(connection)? {
            execute::execute(connection, device, request);
        }
        connection.flush(&mut connection.session());
        let now = Instant::now();
        if connection.receive_if_hungry()? {
            look_until = now.checked_add(limits::LOOK).unwrap_or(now);
            continue;
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
                // Rounded up, so that it is past when the time is over.
                let left = deadline.saturating_duration_since(now).saturating_add(limits::POLL_GRAIN);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            })
        };
        connection.wait(timeout)?;
    }
}

fn next_request(connection: &Connection) -> Result<Option<Request>, ServeError> {
    let request = connection.session().next_request()?;
    if let Some(request) = &request {
        connection.messages.count(request.code());
    }
    Ok(request)
}

impl Connection {
    fn receive_if_hungry(&self) -> Result<bool, ServeError> {
        let hungry = self.session().hungry();
        if hungry { self.receive() } else { Ok(false) }
    }
}

#[cfg(test)]
mod tests;
