//! Three throw-away devices that prove the shape of the device trait: one that polls memory that it shares with
//! its client, one that answers late, and one whose client shares no memory.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use outboard_vfio_user::device::{Description, Device, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma::{self, DmaError, Entry, Iova, View};
use outboard_vfio_user::limits;
use outboard_vfio_user::memory::{Access, Mapping, SharedMemory};
use outboard_vfio_user::server::{Connection, ServeError};
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::transport::Message;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaAccess, IrqAction, IrqData, IrqFlags, IrqIndex, Kind, Query, RegionAccess,
    RegionWrite, Reply as WireReply, SetIrqs, Version, encode_error,
};
use vm_memory::{Bytes, VolatileSlice};

use crate::client::{
    Client, by_messages, copies, descriptors_named, eventfd, eventually, mapping, mappings_named, memory,
    open, open_with, unmap,
};

type DmaRegion = Arc<Entry<dma::Region>>;

/// A copy from one place of the client's memory to another, as both devices take it.
pub(crate) struct Copy {
    from: Iova,
    to: Iova,
    length: usize,
}

impl Copy {
    pub(crate) fn bytes(from: u64, to: u64, length: usize) -> Vec<u8> {
        [from, to, length as u64].iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn parse(bytes: &[u8]) -> Self {
        let value = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        Self { from: Iova(value(0)), to: Iova(value(8)), length: value(16) as usize }
    }

    fn run(&self, view: &mut View) -> Result<(), DmaError> {
        let mut data = vec![0; self.length];
        view.read(self.from, &mut data)?;
        view.write(self.to, &data)
    }
}

/// Polls a page: a new value at `DOORBELL` starts the copy at `COPY`; `DONE` takes the value over, `STATUS` says
/// how it went, and a vector is raised.
struct Poller {
    description: Description,
    page: Arc<SharedMemory>,
    worker: Mutex<Option<(JoinHandle<()>, Arc<AtomicBool>)>>,
}

const DOORBELL: usize = 0;
const DONE: usize = 4;
const STATUS: usize = 8;
const COPY: usize = 16;

impl Poller {
    fn new() -> Arc<Self> {
        let page = Arc::new(SharedMemory::new("poller", 4096).unwrap());
        let file = Arc::new(page.as_fd().try_clone_to_owned().unwrap());
        let bar = Region {
            size: 4096,
            readable: true,
            writable: true,
            mappable: Some(Mappable { file: Some(file), offset: 0, areas: vec![], msix: false }),
            ioeventfds: vec![],
        };
        let irq = Irq { count: 4, flags: IrqFlags::EVENTFD };
        let irqs = vec![Irq::default(), Irq::default(), irq];
        let description = Description { regions: vec![bar], irqs, resets: false };
        Arc::new(Self { description, page, worker: Mutex::default() })
    }
}

fn poll(page: VolatileSlice<'_>, connection: &Connection, mut view: View, stop: &AtomicBool) {
    let mut seen = 0_u32;
    while !stop.load(Ordering::Acquire) {
        view.refresh();
        let doorbell = page.load::<u32>(DOORBELL, Ordering::Acquire).unwrap();
        if doorbell == seen {
            thread::yield_now();
            continue;
        }
        seen = doorbell;
        let mut bytes = [0; 24];
        page.read_slice(&mut bytes, COPY).unwrap();
        let status = u32::from(Copy::parse(&bytes).run(&mut view).is_err());
        page.store(status, STATUS, Ordering::Relaxed).unwrap();
        page.store(seen, DONE, Ordering::Release).unwrap();
        connection.interrupts().trigger(IrqIndex::MSIX, seen as usize % 4);
    }
}

impl Device for Poller {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        let stop = Arc::new(AtomicBool::new(false));
        let worker = thread::spawn({
            let (page, connection, stop) = (self.page.clone(), connection.clone(), stop.clone());
            let view = connection.view();
            move || poll(page.bytes(), &connection, view, &stop)
        });
        *self.worker.lock().unwrap() = Some((worker, stop));
    }

