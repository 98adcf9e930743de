//! A raw client: it sends what it is told to, valid or not. It answers the server's DMA messages while it waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::transport::{Framer, Message, Received, Socket};
use outboard_vfio_user::wire::{
    Backing, Command, CommandCode, DeviceFlags, DeviceInfo, DmaMap, DmaUnmap, HEADER_SIZE, IrqIndex, IrqInfo,
    Kind, Query, RegionAccess, RegionInfo, RegionWrite, Reply, SetIrqs, UnmapTarget,
};

use super::ram::Ram;
use super::{Checked, Stop, failed, same};

/// QEMU gives up after this long (point 14).
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How the device reaches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Through the descriptor.
    Descriptor,
    /// By DMA_READ and DMA_WRITE.
    Messages,
}

/// A connection to the server.
pub struct Client {
    socket: Socket,
    framer: Framer,
    arrived: VecDeque<Message>,
    id: u16,
    buffer: Vec<u8>,
    /// What was sent last, for the report of a failure.
    sent: String,
    ended: bool,
    /// It looks for replies instead of sleeping.
    pub looks: bool,
    /// The memory that it shares.
    pub ram: Ram,
    /// DMA messages about this address are not answered, but put aside.
    pub(super) withhold: Option<u64>,
    pub(super) withheld: Option<Message>,
}

impl Client {
    /// A client that has not said a word.
    ///
    /// # Errors
    /// When the stream cannot be set up.
    pub fn new(stream: UnixStream) -> Checked<Self> {
        let Ok(socket) = Socket::new(stream) else { return failed("connect", "a socket", "none") };
        Ok(Self {
            socket,
            framer: Framer::new(),
            arrived: VecDeque::new(),
            id: 100,
            buffer: vec![0; 64 << 10],
            sent: "nothing".into(),
            ended: false,
            looks: false,
            ram: Ram::default(),
            withhold: None,
            withheld: None,
        })
    }

    /// What came instead of what was expected.
    pub fn wrong<T>(&self, expected: &str, came: impl Into<String>) -> Checked<T> {
        failed(self.sent.clone(), expected, came)
    }

    /// What is being sent, in words, for the report of a failure.
    pub fn says(&mut self, what: impl Into<String>) -> &mut Self {
        self.sent = what.into();
        self
    }

