use std::io::Read;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::transport::{Received, Socket};
use crate::wire::{RegionAccess, RegionWrite};

/// What a client may send.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Read,
    Write,
    Reset,
    Version,
    /// A REGION_READ that is cut short.
    Malformed,
    /// A command that nobody has, with a body.
    Unknown,
    /// Neither command nor reply.
    NoType,
    /// A reply with an id that nobody asked with.
    ReplyToNothing,
}

/// How a client answers a DMA message of ours.
#[derive(Clone, Copy, Debug)]
enum DmaReply {
    Good,
    Refused,
    OtherLength,
    OtherCommand,
}

#[derive(Clone, Copy, Debug)]
enum DeviceAnswer {
    Good,
    Failure,
    /// Given by the command before: it comes too late.
    Stale,
}

#[derive(Clone, Debug)]
enum Step {
    Send { content: Content, id: u16, no_reply: bool, descriptors: usize, cuts: Vec<usize> },
    Take,
    Answer(DeviceAnswer),
    StartDma,
    AnswerDma(usize, DmaReply),
    Pass(u64),
    BadSize(u32),
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let content = prop_oneof![
        6 => Just(Content::Read),
        4 => Just(Content::Write),
        1 => Just(Content::Reset),
        1 => Just(Content::Version),
        2 => Just(Content::Malformed),
        1 => Just(Content::Unknown),
        1 => Just(Content::NoType),
        1 => Just(Content::ReplyToNothing),
    ];
    let answer = prop_oneof![
        4 => Just(DeviceAnswer::Good),
        1 => Just(DeviceAnswer::Failure),
        1 => Just(DeviceAnswer::Stale),
    ];
    let dma = prop_oneof![
        Just(DmaReply::Good),
        Just(DmaReply::Refused),
        Just(DmaReply::OtherLength),
        Just(DmaReply::OtherCommand),
    ];
    prop_oneof![
        40 => (content, 0..4_u16, any::<bool>(), 0..3_usize, vec(1..60_usize, 0..4)).prop_map(
            |(content, id, no_reply, descriptors, cuts)| Step::Send { content, id, no_reply, descriptors, cuts }
        ),
        40 => Just(Step::Take),
        30 => answer.prop_map(Step::Answer),
        8 => Just(Step::StartDma),
        8 => (any::<usize>(), dma).prop_map(|(which, reply)| Step::AnswerDma(which, reply)),
        6 => (0..2500_u64).prop_map(Step::Pass),
        1 => prop_oneof![0..16_u32, limits::MESSAGE + 1..=u32::MAX].prop_map(Step::BadSize),
        1 => Just(Step::End),
    ]
}

/// A message that the model knows of.
#[derive(Debug)]
struct Sent {
    content: Content,
    id: u16,
    no_reply: bool,
    arrived: Instant,
    /// The other ends of the descriptors that went along: at their end once ours are closed.
    ends: Vec<UnixStream>,
}

/// What has to come out.
#[derive(Debug, PartialEq)]
enum Out {
    Reply { id: u16, code: u16, failed: bool },
    Dma { id: u16 },
}

/// The simple model: a queue, and at most one command that is being executed.
struct Model {
    session: Session,
    begin: Instant,
    now: Instant,
    opened: bool,
    ended: bool,
    waiting: VecDeque<Sent>,
    executing: Option<(Ticket, Sent, Instant, Request)>,
    stale: Option<Ticket>,
    dma: Vec<(DmaId, Option<DmaReply>)>,
    expected: VecDeque<Out>,
    ours: Socket,
    client: Socket,
    framer: Framer,
}

const DMA: DmaAccess = DmaAccess { address: 0x1000, count: 24 };

fn code(content: Content) -> u16 {
    match content {
        Content::Read | Content::Malformed | Content::NoType | Content::ReplyToNothing => 9,
        Content::Write => 10,
        Content::Reset => 13,
        Content::Version => 1,
        Content::Unknown => 999,
    }
}

