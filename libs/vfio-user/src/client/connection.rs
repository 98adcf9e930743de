//! The client's socket: who sends, who waits, and the thread that reads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::ClientError;
use crate::counters::Messages;
use crate::dma::{self, DmaError, Iova, Table, View};
use crate::limits;
use crate::session::client::{Event, Session, SessionError, TooManyCommands};
use crate::transport::{Message, Outbox, Received, Sent, Socket};
use crate::wire::{Command, CommandCode, Reply, encode_error};

/// Why a connection is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disconnect {
    /// The server closed it, or is gone.
    #[error("the server closed it")]
    Server,
    /// It was closed here.
    #[error("it was closed by this client")]
    Here,
    /// The server broke the protocol.
    #[error("the server broke the protocol")]
    Session(#[from] SessionError),
    /// The server does not read what it is sent.
    #[error("the server takes no more messages")]
    Stuck,
    /// The socket failed.
    #[error("the socket failed: {0}")]
    Socket(Errno),
}

impl From<io::Error> for Disconnect {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Server,
            _ => Self::Socket(Errno::from_raw(error.raw_os_error().unwrap_or_default())),
        }
    }
}

/// The reply to a command that did not fail.
#[derive(Debug)]
pub(super) struct Answer(Message);

impl Answer {
    /// The reply, typed.
    pub(super) fn reply(&self) -> Result<Reply<'_>, ClientError> {
        let code = self.0.header.code();
        Reply::decode(code, &self.0.body).map_err(|source| ClientError::Malformed { code, source })
    }

    /// What came with it; what is not taken is closed.
    pub(super) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0.descriptors)
    }

    /// The error that it does not answer what was asked.
    pub(super) fn mismatch(&self) -> ClientError {
        ClientError::Mismatch { code: self.0.header.code() }
    }
}

/// A reply, and the errno if the command failed.
type Outcome = (Message, Option<u32>);

#[derive(Debug)]
struct State {
    session: Session<SyncSender<Outcome>>,
    outbox: Outbox,
    ended: Option<Disconnect>,
}

