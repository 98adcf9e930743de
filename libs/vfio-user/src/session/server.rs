//! The server's end of a session, without I/O: bytes and descriptors in, commands out; answers in, bytes and
//! descriptors out.
//!
//! Commands are executed one at a time, in the order of their arrival, and the next is given out when the one
//! before was answered; that is the order that the protocol promises. Meanwhile everything is still read:
//! replies to our own DMA messages are taken at once, commands wait in a bounded queue.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::counters::Messages;
use crate::limits;
use crate::transport::{FrameError, Framer, Message, Outbox};
use crate::wire::{
    Capabilities, Command, CommandCode, DmaAccess, DmaWrite, Header, Kind, Offer, Reply, TwinSocket, Version,
    encode_error,
};

/// Why a session cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The stream cannot be cut into messages any more.
    #[error("The client's stream is broken")]
    Frame(#[from] FrameError),
    /// The first message was not a valid VERSION.
    #[error("The client began with {0}, which is not a valid VERSION")]
    NotNegotiated(CommandCode),
    /// An answer is overdue: the client would not take it any more, so the stream ends here.
    #[error("{code} was not answered within {limit:?}")]
    Overdue {
        /// What is not answered.
        code: CommandCode,
        /// The limit.
        limit: Duration,
    },
    /// The client did not say what it is. It would hold the device's only place for ever.
    #[error("The client did not negotiate within {limit:?}")]
    Silent {
        /// The limit.
        limit: Duration,
    },
    /// The client sent some of a message and then nothing.
    #[error("The client stopped in the middle of a message for {limit:?}")]
    Stalled {
        /// The limit.
        limit: Duration,
    },
    /// The client did not answer a message of ours. It may answer later, about memory that was given away.
    #[error("The client left a {code} unanswered for {limit:?}")]
    Unanswered {
        /// What is not answered.
        code: CommandCode,
        /// How long we waited.
        limit: Duration,
    },
    /// The client shrank a file under us.
    #[error("The client took memory away that it has mapped for DMA{}", place(.range.as_ref()))]
    MemoryLost {
        /// Which; `None` if it has unmapped it meanwhile.
        range: Option<RangeInclusive<u64>>,
    },
    /// The twin socket is for our commands and the replies to them.
    #[error("The client sent {0} over the twin socket")]
    OnTwin(CommandCode),
    /// What carries the session failed under it.
    #[error("The client's socket failed")]
    Transport(#[source] io::Error),
}

fn place(range: Option<&RangeInclusive<u64>>) -> String {
    range.map_or_else(String::new, |range| format!(" at {:#x} to {:#x}", range.start(), range.end()))
}

/// Where the session is.
#[derive(Debug)]
enum Phase {
    /// Before VERSION.
    Opening,
    /// Commands are served.
    Open(Capabilities),
    /// No more commands; why is told once.
    Ended(Option<SessionError>),
}

/// Which command an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// A command to execute, still as a message: [`Request::command`] is its typed form.
#[derive(Debug)]
pub struct Request {
    /// Give it back with the answer.
    pub ticket: Ticket,
    message: Message,
}

impl Request {
    /// The command, which `descriptors` came with; it was decoded before, so it is there.
    pub fn command(&self, descriptors: usize) -> Option<Command<'_>> {
        Command::decode(&self.message.header, &self.message.body, descriptors).ok()
    }

    /// Which command it is.
    pub fn code(&self) -> CommandCode {
        self.message.header.code()
    }

    /// Takes the descriptors that came with it.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.message.descriptors)
    }
}

#[derive(Debug)]
struct Executing {
    ticket: Ticket,
    header: Header,
    deadline: Instant,
}

/// One of our DMA messages.
#[derive(Debug)]
enum Dma {
    Waiting(DmaAccess),
    Over(Result<Vec<u8>, Errno>),
}

/// Names one of our DMA messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaId(u16);