    /// Whether the server has closed the connection.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// When the server does not read, or is gone.
    pub fn send_bytes(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Checked {
        match self.try_send(bytes, descriptors, PATIENCE)? {
            true => Ok(()),
            false => self.wrong("the server reads what is sent", "it does not"),
        }
    }

    /// Sends what fits within `patience`; false if some does not.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn try_send(
        &mut self,
        mut bytes: &[u8],
        mut descriptors: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Checked<bool> {
        while !bytes.is_empty() {
            match self.socket.send(bytes, descriptors) {
                Ok(Some(length)) => (bytes, descriptors) = (&bytes[length..], &[]),
                Ok(None) if !self.ready(PollFlags::POLLOUT, patience) => return Ok(false),
                Ok(None) => {}
                Err(error) => {
                    self.ended |= error.kind() == std::io::ErrorKind::BrokenPipe;
                    return self.wrong("the server takes it", error.to_string());
                }
            }
        }
        Ok(true)
    }

    fn ready(&self, events: PollFlags, patience: Duration) -> bool {
        let mut descriptors = [PollFd::new(self.socket.as_fd(), events)];
        let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
        poll(&mut descriptors, timeout).is_ok_and(|count| count > 0)
    }

    /// Sends a command without waiting for its reply; gives its id.
    ///
    /// # Errors
    /// As [`Client::send_bytes`].
    pub fn send(&mut self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> Checked<u16> {
        self.id = self.id.wrapping_add(1);
        let text = format!("{command:?}");
        self.says(text.chars().take(200).collect::<String>());
        self.send_bytes(&command.encode(self.id, false), descriptors)?;
        Ok(self.id)
    }

    /// Sends a command that wants no reply.
    ///
    /// # Errors
    /// As [`Client::send_bytes`].
    pub fn post(&mut self, command: &Command<'_>) -> Checked {
        self.send_bytes(&command.encode(0xffff, true), &[])
    }

    /// Receives the next message if one comes in time.
    ///
    /// # Errors
    /// When the connection ends, or what comes is no message.
    pub fn receive_within(&mut self, patience: Duration) -> Checked<Option<Message>> {
        let begin = Instant::now();
        loop {
            if let Some(message) = self.arrived.pop_front() {
                return Ok(Some(message));
            }
            match self.socket.receive(&mut self.buffer) {
                Ok(Received::Data { length, descriptors }) => {
                    self.framer.push(&self.buffer[..length], descriptors);
                    loop {
                        match self.framer.next_message() {
                            Ok(Some(message)) => self.arrived.push_back(message),
                            Ok(None) => break,
                            Err(error) => return self.wrong("a message", error.to_string()),
                        }
                    }
                }
                Ok(Received::Closed) => {
                    self.ended = true;
                    return self.wrong("a message", "the end of the connection");
                }
                Ok(Received::WouldBlock) if begin.elapsed() >= patience => return Ok(None),
                Ok(Received::WouldBlock) if self.looks => std::hint::spin_loop(),
                Ok(Received::WouldBlock) => {
                    self.ready(PollFlags::POLLIN, patience.saturating_sub(begin.elapsed()));
                }
                Err(error) => return self.wrong("a message", error.to_string()),
            }
        }
    }

    /// Receives the next message.
    ///
    /// # Errors
    /// When none comes within 5 s.
    pub fn receive(&mut self) -> Checked<Message> {
        match self.receive_within(PATIENCE)? {
            Some(message) => Ok(message),
            None => self.wrong("an answer", format!("nothing within {PATIENCE:?}")),
        }
    }

    /// Takes one receipt, as it comes.
    ///
    /// # Errors
    /// When none comes within 5 s.
    pub fn receive_once(&mut self) -> Checked<(Vec<u8>, Vec<OwnedFd>)> {
        self.ready(PollFlags::POLLIN, PATIENCE);
        match self.socket.receive(&mut self.buffer) {
            Ok(Received::Data { length, descriptors }) => Ok((self.buffer[..length].to_vec(), descriptors)),
            other => self.wrong("an answer", format!("{other:?}")),
        }
    }

    /// The server closes the connection, with nothing more to say.
    ///
    /// # Errors
    /// When it does not, within 5 s.
    pub fn expect_end(&mut self) -> Checked {
        match self.receive_within(PATIENCE) {
            Err(_) if self.ended => Ok(()),
            Err(other) => Err(other),
            Ok(Some(message)) => self.wrong("the end of the connection", format!("{:?}", message.header)),
            Ok(None) => self.wrong("the end of the connection", "nothing"),
        }
    }

    /// Nothing comes for a while.
    ///
    /// # Errors
    /// When something does.
    pub fn expect_silence(&mut self, time: Duration) -> Checked {
        match self.receive_within(time)? {
            None => Ok(()),
            Some(message) => self.wrong("nothing", format!("{:?}", message.header)),
        }
    }

    /// Receives the reply to `id`, which must be next.
    ///
    /// # Errors
    /// [`Stop::Refused`] if it tells of an error.
    pub fn reply(&mut self, id: u16, code: CommandCode) -> Checked<Message> {
        loop {
            let message = self.receive()?;
            if let Kind::Command { .. } = message.header.kind() {
                self.serve(message)?;
                continue;
            }
            same(self.sent.clone(), (message.header.id(), message.header.code()), (id, code))?;
            return match message.header.kind() {
                Kind::Reply { error: None } => Ok(message),
                Kind::Reply { error: Some(errno) } => Err(Stop::Refused { sent: self.sent.clone(), errno }),
                kind => self.wrong("a reply", format!("{kind:?}")),
            };
        }
    }

    /// Answers a DMA message of the server's, or puts it aside.
    ///
    /// # Errors
    /// When it is another command, or the server is gone.
    pub fn serve(&mut self, message: Message) -> Checked {
        let address = message.body.get(..8).and_then(|eight| eight.try_into().ok()).map(u64::from_le_bytes);
        if self.withhold.is_some() && self.withhold == address {
            self.withheld = Some(message);
            return Ok(());
        }
        self.answer(&message)
    }

    /// Answers a DMA message of the server's.
    ///
    /// # Errors
    /// As [`Client::serve`].
    pub fn answer(&mut self, message: &Message) -> Checked {
        match self.ram.serve(message) {
            Some(reply) => self.send_bytes(&reply, &[]),
            None => self.wrong("DMA messages", format!("{:?}", message.header)),
        }
    }

    /// Answers DMA messages for a while.
    ///
    /// # Errors
    /// When something else comes.
    pub fn serve_for(&mut self, time: Duration) -> Checked {
        match self.receive_within(time)? {
            Some(message) => self.serve(message),
            None => Ok(()),
        }
    }

    /// Shares `size` bytes of a file at `address`.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn share(
        &mut self,
        address: u64,
        size: u64,
        access: Access,
        how: Sharing,
        file: &Arc<OwnedFd>,
    ) -> Checked {
        self.ram.insert(address, size, access, file.clone());
        let map = mapping(address, size, access, 0);
        match how {
            Sharing::Descriptor => self.map(&map, Some(file.as_fd())),
            Sharing::Messages => self.map(&DmaMap { backing: Backing::Messages, ..map }, None),
        }
    }

    /// Sends a command and receives its reply.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn call(&mut self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> Checked<Message> {
        let id = self.send(command, descriptors)?;
        self.reply(id, command.code())
    }

    /// A message with a body of the caller's making.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn call_raw(
        &mut self,
        code: CommandCode,
        body: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Checked<Message> {
        self.id = self.id.wrapping_add(1);
        let shown = &body[..body.len().min(64)];
        let (length, count) = (body.len(), descriptors.len());
        self.says(format!("{code} of {length} bytes {shown:02x?} with {count} descriptors"));
        self.send_bytes(&raw(self.id, code.0, body), descriptors)?;
        self.reply(self.id, code)
    }

