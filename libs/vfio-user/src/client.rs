//! The client: a device in another process, as method calls.
//!
//! Any thread may call any method. The server's DMA_READ and DMA_WRITE are served from the memory that
//! [`Client::dma_map`] registered, by a thread of the client's, or by a caller that waits for its reply.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::counters::Messages;
use crate::dma::{Access, Iova, Region as DmaRegion};
use crate::limits;
use crate::memory::Mapping;
use crate::session::client::TooManyCommands;
use crate::wire::{
    Backing, Capabilities, Command, CommandCode, DecodeError, DeviceInfo, DmaMap, DmaUnmap, IoFd, IrqAction,
    IrqData, IrqIndex, IrqInfo, Query, RegionAccess, RegionWrite, RegionWrites, Reply, ReplyError, SetIrqs,
    UnmapTarget, Version,
};

mod connection;
mod reading;
mod region;

pub use connection::Disconnect;
use connection::{Answer, Connection};
pub use region::{AreaError, Region};

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
    /// No answer came. It may still come and is then dropped.
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

/// How a client behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long to wait for a connection, and for each answer. QEMU waits for 5 s.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(5) }
    }
}

/// How the server is to reach memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// It gets the descriptor and maps it.
    Descriptor,
    /// It does not: DMA_READ and DMA_WRITE.
    Messages,
}

/// A part of a file that is memory of ours.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// The file: a memfd, say.
    pub file: BorrowedFd<'a>,
    /// Where the part begins, in bytes; a multiple of the page size.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: usize,
}

/// Whether a write waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It has been done when the call returns.
    Replied,
    /// It will be done before whatever is sent next; that it fails, nobody hears.
    Posted,
}

