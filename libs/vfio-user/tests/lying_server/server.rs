//! The server: it takes its lies from a list, one for each command, and remembers which was whose.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::transport::{Framer, Message, Received, Socket};
use outboard_vfio_user::wire::{
    Capabilities, Command, CommandCode, DmaAccess, DmaUnmap, DmaWrite, IoFds, IrqFlags, IrqIndex, IrqInfo,
    Kind, RegionAccess, RegionFlags, RegionInfo, Reply, TwinSocket, UnmapTarget, Version, encode_error,
};

/// Nobody maps anything from here on.
pub(crate) const NOWHERE: u64 = 1 << 50;
/// Where in a mapping the server writes.
pub(crate) const WRITTEN: u64 = 64;
pub(crate) const PAGE: u64 = 4096;

/// What the server does with a command.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lie {
    /// Answers well.
    Honest,
    /// Answers well, a byte at a time.
    Pieces,
    /// Answers well, but after the next one.
    Late,
    /// Asks for memory before it answers well.
    Ask(Question),
    /// Answers with an error.
    Refuse(u8),
    /// Answers with a byte less, or more.
    Short,
    Long,
    /// Answers about something else.
    Echo,
    /// Answers well, with descriptors.
    Descriptors(u8),
    /// Does not answer.
    Silent,
    /// From here on there is no connection any more.
    Break(Break),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Break {
    WrongId,
    WrongCommand,
    WrongType,
    Size(u32),
    Twice,
    Garbage,
    Close,
    /// Only the socket of the server's commands; both where there is one.
    CloseTwin,
    /// A command where replies belong, or the reverse.
    WrongSocket,
}

/// Which memory the server asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Question {
    /// Of one that is mapped.
    Read(u8),
    Write(u8),
    /// The last byte of one that is mapped, and the one after.
    Across(u8),
    ReadNowhere,
    WriteNowhere,
    /// No question for a client.
    Nonsense,
}

/// Which call a command is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) u16, pub(crate) u64);

/// How a question was answered, and what the server may conclude.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The mapping that it was about.
    pub(crate) of: Option<(u64, Access)>,
    pub(crate) question: Question,
    /// The data, or the errno.
    pub(crate) answer: Result<Vec<u8>, u32>,
}

/// What the server has seen.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) lies: BTreeMap<Key, Lie>,
    pub(crate) asked: Vec<Asked>,
    pub(crate) broken: Option<Break>,
    pub(crate) received: u64,
    /// What became of every place at the end.
    pub(crate) swept: BTreeMap<u64, Result<Vec<u8>, u32>>,
}

pub(crate) struct Server {
    main: Socket,
    twin: Option<Socket>,
    framers: [Framer; 2],
    backlog: VecDeque<Message>,
    late: Option<Vec<u8>>,
    lies: VecDeque<Lie>,
    mapped: Vec<(u64, Access)>,
    last_id: u16,
    /// Where to look at the end.
    places: Receiver<Vec<u64>>,
    log: Log,
}

impl Server {
    pub(crate) fn new(stream: UnixStream, lies: Vec<Lie>, places: Receiver<Vec<u64>>) -> Self {
        Self {
            main: Socket::new(stream).unwrap(),
            twin: None,
            framers: [Framer::new(), Framer::new()],
            backlog: VecDeque::new(),
            late: None,
            lies: lies.into(),
            mapped: Vec::new(),
            last_id: 0,
            places,
            log: Log::default(),
        }
    }

    /// Serves until the client is gone.
    pub(crate) fn run(mut self, twin: bool) -> Log {
        self.open(twin);
        while let Some(message) = self.command() {
            self.log.received += 1;
            self.serve(&message);
        }
        self.log
    }