    fn detach(&self) {
        let (worker, stop) = self.worker.lock().unwrap().take().unwrap();
        stop.store(true, Ordering::Release);
        worker.join().unwrap();
    }

    fn read(&self, _: u32, _: u64, length: usize, reply: Reply<Vec<u8>>) {
        reply.ok(vec![0; length]);
    }

    fn write(&self, _: u32, _: u64, _: &[u8], reply: Reply<()>) {
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        reply.ok(());
    }

    fn dma_unmap(&self, _: &DmaRegion) {}
}

#[test]
fn a_device_that_polls_shared_memory_needs_no_messages() {
    let (mut client, served) = open(&Poller::new());
    let guest = memory("poller-guest", 1 << 20);
    client.map(&mapping(0x10_0000, 0x8_0000, Access::Read, 0), Some(guest.as_fd())).unwrap();
    client.map(&mapping(0x40_0000, 0x8_0000, Access::Write, 0x8_0000), Some(guest.as_fd())).unwrap();
    let vectors: Vec<_> = (0..4).map(|_| eventfd()).collect();
    let set = SetIrqs {
        index: IrqIndex::MSIX,
        start: 0,
        count: 4,
        data: IrqData::Eventfds,
        action: IrqAction::Trigger,
    };
    let borrowed: Vec<_> = vectors.iter().map(AsFd::as_fd).collect();
    client.call(&Command::SetIrqs(set), &borrowed).unwrap();
    let info = client.call(&Command::GetRegionInfo(Query { argsz: 32, index: 0 }), &[]).unwrap();
    let page = Mapping::new(&info.descriptors[0], 0, 4096, Access::ReadWrite).unwrap();
    let ram = Mapping::new(&guest, 0, 1 << 20, Access::ReadWrite).unwrap();
    let (page, ram) = (page.bytes(), ram.bytes());
    let before = served.messages.total();

    let copy = |number: u32, from: u64, to: u64, length: usize| {
        page.write_slice(&Copy::bytes(from, to, length), COPY).unwrap();
        page.store(number, DOORBELL, Ordering::Release).unwrap();
        eventually("the copy is done", || page.load::<u32>(DONE, Ordering::Acquire).unwrap() == number);
        page.load::<u32>(STATUS, Ordering::Relaxed).unwrap()
    };
    for number in 1..=400_u32 {
        let (offset, length) = (u64::from(number) * 512, 1 + number as usize % 600);
        let data = vec![number as u8; length];
        ram.write_slice(&data, offset as usize).unwrap();
        assert_eq!(copy(number, 0x10_0000 + offset, 0x40_0000 + offset, length), 0);
        let mut copied = vec![0; length];
        ram.read_slice(&mut copied, 0x8_0000 + offset as usize).unwrap();
        assert_eq!(copied, data);
    }
    let raised = |vector: usize| vectors[vector].read().unwrap_or(0);
    eventually("the last interrupt is there", || served.messages.total() == before);
    thread::sleep(Duration::from_millis(20));
    assert_eq!((0..4).map(raised).sum::<u64>(), 400);
    assert_eq!(served.messages.total(), before, "no crossing of the socket");

    // Point 48, the other way round: what is read-only is not written, what is write-only is not read.
    assert_eq!(copy(401, 0x40_0000, 0x40_0000, 4), 1);
    assert_eq!(copy(402, 0x10_0000, 0x10_0000, 4), 1);
    // Over the end, and where nothing is.
    assert_eq!(copy(403, 0x17_fff8, 0x40_0000, 16), 1);
    assert_eq!(copy(404, 0, 0x40_0000, 16), 1);

    // Point 50: unmapped under a polling worker, which never uses it again.
    client.unmap(0x40_0000, 0x8_0000).unwrap();
    assert_eq!(mappings_named("poller-guest"), 2, "one is the test's");
    assert_eq!(copy(405, 0x10_0000, 0x40_0000, 4), 1);
    assert_eq!(copies(&vectors[0]), 2);
    drop(client);
    served.outcome().unwrap();
    assert_eq!(copies(&vectors[0]), 1);
    assert_eq!(mappings_named("poller-guest"), 1);
    assert_eq!(descriptors_named("poller-guest"), 1);
}