pub(super) struct Connection {
    socket: Socket,
    state: Mutex<State>,
    timeout: Duration,
    /// What the server may reach by messages.
    pub(super) memory: Arc<Table<dma::Region>>,
    pub(super) sent: Messages,
    pub(super) received: Messages,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Connection {
    pub(super) fn new(stream: UnixStream, timeout: Duration) -> io::Result<Self> {
        Ok(Self {
            socket: Socket::new(stream)?,
            state: Mutex::new(State { session: Session::new(), outbox: Outbox::new(), ended: None }),
            timeout,
            memory: Arc::new(Table::new(usize::try_from(limits::DMA_MAPS).unwrap_or(usize::MAX))),
            sent: Messages::default(),
            received: Messages::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ended(&self) -> Option<Disconnect> {
        self.lock().ended.clone()
    }

    /// Ends it, once; whoever waits is told, and the reader leaves.
    pub(super) fn end(&self, cause: Disconnect) {
        let mut state = self.lock();
        if state.ended.is_none() {
            state.ended = Some(cause);
            state.session = Session::new();
            state.outbox = Outbox::new();
            self.socket.shut_down();
        }
    }

    /// Sends a command and waits for its reply.
    pub(super) fn call(
        &self,
        command: &Command<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Answer, ClientError> {
        let code = command.code();
        let deadline = self.deadline();
        // The channel looks for a moment before it sleeps.
        let (waiter, outcome) = sync_channel(1);
        self.send(code, descriptors, deadline, |session| session.request(command, waiter))?;
        match outcome.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((message, None)) => Ok(Answer(message)),
            Ok((_, Some(errno))) => {
                let errno = Errno::from_raw(i32::try_from(errno).unwrap_or_default());
                Err(ClientError::Refused { code, errno })
            }
            Err(RecvTimeoutError::Timeout) => Err(self.timed_out(code)),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended().unwrap_or(Disconnect::Server).into()),
        }
    }

    /// Sends a command that is not answered.
    pub(super) fn post(&self, command: &Command<'_>) -> Result<(), ClientError> {
        self.send(command.code(), &[], self.deadline(), |session| Ok(session.post(command)))
    }

    fn deadline(&self) -> Instant {
        let now = Instant::now();
        now.checked_add(self.timeout).unwrap_or(now)
    }

    fn timed_out(&self, code: CommandCode) -> ClientError {
        ClientError::TimedOut { code, after: self.timeout }
    }

    /// Sends what `message` makes, and waits until the socket has taken it.
    fn send(
        &self,
        code: CommandCode,
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
        message: impl FnOnce(&mut Session<SyncSender<Outcome>>) -> Result<Vec<u8>, TooManyCommands>,
    ) -> Result<(), ClientError> {
        let descriptors =
            descriptors.iter().map(BorrowedFd::try_clone_to_owned).collect::<io::Result<_>>()?;
        let mut state = self.lock();
        if let Some(cause) = &state.ended {
            return Err(cause.clone().into());
        }
        let message = message(&mut state.session)?;
        self.sent.count(code);
        state.outbox.push(message, descriptors);
        loop {
            let sent = state.outbox.flush(&self.socket);
            drop(state);
            match sent {
                Ok(Sent::Done) => return Ok(()),
                Ok(Sent::WouldBlock) => {}
                Err(error) => {
                    self.end(error.into());
                    return Err(self.ended().unwrap_or(Disconnect::Server).into());
                }
            }
            let patience = deadline.saturating_duration_since(Instant::now());
            if patience.is_zero() {
                // Some of the message may be gone: there is no way back.
                self.end(Disconnect::Stuck);
                return Err(self.timed_out(code));
            }
            let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
            if let Err(error) = self.wait(PollFlags::POLLOUT, patience) {
                self.end(Disconnect::Socket(error));
            }
            state = self.lock();
            if let Some(cause) = &state.ended {
                return Err(cause.clone().into());
            }
        }
    }

    fn wait(&self, events: PollFlags, patience: PollTimeout) -> nix::Result<()> {
        match poll(&mut [PollFd::new(self.socket.as_fd(), events)], patience) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Reads until the end, which it tells to all who wait.
    pub(super) fn read(&self) {
        let Err(cause) = self.read_on();
        if !matches!(cause, Disconnect::Server) {
            tracing::debug!(%cause, "the reader ends");
        }
        self.end(cause);
    }

    fn read_on(&self) -> Result<std::convert::Infallible, Disconnect> {
        let mut memory = View::new(self.memory.clone(), Arc::new(NoMessages));
        let mut buffer = vec![0; limits::RECEIPT];
        let mut last = Instant::now();
        loop {
            match self.socket.receive(&mut buffer)? {
                Received::Data { length, descriptors } => {
                    self.take(buffer.get(..length).unwrap_or_default(), descriptors, &mut memory)?;
                    memory.refresh();
                    last = Instant::now();
                }
                // A wake-up costs more than most answers take.
                Received::WouldBlock if last.elapsed() < limits::LOOK => thread::yield_now(),
                Received::WouldBlock => {
                    memory.release();
                    let events = if self.flush()? {
                        PollFlags::POLLIN
                    } else {
                        PollFlags::POLLIN | PollFlags::POLLOUT
                    };
                    self.wait(events, PollTimeout::NONE).map_err(Disconnect::Socket)?;
                }
                Received::Closed => return Err(Disconnect::Server),
            }
        }
    }

    /// How many bytes the server has yet to take.
    pub(super) fn waiting(&self) -> usize {
        self.lock().outbox.len()
    }

    /// Whether the socket has taken all.
    fn flush(&self) -> io::Result<bool> {
        Ok(self.lock().outbox.flush(&self.socket)? == Sent::Done)
    }

    /// Takes what came from the socket.
    fn take(&self, bytes: &[u8], descriptors: Vec<OwnedFd>, memory: &mut View) -> Result<(), Disconnect> {
        self.lock().session.receive(bytes, descriptors);
        loop {
            // A server that asks and does not listen is not listened to either.
            while self.waiting() > limits::WAITING_BYTES && !self.flush()? {
                memory.release();
                self.wait(PollFlags::POLLOUT, PollTimeout::NONE).map_err(Disconnect::Socket)?;
            }
            let event = self.lock().session.next_event()?;
            match event {
                // The caller may have gone, after its time-out.
                Some(Event::Reply { waiter, message, error }) => drop(waiter.try_send((message, error))),
                Some(Event::Command { message, no_reply }) => {
                    self.received.count(message.header.code());
                    let answer = serve(&message, memory);
                    if !no_reply {
                        let mut state = self.lock();
                        state.outbox.push(answer, Vec::new());
                        state.outbox.flush(&self.socket)?;
                    }
                }
                None => return Ok(()),
            }
        }
    }
}

/// Does what the server asks, and gives the reply.
fn serve(message: &Message, memory: &mut View) -> Vec<u8> {
    let (id, code) = (message.header.id(), message.header.code());
    let refuse = |errno: Errno| encode_error(id, code, (errno as i32).unsigned_abs());
    match Command::decode(&message.header, &message.body, message.descriptors.len()) {
        // Nothing that a server may ask for takes a descriptor.
        Ok(_) if !message.descriptors.is_empty() => refuse(Errno::EINVAL),
        Ok(Command::DmaRead(access)) => {
            let mut data = vec![0; usize::try_from(access.count).unwrap_or_default()];
            match memory.read(Iova(access.address), &mut data) {
                Ok(()) => Reply::DmaRead { address: access.address, data: &data }.encode(id),
                Err(_) => refuse(Errno::EFAULT),
            }
        }
        Ok(Command::DmaWrite(write)) => match memory.write(Iova(write.address), write.data) {
            Ok(()) => Reply::DmaWrite(Some(write.access())).encode(id),
            Err(_) => refuse(Errno::EFAULT),
        },
        Ok(_) => refuse(Errno::ENOSYS),
        Err(error) => refuse(error.errno()),
    }
}

/// Our own memory is all mapped.
struct NoMessages;

impl dma::Messages for NoMessages {
    fn read(&self, from: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        Err(DmaError::Refused { iova: from, length: into.len() })
    }

    fn write(&self, to: Iova, from: &[u8]) -> Result<(), DmaError> {
        Err(DmaError::Refused { iova: to, length: from.len() })
    }
}
