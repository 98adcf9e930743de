//! The client's socket: who sends, who waits, and how it ends. Who reads is in `reading`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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
use crate::transport::{Message, Outbox, Socket};
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

    /// Itself, if no descriptors came with it.
    pub(super) fn alone(self) -> Result<Self, ClientError> {
        match self.0.descriptors.len() {
            0 => Ok(self),
            count => Err(self.unwanted(count, 0)),
        }
    }

    /// The error that more descriptors came with it than `most`.
    pub(super) fn unwanted(&self, count: usize, most: usize) -> ClientError {
        ClientError::Descriptors { code: self.0.header.code(), count, most }
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

/// A command whose reply is still to come.
struct Pending {
    code: CommandCode,
    woken: mpsc::Receiver<Wake>,
}

/// How long a caller waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    timeout: Duration,
    deadline: Instant,
}

impl Patience {
    /// From now on.
    pub(super) fn new(timeout: Duration) -> Self {
        let now = Instant::now();
        // A time that no clock reaches: a year is as good.
        let deadline = now.checked_add(timeout.min(limits::EVER)).unwrap_or(now);
        Self { timeout, deadline }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    pub(super) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// For poll(2), which counts in milliseconds: rounded up, so that it is over after it.
    pub(super) fn poll(&self) -> PollTimeout {
        PollTimeout::try_from(self.left().saturating_add(limits::POLL_GRAIN)).unwrap_or(PollTimeout::MAX)
    }

    fn lost(&self, code: CommandCode) -> ClientError {
        ClientError::TimedOut { code, after: self.timeout }
    }
}

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
    /// The socket of the server's commands, if there is one.
    pub(super) twin: OnceLock<Socket>,
    state: Mutex<State>,
    /// Who holds it reads the socket.
    pub(super) incoming: Mutex<Incoming>,
    /// Wakes the client's own thread.
    nudge: EventFd,
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
        let memory = Arc::new(Table::new(usize::try_from(limits::DMA_MAPS).unwrap_or(usize::MAX)));
        Ok(Self {
            socket: Socket::new(stream)?,
            twin: OnceLock::new(),
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
            if let Some(twin) = self.twin.get() {
                twin.shut_down();
            }
        }
    }

    /// The server's commands come over `stream` from now on.
    pub(super) fn set_twin(&self, stream: UnixStream) -> Result<(), ClientError> {
        let twin = Socket::new(stream)?;
        let mut state = self.lock();
        if let Some(cause) = &state.ended {
            return Err(cause.clone().into());
        }
        state.session.set_twin();
        self.twin.get_or_init(|| twin);
        Ok(())
    }

    pub(super) fn has_twin(&self) -> bool {
        self.twin.get().is_some()
    }

    /// Sends a command and waits for its reply.
    pub(super) fn call(
        &self,
        command: &Command<'_>,
        descriptors: &[BorrowedFd<'_>],
        patience: Patience,
    ) -> Result<Answer, ClientError> {
        let pending = self.start(command, descriptors, patience)?;
        self.finish(&pending, patience)
    }

    /// Sends commands, some ahead of the answers, and gives all answers in order. Each may take as long as `timeout`
    /// after the one before; after one that took longer there is no time for the others.
    pub(super) fn call_batch<'a>(
        &self,
        commands: impl Iterator<Item = Result<(Command<'a>, Option<BorrowedFd<'a>>), ClientError>>,
        timeout: Duration,
    ) -> Vec<Result<Answer, ClientError>> {
        let mut patience = Patience::new(timeout);
        let finish = |pending: Result<Pending, ClientError>, patience: &mut Patience| {
            let answer = pending.and_then(|pending| self.finish(&pending, *patience));
            if !matches!(answer, Err(ClientError::TimedOut { .. })) {
                *patience = Patience::new(timeout);
            }
            answer
        };
        let mut under_way = VecDeque::new();
        let mut answers = Vec::new();
        for command in commands {
            if under_way.len() >= limits::PIPELINED
                && let Some(first) = under_way.pop_front()
            {
                answers.push(finish(first, &mut patience));
            }
            under_way.push_back(
                command
                    .and_then(|(command, descriptor)| self.start(&command, descriptor.as_slice(), patience)),
            );
        }
        answers.extend(under_way.into_iter().map(|pending| finish(pending, &mut patience)));
        answers
    }