/// Prepares memory, and lets go of it, on threads of its own. Memory at `STUCK` it keeps.
pub(crate) struct Late {
    description: Description,
    pub(crate) kept: Mutex<Option<DmaRegion>>,
    detached: AtomicBool,
}

const LATE: Duration = Duration::from_millis(30);
pub(crate) const STUCK: u64 = 0xdead_0000;
const REFUSED: u64 = 0xbad_0000;

impl Late {
    pub(crate) fn new() -> Arc<Self> {
        let bar = Region { size: 4096, readable: true, writable: true, ..Region::default() };
        let description = Description { regions: vec![bar], irqs: vec![], resets: true };
        Arc::new(Self { description, kept: Mutex::default(), detached: AtomicBool::new(false) })
    }
}

fn later(work: impl FnOnce() + Send + 'static) {
    thread::spawn(move || {
        thread::sleep(LATE);
        work();
    });
}

impl Device for Late {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, _: &Arc<Connection>) {}

    fn detach(&self) {
        self.detached.store(true, Ordering::Release);
    }

    fn read(&self, _: u32, _: u64, length: usize, reply: Reply<Vec<u8>>) {
        reply.ok(vec![3; length]);
    }

    fn write(&self, _: u32, _: u64, _: &[u8], reply: Reply<()>) {
        // Forgotten, which must not be lost on the client.
        drop(reply);
    }

    fn reset(&self, reply: Reply<()>) {
        later(|| reply.ok(()));
    }

    fn dma_map(&self, region: &DmaRegion, reply: Reply<()>) {
        let refused = region.start() == REFUSED;
        later(move || reply.send(if refused { Err(Errno::ENOMEM) } else { Ok(()) }));
    }

    fn dma_unmap(&self, region: &DmaRegion) {
        let region = region.clone();
        if region.start() == STUCK {
            *self.kept.lock().unwrap() = Some(region);
        } else {
            later(|| drop(region));
        }
    }
}

#[test]
fn late_answers_keep_their_order() {
    let (mut client, served) = open(&Late::new());
    let guest = memory("late-guest", 0x4000);
    let begin = Instant::now();
    // Pipelined: a fast read behind each slow command.
    let read = Command::RegionRead(RegionAccess { offset: 0, region: 0, count: 8 });
    let commands = [
        Command::DmaMap(mapping(0x1000, 0x4000, Access::ReadWrite, 0)),
        read.clone(),
        unmap(0x1000, 0x4000),
        read.clone(),
        Command::Reset,
        read.clone(),
    ];
    let ids = commands.clone().map(|command| {
        let file = [guest.as_fd()];
        client.send(&command, &file[..command.descriptors()])
    });
    for (command, id) in commands.iter().zip(ids) {
        client.reply(id, command.code()).unwrap();
    }
    assert!(begin.elapsed() >= 3 * LATE);
    assert_eq!(mappings_named("late-guest"), 0, "the unmap was answered when the memory was unmapped");
    // A map that fails late leaves nothing.
    let refused = mapping(REFUSED, 0x1000, Access::Read, 0);
    assert_eq!(client.map(&refused, Some(guest.as_fd())), Err(Errno::ENOMEM as u32));
    assert_eq!(client.unmap(REFUSED, 0x1000), Err(Errno::ENOENT as u32));
    assert_eq!(mappings_named("late-guest"), 0);
    // A reply that the device drops is a failure, not silence.
    assert_eq!(client.write(0, 0, &[1]), Err(Errno::EIO as u32));
    drop(client);
    served.outcome().unwrap();
}