fn message(content: Content, id: u16, no_reply: bool) -> Vec<u8> {
    let access = RegionAccess { offset: 8, region: 0, count: 16 };
    let read = || Command::RegionRead(access).encode(id, no_reply);
    match content {
        Content::Read => read(),
        Content::Write => {
            Command::RegionWrite(RegionWrite { offset: 8, region: 0, data: &[7; 16] }).encode(id, no_reply)
        }
        Content::Reset => Command::Reset.encode(id, no_reply),
        Content::Version => Command::Version(Version::proposal()).encode(id, no_reply),
        Content::Malformed => {
            let mut bytes = read();
            bytes.pop();
            bytes[4] -= 1;
            bytes
        }
        Content::Unknown => {
            let mut bytes = read();
            bytes[2..4].copy_from_slice(&999_u16.to_le_bytes());
            bytes
        }
        Content::NoType => {
            let mut bytes = read();
            bytes[8] = 2;
            bytes
        }
        Content::ReplyToNothing => Reply::DmaRead { address: 0, data: &[] }.encode(0xf000 | id),
    }
}

fn at_end(mut stream: &UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    matches!(stream.read(&mut [0]), Ok(0))
}

impl Model {
    fn new() -> Self {
        let (ours, client) = UnixStream::pair().unwrap();
        let now = Instant::now();
        Self {
            session: Session::new(Arc::default(), Offer::default(), now),
            begin: now,
            now,
            opened: false,
            ended: false,
            waiting: VecDeque::new(),
            executing: None,
            stale: None,
            dma: Vec::new(),
            expected: VecDeque::new(),
            ours: Socket::new(ours).unwrap(),
            client: Socket::new(client).unwrap(),
            framer: Framer::new(),
        }
    }

    fn reply(&mut self, sent: &Sent, failed: bool) {
        if !sent.no_reply || sent.content == Content::NoType {
            self.expected.push_back(Out::Reply { id: sent.id, code: code(sent.content), failed });
        }
        assert!(sent.ends.iter().all(at_end), "{sent:?} is over and its descriptors are open");
    }

    fn end(&mut self) {
        self.ended = true;
        self.waiting.clear();
        self.executing = None;
    }

    fn send(&mut self, content: Content, id: u16, no_reply: bool, descriptors: usize, cuts: &[usize]) {
        let (mut given, ends): (Vec<OwnedFd>, Vec<_>) = (0..descriptors)
            .map(|_| UnixStream::pair().unwrap())
            .map(|(ours, end)| (OwnedFd::from(ours), end))
            .unzip();
        let bytes = message(content, id, no_reply);
        let mut rest = &bytes[..];
        for &cut in cuts {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            self.session.receive(piece, std::mem::take(&mut given), self.now);
            rest = after;
        }
        self.session.receive(rest, given, self.now);
        let sent = Sent { content, id, no_reply, arrived: self.now, ends };
        if content == Content::ReplyToNothing || self.ended {
            assert!(sent.ends.iter().all(at_end));
        } else {
            self.waiting.push_back(sent);
        }
    }

    fn take(&mut self) {
        let got = self.session.next_request(self.now);
        while self.executing.is_none() && !self.ended {
            let Some(sent) = self.waiting.pop_front() else { break };
            let posted = sent.no_reply && sent.content != Content::NoType;
            let deadline = if posted { self.now } else { sent.arrived } + limits::REPLY;
            if self.now >= deadline {
                assert!(matches!(got, Err(SessionError::Overdue { .. })), "{got:?}");
                return self.end();
            }
            let valid_version = sent.content == Content::Version && sent.ends.is_empty();
            match sent.content {
                _ if !self.opened => {
                    self.opened = true;
                    if valid_version {
                        self.reply(&sent, false);
                        continue;
                    }
                    self.reply(&sent, true);
                    assert!(matches!(got, Err(SessionError::NotNegotiated(_))), "{got:?}");
                    return self.end();
                }
                Content::Read | Content::Write | Content::Reset => {
                    let mut request = got.unwrap().expect("a request");
                    assert_eq!(request.code().0, code(sent.content));
                    assert_eq!(request.take_descriptors().len(), sent.ends.len());
                    self.executing = Some((request.ticket, sent, deadline, request));
                    return;
                }
                _ => self.reply(&sent, true),
            }
        }
        assert!(matches!(got, Ok(None)), "{got:?}");
    }

