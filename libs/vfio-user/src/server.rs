//! Serves a device to one client: the session with its I/O.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::counters::Messages;
use crate::device::Device;
use crate::dma::{self, DmaError, Iova, View};
use crate::irq::Interrupts;
use crate::limits;
use crate::memory::guard::Alarm;
use crate::session::server::{DmaId, Request, Session, SessionError, Ticket};
use crate::transport::{Outbox, Received, Socket};
use crate::wire::{Capabilities, CommandCode, DmaAccess, DmaWrite, Reply as WireReply};

mod execute;

/// Why serving a client ended before it left.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// What the client sent, or what the device did not answer.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The socket, or what the session waits with.
    #[error("The client's socket failed")]
    Socket(#[from] io::Error),
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
    /// The socket of our own commands, if the client has asked for one.
    twin: OnceLock<Socket>,
    /// What the session's thread receives into.
    buffer: Mutex<Vec<u8>>,
    /// Wakes the session's thread.
    alarm: Arc<Alarm>,
    thread: ThreadId,
    /// A reply to one of our DMA messages came, or none will come any more.
    dma_over: Condvar,
    memory: Arc<dma::Table<dma::Region>>,
    interrupts: Interrupts,
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
        if session.finish(ticket, answer, Instant::now()) {
            self.flush(&mut session);
            if !self.is_session_thread() {
                self.alarm.ring();
            }
        }
    }

    fn is_session_thread(&self) -> bool {
        thread::current().id() == self.thread
    }

    /// Sends until the socket is full; the session's thread goes on when it has room. A broken socket shows
    /// when that thread reads from it.
    fn flush(&self, session: &mut Session) {
        if let Err(error) = session.output().flush(&self.socket) {
            tracing::debug!(%error, "the client does not take its replies");
            *session.output() = Outbox::new();
        }
        if let (Some(twin), Some(output)) = (self.twin.get(), session.twin_output())
            && let Err(error) = output.flush(twin)
        {
            tracing::debug!(%error, "the client does not take our commands");
            *output = Outbox::new();
        }
    }

    /// Sends one DMA message and waits for its reply.
    fn dma_message(
        &self,
        code: CommandCode,
        start: impl FnOnce(&mut Session) -> Result<DmaId, Errno>,
    ) -> Result<Vec<u8>, Errno> {
        let mut session = self.session();
        let id = start(&mut session)?;
        self.flush(&mut session);
        let here = self.is_session_thread();
        if !here && session.has_output() {
            self.alarm.ring();
        }
        let sent = Instant::now();
        let mut deadline = after(sent, limits::REPLY);
        if here && let Some(command) = session.answer_deadline() {
            deadline = deadline.min(command);
        }
        loop {
            if let Some(outcome) = session.dma_outcome(id) {
                return outcome;
            }
            let now = Instant::now();
            if now >= deadline {
                session.abort(SessionError::Unanswered { code, limit: limits::REPLY });
                self.dma_over.notify_all();
                self.alarm.ring();
                return Err(Errno::ETIMEDOUT);
            }
            if here {
                // A device that needs memory inside of a command: this thread is the one that moves the messages.
                self.flush(&mut session);
                drop(session);
                self.pump(now < after(sent, limits::LOOK), deadline);
                session = self.session();
            } else {
                let left = deadline.saturating_duration_since(now);
                session = self.dma_over.wait_timeout(session, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Receives once; where nothing has come and we do not only look, sleeps until something may have.
    fn pump(&self, look: bool, deadline: Instant) {
        let result = match self.receive() {
            Ok(Arrival::Something) => Ok(()),
            Ok(Arrival::Nothing) if look => {
                thread::yield_now();
                Ok(())
            }
            Ok(Arrival::Nothing) => self.wait(Some(deadline)).map_err(Into::into),
            Ok(Arrival::End) => return self.session().end(),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            self.session().abort(SessionError::Transport(error));
        }
    }

    /// Takes what the sockets have, if there is room for it.
    fn receive(&self) -> io::Result<Arrival> {
        // The twin first: when that is at its end, whatever the client had sent before is there on the other.
        let twin = match self.twin.get() {
            Some(twin) => self.receive_from(twin, Session::receive_twin)?,
            None => Arrival::Nothing,
        };
        let hungry = self.session().hungry();
        let main = if hungry {
            let now = Instant::now();
            self.receive_from(&self.socket, |session, bytes, descriptors| {
                session.receive(bytes, descriptors, now);
            })?
        } else {
            Arrival::Nothing
        };
        Ok(if let Arrival::Nothing = main { twin } else { main })
    }

    fn receive_from(
        &self,
        socket: &Socket,
        take: impl FnOnce(&mut Session, &[u8], Vec<OwnedFd>),
    ) -> io::Result<Arrival> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        match socket.receive(&mut buffer)? {
            Received::Data { length, descriptors } => {
                take(&mut self.session(), buffer.get(..length).unwrap_or_default(), descriptors);
                self.dma_over.notify_all();
                Ok(Arrival::Something)
            }
            Received::WouldBlock => Ok(Arrival::Nothing),
            Received::Closed => Ok(Arrival::End),
        }
    }

    /// Sleeps until there may be something to do, at most until `deadline`.
    ///
    /// # Errors
    /// What poll(2) says; ECONNRESET when the client has left while nothing more may be read.
    fn wait(&self, deadline: Option<Instant>) -> Result<(), Errno> {
        let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up, so that the deadline is past when the time is over.
            let left = if left.is_zero() { left } else { left.saturating_add(limits::POLL_GRAIN) };
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        let mut events = PollFlags::empty();
        let mut twin_events = PollFlags::POLLIN;
        {
            let mut session = self.session();
            events.set(PollFlags::POLLIN, session.hungry());
            events.set(PollFlags::POLLOUT, !session.output().is_empty());
            let sends = session.twin_output().is_some_and(|output| !output.is_empty());
            twin_events.set(PollFlags::POLLOUT, sends);
        }
        self.interrupts.with_unmask_descriptor(|unmask| {
            let mut descriptors = vec![
                PollFd::new(self.socket.as_fd(), events),
                PollFd::new(self.alarm.as_fd(), PollFlags::POLLIN),
            ];
            descriptors.extend(unmask.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)));
            let unmask = unmask.is_some();
            descriptors.extend(self.twin.get().map(|twin| PollFd::new(twin.as_fd(), twin_events)));
            match poll(&mut descriptors, timeout) {
                Err(Errno::EINTR) => return Ok(()),
                result => result?,
            };
            let happened =
                |at: usize| descriptors.get(at).and_then(PollFd::revents).unwrap_or(PollFlags::empty());
            if happened(1).contains(PollFlags::POLLIN) {
                self.alarm.hush();
            }
            if unmask && happened(2).contains(PollFlags::POLLIN) {
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

    /// Ends the session if its memory was lost.
    fn check_memory(&self) {
        if self.alarm.memory_lost() {
            let entries = self.memory.entries();
            let lost = entries.iter().find(|entry| entry.value.is_lost());
            let range = lost.map(|entry| entry.start()..=entry.last());
            self.session().abort(SessionError::MemoryLost { range });
        }
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
                .dma_message(CommandCode::DMA_READ, |session| session.dma_read(DmaAccess { address, count }))
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
            self.dma_message(CommandCode::DMA_WRITE, |session| session.dma_write(DmaWrite { address, data }))
                .map_err(|_| DmaError::Refused { iova: to, length: from.len() })?;
            address = address.wrapping_add(data.len() as u64);
        }
        Ok(())
    }

    fn are_served(&self) -> bool {
        self.session().client().is_some_and(Capabilities::serve_dma)
    }
}

/// Serves `device` to the client at the other end of `stream` until it leaves. Blocks; to end it from elsewhere,
/// shut the stream down. When it returns, the device has let go of the client.
///
/// # Errors
/// [`ServeError`] when the session ended for another reason than the client's leaving.
pub fn serve(stream: UnixStream, device: &dyn Device, messages: &Arc<Messages>) -> Result<(), ServeError> {
    let description = device.description();
    let counts: Vec<u32> = description.irqs.iter().map(|irq| irq.count).collect();
    let connection = Arc::new(Connection {
        session: Mutex::new(Session::new(messages.clone(), description.offer(), Instant::now())),
        socket: Socket::new(stream)?,
        twin: OnceLock::new(),
        buffer: Mutex::new(vec![0; limits::RECEIPT]),
        alarm: Arc::new(Alarm::new()?),
        thread: thread::current().id(),
        dma_over: Condvar::new(),
        memory: Arc::new(dma::Table::new(description.max_dma_maps.min(limits::DMA_MAPS) as usize)),
        interrupts: Interrupts::new(&counts),
    });
    device.attach(&connection);
    let result = run(&connection, device);
    connection.flush(&mut connection.session());
    connection.close();
    connection.socket.shut_down();
    if let Some(twin) = connection.twin.get() {
        twin.shut_down();
    }
    device.detach();
    connection.memory.clear();
    result
}

fn run(connection: &Arc<Connection>, device: &dyn Device) -> Result<(), ServeError> {
    let mut look_until = Instant::now();
    // The other descriptors are looked at this often while the socket keeps us busy.
    let mut poll_at = look_until;
    loop {
        connection.check_memory();
        connection.session().expire(Instant::now());
        while let Some(request) = connection.next_request()? {
            execute::execute(connection, device, request);
        }
        connection.flush(&mut connection.session());
        let arrival = connection.receive()?;
        let now = Instant::now();
        match arrival {
            Arrival::Something => look_until = after(now, limits::LOOK),
            Arrival::Nothing if now < look_until => thread::yield_now(),
            Arrival::Nothing => {}
            Arrival::End => return Ok(()),
        }
        let looking = now < look_until;
        if looking && now < poll_at {
            continue;
        }
        poll_at = after(now, limits::LOOK);
        let deadline = if looking { Some(now) } else { connection.session().deadline() };
        match connection.wait(deadline) {
            Err(Errno::ECONNRESET) => return Ok(()),
            result => result?,
        }
    }
}

impl Connection {
    /// Not in the loop's head, where the lock would be held over the body.
    fn next_request(&self) -> Result<Option<Request>, ServeError> {
        let mut session = self.session();
        let request = session.next_request(Instant::now())?;
        if let Some(twin) = session.take_twin() {
            let twin = Socket::new(twin)?;
            self.twin.get_or_init(|| twin);
        }
        Ok(request)
    }
}

fn after(start: Instant, time: Duration) -> Instant {
    start.checked_add(time).unwrap_or(start)
}