/// Points 14 and 50: an unmap that never ends costs the session, and the memory lives until the device lets go.
#[test]
fn an_unmap_that_never_ends_ends_the_session() {
    let device = Late::new();
    let (mut client, served) = open(&device);
    let guest = memory("stuck-guest", 0x1000);
    client.map(&mapping(STUCK, 0x1000, Access::ReadWrite, 0), Some(guest.as_fd())).unwrap();
    let begin = Instant::now();
    client.send(&unmap(STUCK, 0x1000), &[]);
    assert!(client.receive_within(Duration::from_secs(8)).is_none(), "nothing is sent, early or late");
    let took = begin.elapsed();
    assert!((limits::REPLY..Duration::from_millis(4500)).contains(&took), "{took:?}");
    let error = served.outcome().unwrap_err();
    assert!(
        matches!(
            error,
            ServeError::Session(SessionError::Overdue { code: CommandCode::DMA_UNMAP, limit: limits::REPLY })
        ),
        "{error}"
    );
    assert!(device.detached.load(Ordering::Acquire));
    let kept = device.kept.lock().unwrap().take().unwrap();
    assert_eq!(mappings_named("stuck-guest"), 1);
    kept.value.bytes().unwrap().write_slice(b"still here", 0).unwrap();
    drop(kept);
    assert_eq!(mappings_named("stuck-guest"), 0);
    // The device serves the next client.
    let (mut client, _served) = open(&device);
    assert_eq!(client.read(0, 0, 2), Ok(vec![3; 2]));
}

/// Copies in its client's memory: for region 0 on the session's thread, for region 1 on one of its own.
pub(crate) struct Messenger {
    description: Description,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl Messenger {
    pub(crate) fn new() -> Arc<Self> {
        let bar = || Region { size: 4096, readable: true, writable: true, ..Region::default() };
        let description = Description { regions: vec![bar(), bar()], irqs: vec![], resets: false };
        Arc::new(Self { description, connection: Mutex::default() })
    }
}

impl Device for Messenger {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        *self.connection.lock().unwrap() = Some(connection.clone());
    }

    fn detach(&self) {
        *self.connection.lock().unwrap() = None;
    }

    fn read(&self, _: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        reply.ok(vec![offset as u8; length]);
    }

    fn write(&self, region: u32, _: u64, data: &[u8], reply: Reply<()>) {
        let connection = self.connection.lock().unwrap().clone().unwrap();
        let copy = Copy::parse(data);
        let work = move || {
            let mut view = connection.view();
            reply.send(copy.run(&mut view).map_err(|_| Errno::EFAULT));
        };
        if region == 0 {
            work();
        } else {
            thread::spawn(work);
        }
    }

    fn reset(&self, reply: Reply<()>) {
        reply.ok(());
    }

    fn dma_unmap(&self, _: &DmaRegion) {}
}

const GUEST: u64 = 0x10_0000;
const GUEST_SIZE: usize = 1 << 20;

/// A client that keeps its memory to itself.
struct Guest {
    client: Client,
    ram: Vec<u8>,
    /// The largest DMA message that came.
    largest: usize,
}

impl Guest {
    fn new(mut client: Client) -> Self {
        client.map(&by_messages(GUEST, GUEST_SIZE as u64), None).unwrap();
        Self { client, ram: (0..GUEST_SIZE).map(|at| (at % 251) as u8).collect(), largest: 0 }
    }

    /// Begins a copy; gives the command's id.
    fn copy(&mut self, region: u32, from: usize, to: usize, length: usize) -> u16 {
        let data = Copy::bytes(GUEST + from as u64, GUEST + to as u64, length);
        self.client.send(&Command::RegionWrite(RegionWrite { offset: 0, region, data: &data }), &[])
    }

    /// The next DMA message, or the reply that came instead.
    fn next(&mut self) -> Result<Message, Message> {
        let message = self.client.receive();
        match message.header.kind() {
            Kind::Command { no_reply: false } => Ok(message),
            _ => Err(message),
        }
    }

    fn place(access: DmaAccess) -> std::ops::Range<usize> {
        let start = (access.address - GUEST) as usize;
        start..start + access.count as usize
    }

