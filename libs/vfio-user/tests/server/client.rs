//! A raw client: it sends what it is told to, valid or not.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use outboard_vfio_user::counters::Messages;
use outboard_vfio_user::device::Device;
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::server::{ServeError, serve};
use outboard_vfio_user::transport::{Framer, Message, Received, Socket};
use outboard_vfio_user::wire::{
    Backing, Command, CommandCode, DmaMap, DmaUnmap, Kind, RegionAccess, RegionWrite, Reply, UnmapTarget,
    Version,
};

/// Longer than anything may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A device that is being served, on its own thread.
pub(crate) struct Served {
    thread: JoinHandle<Result<(), ServeError>>,
    pub(crate) messages: Arc<Messages>,
}

impl Served {
    pub(crate) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Why it ended; soon, since the test has given it cause to.
    pub(crate) fn outcome(self) -> Result<(), ServeError> {
        self.outcome_within(PATIENCE)
    }

    pub(crate) fn outcome_within(self, patience: Duration) -> Result<(), ServeError> {
        within(patience, "the session ends", || self.thread.is_finished());
        self.thread.join().expect("the session does not panic")
    }
}

pub(crate) fn eventually(what: &str, done: impl FnMut() -> bool) {
    within(PATIENCE, what, done);
}

fn within(patience: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < patience, "{what}: not after {patience:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) struct Client {
    socket: Socket,
    framer: Framer,
    arrived: VecDeque<Message>,
    id: u16,
    /// It looks for replies instead of sleeping.
    pub(crate) looks: bool,
}

/// A client that has not said a word, and its server.
pub(crate) fn connect<D: Device + 'static>(device: &Arc<D>) -> (Client, Served) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    serve_at(theirs, device, ours)
}

pub(crate) fn serve_at<D: Device + 'static>(
    theirs: UnixStream,
    device: &Arc<D>,
    ours: UnixStream,
) -> (Client, Served) {
    let messages = Arc::new(Messages::default());
    let thread = thread::spawn({
        let (device, messages) = (device.clone(), messages.clone());
        move || serve(theirs, &*device, &messages)
    });
    (Client::over(ours), Served { thread, messages })
}

/// A client past VERSION.
pub(crate) fn open<D: Device + 'static>(device: &Arc<D>) -> (Client, Served) {
    open_with(device, &Version::proposal())
}

pub(crate) fn open_with<D: Device + 'static>(device: &Arc<D>, version: &Version) -> (Client, Served) {
    let (mut client, served) = connect(device);
    client.call(&Command::Version(version.clone()), &[]).unwrap();
    (client, served)
}

impl Client {
    /// A client at the other end of `stream`.
    pub(crate) fn over(stream: UnixStream) -> Self {
        let socket = Socket::new(stream).unwrap();
        Self { socket, framer: Framer::new(), arrived: VecDeque::new(), id: 100, looks: false }
    }