    fn answer(&mut self, answer: DeviceAnswer) {
        if matches!(answer, DeviceAnswer::Stale) {
            if let Some(stale) = self.stale {
                assert!(!self.session.finish(stale, Err(Errno::EIO), self.now));
            }
            return;
        }
        let Some((ticket, sent, deadline, _request)) = self.executing.take() else { return };
        let access = RegionAccess { offset: 8, region: 0, count: 16 };
        let reply = match sent.content {
            Content::Read => Reply::RegionRead { offset: 8, region: 0, data: &[1; 16] },
            Content::Write => Reply::RegionWrite(access),
            _ => Reply::Done(CommandCode::DEVICE_RESET),
        };
        let failed = matches!(answer, DeviceAnswer::Failure);
        let given = if failed { Err(Errno::ENXIO) } else { Ok((reply, vec![])) };
        assert!(self.session.finish(ticket, given, self.now));
        self.stale = Some(ticket);
        if self.now >= deadline {
            self.end();
            assert!(matches!(self.session.next_request(self.now), Err(SessionError::Overdue { .. })));
        } else {
            self.reply(&sent, failed);
        }
    }

    fn start_dma(&mut self) {
        match self.session.dma_read(DMA) {
            Ok(id) => {
                self.dma.push((id, None));
                self.expected.push_back(Out::Dma { id: id.0 });
                assert!(self.session.dma_outcome(id).is_none());
            }
            Err(errno) => assert!(errno == Errno::ENOTCONN && (self.ended || !self.opened)),
        }
    }

    fn answer_dma(&mut self, which: usize, reply: DmaReply) {
        if self.dma.is_empty() || self.ended {
            return;
        }
        let index = which % self.dma.len();
        let (id, answered) = &mut self.dma[index];
        let address = DMA.address;
        let bytes = match reply {
            DmaReply::Good => Reply::DmaRead { address, data: &[5; 24] }.encode(id.0),
            DmaReply::Refused => encode_error(id.0, CommandCode::DMA_READ, 14),
            DmaReply::OtherLength => Reply::DmaRead { address, data: &[5; 23] }.encode(id.0),
            DmaReply::OtherCommand => Reply::Done(CommandCode::DEVICE_RESET).encode(id.0),
        };
        self.session.receive(&bytes, vec![], self.now);
        // The first answer counts.
        let reply = *answered.get_or_insert(reply);
        if which.is_multiple_of(3) {
            let (id, _) = self.dma.remove(index);
            let outcome = self.session.dma_outcome(id).expect("an outcome");
            match reply {
                DmaReply::Good => assert_eq!(outcome, Ok(vec![5; 24])),
                DmaReply::Refused => assert_eq!(outcome, Err(Errno::EFAULT)),
                DmaReply::OtherLength | DmaReply::OtherCommand => assert_eq!(outcome, Err(Errno::EPROTO)),
            }
            assert_eq!(self.session.dma_outcome(id), Some(Err(Errno::EINVAL)), "an outcome is given once");
        }
    }

    fn bad_size(&mut self, size: u32) {
        let mut bytes = message(Content::Read, 9, false);
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        self.session.receive(&bytes, vec![], self.now);
        if !self.ended {
            self.expected.push_back(Out::Reply { id: 9, code: 9, failed: true });
            self.end();
            assert!(matches!(self.session.next_request(self.now), Err(SessionError::Frame(_))));
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Send { content, id, no_reply, descriptors, cuts } => {
                self.send(*content, *id, *no_reply, *descriptors, cuts);
            }
            Step::Take => self.take(),
            Step::Answer(answer) => self.answer(*answer),
            Step::StartDma => self.start_dma(),
            Step::AnswerDma(which, reply) => self.answer_dma(*which, *reply),
            Step::Pass(milliseconds) => {
                self.now += Duration::from_millis(*milliseconds);
                self.session.expire(self.now);
                if self.executing.as_ref().is_some_and(|(_, _, deadline, _)| self.now >= *deadline) {
                    assert!(matches!(self.session.next_request(self.now), Err(SessionError::Overdue { .. })));
                    self.end();
                }
                let silent = !self.opened && self.now >= self.begin + limits::HANDSHAKE;
                if silent && !std::mem::replace(&mut self.ended, true) {
                    assert!(matches!(self.session.next_request(self.now), Err(SessionError::Silent { .. })));
                    self.end();
                }
            }
            Step::BadSize(size) => self.bad_size(*size),
            Step::End => {
                self.session.end();
                self.end();
            }
        }
    }

