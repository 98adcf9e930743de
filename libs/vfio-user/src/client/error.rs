//! What a call can end in.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;

use super::connection::Disconnect;
use crate::session::client::TooManyCommands;
use crate::wire::{CommandCode, DecodeError, ReplyError};

/// What a call can end in, other than well.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no server at this path, or it does not take us.
    #[error("Cannot connect to {path}", path = path.display())]
    Connect {
        /// The path.
        path: PathBuf,
        /// What connect(2) says.
        source: io::Error,
    },
    /// The server's answer is an error.
    #[error("The server refused {code}: {errno}")]
    Refused {
        /// What was asked.
        code: CommandCode,
        /// As sent; `UnknownErrno` if the server gave none.
        errno: Errno,
    },
    /// The server's answer makes no sense.
    #[error("The server's answer to {code} is malformed")]
    Malformed {
        /// What was asked.
        code: CommandCode,
        /// What is wrong with it.
        source: ReplyError,
    },
    /// The server's answer is well-formed, but to another question.
    #[error("The server's answer to {code} is not to what was asked")]
    Mismatch {
        /// What was asked.
        code: CommandCode,
    },
    /// The server's answer came with more descriptors than it has use for.
    #[error("{count} descriptors came with the server's answer to {code}, not {most}")]
    Descriptors {
        /// What was asked.
        code: CommandCode,
        /// How many came.
        count: usize,
        /// The most that belong to it.
        most: usize,
    },
    /// The server's twin socket is not what the server says.
    #[error("The server's twin socket cannot be used: {reason}")]
    TwinSocket {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The server has done some of what was asked, in order.
    #[error("The server did {done} of {count} writes")]
    Incomplete {
        /// How many it did.
        done: u64,
        /// How many it was to do.
        count: u64,
    },
    /// The server says that its device has more of something than any device.
    #[error("The server has {count} {what}, more than {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: u32,
        /// The most that we take.
        limit: u32,
    },
    /// No answer came. It may still come and is then dropped; what was asked may have been done, or be done later.
    #[error("The server did not answer {code} within {after:?}")]
    TimedOut {
        /// What was asked.
        code: CommandCode,
        /// How long we waited.
        after: Duration,
    },
    /// The connection is over.
    #[error("The connection is over")]
    Disconnected(#[from] Disconnect),
    /// All ids are taken.
    #[error(transparent)]
    Busy(#[from] TooManyCommands),
    /// What the caller asks for cannot be put into a message.
    #[error("{code} cannot be sent")]
    Invalid {
        /// What was to be asked.
        code: CommandCode,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// This process is out of something: descriptors, threads or memory.
    #[error("This process is out of resources")]
    Resources(#[from] io::Error),
}
