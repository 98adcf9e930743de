//! The client's socket: who sends, who waits, and how it ends. Who reads is in `reading`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::ClientError;
use super::reading::Incoming;
use crate::counters::Messages;
use crate::dma::{self, Table};
use crate::limits;
use crate::session::client::{Session, SessionError, TooManyCommands};
use crate::transport::{Message, Outbox, Sent, Socket};
use crate::wire::{Command, CommandCode, Reply};

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

/// What a caller is woken with.
#[derive(Debug)]
pub(super) enum Wake {
    /// Its reply, and the errno if the command failed.
    Reply(Message, Option<u32>),
    /// Nobody reads the socket any more: it may.
    Lead,
}

pub(super) type Waiter = mpsc::Sender<Wake>;

#[derive(Debug)]
pub(super) struct State {
    pub(super) session: Session<Waiter>,
    pub(super) outbox: Outbox,
    pub(super) ended: Option<Disconnect>,
}

impl State {
    /// Whether the server has left so many replies unread that it gets no more.
    pub(super) fn is_flooded(&self) -> bool {
        self.outbox.len() > limits::WAITING_BYTES
    }
}

pub(super) struct Connection {
    pub(super) socket: Socket,
    state: Mutex<State>,
    /// Who holds it reads the socket.
    pub(super) incoming: Mutex<Incoming>,
    /// Wakes the client's own thread.
    nudge: EventFd,
    pub(super) timeout: Duration,
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
        let memory = Arc::new(Table::new(usize::try_from(limits::DMA_MAPS).unwrap_or(usize::MAX)));
        Ok(Self {
            socket: Socket::new(stream)?,
            state: Mutex::new(State { session: Session::new(), outbox: Outbox::new(), ended: None }),
            incoming: Mutex::new(Incoming::new(&memory)),
            nudge: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            timeout,
            memory,
            sent: Messages::default(),
            received: Messages::default(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ended(&self) -> Option<Disconnect> {
        self.lock().ended.clone()
    }

    /// Why it ended, when it has.
    pub(super) fn why(&self) -> Disconnect {
        self.ended().unwrap_or(Disconnect::Server)
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
        let (waiter, woken) = channel();
        self.send(code, descriptors, deadline, |session| session.request(command, waiter))?;
        let outcome = loop {
            // Reading is quicker than being woken by who reads.
            if let Some(outcome) = self.lead(|incoming| self.read_for(incoming, &woken, deadline)) {
                self.hand_over();
                break outcome?;
            }
            match woken.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Wake::Lead) => {}
                Ok(Wake::Reply(message, error)) => break Some((message, error)),
                Err(RecvTimeoutError::Timeout) => break None,
                Err(RecvTimeoutError::Disconnected) => return Err(self.why().into()),
            }
        };
        match outcome {
            Some((message, None)) => Ok(Answer(message)),
            Some((_, Some(errno))) => {
                let errno = Errno::from_raw(i32::try_from(errno).unwrap_or_default());
                Err(ClientError::Refused { code, errno })
            }
            None => Err(self.timed_out(code)),
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
        message: impl FnOnce(&mut Session<Waiter>) -> Result<Vec<u8>, TooManyCommands>,
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
                    return Err(self.why().into());
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

    /// Wakes who is in [`Connection::wait_or_nudge`], or will be.
    pub(super) fn nudge(&self) {
        // A full counter wakes as well.
        let _ = self.nudge.write(1);
    }

    /// Waits for the socket, or for a nudge. It may wake up for nothing.
    pub(super) fn wait_or_nudge(&self, events: PollFlags) -> nix::Result<()> {
        let socket = PollFd::new(self.socket.as_fd(), events);
        match poll(&mut [socket, PollFd::new(self.nudge.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
        match self.nudge.read() {
            Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Waits for the socket. It may wake up for nothing.
    pub(super) fn wait(&self, events: PollFlags, patience: PollTimeout) -> nix::Result<()> {
        match poll(&mut [PollFd::new(self.socket.as_fd(), events)], patience) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
