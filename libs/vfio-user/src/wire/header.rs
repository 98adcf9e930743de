//! The 16 bytes that every message begins with.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The length of a [`Header`] in bytes.
pub const HEADER_SIZE: usize = size_of::<Header>();

/// The header of a message, as it is on the wire ("Header").
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    id: U16,
    command: U16,
    size: U32,
    flags: U32,
    error: U32,
}

const _: () = assert!(HEADER_SIZE == 16);

const TYPE: u32 = 0xf;
const COMMAND: u32 = 0;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request; its `error` field means nothing.
    Command {
        /// Nothing may be sent back, be it success or failure.
        no_reply: bool,
    },
    /// The answer to a request.
    Reply {
        /// The errno of a failure; some peers leave it 0.
        error: Option<u32>,
    },
    /// A type that the protocol does not have.
    Invalid(u8),
}

impl Header {
    /// The header of a command whose message has `size` bytes, this header included.
    pub fn command(id: u16, code: CommandCode, no_reply: bool, size: u32) -> Self {
        Self::new(id, code, size, COMMAND | if no_reply { NO_REPLY } else { 0 }, 0)
    }

    /// The header of a successful reply of `size` bytes, this header included.
    pub fn reply(id: u16, code: CommandCode, size: u32) -> Self {
        Self::new(id, code, size, REPLY, 0)
    }

    /// The header of a reply that tells of a failure.
    pub fn error(id: u16, code: CommandCode, errno: u32, size: u32) -> Self {
        Self::new(id, code, size, REPLY | ERROR, errno)
    }

    fn new(id: u16, code: CommandCode, size: u32, flags: u32, error: u32) -> Self {
        Self {
            id: id.into(),
            command: code.0.into(),
            size: size.into(),
            flags: flags.into(),
            error: error.into(),
        }
    }

    /// Chosen by the sender of a command, echoed in the reply; need not be unique.
    pub fn id(&self) -> u16 {
        self.id.get()
    }

    /// Which command this is, or answers.
    pub fn code(&self) -> CommandCode {
        CommandCode(self.command.get())
    }

    /// The length of the whole message in bytes, as its sender says.
    pub fn size(&self) -> u32 {
        self.size.get()
    }

    /// What the message is; reserved flags are ignored.
    pub fn kind(&self) -> Kind {
        let flags = self.flags.get();
        match flags & TYPE {
            COMMAND => Kind::Command { no_reply: flags & NO_REPLY != 0 },
            REPLY => Kind::Reply { error: (flags & ERROR != 0).then_some(self.error.get()) },
            other => Kind::Invalid(other.to_le_bytes()[0]),
        }
    }
}

/// The number of a command ("Commands"); any value can arrive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandCode(pub u16);

macro_rules! command_codes {
    ($($name:ident = $value:literal),* $(,)?) => {
        #[expect(missing_docs, reason = "the names are the specification's")]
        impl CommandCode {
            $(pub const $name: Self = Self($value);)*

            /// The specification's name, if the command is one that we know of.
            pub fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

command_codes! {
    VERSION = 1,
    DMA_MAP = 2,
    DMA_UNMAP = 3,
    DEVICE_GET_INFO = 4,
    DEVICE_GET_REGION_INFO = 5,
    DEVICE_GET_REGION_IO_FDS = 6,
    DEVICE_GET_IRQ_INFO = 7,
    DEVICE_SET_IRQS = 8,
    REGION_READ = 9,
    REGION_WRITE = 10,
    DMA_READ = 11,
    DMA_WRITE = 12,
    DEVICE_RESET = 13,
    REGION_WRITE_MULTI = 15,
    DEVICE_FEATURE = 16,
    MIG_DATA_READ = 17,
    MIG_DATA_WRITE = 18,
}

impl std::fmt::Debug for CommandCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

impl std::fmt::Display for CommandCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}