/// The session.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    /// What the device is, for the answer to VERSION.
    offer: Offer,
    framer: Framer,
    /// When the client connected; once it has negotiated, when something last came of it.
    heard: Instant,
    waiting: VecDeque<(Message, Instant)>,
    waiting_bytes: usize,
    waiting_descriptors: usize,
    executing: Option<Executing>,
    tickets: u64,
    dma: HashMap<u16, Dma>,
    last_dma: u16,
    output: Outbox,
    /// Where our own commands go, if the client has asked for it.
    twin: Option<Twin>,
    messages: Arc<Messages>,
}

/// The second socket, for our commands and their replies.
#[derive(Debug)]
struct Twin {
    /// Our end, until it is taken.
    end: Option<UnixStream>,
    framer: Framer,
    output: Outbox,
}

impl Session {
    /// A session that waits for VERSION from `now` on and answers it with `offer`; `messages` counts what crosses the
    /// socket, either way.
    pub fn new(messages: Arc<Messages>, offer: Offer, now: Instant) -> Self {
        Self {
            phase: Phase::Opening,
            offer,
            framer: Framer::new(),
            heard: now,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            waiting_descriptors: 0,
            executing: None,
            tickets: 0,
            dma: HashMap::new(),
            last_dma: 0,
            output: Outbox::new(),
            twin: None,
            messages,
        }
    }

    /// What the client can do, once it said so.
    pub fn client(&self) -> Option<&Capabilities> {
        match &self.phase {
            Phase::Open(capabilities) => Some(capabilities),
            Phase::Opening | Phase::Ended(_) => None,
        }
    }

    /// Takes what came from the socket at `now`, in any fragmentation. A stream that breaks ends the session.
    pub fn receive(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>, now: Instant) {
        if matches!(self.phase, Phase::Ended(_)) {
            return;
        }
        if matches!(self.phase, Phase::Open(_)) {
            self.heard = now;
        }
        self.framer.push(bytes, descriptors);
        loop {
            match self.framer.next_message() {
                Ok(Some(message)) => self.sort(message, now),
                Ok(None) => return,
                Err(error) => {
                    if let FrameError::Size { header } = error {
                        self.refuse(&header, Errno::EINVAL);
                    }
                    return self.abort(error.into());
                }
            }
        }
    }

    /// Takes what came from the twin socket, as [`Session::receive`].
    pub fn receive_twin(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>) {
        let Some(twin) = &mut self.twin else { return };
        twin.framer.push(bytes, descriptors);
        loop {
            let Some(twin) = &mut self.twin else { return };
            match twin.framer.next_message() {
                Ok(Some(message)) => match message.header.kind() {
                    Kind::Reply { error } => self.dma_reply(&message, error),
                    _ => return self.abort(SessionError::OnTwin(message.header.code())),
                },
                Ok(None) => return,
                Err(error) => return self.abort(error.into()),
            }
        }
    }

    fn sort(&mut self, message: Message, now: Instant) {
        if let Kind::Reply { error } = message.header.kind() {
            if self.twin.is_some() {
                return tracing::debug!(id = message.header.id(), "a reply beside the twin socket");
            }
            return self.dma_reply(&message, error);
        }
        self.messages.count(message.header.code());
        self.waiting_bytes = self.waiting_bytes.saturating_add(message.body.len());
        self.waiting_descriptors = self.waiting_descriptors.saturating_add(message.descriptors.len());
        self.waiting.push_back((message, now));
    }

    fn dma_reply(&mut self, message: &Message, error: Option<u32>) {
        let Some(state) = self.dma.get_mut(&message.header.id()) else {
            return tracing::debug!(id = message.header.id(), "a reply to nothing");
        };
        let Dma::Waiting(access) = *state else { return };
        let outcome = match (error, Reply::decode(message.header.code(), &message.body)) {
            (Some(errno), _) => Err(i32::try_from(errno).map_or(Errno::EIO, Errno::from_raw)),
            (None, Ok(Reply::DmaRead { address, data }))
                if address == access.address && data.len() == access.count as usize =>
            {
                Ok(data.to_vec())
            }
            // What a client says of its own memory is not checked further: QEMU's releases say it differently.
            (None, Ok(Reply::DmaWrite(_))) => Ok(vec![]),
            (None, other) => {
                tracing::warn!(?access, reply = ?other.map(|reply| reply.code()), "nonsense answers a DMA message");
                Err(Errno::EPROTO)
            }
        };
        *state = Dma::Over(outcome);
    }