    /// Sends bytes as they are.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        assert!(self.try_send(bytes, descriptors), "the server does not read");
    }

    /// As much as fits within a moment; false if some does not.
    pub(crate) fn try_send(&mut self, mut bytes: &[u8], mut descriptors: &[BorrowedFd<'_>]) -> bool {
        while !bytes.is_empty() {
            match self.socket.send(bytes, descriptors).unwrap() {
                Some(length) => (bytes, descriptors) = (&bytes[length..], &[]),
                None if !self.ready(PollFlags::POLLOUT, Duration::from_millis(300)) => return false,
                None => {}
            }
        }
        true
    }

    fn ready(&self, events: PollFlags, patience: Duration) -> bool {
        let mut descriptors = [PollFd::new(self.socket.as_fd(), events)];
        poll(&mut descriptors, PollTimeout::try_from(patience).unwrap()).unwrap() > 0
    }

    /// Sends a command without waiting for its reply; gives its id.
    pub(crate) fn send(&mut self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> u16 {
        self.id = self.id.wrapping_add(1);
        self.send_bytes(&command.encode(self.id, false), descriptors);
        self.id
    }

    /// Receives the next message if one comes in time; an end is none.
    pub(crate) fn receive_within(&mut self, patience: Duration) -> Option<Message> {
        let begin = Instant::now();
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = self.arrived.pop_front() {
                return Some(message);
            }
            match self.socket.receive(&mut buffer).unwrap() {
                Received::Data { length, descriptors } => {
                    self.framer.push(&buffer[..length], descriptors);
                    while let Some(message) = self.framer.next_message().unwrap() {
                        self.arrived.push_back(message);
                    }
                }
                Received::Closed => return None,
                Received::WouldBlock if begin.elapsed() > patience => return None,
                Received::WouldBlock if self.looks => std::hint::spin_loop(),
                Received::WouldBlock => {
                    self.ready(PollFlags::POLLIN, patience.min(Duration::from_millis(20)));
                }
            }
        }
    }

    pub(crate) fn receive(&mut self) -> Message {
        self.receive_within(PATIENCE).expect("a message")
    }

    /// Whether the server has closed the connection, with nothing more to say.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut buffer = [0; 16];
        eventually("something happens", || self.ready(PollFlags::POLLIN, Duration::from_millis(10)));
        self.arrived.is_empty() && matches!(self.socket.receive(&mut buffer).unwrap(), Received::Closed)
    }

    /// Receives the reply to `id`, which must be next, or the errno that it tells of.
    pub(crate) fn reply(&mut self, id: u16, code: CommandCode) -> Result<Message, u32> {
        let message = self.receive();
        assert_eq!((message.header.id(), message.header.code()), (id, code), "the reply that is due");
        match message.header.kind() {
            Kind::Reply { error: None } => Ok(message),
            Kind::Reply { error: Some(errno) } => {
                // Points 8 and 10.
                assert!(message.body.is_empty() && message.descriptors.is_empty() && errno > 0);
                Err(errno)
            }
            kind => panic!("{kind:?} is no reply"),
        }
    }

    pub(crate) fn call(
        &mut self,
        command: &Command<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Message, u32> {
        let id = self.send(command, descriptors);
        self.reply(id, command.code())
    }

    /// A message with a body of the test's making.
    pub(crate) fn call_raw(
        &mut self,
        code: CommandCode,
        body: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Message, u32> {
        self.id = self.id.wrapping_add(1);
        self.send_bytes(&raw(self.id, code.0, body), descriptors);
        self.reply(self.id, code)
    }

    pub(crate) fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, u32> {
        let message = self.call(&Command::RegionRead(RegionAccess { offset, region, count }), &[])?;
        match Reply::decode(message.header.code(), &message.body) {
            Ok(Reply::RegionRead { offset: at, region: of, data }) => {
                assert_eq!((at, of, data.len()), (offset, region, count as usize));
                Ok(data.to_vec())
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), u32> {
        self.call(&Command::RegionWrite(RegionWrite { offset, region, data }), &[]).map(|_| ())
    }

    pub(crate) fn map(&mut self, map: &DmaMap, file: Option<BorrowedFd<'_>>) -> Result<(), u32> {
        self.call(&Command::DmaMap(*map), file.as_slice()).map(|_| ())
    }

    pub(crate) fn unmap(&mut self, address: u64, size: u64) -> Result<(), u32> {
        let message = self.call(&unmap(address, size), &[])?;
        // Point 52.
        assert_eq!(message.body.len(), 24);
        Ok(())
    }

    pub(crate) fn set_buffers(&self, size: usize) {
        shrink(self.socket.as_fd(), size);
    }
}

pub(crate) fn unmap(address: u64, size: u64) -> Command<'static> {
    Command::DmaUnmap(DmaUnmap::new(UnmapTarget::Range { address, size }))
}

pub(crate) fn mapping(address: u64, size: u64, access: Access, offset: u64) -> DmaMap {
    DmaMap { address, size, access, backing: Backing::Mapping { offset } }
}

pub(crate) fn by_messages(address: u64, size: u64) -> DmaMap {
    DmaMap { address, size, access: Access::ReadWrite, backing: Backing::Messages }
}

/// A command of any kind.
pub(crate) fn raw(id: u16, code: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(&code.to_le_bytes());
    bytes.extend_from_slice(&(16 + u32::try_from(body.len()).unwrap()).to_le_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(body);
    bytes
}

/// The smallest socket buffers that the kernel gives.
pub(crate) fn shrink(socket: BorrowedFd<'_>, size: usize) {
    use nix::sys::socket::{setsockopt, sockopt};
    setsockopt(&socket, sockopt::SndBuf, &size).unwrap();
    setsockopt(&socket, sockopt::RcvBuf, &size).unwrap();
}

/// A memfd that nobody has sealed. The name finds it in /proc.
pub(crate) fn memory(name: &str, size: u64) -> OwnedFd {
    let file = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&file, i64::try_from(size).unwrap()).unwrap();
    file
}

/// How many descriptors of this process are that memfd.
pub(crate) fn descriptors_named(name: &str) -> usize {
    let wanted = format!("/memfd:{name} ");
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter(|link| link.to_string_lossy().starts_with(&wanted))
        .count()
}

/// How many mappings of this process are of that memfd.
pub(crate) fn mappings_named(name: &str) -> usize {
    let wanted = format!("/memfd:{name} ");
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains(&wanted)).count()
}

pub(crate) fn eventfd() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap()
}

/// How many descriptors of this process are that eventfd.
pub(crate) fn copies(eventfd: &EventFd) -> usize {
    let id = |fd: &str| {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        info.lines().find(|line| line.starts_with("eventfd-id")).map(str::to_owned)
    };
    let ours = id(&eventfd.as_fd().as_raw_fd().to_string());
    assert!(ours.is_some(), "the kernel names eventfds");
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|entry| id(&entry.file_name().to_string_lossy()) == ours).count()
}
