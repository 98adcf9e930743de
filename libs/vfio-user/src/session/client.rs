//! The client's end of a session, without I/O.
//!
//! Any number of commands can be under way. Each has a waiter, whatever that is to the caller, which comes back
//! with the reply. A reply that belongs to no command ends the session: the stream cannot be trusted any more.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;

use crate::transport::{FrameError, Framer, Message};
use crate::wire::{Command, CommandCode, Kind};

/// Why the session cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The stream cannot be cut into messages any more.
    #[error("The server's stream is broken")]
    Frame(#[from] FrameError),
    /// A reply to nothing.
    #[error("The server answered a {code} with the id {id}, which was not sent")]
    UnexpectedReply {
        /// The id in it.
        id: u16,
        /// The command in it.
        code: CommandCode,
    },
    /// A reply that names another command than the one that has its id.
    #[error("The server answered {sent} with the id {id} as if it were {answered}")]
    WrongCommand {
        /// The id of both.
        id: u16,
        /// What was sent.
        sent: CommandCode,
        /// What was answered.
        answered: CommandCode,
    },
    /// A command of the server's where only replies belong.
    #[error("The server sent a {code} beside its twin socket")]
    BesideTwin {
        /// The command.
        code: CommandCode,
    },
    /// Neither a command nor a reply.
    #[error("The server sent a message of type {kind}")]
    InvalidType {
        /// The type.
        kind: u8,
    },
}

/// More commands are under way than there are ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{count} commands are under way already")]
pub struct TooManyCommands {
    /// How many.
    pub count: usize,
}

/// What the server sent.
#[derive(Debug)]
pub enum Event<W> {
    /// The reply to a command.
    Reply {
        /// Who waits for it.
        waiter: W,
        /// The reply; not looked into yet.
        message: Message,
        /// The errno, if the command failed; some servers leave it 0.
        error: Option<u32>,
    },
    /// A command of the server's, to be answered unless it says that no reply is wanted.
    Command {
        /// The command; not looked into yet.
        message: Message,
        /// Whether nothing may be sent back.
        no_reply: bool,
    },
}

/// The session. Dropping it drops the waiters.
///
/// A twin socket is a session of its own, in which nothing is sent, and so every reply is one to nothing.
#[derive(Debug)]
pub struct Session<W> {
    framer: Framer,
    /// The server's commands come elsewhere.
    has_twin: bool,
    pending: HashMap<u16, (CommandCode, W)>,
    last_id: u16,
}

impl<W> Default for Session<W> {
    fn default() -> Self {
        Self::new()
    }
}

impl<W> Session<W> {
    /// Nothing was sent.
    pub fn new() -> Self {
        Self { framer: Framer::new(), has_twin: false, pending: HashMap::new(), last_id: 0 }
    }

    /// From now on the server's commands come over the twin socket; one that does not ends the session.
    pub fn set_twin(&mut self) {
        self.has_twin = true;
    }

    /// The message of a command whose reply is for `waiter`. Its id stays taken until the reply comes, also if
    /// nobody waits for it any more.
    ///
    /// # Errors
    /// [`TooManyCommands`]
    pub fn request(&mut self, command: &Command<'_>, waiter: W) -> Result<Vec<u8>, TooManyCommands> {
        let count = self.pending.len();
        if count > usize::from(u16::MAX) {
            return Err(TooManyCommands { count });
        }
        let id = self.next_id();
        self.pending.insert(id, (command.code(), waiter));
        Ok(command.encode(id, false))
    }

    /// The message of a command that is not to be answered.
    pub fn post(&mut self, command: &Command<'_>) -> Vec<u8> {
        command.encode(self.next_id(), true)
    }

    /// An id that no reply is expected for; there is one.
    fn next_id(&mut self) -> u16 {
        loop {
            self.last_id = self.last_id.wrapping_add(1);
            if !self.pending.contains_key(&self.last_id) || self.pending.len() > usize::from(u16::MAX) {
                return self.last_id;
            }
        }
    }

    /// How many commands were not answered yet.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Who waits.
    pub fn waiters(&self) -> impl Iterator<Item = &W> {
        self.pending.values().map(|(_, waiter)| waiter)
    }

    /// Takes what came from the socket, in any fragmentation.
    pub fn receive(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>) {
        self.framer.push(bytes, descriptors);
    }

    /// Whether [`Session::next_event`] has something to say.
    pub fn has_event(&self) -> bool {
        self.framer.has_message()
    }

    /// What the server sent next, if all of it has arrived.
    ///
    /// # Errors
    /// [`SessionError`]; there is no way to go on.
    pub fn next_event(&mut self) -> Result<Option<Event<W>>, SessionError> {
        let Some(message) = self.framer.next_message()? else { return Ok(None) };
        let (id, answered) = (message.header.id(), message.header.code());
        match message.header.kind() {
            Kind::Command { .. } if self.has_twin => Err(SessionError::BesideTwin { code: answered }),
            Kind::Command { no_reply } => Ok(Some(Event::Command { message, no_reply })),
            Kind::Invalid(kind) => Err(SessionError::InvalidType { kind }),
            // A waiter is let go of only with its reply, or with the session.
            Kind::Reply { error } => match self.pending.entry(id) {
                Entry::Vacant(_) => Err(SessionError::UnexpectedReply { id, code: answered }),
                Entry::Occupied(entry) if entry.get().0 != answered => {
                    Err(SessionError::WrongCommand { id, sent: entry.get().0, answered })
                }
                Entry::Occupied(entry) => {
                    let (_, waiter) = entry.remove();
                    Ok(Some(Event::Reply { waiter, message, error }))
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