    /// Sends a command that is to be answered.
    fn start(
        &self,
        command: &Command<'_>,
        descriptors: &[BorrowedFd<'_>],
        patience: Patience,
    ) -> Result<Pending, ClientError> {
        let code = command.code();
        let (waiter, woken) = channel();
        self.send(code, descriptors, patience, |session| session.request(command, waiter))?;
        Ok(Pending { code, woken })
    }

    /// Waits for the reply to a command.
    fn finish(&self, pending: &Pending, patience: Patience) -> Result<Answer, ClientError> {
        let Pending { code, woken } = pending;
        let code = *code;
        let outcome = loop {
            // Reading is quicker than being woken by who reads.
            if let Some(outcome) = self.lead(|incoming| self.read_for(incoming, woken, patience)) {
                self.hand_over();
                break outcome?;
            }
            match woken.recv_timeout(patience.left()) {
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
            None => Err(patience.lost(code)),
        }
    }

    /// Sends a command that is not answered.
    pub(super) fn post(&self, command: &Command<'_>, patience: Patience) -> Result<(), ClientError> {
        self.send(command.code(), &[], patience, |session| Ok(session.post(command)))
    }

    /// Sends what `message` makes, and waits until the socket has taken it.
    fn send(
        &self,
        code: CommandCode,
        descriptors: &[BorrowedFd<'_>],
        patience: Patience,
        message: impl FnOnce(&mut Session<Waiter>) -> Result<Vec<u8>, TooManyCommands>,
    ) -> Result<(), ClientError> {
        let descriptors =
            descriptors.iter().map(BorrowedFd::try_clone_to_owned).collect::<io::Result<_>>()?;
        if patience.is_over() {
            return Err(patience.lost(code));
        }
        // What callers without patience have left is bounded.
        let Some(mut state) = self.send_down_to(limits::WAITING_BYTES, patience)? else {
            return Err(self.not_taken(code, patience));
        };
        let message = message(&mut state.session)?;
        self.sent.count(code);
        state.outbox.push(message, descriptors);
        drop(state);
        match self.send_down_to(0, patience)? {
            Some(_) => Ok(()),
            None => Err(self.not_taken(code, patience)),
        }
    }

    /// Sends until no more than `rest` bytes wait; `None` if that takes too long.
    fn send_down_to(
        &self,
        rest: usize,
        patience: Patience,
    ) -> Result<Option<MutexGuard<'_, State>>, ClientError> {
        loop {
            let mut state = self.lock();
            if let Some(cause) = &state.ended {
                return Err(cause.clone().into());
            }
            let sent = state.outbox.flush(&self.socket);
            if sent.is_ok() && state.outbox.len() <= rest {
                return Ok(Some(state));
            }
            drop(state);
            let waited = sent.map_err(Disconnect::from).and_then(|_| {
                if patience.is_over() {
                    return Ok(false);
                }
                self.wait(PollFlags::POLLOUT, patience.poll()).map_err(Disconnect::Socket)?;
                Ok(true)
            });
            match waited {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(cause) => {
                    self.end(cause);
                    return Err(self.why().into());
                }
            }
        }
    }

    /// The server has not taken what it was sent for as long as a caller waits. Of the message some may be gone, so
    /// it stays and goes out when there is room. A server that takes nothing for the connection's own time is left.
    fn not_taken(&self, code: CommandCode, patience: Patience) -> ClientError {
        if patience.timeout >= self.timeout {
            self.end(Disconnect::Stuck);
        } else {
            self.nudge();
        }
        patience.lost(code)
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
