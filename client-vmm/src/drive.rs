//! An NVMe drive behind a vfio-user socket, for `nvme::driver`.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use outboard_nvme::Iova;
use outboard_nvme::driver::{self, Drive, Options};
use outboard_nvme::spec::{DOORBELLS, Register};
use outboard_vfio_user::client::{AreaError, Client, ClientError, Delivery, Memory, Sharing};
use outboard_vfio_user::dma;
use outboard_vfio_user::memory::{Access, Mapping, SharedMemory};
use outboard_vfio_user::wire::SparseArea;
use vm_memory::{Bytes, VolatileMemory};

use crate::limits;

/// BAR 0: registers and doorbells.
const BAR: u32 = 0;
/// The configuration space.
const CONFIGURATION: u32 = 7;
/// The class of an NVMe controller: mass storage, non-volatile, NVM Express (PCI Code and ID Assignment 1.2).
const CLASS: [u8; 3] = [0x02, 0x08, 0x01];
/// Memory space, bus master, no INTx (PCI 3.0, 6.2.2).
const ENABLE: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Where the drive sees our memory. Not at 0, which looks like nothing.
const FIRST_IOVA: u64 = 1 << 20;

const PAGE: usize = driver::limits::PAGE_SIZE;

/// Why a drive cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// The connection, or the server.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The drive.
    #[error("The drive cannot be used")]
    Driver(#[from] driver::Error),
    /// Another device.
    #[error("The device has the class code {class:02x?}, not that of an NVMe controller")]
    NotNvme {
        /// Programming interface, subclass, class.
        class: [u8; 3],
    },
    /// The doorbells were to be mapped, but cannot be.
    #[error("The server lets no doorbell be mapped (is it started with --doorbells posted?)")]
    NotMappable,
    /// What the server says of its areas is wrong.
    #[error("The doorbells cannot be mapped")]
    Area(#[from] AreaError),
    /// This process has no memory for it.
    #[error("No memory that can be shared")]
    Memory(#[from] io::Error),
}

/// How doorbells are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DoorbellAccess {
    /// As the server allows, mapped where it does.
    #[default]
    Any,
    /// By stores to mapped memory, or not at all.
    Mapped,
    /// By posted messages.
    Posted,
}

/// How a drive is to be used.
#[derive(Clone, Copy, Debug)]
pub struct Attachment {
    /// How doorbells are written.
    pub doorbells: DoorbellAccess,
    /// How the drive reaches our memory.
    pub sharing: Sharing,
    /// How much of it there is to be, in bytes; what queues and buffers take.
    pub memory: usize,
}

/// An enabled drive behind a socket.
pub type NvmeDrive = Drive<Registers, Arena>;

/// Finds, enables and identifies the drive of a connection.
///
/// # Errors
/// [`DriveError`]
pub fn attach(client: &Arc<Client>, attachment: Attachment) -> Result<NvmeDrive, DriveError> {
    let mut class = [0; 3];
    client.region_read(CONFIGURATION, 0x09, &mut class)?;
    if class != CLASS {
        return Err(DriveError::NotNvme { class });
    }
    let mut command = [0; 2];
    client.region_read(CONFIGURATION, 0x04, &mut command)?;
    let command = u16::from_le_bytes(command) | ENABLE;
    client.region_write(CONFIGURATION, 0x04, &command.to_le_bytes(), Delivery::Replied)?;
    let registers = Registers::new(client.clone(), attachment.doorbells)?;
    let memory = Arena::new(client.clone(), attachment.memory, attachment.sharing)?;
    let options = Options { admin_timeout: limits::ADMIN, ready_timeout: limits::ADMIN };
    Ok(Drive::enable(registers, memory, options)?)
}

/// Shuts the drive down in good order and takes our memory away from it.
///
/// # Errors
/// [`DriveError`]
pub fn detach(mut drive: NvmeDrive) -> Result<(), DriveError> {
    drive.shutdown()?;
    let (_, memory) = drive.disable()?;
    Ok(memory.unmap()?)
}

/// The registers of the drive: messages, but for what is mapped.
#[derive(Debug)]
pub struct Registers {
    client: Arc<Client>,
    /// What is mapped of the BAR.
    areas: Vec<(SparseArea, Arc<Mapping>)>,
}

impl Registers {
    fn new(client: Arc<Client>, access: DoorbellAccess) -> Result<Self, DriveError> {
        let mut areas = Vec::new();
        if access != DoorbellAccess::Posted {
            let region = client.region(BAR)?;
            for area in region.areas()? {
                areas.push((area, Arc::new(region.map(area, Access::ReadWrite)?)));
            }
        }
        let registers = Self { client, areas };
        if access == DoorbellAccess::Mapped && registers.find(DOORBELLS.into()).is_none() {
            return Err(DriveError::NotMappable);
        }
        Ok(registers)
    }

    /// The mapped dword at `offset` of the BAR.
    fn find(&self, offset: u64) -> Option<(Arc<Mapping>, usize)> {
        self.areas.iter().find_map(|(area, mapping)| {
            let inside = usize::try_from(offset.checked_sub(area.offset)?).ok()?;
            mapping.bytes().get_atomic_ref::<AtomicU32>(inside).ok()?;
            Some((mapping.clone(), inside))
        })
    }
}

impl driver::Registers for Registers {
    type Doorbell = Doorbell;

    fn read32(&mut self, register: Register) -> io::Result<u32> {
        if let Some((mapping, offset)) = self.find(register.0.into()) {
            let value: u32 = mapping.bytes().load(offset, Ordering::Acquire).map_err(io::Error::other)?;
            return Ok(u32::from_le(value));
        }
        let mut bytes = [0; 4];
        self.client.region_read(BAR, register.0.into(), &mut bytes).map_err(io::Error::other)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn read64(&mut self, register: Register) -> io::Result<u64> {
        let low = self.read32(register)?;
        let high = self.read32(Register(register.0.saturating_add(4)))?;
        Ok(u64::from(high) << 32 | u64::from(low))
    }

    fn write32(&mut self, register: Register, value: u32) -> io::Result<()> {
        if let Some((mapping, offset)) = self.find(register.0.into()) {
            return mapping.bytes().store(value.to_le(), offset, Ordering::Release).map_err(io::Error::other);
        }
        let bytes = value.to_le_bytes();
        self.client.region_write(BAR, register.0.into(), &bytes, Delivery::Replied).map_err(io::Error::other)
    }

    fn write64(&mut self, register: Register, value: u64) -> io::Result<()> {
        self.write32(register, (value & 0xffff_ffff) as u32)?;
        self.write32(Register(register.0.saturating_add(4)), (value >> 32) as u32)
    }

    fn doorbell(&mut self, offset: u64) -> io::Result<Doorbell> {
        Ok(match self.find(offset) {
            Some((mapping, offset)) => Doorbell::Mapped { mapping, offset },
            None => Doorbell::Posted { client: self.client.clone(), offset },
        })
    }
}

/// A doorbell of the drive.
#[derive(Debug)]
pub enum Doorbell {
    /// A store.
    Mapped {
        /// Where.
        mapping: Arc<Mapping>,
        /// In bytes from the mapping's start.
        offset: usize,
    },
    /// A posted write.
    Posted {
        /// To whom.
        client: Arc<Client>,
        /// In bytes from the BAR's start.
        offset: u64,
    },
}

impl driver::Doorbell for Doorbell {
    #[inline]
    fn ring(&mut self, value: u32) -> io::Result<()> {
        match self {
            Self::Mapped { mapping, offset } => {
                mapping.bytes().store(value.to_le(), *offset, Ordering::Release).map_err(io::Error::other)
            }
            Self::Posted { client, offset } => client
                .region_write(BAR, *offset, &value.to_le_bytes(), Delivery::Posted)
                .map_err(io::Error::other),
        }
    }
}

/// Memory that the drive reaches, handed out piece by piece and given back as a whole.
#[derive(Debug)]
pub struct Arena {
    client: Arc<Client>,
    memory: Arc<SharedMemory>,
    size: usize,
    used: usize,
}

impl Arena {
    fn new(client: Arc<Client>, size: usize, sharing: Sharing) -> Result<Self, DriveError> {
        let size = size.next_multiple_of(PAGE);
        let memory = Arc::new(SharedMemory::new("outboard-vmm", size)?);
        let part = Memory { file: memory.as_fd(), offset: 0, length: size };
        client.dma_map(dma::Iova(FIRST_IOVA), part, Access::ReadWrite, sharing)?;
        Ok(Self { client, memory, size, used: 0 })
    }

    fn unmap(self) -> Result<(), ClientError> {
        self.client.dma_unmap(dma::Iova(FIRST_IOVA), self.size as u64)
    }
}

impl driver::Memory for Arena {
    type Block = Block;

    fn allocate(&mut self, length: usize) -> io::Result<Block> {
        let end = length.checked_next_multiple_of(PAGE).and_then(|length| self.used.checked_add(length));
        let Some(end) = end.filter(|&end| end <= self.size) else {
            let text = format!("{length} bytes more than {} of {}", self.used, self.size);
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        };
        let start = std::mem::replace(&mut self.used, end);
        Ok(Block { memory: self.memory.clone(), start, size: end.saturating_sub(start) })
    }
}

/// A piece of an [`Arena`].
#[derive(Clone, Debug)]
pub struct Block {
    memory: Arc<SharedMemory>,
    start: usize,
    size: usize,
}

impl Block {
    /// Where `offset` bytes into it are in the arena. Only the driver's own sums get here.
    fn at(&self, offset: usize) -> usize {
        self.start.saturating_add(offset)
    }
}

#[expect(clippy::expect_used, reason = "an offset past a block's end is a bug of the driver's")]
impl driver::Block for Block {
    fn iova(&self) -> Iova {
        Iova(FIRST_IOVA.saturating_add(self.start as u64))
    }

    fn size(&self) -> usize {
        self.size
    }

    #[inline]
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.memory.bytes().read_slice(into, self.at(offset)).expect("inside the block");
    }

    #[inline]
    fn write(&self, offset: usize, from: &[u8]) {
        self.memory.bytes().write_slice(from, self.at(offset)).expect("inside the block");
    }

    #[inline]
    fn load(&self, offset: usize) -> u32 {
        let value = self.memory.bytes().load(self.at(offset), Ordering::Acquire);
        u32::from_le(value.expect("an aligned dword inside the block"))
    }

    #[inline]
    fn store(&self, offset: usize, value: u32) {
        let result = self.memory.bytes().store(value.to_le(), self.at(offset), Ordering::Release);
        result.expect("an aligned dword inside the block");
    }
}
