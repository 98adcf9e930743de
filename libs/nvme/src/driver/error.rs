//! What can go wrong.

use std::io;
use std::time::Duration;

use crate::spec::{Capabilities, ControllerStatus, Status};
use crate::{Nsid, QueueId};

/// A command that the drive completed with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("The drive answered {status:?} (do not retry: {do_not_retry})")]
pub struct CommandError {
    /// The status code.
    pub status: Status,
    /// The same command would fail again.
    pub do_not_retry: bool,
}

/// A command that could not be queued. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many commands are outstanding as the queue holds.
    #[error("All {depth} commands of queue {queue} are outstanding", queue = queue.0)]
    Full {
        /// The queue.
        queue: QueueId,
        /// How many it holds.
        depth: u16,
    },
    /// A command cannot move so many blocks.
    #[error("A command moves 1 to 65536 blocks, not {0}")]
    Blocks(u32),
    /// A command cannot name so many ranges.
    #[error("A command deallocates 1 to 256 ranges, not {0}")]
    Ranges(u32),
}

/// Why the drive could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Registers, doorbells or memory could not be reached.
    #[error("The device could not be reached")]
    Access(#[from] io::Error),
    /// A register read as all ones.
    #[error("The drive is gone: its registers read as all ones")]
    Gone,
    /// The controller has a fatal error.
    #[error("The drive reports a fatal error: {0:?}")]
    Fatal(ControllerStatus),
    /// CSTS did not become what it should.
    #[error("The drive did not {change} within {limit:?}: {status:?}")]
    NotReady {
        /// What was waited for.
        change: &'static str,
        /// How long.
        limit: Duration,
        /// The last that was seen.
        status: ControllerStatus,
    },
    /// The drive cannot be used by this driver.
    #[error("The drive supports no NVM command set or no pages of 4 KiB: {0:?}")]
    Unsupported(Capabilities),
    /// A queue cannot have so many entries.
    #[error("A queue has 2 to {max} entries, not {entries}")]
    QueueSize {
        /// What was asked.
        entries: u16,
        /// What drive and driver allow.
        max: u16,
    },
    /// The drive allows no more queues.
    #[error("All {0} queues are in use")]
    NoQueueLeft(u16),
    /// The drive has no shadow doorbells, or they do not reach so far.
    #[error("No shadow doorbells: {0}")]
    NoShadow(&'static str),
    /// The namespace cannot be used.
    #[error("Namespace {nsid} has {blocks} blocks of 2^{shift} bytes with {metadata} bytes of metadata", nsid = nsid.0)]
    Namespace {
        /// The namespace.
        nsid: Nsid,
        /// NSZE.
        blocks: u64,
        /// LBADS.
        shift: u8,
        /// MS.
        metadata: u16,
    },
    /// More was asked than fits in one page.
    #[error("{0} bytes do not fit in a page")]
    TooLong(usize),
    /// A command was not completed in time. Its memory still belongs to the drive, which must be reset.
    #[error("Command {command:#06x} of queue {queue} was not completed within {limit:?}", queue = queue.0)]
    TimedOut {
        /// The queue.
        queue: QueueId,
        /// The command identifier.
        command: u16,
        /// How long it was waited for.
        limit: Duration,
    },
    /// An earlier admin command was not completed in time: the drive must be reset.
    #[error("The drive's admin queue is stuck")]
    Stuck,
    /// A completion of a command that is not outstanding: the drive must be reset.
    #[error("Queue {queue} completed command {command:#06x} of queue {claimed}, which is not outstanding", queue = queue.0)]
    Forged {
        /// The queue that it came from.
        queue: QueueId,
        /// The submission queue that it names.
        claimed: u16,
        /// The command that it names.
        command: u16,
    },
    /// The command could not be queued.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The drive completed the command with an error.
    #[error(transparent)]
    Command(#[from] CommandError),
}
