//! Commands, from either end.

use zerocopy::IntoBytes;

use super::{
    CommandCode, DecodeError, DmaAccess, DmaMap, DmaUnmap, DmaWrite, HEADER_SIZE, Header, Query,
    RegionAccess, RegionWrite, RegionWrites, SetIrqs, Version, device, field, irq,
};

/// A valid command. What is long is borrowed from the message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "named as in the specification; the content is documented where it is defined"
)]
pub enum Command<'a> {
    Version(Version),
    DmaMap(DmaMap),
    DmaUnmap(DmaUnmap),
    GetInfo {
        /// The room that the client has for the answer, in bytes.
        argsz: u32,
    },
    GetRegionInfo(Query),
    GetRegionIoFds(Query),
    GetIrqInfo(Query),
    SetIrqs(SetIrqs<'a>),
    RegionRead(RegionAccess),
    RegionWrite(RegionWrite<'a>),
    RegionWriteMulti(RegionWrites<'a>),
    DmaRead(DmaAccess),
    DmaWrite(DmaWrite<'a>),
    Reset,
    /// DEVICE_FEATURE, MIG_DATA_READ or MIG_DATA_WRITE, which nobody here serves yet: EINVAL, which QEMU takes
    /// for "no such feature".
    Migration {
        /// Which of them.
        code: CommandCode,
        /// As sent.
        body: &'a [u8],
    },
}

impl<'a> Command<'a> {
    /// The command whose header is `header`, with what follows the header and the number of descriptors that
    /// came with it. A command that takes no descriptor may have one (SPDK's DMA_UNMAP does), which is to be
    /// closed; VERSION may not. So a longer body than needed is tolerated (SPDK pads to 4 KiB).
    ///
    /// # Errors
    /// [`DecodeError`], whose [`DecodeError::errno`] is the answer.
    pub fn decode(header: &Header, body: &'a [u8], descriptors: usize) -> Result<Self, DecodeError> {
        Ok(match header.code() {
            CommandCode::VERSION if descriptors != 0 => {
                return Err(DecodeError::Descriptors { descriptors, expected: 0 });
            }
            CommandCode::VERSION => Self::Version(Version::decode(body)?),
            CommandCode::DMA_MAP => Self::DmaMap(DmaMap::decode(body, descriptors)?),
            CommandCode::DMA_UNMAP => Self::DmaUnmap(DmaUnmap::decode(body)?),
            CommandCode::DEVICE_GET_INFO => Self::GetInfo { argsz: device::decode_get_info(body)? },
            CommandCode::DEVICE_GET_REGION_INFO => Self::GetRegionInfo(device::decode_region_query(body)?),
            CommandCode::DEVICE_GET_REGION_IO_FDS => Self::GetRegionIoFds(device::decode_io_fds_query(body)?),
            CommandCode::DEVICE_GET_IRQ_INFO => Self::GetIrqInfo(irq::decode_irq_query(body)?),
            CommandCode::DEVICE_SET_IRQS => Self::SetIrqs(SetIrqs::decode(body, descriptors)?),
            CommandCode::REGION_READ => Self::RegionRead(RegionAccess::decode(body)?),
            CommandCode::REGION_WRITE => Self::RegionWrite(RegionWrite::decode(body)?),
            CommandCode::REGION_WRITE_MULTI => Self::RegionWriteMulti(RegionWrites::decode(body)?),
            CommandCode::DMA_READ => Self::DmaRead(DmaAccess::decode(body)?),
            CommandCode::DMA_WRITE => Self::DmaWrite(DmaWrite::decode(body)?),
            CommandCode::DEVICE_RESET => Self::Reset,
            code @ (CommandCode::DEVICE_FEATURE
            | CommandCode::MIG_DATA_READ
            | CommandCode::MIG_DATA_WRITE) => Self::Migration { code, body },
            code => return Err(DecodeError::UnknownCommand { code }),
        })
    }

    /// The message, header first. Its descriptors are sent beside it: as many as [`Command::descriptors`] says.
    pub fn encode(&self, id: u16, no_reply: bool) -> Vec<u8> {
        let mut message = vec![0; HEADER_SIZE];
        let body = &mut message;
        match self {
            Self::Version(version) => version.encode(body),
            Self::DmaMap(map) => map.encode(body),
            Self::DmaUnmap(unmap) => unmap.encode(body),
            Self::GetInfo { argsz } => device::encode_get_info(*argsz, body),
            Self::GetRegionInfo(query) => device::encode_region_query(*query, body),
            Self::GetRegionIoFds(query) => device::encode_io_fds_query(*query, body),
            Self::GetIrqInfo(query) => irq::encode_irq_query(*query, body),
            Self::SetIrqs(set) => set.encode(body),
            Self::RegionRead(access) => access.encode(body),
            Self::RegionWrite(write) => write.encode(body),
            Self::RegionWriteMulti(writes) => writes.encode(body),
            Self::DmaRead(access) => access.encode(body),
            Self::DmaWrite(write) => write.encode(body),
            Self::Reset => {}
            Self::Migration { body: bytes, .. } => body.extend_from_slice(bytes),
        }
        let header = Header::command(id, self.code(), no_reply, field(message.len()));
        finish(message, &header)
    }

    /// Its number.
    pub fn code(&self) -> CommandCode {
        match self {
            Self::Version(_) => CommandCode::VERSION,
            Self::DmaMap(_) => CommandCode::DMA_MAP,
            Self::DmaUnmap(_) => CommandCode::DMA_UNMAP,
            Self::GetInfo { .. } => CommandCode::DEVICE_GET_INFO,
            Self::GetRegionInfo(_) => CommandCode::DEVICE_GET_REGION_INFO,
            Self::GetRegionIoFds(_) => CommandCode::DEVICE_GET_REGION_IO_FDS,
            Self::GetIrqInfo(_) => CommandCode::DEVICE_GET_IRQ_INFO,
            Self::SetIrqs(_) => CommandCode::DEVICE_SET_IRQS,
            Self::RegionRead(_) => CommandCode::REGION_READ,
            Self::RegionWrite(_) => CommandCode::REGION_WRITE,
            Self::RegionWriteMulti(_) => CommandCode::REGION_WRITE_MULTI,
            Self::DmaRead(_) => CommandCode::DMA_READ,
            Self::DmaWrite(_) => CommandCode::DMA_WRITE,
            Self::Reset => CommandCode::DEVICE_RESET,
            Self::Migration { code, .. } => *code,
        }
    }

    /// How many descriptors go with it.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::DmaMap(map) => map.descriptors(),
            Self::SetIrqs(set) => set.descriptors(),
            _ => 0,
        }
    }
}

/// Puts the header where room was left for it.
pub(super) fn finish(mut message: Vec<u8>, header: &Header) -> Vec<u8> {
    if let Some(room) = message.get_mut(..HEADER_SIZE) {
        room.copy_from_slice(header.as_bytes());
    }
    message
}