    fn open(&mut self, twin: bool) {
        let version = self.command().unwrap();
        let mut capabilities = Capabilities::ours();
        capabilities.write_multiple = Some(true);
        let mut descriptors: Vec<OwnedFd> = Vec::new();
        if twin {
            let (ours, theirs) = UnixStream::pair().unwrap();
            self.twin = Some(Socket::new(ours).unwrap());
            capabilities.twin_socket = Some(TwinSocket { supported: true, fd_index: Some(0) });
            descriptors.push(theirs.into());
        }
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let reply = Reply::Version(Version { minor: 1, capabilities }).encode(version.header.id());
        self.send(&reply, &borrowed);
    }

    /// The next command; what is late is sent when none comes for a while. None at the end.
    fn command(&mut self) -> Option<Message> {
        if let Some(message) = self.backlog.pop_front() {
            return Some(message);
        }
        loop {
            match self.receive(0, Duration::from_millis(20)) {
                Arrival::Message(message) => return Some(message),
                Arrival::Nothing => self.send_late(),
                Arrival::End => return None,
            }
        }
    }

    fn send_late(&mut self) {
        if let Some(late) = self.late.take() {
            self.send(&late, &[]);
        }
    }

    fn receive(&mut self, which: usize, patience: Duration) -> Arrival {
        let mut buffer = [0; 4096];
        let socket = match (which, &self.twin) {
            (1, Some(twin)) => twin,
            _ => &self.main,
        };
        loop {
            // A client that is gone leaves half a message, no broken one.
            match self.framers[which].next_message().unwrap() {
                Some(message) => return Arrival::Message(message),
                None => match socket.receive(&mut buffer) {
                    Ok(Received::Data { length, descriptors }) => {
                        self.framers[which].push(&buffer[..length], descriptors);
                    }
                    Ok(Received::WouldBlock) => {
                        let mut descriptors = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
                        if poll(&mut descriptors, PollTimeout::try_from(patience).unwrap()).unwrap() == 0 {
                            return Arrival::Nothing;
                        }
                    }
                    Ok(Received::Closed) | Err(_) => return Arrival::End,
                },
            }
        }
    }

    fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        send(&self.main, bytes, descriptors);
    }

    fn serve(&mut self, message: &Message) {
        let (id, code) = (message.header.id(), message.header.code());
        let command = Command::decode(&message.header, &message.body, message.descriptors.len());
        let command = command.expect("the client's commands are valid");
        if code == CommandCode::DEVICE_RESET {
            let places = self.places.recv().unwrap();
            for place in places {
                let answer = self.ask(&Command::DmaRead(DmaAccess { address: place, count: 8 }));
                self.log.swept.insert(place, answer);
            }
            return self.send(&Reply::Done(code).encode(id), &[]);
        }
        let (key, access) = key(&command);
        if code == CommandCode::DMA_UNMAP {
            self.mapped.retain(|&(place, _)| place != key.1);
        }
        let lie = self.lies.pop_front().unwrap_or(Lie::Honest);
        assert!(self.log.lies.insert(key, lie).is_none(), "{key:?} came twice");
        let honest = honest(&command).encode(id);
        let mut reply = honest.clone();
        let mut descriptors: Vec<OwnedFd> = Vec::new();
        match lie {
            Lie::Honest | Lie::Late | Lie::Pieces => {}
            Lie::Ask(question) => self.question(question),
            Lie::Refuse(errno) => reply = encode_error(id, code, errno.into()),
            Lie::Short if reply.len() > 16 => {
                reply.pop();
            }
            Lie::Short => {}
            Lie::Long => reply.push(0),
            Lie::Echo => reply = echo(&command).encode(id),
            Lie::Descriptors(count) => {
                descriptors = (0..count).map(|_| tempfile::tempfile().unwrap().into()).collect();
            }
            Lie::Silent => return,
            Lie::Break(way) => return self.break_off(way, honest),
        }
        let length = u32::try_from(reply.len()).unwrap();
        reply[4..8].copy_from_slice(&length.to_le_bytes());
        if code == CommandCode::DMA_MAP && good(lie) {
            self.mapped.push((key.1, access.unwrap()));
        }
        if lie == Lie::Late && self.late.is_none() {
            self.late = Some(reply);
            return;
        }
        if lie == Lie::Pieces {
            reply.chunks(1).for_each(|byte| self.send(byte, &[]));
        } else {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            self.send(&reply, &borrowed);
        }
        self.send_late();
    }

    fn break_off(&mut self, way: Break, mut reply: Vec<u8>) {
        self.log.broken.get_or_insert(way);
        match way {
            Break::WrongId => reply[0..2].copy_from_slice(&0x7fff_u16.to_le_bytes()),
            Break::WrongCommand => reply[2] = CommandCode::VERSION.0 as u8,
            Break::WrongType => reply[8] = 5,
            Break::Size(size) => reply[4..8].copy_from_slice(&size.to_le_bytes()),
            Break::Twice => reply.extend(reply.clone()),
            Break::Garbage => reply.fill(0xff),
            Break::WrongSocket if self.twin.is_some() => {
                reply = Command::DmaRead(DmaAccess { address: 0, count: 1 }).encode(1, false);
            }
            Break::CloseTwin if self.twin.is_some() => {
                return self.twin.as_ref().unwrap().shut_down();
            }
            Break::Close | Break::CloseTwin | Break::WrongSocket => return self.main.shut_down(),
        }
        self.send(&reply, &[]);
    }

    fn question(&mut self, question: Question) {
        let of = |which: u8| {
            let count = self.mapped.len();
            (count > 0).then(|| self.mapped[usize::from(which) % count])
        };
        let (place, command): (_, Box<dyn Fn(u64) -> Command<'static>>) = match question {
            Question::Read(which) => (of(which), Box::new(|at| read(at, 8))),
            Question::Across(which) => (of(which), Box::new(|at| read(at + PAGE - 1, 2))),
            Question::Write(which) => (of(which), Box::new(|at| write(at + WRITTEN))),
            Question::ReadNowhere => (None, Box::new(|_| read(NOWHERE, 8))),
            Question::WriteNowhere => (None, Box::new(|_| write(NOWHERE))),
            Question::Nonsense => (None, Box::new(|_| Command::Reset)),
        };
        let of_mapping =
            !matches!(question, Question::ReadNowhere | Question::WriteNowhere | Question::Nonsense);
        if of_mapping && place.is_none() {
            return;
        }
        let answer = self.ask(&command(place.map_or(0, |(at, _)| at)));
        self.log.asked.push(Asked { of: place, question, answer });
    }

    /// Asks the client; its commands wait meanwhile.
    fn ask(&mut self, command: &Command<'_>) -> Result<Vec<u8>, u32> {
        self.last_id += 1;
        let id = self.last_id;
        let socket = self.twin.as_ref().unwrap_or(&self.main);
        send(socket, &command.encode(id, false), &[]);
        let which = usize::from(self.twin.is_some());
        loop {
            match self.receive(which, Duration::from_secs(20)) {
                Arrival::Message(message) => match message.header.kind() {
                    Kind::Command { .. } => self.backlog.push_back(message),
                    Kind::Reply { error } => {
                        assert_eq!((message.header.id(), message.header.code()), (id, command.code()));
                        let data = message.body.get(16..).unwrap_or_default().to_vec();
                        return error.map_or(Ok(data), Err);
                    }
                    kind @ Kind::Invalid(_) => panic!("{kind:?}"),
                },
                Arrival::Nothing => panic!("{command:?} is not answered"),
                Arrival::End => return Err(u32::MAX),
            }
        }
    }
}

enum Arrival {
    Message(Message),
    Nothing,
    End,
}