    fn serve(&mut self, message: &Message) {
        let id = message.header.id();
        let reply = match Command::decode(&message.header, &message.body, 0).unwrap() {
            Command::DmaRead(access) => {
                self.largest = self.largest.max(access.count as usize);
                WireReply::DmaRead { address: access.address, data: &self.ram[Self::place(access)] }
                    .encode(id)
            }
            Command::DmaWrite(write) => {
                self.largest = self.largest.max(write.data.len());
                self.ram[Self::place(write.access())].copy_from_slice(write.data);
                // Point 49: clients answer with 0, 12 or 16 bytes.
                let mut reply = WireReply::DmaWrite(Some(write.access())).encode(id);
                let length = [16, 28, 32][usize::from(id) % 3];
                reply.truncate(length);
                reply[4] = length as u8;
                reply
            }
            other => panic!("{other:?}"),
        };
        self.client.send_bytes(&reply, &[]);
    }

    /// Serves DMA until the reply to `id` comes.
    fn finish(&mut self, id: u16) -> Result<(), u32> {
        loop {
            match self.next() {
                Ok(message) => self.serve(&message),
                Err(reply) => {
                    assert_eq!(reply.header.id(), id);
                    return match reply.header.kind() {
                        Kind::Reply { error: Some(errno) } => Err(errno),
                        _ => Ok(()),
                    };
                }
            }
        }
    }
}

/// Point 57, fault 17: chunks of what the client takes and no more, and nothing beside them.
#[test]
fn dma_messages_are_cut_to_the_clients_size() {
    for (announced, most) in [(4096, 4096), (1 << 20, 64 << 10)] {
        let mut version = Version::proposal();
        version.capabilities.max_data_xfer_size = Some(announced);
        let (client, served) = open_with(&Messenger::new(), &version);
        let mut guest = Guest::new(client);
        let lengths = [1, most - 1, most, most + 1, 2 * most + 7];
        for (region, length) in [0, 1].into_iter().flat_map(|region| lengths.map(|length| (region, length))) {
            let (from, to) = (17, GUEST_SIZE / 2 + 33);
            guest.ram[to - 8..to + length + 8].fill(0xee);
            let before = guest.ram.clone();
            let id = guest.copy(region, from, to, length);
            guest.finish(id).unwrap();
            let mut expected = before;
            expected.copy_within(from..from + length, to);
            assert!(guest.ram == expected, "{length} bytes, guards included");
        }
        assert_eq!(guest.largest, most);
        assert_eq!(served.messages.of(CommandCode::DMA_READ), 2 * (1 + 1 + 1 + 2 + 3));
        assert_eq!(served.messages.of(CommandCode::DMA_WRITE), 2 * (1 + 1 + 1 + 2 + 3));
        // Over the end of what is mapped: refused without a message.
        let id = guest.copy(0, GUEST_SIZE - 8, 0, 16);
        assert!(guest.finish(id).is_err());
        drop(guest);
        served.outcome().unwrap();
    }
}

/// Fault 2, point 58: commands that arrive before the DMA reply wait for their turn.
#[test]
fn commands_that_overtake_a_dma_reply_are_queued() {
    for region in [0, 1] {
        let (client, _served) = open(&Messenger::new());
        let mut guest = Guest::new(client);
        let copy = guest.copy(region, 0, 0x1000, 64);
        let message = guest.next().unwrap();
        let read = |offset| Command::RegionRead(RegionAccess { offset, region: 0, count: 4 });
        let first = guest.client.send(&read(5), &[]);
        let second = guest.client.send(&read(6), &[]);
        assert!(guest.client.receive_within(Duration::from_millis(50)).is_none());
        guest.serve(&message);
        guest.finish(copy).unwrap();
        assert_eq!(guest.client.reply(first, CommandCode::REGION_READ).unwrap().body[16..], [5; 4]);
        assert_eq!(guest.client.reply(second, CommandCode::REGION_READ).unwrap().body[16..], [6; 4]);
        assert_eq!(guest.ram[0x1000..0x1040], guest.ram[..64].to_vec()[..]);
    }
}