/// A connection to a device's server.
#[derive(Debug)]
pub struct Client {
    connection: Arc<Connection>,
    reader: Option<JoinHandle<()>>,
    capabilities: Capabilities,
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`ClientError::Connect`], and whatever VERSION ends in.
    pub fn connect(path: &Path, options: Options) -> Result<Self, ClientError> {
        let stream = connect_within(path, options.timeout)
            .map_err(|source| ClientError::Connect { path: path.to_owned(), source })?;
        Self::new(stream, options)
    }

    /// Takes over a stream to a server and negotiates.
    ///
    /// # Errors
    /// Whatever VERSION ends in.
    pub fn new(stream: UnixStream, options: Options) -> Result<Self, ClientError> {
        let connection = Arc::new(Connection::new(stream, options.timeout)?);
        let reader = thread::Builder::new().name("vfio-user client".to_owned()).spawn({
            let connection = connection.clone();
            move || connection.attend()
        })?;
        let mut client = Self { connection, reader: Some(reader), capabilities: Capabilities::default() };
        client.capabilities = client.negotiate()?;
        Ok(client)
    }

    fn negotiate(&self) -> Result<Capabilities, ClientError> {
        let proposal = Version::proposal();
        let highest = proposal.minor;
        match self.call(&Command::Version(proposal), &[])?.reply()? {
            Reply::Version(answer) if answer.minor <= highest => Ok(answer.capabilities),
            _ => Err(ClientError::Mismatch { code: CommandCode::VERSION }),
        }
    }

    /// What the server can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The commands that we sent.
    pub fn sent(&self) -> &Messages {
        &self.connection.sent
    }

    /// The commands that the server sent.
    pub fn received(&self) -> &Messages {
        &self.connection.received
    }

    /// Why the connection is over, if it is.
    pub fn disconnected(&self) -> Option<Disconnect> {
        self.connection.ended()
    }

    /// Ends the connection; whoever waits gets [`ClientError::Disconnected`].
    pub fn close(&self) {
        self.connection.end(Disconnect::Here);
    }

    fn call(&self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> Result<Answer, ClientError> {
        self.connection.call(command, descriptors)
    }

    /// Sends a command whose reply says no more than "done".
    fn done(&self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call(command, descriptors)?.reply().map(drop)
    }

    /// Lets the device access `memory` at `iova`.
    ///
    /// # Errors
    /// [`ClientError::Invalid`] where we have mapped some of it already.
    pub fn dma_map(
        &self,
        iova: Iova,
        memory: Memory<'_>,
        access: Access,
        sharing: Sharing,
    ) -> Result<(), ClientError> {
        let size = memory.length as u64;
        // Also shared memory may be asked for by messages.
        let mapping = Mapping::new(memory.file, memory.offset, memory.length, access)?;
        let (backing, descriptors) = match sharing {
            Sharing::Descriptor => (Backing::Mapping { offset: memory.offset }, &[memory.file][..]),
            Sharing::Messages => (Backing::Messages, &[][..]),
        };
        let memory = &self.connection.memory;
        memory.insert(iova.0, size, DmaRegion::mapped(mapping, access)).map_err(|_| {
            ClientError::Invalid {
                code: CommandCode::DMA_MAP,
                source: DecodeError::Range { start: iova.0, count: size },
            }
        })?;
        let command = Command::DmaMap(DmaMap { address: iova.0, size, access, backing });
        let result = self.done(&command, descriptors);
        if result.is_err() {
            memory.remove(iova.0, size);
        }
        result
    }

    /// Takes memory away from the device: exactly what was mapped at `iova`. When this returns well, the device
    /// accesses it no more.
    ///
    /// # Errors
    /// [`ClientError`]; the device may then still access it.
    pub fn dma_unmap(&self, iova: Iova, size: u64) -> Result<(), ClientError> {
        let target = UnmapTarget::Range { address: iova.0, size };
        self.done(&Command::DmaUnmap(DmaUnmap::new(target)), &[])?;
        self.connection.memory.remove(iova.0, size);
        Ok(())
    }

    /// Takes all memory away from the device.
    ///
    /// # Errors
    /// [`ClientError`]; the device may then still access it.
    pub fn dma_unmap_all(&self) -> Result<(), ClientError> {
        self.done(&Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), &[])?;
        self.connection.memory.clear();
        Ok(())
    }

    /// What kind of device it is.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn device_info(&self) -> Result<DeviceInfo, ClientError> {
        let answer = self.call(&Command::GetInfo { argsz: 16 }, &[])?;
        let Reply::Info(info) = answer.reply()? else { return Err(answer.mismatch()) };
        for (what, count, limit) in [
            ("regions", info.regions, limits::REGIONS),
            ("interrupt types", info.interrupts, limits::INTERRUPT_TYPES),
        ] {
            if count > limit {
                return Err(ClientError::TooMany { what, count, limit });
            }
        }
        Ok(info)
    }

    /// A region, with all that is said of it.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn region(&self, index: u32) -> Result<Region, ClientError> {
        // The fixed part first: how much more there is, the answer says.
        let mut argsz = 32;
        for _ in 0..2 {
            let mut answer = self.call(&Command::GetRegionInfo(Query { argsz, index }), &[])?;
            let file = answer.take_descriptors().into_iter().next();
            let Reply::RegionInfo { info, argsz: needed } = answer.reply()? else {
                return Err(answer.mismatch());
            };
            if info.index != index {
                return Err(answer.mismatch());
            }
            if needed <= argsz || !info.capabilities.is_empty() {
                return Ok(Region::new(info, file));
            }
            argsz = needed;
        }
        Err(ClientError::Mismatch { code: CommandCode::DEVICE_GET_REGION_INFO })
    }

    /// The parts of a region that descriptors serve, and those descriptors.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Mismatch`] also where a part names a descriptor that did not come.
    pub fn region_io_fds(&self, index: u32) -> Result<(Vec<IoFd>, Vec<std::os::fd::OwnedFd>), ClientError> {
        let mut argsz = 16;
        for _ in 0..2 {
            let mut answer = self.call(&Command::GetRegionIoFds(Query { argsz, index }), &[])?;
            let descriptors = answer.take_descriptors();
            let Reply::RegionIoFds { fds, argsz: needed } = answer.reply()? else {
                return Err(answer.mismatch());
            };
            let came =
                |entry: &IoFd| usize::try_from(entry.descriptor).is_ok_and(|index| index < descriptors.len());
            if fds.index != index || !fds.entries.iter().all(came) {
                return Err(answer.mismatch());
            }
            if needed <= argsz {
                return Ok((fds.entries, descriptors));
            }
            argsz = needed;
        }
        Err(ClientError::Mismatch { code: CommandCode::DEVICE_GET_REGION_IO_FDS })
    }

    /// How many interrupts of a type there are, and what can be done with them.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn irq_info(&self, index: IrqIndex) -> Result<IrqInfo, ClientError> {
        let answer = self.call(&Command::GetIrqInfo(Query { argsz: 16, index: index.0 }), &[])?;
        match answer.reply()? {
            Reply::IrqInfo(info) if info.index == index && info.count <= limits::VECTORS => Ok(info),
            Reply::IrqInfo(IrqInfo { count, .. }) if count > limits::VECTORS => {
                Err(ClientError::TooMany { what: "interrupt vectors", count, limit: limits::VECTORS })
            }
            _ => Err(answer.mismatch()),
        }
    }

    /// Does something with interrupts; with [`IrqData::Eventfds`] go as many `eventfds` as vectors are named.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn set_irqs(&self, set: SetIrqs<'_>, eventfds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done(&Command::SetIrqs(set), eventfds)
    }

    /// Has the vectors from `start` on signal these eventfds, in as many messages as the server needs.
    ///
    /// # Errors
    /// [`ClientError`]; some of them may then be bound.
    pub fn bind_vectors(
        &self,
        index: IrqIndex,
        start: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let room = self.capabilities.descriptors().clamp(1, limits::DESCRIPTORS);
        let mut start = start;
        for eventfds in eventfds.chunks(room) {
            let count = u32::try_from(eventfds.len()).unwrap_or(u32::MAX);
            let set = SetIrqs { index, start, count, data: IrqData::Eventfds, action: IrqAction::Trigger };
            self.set_irqs(set, eventfds)?;
            start = start.saturating_add(count);
        }
        Ok(())
    }

    /// Unbinds all vectors of a type.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn disable_irqs(&self, index: IrqIndex) -> Result<(), ClientError> {
        let set = SetIrqs { index, start: 0, count: 0, data: IrqData::None, action: IrqAction::Trigger };
        self.set_irqs(set, &[])
    }

    /// Reads from a region, in as many messages as the server needs.
    ///
    /// # Errors
    /// [`ClientError`]; some of `into` may have been filled.
    pub fn region_read(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), ClientError> {
        let mut offset = offset;
        for piece in into.chunks_mut(self.piece()) {
            let count = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let answer = self.call(&Command::RegionRead(RegionAccess { offset, region, count }), &[])?;
            match answer.reply()? {
                Reply::RegionRead { offset: at, region: of, data }
                    if (at, of, data.len()) == (offset, region, piece.len()) =>
                {
                    piece.copy_from_slice(data);
                }
                _ => return Err(answer.mismatch()),
            }
            offset = offset.saturating_add(count.into());
        }
        Ok(())
    }

    /// Writes to a region, in as many messages as the server needs.
    ///
    /// # Errors
    /// [`ClientError`]; some of it may have been written.
    pub fn region_write(
        &self,
        region: u32,
        offset: u64,
        data: &[u8],
        delivery: Delivery,
    ) -> Result<(), ClientError> {
        let mut offset = offset;
        for data in data.chunks(self.piece()) {
            let write = RegionWrite { offset, region, data };
            let command = Command::RegionWrite(write);
            match delivery {
                Delivery::Posted => self.connection.post(&command)?,
                Delivery::Replied => {
                    let answer = self.call(&command, &[])?;
                    if answer.reply()? != Reply::RegionWrite(write.access()) {
                        return Err(answer.mismatch());
                    }
                }
            }
            offset = offset.saturating_add(data.len() as u64);
        }
        Ok(())
    }

    /// Does up to [`limits::MULTIPLE_WRITES`] writes of at most 8 bytes each with one message; only for a server
    /// whose capabilities have `write_multiple`.
    ///
    /// # Errors
    /// [`ClientError`]; some of them may have been done.
    pub fn region_write_multi(
        &self,
        writes: &[RegionWrite<'_>],
        delivery: Delivery,
    ) -> Result<(), ClientError> {
        let code = CommandCode::REGION_WRITE_MULTI;
        let invalid = |source| ClientError::Invalid { code, source };
        let body = RegionWrites::body(writes).map_err(invalid)?;
        let command = Command::RegionWriteMulti(RegionWrites::decode(&body).map_err(invalid)?);
        match delivery {
            Delivery::Posted => self.connection.post(&command),
            Delivery::Replied => {
                let answer = self.call(&command, &[])?;
                match answer.reply()? {
                    Reply::RegionWriteMulti { count } if count == writes.len() as u64 => Ok(()),
                    _ => Err(answer.mismatch()),
                }
            }
        }
    }

    /// Resets the device.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn reset(&self) -> Result<(), ClientError> {
        self.done(&Command::Reset, &[])
    }

    /// How much data goes into one message.
    fn piece(&self) -> usize {
        usize::try_from(self.capabilities.data_transfer()).unwrap_or(usize::MAX).max(1)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
        if let Some(reader) = self.reader.take() {
            // It has no panics of its own; one elsewhere was reported already.
            let _ = reader.join();
        }
    }
}

/// connect(2) that gives up: a server with a client may let others queue up for ever.
fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let milliseconds = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
    setsockopt(&stream, sockopt::SendTimeout, &TimeVal::milliseconds(milliseconds))?;
    connect(stream.as_fd().as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(stream.into())
}

#[cfg(test)]
mod tests;