    /// Everything that came out, and nothing else, in this order.
    fn check_output(&mut self) {
        self.session.output().flush(&self.ours).unwrap();
        let mut buffer = [0; 4096];
        while let Received::Data { length, .. } = self.client.receive(&mut buffer).unwrap() {
            self.framer.push(&buffer[..length], vec![]);
        }
        while let Some(message) = self.framer.next_message().unwrap() {
            let (id, code) = (message.header.id(), message.header.code().0);
            let out = match message.header.kind() {
                Kind::Reply { error } => {
                    assert!(error.is_none_or(|errno| errno > 0 && message.body.is_empty()));
                    Out::Reply { id, code, failed: error.is_some() }
                }
                kind => {
                    assert_eq!((kind, code), (Kind::Command { no_reply: false }, 11));
                    Out::Dma { id }
                }
            };
            assert_eq!(Some(out), self.expected.pop_front());
        }
        assert!(self.expected.is_empty(), "still to come: {:?}", self.expected);
    }
}

proptest! {
    /// One reply for every replied command, in order, ids and codes echoed; none for the posted ones; no
    /// descriptor stays open; whatever else happens meanwhile.
    #[test]
    fn behaves_like_a_queue(opening in 0..20_u8, steps in vec(step(), 1..120)) {
        let mut model = Model::new();
        if opening > 0 {
            model.send(Content::Version, 77, false, 0, &[]);
            model.take();
        }
        for step in &steps {
            model.step(step);
            model.check_output();
        }
        let ends: Vec<_> = model.waiting.drain(..).flat_map(|sent| sent.ends).collect();
        drop(model);
        prop_assert!(ends.iter().all(at_end));
    }
}

fn open(now: Instant) -> Session {
    let mut session = Session::new(Arc::default(), Offer::default(), now);
    session.receive(&message(Content::Version, 0, false), vec![], now);
    assert!(session.next_request(now).unwrap().is_none());
    session
}

/// A client that pipelines without end, and takes nothing, makes us keep a bounded amount.
#[test]
fn the_queues_are_bounded() {
    let now = Instant::now();
    let mut session = open(now);
    let mut sent = 0;
    while session.hungry() {
        session.receive(&message(Content::Read, sent, false), vec![], now);
        sent += 1;
    }
    assert_eq!(usize::from(sent), limits::WAITING_COMMANDS);
    let data = vec![0; 1 << 20];
    let mut answered = 0;
    while let Some(request) = session.next_request(now).unwrap() {
        let reply = Reply::RegionRead { offset: 0, region: 0, data: &data };
        session.finish(request.ticket, Ok((reply, vec![])), now);
        answered += 1;
    }
    assert_eq!(answered, 4, "the rest waits until these replies are taken");
    assert!(!session.hungry());
}

#[test]
fn waiting_commands_hold_few_descriptors() {
    let now = Instant::now();
    let mut session = open(now);
    let mut held = 0;
    while session.hungry() {
        let descriptors: Vec<OwnedFd> =
            (0..50).map(|_| OwnedFd::from(UnixStream::pair().unwrap().0)).collect();
        session.receive(&message(Content::Read, 0, false), descriptors, now);
        held += 50;
    }
    assert!(held <= limits::WAITING_DESCRIPTORS + 50, "{held}");
}

/// A client that asks for the same region again and again, and takes no answer, would have us hold a descriptor for
/// each: those of the whole process.
#[test]
fn waiting_replies_hold_few_descriptors() {
    let now = Instant::now();
    let mut session = open(now);
    let mut answered = 0;
    while session.hungry() {
        session.receive(&message(Content::Read, 0, false), vec![], now);
        while let Some(request) = session.next_request(now).unwrap() {
            let reply = Reply::RegionRead { offset: 0, region: 0, data: &[0; 4] };
            let descriptor = OwnedFd::from(UnixStream::pair().unwrap().0);
            session.finish(request.ticket, Ok((reply, vec![descriptor])), now);
            answered += 1;
        }
    }
    assert_eq!(answered, limits::WAITING_DESCRIPTORS);
}