/// Fault 1 for our own messages: a socket that takes little at a time.
#[test]
fn a_dma_message_that_does_not_fit_the_socket_is_sent_in_pieces() {
    for region in [0, 1] {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        crate::client::shrink(theirs.as_fd(), 1);
        let (mut client, _served) = crate::client::serve_at(theirs, &Messenger::new(), ours);
        client.set_buffers(1);
        client.call(&Command::Version(Version::proposal()), &[]).unwrap();
        let mut guest = Guest::new(client);
        let id = guest.copy(region, 0, GUEST_SIZE / 2, 200_000);
        guest.finish(id).unwrap();
        let (from, to) = guest.ram.split_at(GUEST_SIZE / 2);
        assert!(from[..200_000] == to[..200_000]);
    }
}

/// Errors and nonsense fail the access, and only that.
#[test]
fn bad_dma_replies_fail_the_access() {
    let nonsense: [fn(u16, DmaAccess) -> Vec<u8>; 5] = [
        |id, _| encode_error(id, CommandCode::DMA_READ, Errno::EFAULT as u32),
        |id, _| encode_error(id, CommandCode::DMA_READ, 0),
        |id, access| WireReply::DmaRead { address: access.address, data: &[1; 63] }.encode(id),
        |id, access| WireReply::DmaRead { address: access.address + 1, data: &[1; 64] }.encode(id),
        |id, access| WireReply::DmaWrite(Some(access)).encode(id),
    ];
    for region in [0, 1] {
        let (client, served) = open(&Messenger::new());
        let mut guest = Guest::new(client);
        for make in nonsense {
            let before = guest.ram.clone();
            let id = guest.copy(region, 0, 0x1000, 64);
            let message = guest.next().unwrap();
            let Ok(Command::DmaRead(access)) = Command::decode(&message.header, &message.body, 0) else {
                panic!("{message:?}")
            };
            // Replies to nothing change nothing.
            guest
                .client
                .send_bytes(&encode_error(message.header.id() ^ 0x8000, CommandCode::DMA_READ, 5), &[]);
            let reply = make(message.header.id(), access);
            guest.client.send_bytes(&reply, &[]);
            guest.client.send_bytes(&reply, &[]);
            assert_eq!(guest.finish(id), Err(Errno::EFAULT as u32));
            assert!(guest.ram == before);
        }
        let id = guest.copy(region, 0, 0x1000, 64);
        guest.finish(id).unwrap();
        drop(guest);
        served.outcome().unwrap();
    }
}

/// Point 71: the client dies while we wait for its memory.
#[test]
fn a_client_that_dies_during_dma_is_no_loss() {
    for region in [0, 1] {
        let (client, served) = open(&Messenger::new());
        let mut guest = Guest::new(client);
        guest.copy(region, 0, 0x1000, 64);
        guest.next().unwrap();
        let begin = Instant::now();
        drop(guest);
        served.outcome().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(1));
    }
}

/// A client that breaks the stream while we wait for its memory: the session ends, with the cause.
#[test]
fn a_stream_that_breaks_during_dma_ends_the_session() {
    let (client, served) = open(&Messenger::new());
    let mut guest = Guest::new(client);
    guest.copy(0, 0, 0x1000, 64);
    guest.next().unwrap();
    guest.client.send_bytes(&[0; 16], &[]);
    let error = served.outcome().unwrap_err();
    assert!(matches!(error, ServeError::Session(SessionError::Frame(_))), "{error}");
}

/// A DMA message that is never answered ends the session in time, with the cause.
#[test]
fn an_unanswered_dma_message_ends_the_session() {
    let begin = Instant::now();
    let sessions = [0, 1].map(|region| {
        let (client, served) = open(&Messenger::new());
        let mut guest = Guest::new(client);
        guest.copy(region, 0, 0x1000, 64);
        guest.next().unwrap();
        (guest, served)
    });
    for (mut guest, served) in sessions {
        let error = served.outcome().unwrap_err();
        let took = begin.elapsed();
        assert!((limits::REPLY - LATE..Duration::from_millis(4500)).contains(&took), "{took:?}");
        assert!(
            matches!(
                error,
                ServeError::Session(SessionError::Unanswered { .. } | SessionError::Overdue { .. })
            ),
            "{error}"
        );
        assert!(guest.client.is_closed(), "nothing is sent after the limit");
    }
}
