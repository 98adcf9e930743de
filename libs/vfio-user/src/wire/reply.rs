//! Replies, from either end.

use super::command::finish;
use super::{
    CommandCode, DecodeError, DeviceInfo, DmaAccess, DmaUnmap, HEADER_SIZE, Header, IoFds, IrqInfo,
    RegionAccess, RegionInfo, ReplyError, UnmapTarget, Version, field, split,
};

/// The reply to a command that succeeded. What is long is borrowed from the message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the commands; the content is documented where it is defined")]
pub enum Reply<'a> {
    Version(Version),
    /// DMA_MAP, DEVICE_SET_IRQS, DEVICE_RESET: nothing but "done".
    Done(CommandCode),
    /// The command again.
    DmaUnmap(DmaUnmap),
    Info(DeviceInfo),
    RegionInfo {
        /// Without its capabilities, if the client had no room for them.
        info: RegionInfo,
        /// The room that all of it needs, in bytes.
        argsz: u32,
    },
    RegionIoFds {
        /// Without its entries, if the client had no room for them.
        fds: IoFds,
        /// The room that all of it needs, in bytes.
        argsz: u32,
    },
    IrqInfo(IrqInfo),
    RegionRead {
        /// The first byte.
        offset: u64,
        /// The region's index.
        region: u32,
        /// What was read.
        data: &'a [u8],
    },
    /// Where it was written.
    RegionWrite(RegionAccess),
    RegionWriteMulti {
        /// How many of the writes were done.
        count: u64,
    },
    DmaRead {
        /// The first byte.
        address: u64,
        /// What was read.
        data: &'a [u8],
    },
    /// Where it was written. Older clients leave it out.
    DmaWrite(Option<DmaAccess>),
}

/// The length of a reply that has only one.
fn fixed_length(code: CommandCode) -> Option<usize> {
    match code {
        CommandCode::DMA_MAP | CommandCode::DEVICE_SET_IRQS | CommandCode::DEVICE_RESET => Some(0),
        CommandCode::REGION_WRITE_MULTI => Some(8),
        CommandCode::DEVICE_GET_INFO | CommandCode::DEVICE_GET_IRQ_INFO | CommandCode::REGION_WRITE => {
            Some(16)
        }
        _ => None,
    }
}

/// A failure: a header alone.
pub fn encode_error(id: u16, code: CommandCode, errno: u32) -> Vec<u8> {
    finish(vec![0; HEADER_SIZE], &Header::error(id, code, errno, field(HEADER_SIZE)))
}

impl<'a> Reply<'a> {
    /// The answer to a question about a region by a client that has room for `argsz` bytes. A descriptor may go
    /// with it only if its [`RegionInfo`] still has what `info` has.
    pub fn region_info(mut info: RegionInfo, argsz: u32) -> Self {
        let needed = info.encoded_size();
        if needed > argsz {
            info.capabilities.clear();
        }
        Reply::RegionInfo { info, argsz: needed }
    }

    /// The answer to a question about a region's I/O descriptors by a client that has room for `argsz` bytes.
    /// Descriptors may go with it only if there are entries.
    pub fn region_io_fds(mut fds: IoFds, argsz: u32) -> Self {
        let needed = fds.encoded_size();
        if needed > argsz {
            fds.entries.clear();
        }
        Reply::RegionIoFds { fds, argsz: needed }
    }

    /// The message, header first.
    pub fn encode(&self, id: u16) -> Vec<u8> {
        let mut message = vec![0; HEADER_SIZE];
        let body = &mut message;
        match self {
            Self::Version(version) => version.encode(body),
            Self::Done(_) => {}
            Self::DmaUnmap(unmap) => unmap.encode(body),
            Self::Info(info) => info.encode(body),
            Self::RegionInfo { info, argsz } => info.encode(*argsz, body),
            Self::RegionIoFds { fds, argsz } => fds.encode(*argsz, body),
            Self::IrqInfo(info) => info.encode(body),
            Self::RegionRead { offset, region, data } => {
                RegionAccess { offset: *offset, region: *region, count: field(data.len()) }.encode(body);
                body.extend_from_slice(data);
            }
            Self::RegionWrite(access) => access.encode(body),
            Self::RegionWriteMulti { count } => body.extend_from_slice(&count.to_le_bytes()),
            Self::DmaRead { address, data } => {
                DmaAccess { address: *address, count: field(data.len()) }.encode(body);
                body.extend_from_slice(data);
            }
            Self::DmaWrite(Some(access)) => access.encode(body),
            Self::DmaWrite(None) => {}
        }
        let header = Header::reply(id, self.code(), field(message.len()));
        finish(message, &header)
    }

