//! What can be wrong with a message.

use nix::errno::Errno;

use super::CommandCode;
use crate::limits;

/// Why a command is refused before the device sees it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// No such command.
    #[error("The command {code:?} is unknown")]
    UnknownCommand {
        /// Its number.
        code: CommandCode,
    },
    /// The body ends too early.
    #[error("The body has {length} bytes, not the {needed} that it needs")]
    Short {
        /// Its length.
        length: usize,
        /// The shortest valid one.
        needed: usize,
    },
    /// `argsz` has no room for the fixed part of the reply, or asks for too much.
    #[error("The argsz of {argsz} is not between {least} and {most}", most = limits::ARGUMENT)]
    ArgumentSize {
        /// As sent.
        argsz: u32,
        /// The fixed part.
        least: u32,
    },
    /// Bits that mean nothing, or that do not go together.
    #[error("The flags {flags:#x} are not valid")]
    Flags {
        /// As sent.
        flags: u32,
    },
    /// More or fewer descriptors than the command takes.
    #[error("{descriptors} descriptors came with the message, not {expected}")]
    Descriptors {
        /// How many came.
        descriptors: usize,
        /// How many it takes.
        expected: usize,
    },
    /// A range that is empty, wraps around, or breaks a rule of its command.
    #[error("The range {start:#x}+{count:#x} is not valid here")]
    Range {
        /// The first address, offset or index.
        start: u64,
        /// The length or count.
        count: u64,
    },
    /// More data than one message may move.
    #[error("{count} bytes of data are more than {limit}")]
    TooMuchData {
        /// As sent.
        count: u64,
        /// The limit.
        limit: u32,
    },
    /// The data has another length than the message says.
    #[error("{length} bytes of data came, but the message says {count}")]
    DataLength {
        /// What came.
        length: usize,
        /// What the message says.
        count: u64,
    },
    /// A REGION_WRITE_MULTI of none or too many writes.
    #[error("{count} writes in one message are not between 1 and {limit}", limit = limits::MULTIPLE_WRITES)]
    Writes {
        /// As sent.
        count: u64,
    },
    /// A major version that is not ours.
    #[error("The major version {major} is not 0")]
    MajorVersion {
        /// As sent.
        major: u16,
    },
    /// The capabilities are longer than any peer's.
    #[error("The capabilities have {length} bytes, more than {limit}", limit = limits::CAPABILITIES)]
    CapabilitiesLength {
        /// Their length, the NUL included.
        length: usize,
    },
    /// The capabilities are not a NUL-terminated string.
    #[error("The capabilities do not end in a NUL")]
    CapabilitiesEnd,
    /// The capabilities are not JSON, or of the wrong types.
    #[error("The capabilities do not parse: {reason}")]
    Capabilities {
        /// What the parser says.
        reason: String,
    },
    /// A capability whose value cannot be worked with.
    #[error("The capability {name} cannot be {value}")]
    CapabilityValue {
        /// Its key.
        name: &'static str,
        /// As sent.
        value: u64,
    },
}

impl DecodeError {
    /// What the error reply says: EINVAL as libvfio-user has it, and for a command that nobody knows ENOSYS as
    /// QEMU has it.
    pub fn errno(&self) -> Errno {
        match self {
            Self::UnknownCommand { .. } => Errno::ENOSYS,
            Self::Short { .. }
            | Self::ArgumentSize { .. }
            | Self::Flags { .. }
            | Self::Descriptors { .. }
            | Self::Range { .. }
            | Self::TooMuchData { .. }
            | Self::DataLength { .. }
            | Self::Writes { .. }
            | Self::MajorVersion { .. }
            | Self::CapabilitiesLength { .. }
            | Self::CapabilitiesEnd
            | Self::Capabilities { .. }
            | Self::CapabilityValue { .. } => Errno::EINVAL,
        }
    }
}

/// Why a reply cannot be believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// It breaks a rule that commands have too.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    /// More than the answer has.
    #[error("The body has {length} bytes, more than the answer's {expected}")]
    Long {
        /// Its length.
        length: usize,
        /// The answer's.
        expected: usize,
    },
    /// A chain of region capabilities leaves the reply, or does not end.
    #[error("The capability at {offset} of a region's {length} bytes is out of place")]
    CapabilityChain {
        /// Where it is said to be, from the start of the region's information.
        offset: u32,
        /// How much came.
        length: usize,
    },
    /// A list of I/O descriptors has entries of no known size.
    #[error("{length} bytes do not hold {count} sub-regions")]
    IoFds {
        /// The length of the list.
        length: usize,
        /// How many it is said to have.
        count: u32,
    },
}