    /// Whether more may be read from the socket: the queue has room.
    pub fn hungry(&self) -> bool {
        self.waiting.len() < limits::WAITING_COMMANDS
            && self.waiting_bytes < limits::WAITING_BYTES
            && self.waiting_descriptors < limits::WAITING_DESCRIPTORS
            && self.takes_replies()
    }

    /// Whether the client takes its replies: until it does, nothing more is executed or read.
    fn takes_replies(&self) -> bool {
        self.output.len() < limits::WAITING_BYTES && self.output.descriptors() < limits::WAITING_DESCRIPTORS
    }

    /// The next command to execute, if there is one and its turn has come. Malformed ones are answered here.
    ///
    /// # Errors
    /// Why the session has ended, once; of a session that [`Session::end`] ended there is nothing to tell.
    pub fn next_request(&mut self, now: Instant) -> Result<Option<Request>, SessionError> {
        while self.executing.is_none() && self.takes_replies() {
            let Some((message, arrived)) = self.waiting.pop_front() else { break };
            self.waiting_bytes = self.waiting_bytes.saturating_sub(message.body.len());
            self.waiting_descriptors = self.waiting_descriptors.saturating_sub(message.descriptors.len());
            let header = message.header;
            // Nobody waits for the answer to a posted command, so its time begins with its execution.
            let deadline = reply_deadline(if is_posted(&header) { now } else { arrived });
            if now >= deadline {
                self.abort_overdue(header.code());
                break;
            }
            let command = Command::decode(&header, &message.body, message.descriptors.len());
            match (&self.phase, header.kind(), command) {
                (Phase::Opening, Kind::Command { .. }, Ok(Command::Version(version))) => {
                    self.negotiate(&header, &version, now);
                }
                (Phase::Opening, ..) => {
                    self.refuse(&header, Errno::EINVAL);
                    self.abort(SessionError::NotNegotiated(header.code()));
                }
                (_, Kind::Command { .. }, Ok(Command::Version(_))) => self.refuse(&header, Errno::EINVAL),
                (_, Kind::Command { .. }, Ok(_)) => {
                    self.tickets = self.tickets.wrapping_add(1);
                    let ticket = Ticket(self.tickets);
                    self.executing = Some(Executing { ticket, header, deadline });
                    return Ok(Some(Request { ticket, message }));
                }
                (_, Kind::Command { .. }, Err(error)) => {
                    tracing::debug!(code = %header.code(), %error, "malformed command");
                    self.refuse(&header, error.errno());
                }
                (_, kind, _) => {
                    tracing::debug!(?kind, "a message is neither command nor reply");
                    self.refuse(&header, Errno::EINVAL);
                }
            }
        }
        match &mut self.phase {
            Phase::Ended(cause) => cause.take().map_or(Ok(None), Err),
            Phase::Opening | Phase::Open(_) => Ok(None),
        }
    }

    fn negotiate(&mut self, header: &Header, version: &Version, now: Instant) {
        if !is_posted(header) {
            let mut answer = version.answer(&self.offer);
            let mut descriptors = Vec::new();
            if let Some(theirs) = self.twin_for(&version.capabilities) {
                answer.capabilities.twin_socket = Some(TwinSocket { supported: true, fd_index: Some(0) });
                descriptors.push(theirs);
            }
            self.output.push(Reply::Version(answer).encode(header.id()), descriptors);
        }
        self.phase = Phase::Open(version.capabilities.clone());
        self.heard = now;
    }