    /// The reply to a command `code`, from what follows the header.
    ///
    /// # Errors
    /// [`ReplyError`]. That it answers what was asked (the same region, as much data) is for the asker to check.
    pub fn decode(code: CommandCode, body: &'a [u8]) -> Result<Self, ReplyError> {
        let length = body.len();
        if let Some(expected) = fixed_length(code).filter(|&expected| length > expected) {
            return Err(ReplyError::Long { length, expected });
        }
        Ok(match code {
            CommandCode::VERSION => Self::Version(Version::decode(body)?),
            CommandCode::DMA_MAP | CommandCode::DEVICE_SET_IRQS | CommandCode::DEVICE_RESET => {
                Self::Done(code)
            }
            CommandCode::DMA_UNMAP => {
                let unmap = DmaUnmap::decode(body)?;
                let with_bitmap = matches!(unmap.target, UnmapTarget::RangeWithDirtyBitmap { .. });
                if length > 24 && !with_bitmap {
                    return Err(ReplyError::Long { length, expected: 24 });
                }
                Self::DmaUnmap(unmap)
            }
            CommandCode::DEVICE_GET_INFO => Self::Info(DeviceInfo::decode(body)?),
            CommandCode::DEVICE_GET_REGION_INFO => {
                let (info, argsz) = RegionInfo::decode(body)?;
                Self::RegionInfo { info, argsz }
            }
            CommandCode::DEVICE_GET_REGION_IO_FDS => {
                let (fds, argsz) = IoFds::decode(body)?;
                Self::RegionIoFds { fds, argsz }
            }
            CommandCode::DEVICE_GET_IRQ_INFO => Self::IrqInfo(IrqInfo::decode(body)?),
            CommandCode::REGION_READ => {
                let (access, data) = RegionAccess::decode_with_data(body)?;
                Self::RegionRead { offset: access.offset, region: access.region, data }
            }
            CommandCode::REGION_WRITE => Self::RegionWrite(RegionAccess::decode(body)?),
            CommandCode::REGION_WRITE_MULTI => {
                Self::RegionWriteMulti { count: split::<zerocopy::little_endian::U64>(body)?.0.get() }
            }
            CommandCode::DMA_READ => {
                let (access, data) = DmaAccess::decode_with_data(body)?;
                Self::DmaRead { address: access.address, data }
            }
            // Nothing, or an address and four bytes of count (QEMU 10.1), or the same as libvfio-user expects.
            CommandCode::DMA_WRITE if body.len() < 16 => Self::DmaWrite(None),
            CommandCode::DMA_WRITE => Self::DmaWrite(Some(DmaAccess::decode(body)?)),
            code => return Err(DecodeError::UnknownCommand { code }.into()),
        })
    }

    /// The number of the command that it answers.
    pub fn code(&self) -> CommandCode {
        match self {
            Self::Version(_) => CommandCode::VERSION,
            Self::Done(code) => *code,
            Self::DmaUnmap(_) => CommandCode::DMA_UNMAP,
            Self::Info(_) => CommandCode::DEVICE_GET_INFO,
            Self::RegionInfo { .. } => CommandCode::DEVICE_GET_REGION_INFO,
            Self::RegionIoFds { .. } => CommandCode::DEVICE_GET_REGION_IO_FDS,
            Self::IrqInfo(_) => CommandCode::DEVICE_GET_IRQ_INFO,
            Self::RegionRead { .. } => CommandCode::REGION_READ,
            Self::RegionWrite(_) => CommandCode::REGION_WRITE,
            Self::RegionWriteMulti { .. } => CommandCode::REGION_WRITE_MULTI,
            Self::DmaRead { .. } => CommandCode::DMA_READ,
            Self::DmaWrite(_) => CommandCode::DMA_WRITE,
        }
    }
}