#[test]
fn more_dma_messages_than_the_limit_are_refused() {
    let now = Instant::now();
    let mut session = open(now);
    let ids: Vec<_> = (0..limits::DMA_MESSAGES).map(|_| session.dma_read(DMA).unwrap()).collect();
    assert_eq!(session.dma_read(DMA), Err(Errno::EAGAIN));
    session.receive(&Reply::DmaRead { address: DMA.address, data: &[1; 24] }.encode(ids[3].0), vec![], now);
    assert_eq!(session.dma_outcome(ids[3]), Some(Ok(vec![1; 24])));
    let id = session.dma_read(DMA).unwrap();
    assert!(!ids.contains(&id), "an id is not used again at once");
}

/// 2^16 messages later the ids that are still under way are passed over.
#[test]
fn dma_ids_of_messages_under_way_are_not_used_again() {
    let now = Instant::now();
    let mut session = open(now);
    let slow = session.dma_read(DMA).unwrap();
    for _ in 0..70_000 {
        let id = session.dma_read(DMA).unwrap();
        assert_ne!(id, slow);
        session.receive(&encode_error(id.0, CommandCode::DMA_READ, 14), vec![], now);
        assert_eq!(session.dma_outcome(id), Some(Err(Errno::EFAULT)));
        *session.output() = Outbox::new();
    }
}

#[test]
fn a_client_has_to_negotiate_in_time() {
    let begin = Instant::now();
    let version = message(Content::Version, 0, false);
    // Not a byte, and one every second.
    for pieces in [0, 9] {
        let mut session = Session::new(Arc::default(), Offer::default(), begin);
        assert_eq!(session.deadline(), Some(begin + limits::HANDSHAKE));
        for (second, byte) in version[..pieces].iter().enumerate() {
            let now = begin + Duration::from_secs(second as u64 + 1);
            session.expire(now);
            session.receive(&[*byte], vec![], now);
            assert!(session.next_request(now).unwrap().is_none());
        }
        session.expire(begin + limits::HANDSHAKE);
        let error = session.next_request(begin + limits::HANDSHAKE).unwrap_err();
        assert_eq!(error.to_string(), "The client did not negotiate within 10s");
    }
    let later = begin + Duration::from_secs(3600);
    let mut session = open(begin);
    assert_eq!(session.deadline(), None);
    session.expire(later);
    assert!(session.next_request(later).unwrap().is_none());
}

#[test]
fn a_client_does_not_stop_in_the_middle_of_a_message() {
    let begin = Instant::now();
    let message = message(Content::Write, 5, true);
    for length in [1, 15, 16, 17, message.len() - 1] {
        let mut session = open(begin);
        let mut now = begin;
        for byte in &message[..length] {
            now += limits::STALL - Duration::from_millis(1);
            session.expire(now);
            session.receive(&[*byte], vec![], now);
        }
        assert_eq!(session.deadline(), Some(now + limits::STALL));
        session.expire(now + limits::STALL - Duration::from_millis(1));
        assert!(session.next_request(now).unwrap().is_none(), "it was slow, not silent");
        session.expire(now + limits::STALL);
        assert!(matches!(session.next_request(now), Err(SessionError::Stalled { .. })));
    }
}

/// A message that we do not read on purpose may take its time.
#[test]
fn a_message_that_waits_for_us_is_no_stall() {
    let begin = Instant::now();
    let mut session = open(begin);
    while session.hungry() {
        session.receive(&message(Content::Read, 0, true), vec![], begin);
    }
    session.receive(&[9], vec![], begin);
    assert_eq!(session.deadline(), None);
    session.expire(begin + 3 * limits::STALL);
    let now = begin + 3 * limits::STALL;
    let request = session.next_request(now).unwrap().unwrap();
    assert_eq!(session.deadline(), Some(now + limits::REPLY));
    session.finish(request.ticket, Err(Errno::EIO), now);
    assert_eq!(session.deadline(), Some(now + limits::STALL), "now it is read");
}