    /// DEVICE_GET_INFO.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn info(&mut self) -> Checked<DeviceInfo> {
        let message = self.call(&Command::GetInfo { argsz: 16 }, &[])?;
        match Reply::decode(message.header.code(), &message.body) {
            Ok(Reply::Info(info)) => Ok(info),
            other => self.wrong("information about the device", format!("{other:?}")),
        }
    }

    /// Whether the server says that DEVICE_RESET works.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn can_reset(&mut self) -> Checked<bool> {
        Ok(self.info()?.flags.contains(DeviceFlags::RESET))
    }

    /// DEVICE_GET_REGION_INFO with that much room: the information, the room that all of it needs, descriptors.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn region_info(&mut self, index: u32, argsz: u32) -> Checked<(RegionInfo, u32, Vec<OwnedFd>)> {
        let message = self.call(&Command::GetRegionInfo(Query { argsz, index }), &[])?;
        match Reply::decode(message.header.code(), &message.body) {
            Ok(Reply::RegionInfo { info, argsz }) => Ok((info, argsz, message.descriptors)),
            other => self.wrong("information about the region", format!("{other:?}")),
        }
    }

    /// DEVICE_GET_IRQ_INFO.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn irq_info(&mut self, index: IrqIndex) -> Checked<IrqInfo> {
        let message = self.call(&Command::GetIrqInfo(Query { argsz: 16, index: index.0 }), &[])?;
        match Reply::decode(message.header.code(), &message.body) {
            Ok(Reply::IrqInfo(info)) => Ok(info),
            other => self.wrong("information about the interrupts", format!("{other:?}")),
        }
    }

    /// DEVICE_SET_IRQS.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: &[&EventFd]) -> Checked {
        let eventfds: Vec<_> = eventfds.iter().map(|eventfd| eventfd.as_fd()).collect();
        self.call(&Command::SetIrqs(set), &eventfds).map(|_| ())
    }

    /// REGION_READ.
    ///
    /// # Errors
    /// As [`Client::reply`], and when the reply is about something else.
    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Checked<Vec<u8>> {
        let message = self.call(&Command::RegionRead(RegionAccess { offset, region, count }), &[])?;
        match Reply::decode(message.header.code(), &message.body) {
            Ok(Reply::RegionRead { offset: at, region: of, data })
                if (at, of, data.len()) == (offset, region, count as usize) =>
            {
                Ok(data.to_vec())
            }
            other => self.wrong("the same region, offset and count, and data", format!("{other:?}")),
        }
    }

    /// REGION_WRITE.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Checked {
        self.call(&Command::RegionWrite(RegionWrite { offset, region, data }), &[]).map(|_| ())
    }

    /// DMA_MAP.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn map(&mut self, map: &DmaMap, file: Option<BorrowedFd<'_>>) -> Checked {
        self.call(&Command::DmaMap(*map), file.as_slice()).map(|_| ())
    }

    /// DMA_UNMAP.
    ///
    /// # Errors
    /// As [`Client::reply`].
    pub fn unmap(&mut self, address: u64, size: u64) -> Checked {
        self.call(&unmap(address, size), &[]).map(|_| ())
    }

    /// The smallest socket buffers that the kernel gives, on this end.
    pub fn shrink_buffers(&self) {
        use nix::sys::socket::{setsockopt, sockopt};
        let _ = setsockopt(&self.socket, sockopt::SndBuf, &1);
        let _ = setsockopt(&self.socket, sockopt::RcvBuf, &1);
    }
}

/// A command of any kind.
pub fn raw(id: u16, code: u16, body: &[u8]) -> Vec<u8> {
    raw_message(id, code, 0, body)
}

/// A message with the flags of one's choice.
///
/// # Panics
/// When it is longer than 4 GiB.
pub fn raw_message(id: u16, code: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(HEADER_SIZE + body.len()).expect("a message of less than 4 GiB");
    let mut bytes = Vec::with_capacity(HEADER_SIZE + body.len());
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(&code.to_le_bytes());
    bytes.extend_from_slice(&size.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(body);
    bytes
}

/// DMA_UNMAP of one mapping.
pub fn unmap(address: u64, size: u64) -> Command<'static> {
    Command::DmaUnmap(DmaUnmap::new(UnmapTarget::Range { address, size }))
}

/// A DMA_MAP that goes with a descriptor.
pub fn mapping(address: u64, size: u64, access: Access, offset: u64) -> DmaMap {
    DmaMap { address, size, access, backing: Backing::Mapping { offset } }
}

/// A DMA_MAP of memory that is reached by messages.
pub fn by_messages(address: u64, size: u64) -> DmaMap {
    DmaMap { address, size, access: Access::ReadWrite, backing: Backing::Messages }
}

/// A memfd that nobody has sealed.
///
/// # Panics
/// When there is no memory.
pub fn memory(size: u64) -> OwnedFd {
    let file = memfd_create("conformance", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING);
    let file = file.expect("memory");
    nix::unistd::ftruncate(&file, i64::try_from(size).expect("a length")).expect("memory");
    file
}

/// An eventfd that does not block.
///
/// # Panics
/// When there are no more descriptors.
pub fn eventfd() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).expect("an eventfd")
}