    /// The client's end of a twin socket, if it asks for one. Only then: a descriptor is the end of it to QEMU.
    fn twin_for(&mut self, client: &Capabilities) -> Option<OwnedFd> {
        if !client.twin_socket.is_some_and(|twin| twin.supported) || client.descriptors() == 0 {
            return None;
        }
        let (ours, theirs) = UnixStream::pair()
            .inspect_err(|error| tracing::warn!(%error, "no twin socket for this client"))
            .ok()?;
        self.twin = Some(Twin { end: Some(ours), framer: Framer::new(), output: Outbox::new() });
        Some(theirs.into())
    }

    /// Our end of the twin socket, once, when there is one.
    pub fn take_twin(&mut self) -> Option<UnixStream> {
        self.twin.as_mut()?.end.take()
    }

    fn refuse(&mut self, header: &Header, errno: Errno) {
        if !is_posted(header) {
            // Positive whatever the device made of it: errno 0 would look like success to some.
            let errno = u32::try_from(errno as i32).unwrap_or(0).max(1);
            self.output.push(encode_error(header.id(), header.code(), errno), vec![]);
        }
    }

    /// Answers the command that is being executed; an answer to another is late and ignored, and so is one past
    /// the deadline: that ends the session. Gives whether there is something to do now.
    pub fn finish(
        &mut self,
        ticket: Ticket,
        answer: Result<(Reply<'_>, Vec<OwnedFd>), Errno>,
        now: Instant,
    ) -> bool {
        let Some(Executing { header, deadline, .. }) =
            self.executing.take_if(|executing| executing.ticket == ticket)
        else {
            return false;
        };
        match answer {
            _ if now >= deadline => self.abort_overdue(header.code()),
            Err(errno) => self.refuse(&header, errno),
            Ok(_) if is_posted(&header) => {}
            Ok((reply, descriptors)) => self.output.push(reply.encode(header.id()), descriptors),
        }
        true
    }

    /// When the session ends unless something happens until then.
    pub fn deadline(&self) -> Option<Instant> {
        self.answer_deadline().into_iter().chain(self.client_deadline().map(|(deadline, _)| deadline)).min()
    }

    /// When the session ends unless the command that is being executed is answered.
    pub fn answer_deadline(&self) -> Option<Instant> {
        self.executing.as_ref().map(|executing| executing.deadline)
    }

    /// When the client's patience with us is not the question, but ours with it.
    fn client_deadline(&self) -> Option<(Instant, SessionError)> {
        let (limit, error) = match self.phase {
            Phase::Opening => (limits::HANDSHAKE, SessionError::Silent { limit: limits::HANDSHAKE }),
            // What we do not read cannot come.
            Phase::Open(_) if self.framer.is_mid_message() && self.hungry() => {
                (limits::STALL, SessionError::Stalled { limit: limits::STALL })
            }
            Phase::Open(_) | Phase::Ended(_) => return None,
        };
        Some((self.heard.checked_add(limit)?, error))
    }

    /// Ends the session if a deadline is past.
    pub fn expire(&mut self, now: Instant) {
        if let Some(Executing { header, .. }) = self.executing.take_if(|executing| now >= executing.deadline)
        {
            self.abort_overdue(header.code());
        }
        if matches!(self.phase, Phase::Open(_)) && !self.hungry() {
            self.heard = now;
        }
        if let Some((deadline, error)) = self.client_deadline()
            && now >= deadline
        {
            self.abort(error);
        }
    }

    fn abort_overdue(&mut self, code: CommandCode) {
        self.abort(SessionError::Overdue { code, limit: limits::REPLY });
    }

    /// Ends the session; [`Session::next_request`] tells why.
    pub fn abort(&mut self, cause: SessionError) {
        if !matches!(self.phase, Phase::Ended(_)) {
            self.end();
            self.phase = Phase::Ended(Some(cause));
        }
    }

    /// No more commands, no more answers; what is in the output may still be sent.
    pub fn end(&mut self) {
        if !matches!(self.phase, Phase::Ended(_)) {
            self.phase = Phase::Ended(None);
        }
        self.framer = Framer::new();
        if let Some(twin) = &mut self.twin {
            twin.framer = Framer::new();
        }
        self.executing = None;
        self.waiting.clear();
        self.waiting_bytes = 0;
        self.waiting_descriptors = 0;
        for state in self.dma.values_mut() {
            if let Dma::Waiting(_) = state {
                *state = Dma::Over(Err(Errno::ENOTCONN));
            }
        }
    }

    /// Sends a DMA_READ. At most [`Session::dma_limit`] bytes.
    ///
    /// # Errors
    /// ENOTCONN before negotiation and after the end, EAGAIN when all ids are in use.
    pub fn dma_read(&mut self, access: DmaAccess) -> Result<DmaId, Errno> {
        self.dma_message(access, Command::DmaRead(access))
    }

    /// Sends a DMA_WRITE. At most [`Session::dma_limit`] bytes.
    ///
    /// # Errors
    /// As [`Session::dma_read`].
    pub fn dma_write(&mut self, write: DmaWrite<'_>) -> Result<DmaId, Errno> {
        self.dma_message(write.access(), Command::DmaWrite(write))
    }

    fn dma_message(&mut self, access: DmaAccess, command: Command<'_>) -> Result<DmaId, Errno> {
        if self.client().is_none() {
            return Err(Errno::ENOTCONN);
        }
        if self.dma.len() >= limits::DMA_MESSAGES {
            return Err(Errno::EAGAIN);
        }
        // There are far fewer messages than ids, so this finds one.
        self.last_dma = self.last_dma.wrapping_add(1);
        while self.dma.contains_key(&self.last_dma) {
            self.last_dma = self.last_dma.wrapping_add(1);
        }
        self.messages.count(command.code());
        let output = self.twin.as_mut().map_or(&mut self.output, |twin| &mut twin.output);
        output.push(command.encode(self.last_dma, false), vec![]);
        self.dma.insert(self.last_dma, Dma::Waiting(access));
        Ok(DmaId(self.last_dma))
    }

    /// Whether a DMA message is not answered yet.
    pub fn dma_under_way(&self, id: DmaId) -> bool {
        matches!(self.dma.get(&id.0), Some(Dma::Waiting(_)))
    }

    /// What became of a DMA message: `None` while it is under way. The outcome is given once.
    pub fn dma_outcome(&mut self, id: DmaId) -> Option<Result<Vec<u8>, Errno>> {
        if self.dma_under_way(id) {
            return None;
        }
        match self.dma.remove(&id.0) {
            Some(Dma::Over(outcome)) => Some(outcome),
            _ => Some(Err(Errno::EINVAL)),
        }
    }

    /// The most bytes in one DMA message: a client that sends its reply in one piece without waiting (QEMU) cuts
    /// off what its socket does not take, so they are small.
    pub fn dma_limit(&self) -> u32 {
        self.client().map_or(1, Capabilities::data_transfer).clamp(1, limits::DMA_MESSAGE)
    }

    /// What is to be sent next.
    pub fn output(&mut self) -> &mut Outbox {
        &mut self.output
    }

    /// What is to be sent next over the twin socket, if there is one.
    pub fn twin_output(&mut self) -> Option<&mut Outbox> {
        self.twin.as_mut().map(|twin| &mut twin.output)
    }

    /// Whether anything is to be sent.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty() || self.twin.as_ref().is_some_and(|twin| !twin.output.is_empty())
    }
}

fn is_posted(header: &Header) -> bool {
    matches!(header.kind(), Kind::Command { no_reply: true })
}

/// When it is too late to answer a command of `start`.
fn reply_deadline(start: Instant) -> Instant {
    start.checked_add(limits::REPLY).unwrap_or(start)
}

#[cfg(test)]
mod tests;