fn send(socket: &Socket, mut bytes: &[u8], mut descriptors: &[BorrowedFd<'_>]) {
    while !bytes.is_empty() {
        match socket.send(bytes, descriptors) {
            Ok(Some(length)) => (bytes, descriptors) = (&bytes[length..], &[]),
            Ok(None) => std::thread::yield_now(),
            // The client is gone.
            Err(_) => return,
        }
    }
}

fn read(address: u64, count: u32) -> Command<'static> {
    Command::DmaRead(DmaAccess { address, count })
}

fn write(address: u64) -> Command<'static> {
    Command::DmaWrite(DmaWrite { address, data: &[0x77; 8] })
}

/// Whether the call goes well.
pub(crate) fn good(lie: Lie) -> bool {
    matches!(lie, Lie::Honest | Lie::Pieces | Lie::Late | Lie::Ask(_) | Lie::Short)
}

fn key(command: &Command<'_>) -> (Key, Option<Access>) {
    let (of, access) = match command {
        Command::RegionRead(RegionAccess { offset, .. }) => (*offset, None),
        Command::RegionWrite(write) => (write.offset, None),
        Command::RegionWriteMulti(writes) => (writes.iter().next().unwrap().offset, None),
        Command::GetRegionInfo(query) | Command::GetRegionIoFds(query) | Command::GetIrqInfo(query) => {
            (query.index.into(), None)
        }
        Command::SetIrqs(set) => (set.start.into(), None),
        Command::DmaMap(map) => (map.address, Some(map.access)),
        Command::DmaUnmap(DmaUnmap { target: UnmapTarget::Range { address, .. }, .. }) => (*address, None),
        other => panic!("{other:?}"),
    };
    (Key(command.code().0, of), access)
}

/// What is read at an offset: nobody else's data.
pub(crate) fn data_at(offset: u64, count: usize) -> Vec<u8> {
    offset.to_le_bytes().into_iter().cycle().take(count).collect()
}

enum Answer {
    Reply(Reply<'static>),
    Read(RegionAccess),
}

impl Answer {
    fn encode(&self, id: u16) -> Vec<u8> {
        match self {
            Self::Reply(reply) => reply.encode(id),
            Self::Read(RegionAccess { offset, region, count }) => {
                let data = data_at(*offset, *count as usize);
                Reply::RegionRead { offset: *offset, region: *region, data: &data }.encode(id)
            }
        }
    }
}

fn honest(command: &Command<'_>) -> Answer {
    answer(command, 0)
}

/// About something next to it.
fn echo(command: &Command<'_>) -> Answer {
    answer(command, 1)
}

fn answer(command: &Command<'_>, beside: u32) -> Answer {
    let further = |offset: u64| offset + u64::from(beside) * 8;
    Answer::Reply(match command {
        Command::RegionRead(access) => {
            return Answer::Read(RegionAccess { offset: further(access.offset), ..*access });
        }
        Command::RegionWrite(write) => {
            let access = write.access();
            Reply::RegionWrite(RegionAccess { offset: further(access.offset), ..access })
        }
        Command::RegionWriteMulti(writes) => {
            Reply::RegionWriteMulti { count: writes.iter().count() as u64 + u64::from(beside) }
        }
        Command::GetRegionInfo(query) => {
            let index = query.index + beside;
            Reply::region_info(
                RegionInfo { index, flags: RegionFlags(7), size: PAGE, ..RegionInfo::default() },
                32,
            )
        }
        Command::GetRegionIoFds(query) => {
            Reply::region_io_fds(IoFds::new(query.index + beside, Vec::new()), 16)
        }
        Command::GetIrqInfo(query) => {
            let index = IrqIndex(query.index + beside);
            Reply::IrqInfo(IrqInfo { index, flags: IrqFlags::EVENTFD, count: query.index % 2048 })
        }
        Command::DmaUnmap(DmaUnmap { target: UnmapTarget::Range { address, size }, .. }) => {
            let address = further(*address);
            Reply::DmaUnmap(DmaUnmap::new(UnmapTarget::Range { address, size: *size }))
        }
        other => Reply::Done(other.code()),
    })
}
