//! Throw-away devices that prove the shape of the device trait: one that polls memory that it shares with its
//! client, and one that answers late. And a client that shares no memory.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use outboard_vfio_user::device::{Description, Device, Direct, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma::{self, Entry, View};
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

use outboard_tests::conformance::{Checked, Client, Process, by_messages, eventfd, mapping, memory, unmap};
use outboard_tests::in_process::{eventually, open, serve_at};
use outboard_tests::plain::{Copy, Plain, region};

type DmaRegion = Arc<Entry<dma::Region>>;

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
            mappable: Some(Mappable {
                file: Some(file),
                offset: 0,
                areas: vec![],
                msix: false,
                direct: Direct::Granted,
            }),
            ioeventfds: vec![],
        };
        let irq = Irq { count: 4, flags: IrqFlags::EVENTFD };
        let irqs = vec![Irq::default(), Irq::default(), irq];
        let description = Description { regions: vec![bar], irqs, resets: false, ..Description::pci() };
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
    let guest = memory(1 << 20);
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
    let mut raised = 0;
    eventually("the last interrupt is there", || {
        raised += vectors.iter().map(|vector| vector.read().unwrap_or(0)).sum::<u64>();
        raised >= 400
    });
    assert_eq!(raised, 400);
    assert_eq!(served.messages.total(), before, "no crossing of the socket");

    // Point 48, the other way round: what is read-only is not written, what is write-only is not read.
    assert_eq!(copy(401, 0x40_0000, 0x40_0000, 4), 1);
    assert_eq!(copy(402, 0x10_0000, 0x10_0000, 4), 1);
    // Over the end, and where nothing is.
    assert_eq!(copy(403, 0x17_fff8, 0x40_0000, 16), 1);
    assert_eq!(copy(404, 0, 0x40_0000, 16), 1);

    // Point 50: unmapped under a polling worker, which never uses it again.
    client.unmap(0x40_0000, 0x8_0000).unwrap();
    assert_eq!(Process::this().mappings(&guest), 2, "one is the test's");
    assert_eq!(copy(405, 0x10_0000, 0x40_0000, 4), 1);
    assert_eq!(Process::this().descriptors(&vectors[0]), 2);
    drop(client);
    served.outcome().unwrap();
    assert_eq!(Process::this().descriptors(&vectors[0]), 1);
    assert_eq!(Process::this().mappings(&guest), 1);
    assert_eq!(Process::this().descriptors(&guest), 1);
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
        let description = Description { regions: vec![bar], irqs: vec![], ..Description::pci() };
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

fn errno(result: Checked) -> Option<u32> {
    result.unwrap_err().errno()
}

#[test]
fn late_answers_keep_their_order() {
    let (mut client, served) = open(&Late::new());
    let guest = memory(0x4000);
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
        client.send(&command, &file[..command.descriptors()]).unwrap()
    });
    for (command, id) in commands.iter().zip(ids) {
        client.reply(id, command.code()).unwrap();
    }
    assert!(begin.elapsed() >= 3 * LATE);
    assert_eq!(Process::this().mappings(&guest), 0, "the unmap was answered when the memory was unmapped");
    // A map that fails late leaves nothing.
    let refused = mapping(REFUSED, 0x1000, Access::Read, 0);
    assert_eq!(errno(client.map(&refused, Some(guest.as_fd()))), Some(Errno::ENOMEM as u32));
    assert_eq!(errno(client.unmap(REFUSED, 0x1000)), Some(Errno::ENOENT as u32));
    assert_eq!(Process::this().mappings(&guest), 0);
    // A reply that the device drops is a failure, not silence.
    assert_eq!(errno(client.write(0, 0, &[1])), Some(Errno::EIO as u32));
    drop(client);
    served.outcome().unwrap();
}

/// Points 14 and 50: an unmap that never ends costs the session, and the memory lives until the device lets go.
#[test]
fn an_unmap_that_never_ends_ends_the_session() {
    let device = Late::new();
    let (mut client, served) = open(&device);
    let guest = memory(0x1000);
    client.map(&mapping(STUCK, 0x1000, Access::ReadWrite, 0), Some(guest.as_fd())).unwrap();
    let begin = Instant::now();
    client.send(&unmap(STUCK, 0x1000), &[]).unwrap();
    client.expect_end().unwrap();
    let took = begin.elapsed();
    assert!((limits::REPLY..limits::REPLY * 2).contains(&took), "{took:?}");
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
    assert_eq!(Process::this().mappings(&guest), 1);
    kept.value.bytes().unwrap().write_slice(b"still here", 0).unwrap();
    drop(kept);
    assert_eq!(Process::this().mappings(&guest), 0);
    // The device serves the next client.
    let (mut client, _served) = open(&device);
    assert_eq!(client.read(0, 0, 2), Ok(vec![3; 2]));
}

const COPIES: [u32; 2] = [region::COPY_HERE, region::COPY_THERE];
const GUEST: u64 = 0x10_0000;
const GUEST_SIZE: usize = 1 << 20;

/// A client that keeps its memory to itself.
struct Guest {
    client: Client,
    ram: Vec<u8>,
}

impl Guest {
    fn new(mut client: Client) -> Self {
        client.map(&by_messages(GUEST, GUEST_SIZE as u64), None).unwrap();
        Self { client, ram: (0..GUEST_SIZE).map(|at| (at % 251) as u8).collect() }
    }

    /// Begins a copy; gives the command's id.
    fn copy(&mut self, region: u32, from: usize, to: usize, length: usize) -> u16 {
        let data = Copy::bytes(GUEST + from as u64, GUEST + to as u64, length);
        self.client.send(&Command::RegionWrite(RegionWrite { offset: 0, region, data: &data }), &[]).unwrap()
    }

    /// The next DMA message, or the reply that came instead.
    fn next(&mut self) -> Result<Message, Message> {
        let message = self.client.receive().unwrap();
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
                WireReply::DmaRead { address: access.address, data: &self.ram[Self::place(access)] }
                    .encode(id)
            }
            Command::DmaWrite(write) => {
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
        self.client.send_bytes(&reply, &[]).unwrap();
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

/// Fault 1 for our own messages: a socket that takes little at a time.
#[test]
fn a_dma_message_that_does_not_fit_the_socket_is_sent_in_pieces() {
    for region in COPIES {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        setsockopt(&theirs, sockopt::SndBuf, &1).unwrap();
        setsockopt(&theirs, sockopt::RcvBuf, &1).unwrap();
        let _served = serve_at(theirs, &Plain::new());
        let mut client = Client::new(ours).unwrap();
        client.shrink_buffers();
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
    for region in COPIES {
        let (client, served) = open(&Plain::new());
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
                .send_bytes(&encode_error(message.header.id() ^ 0x8000, CommandCode::DMA_READ, 5), &[])
                .unwrap();
            let reply = make(message.header.id(), access);
            guest.client.send_bytes(&reply, &[]).unwrap();
            guest.client.send_bytes(&reply, &[]).unwrap();
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
    for region in COPIES {
        let (client, served) = open(&Plain::new());
        let mut guest = Guest::new(client);
        guest.copy(region, 0, 0x1000, 64);
        guest.next().unwrap();
        let begin = Instant::now();
        drop(guest);
        served.outcome().unwrap();
        // It is not waited for.
        assert!(begin.elapsed() < limits::REPLY);
    }
}

/// A client that breaks the stream while we wait for its memory: the session ends, with the cause.
#[test]
fn a_stream_that_breaks_during_dma_ends_the_session() {
    let (client, served) = open(&Plain::new());
    let mut guest = Guest::new(client);
    guest.copy(region::COPY_HERE, 0, 0x1000, 64);
    guest.next().unwrap();
    guest.client.send_bytes(&[0; 16], &[]).unwrap();
    let error = served.outcome().unwrap_err();
    assert!(matches!(error, ServeError::Session(SessionError::Frame(_))), "{error}");
}

/// A DMA message that is never answered ends the session in time, with the cause.
#[test]
fn an_unanswered_dma_message_ends_the_session() {
    let sessions = COPIES.map(|region| {
        let (client, served) = open(&Plain::new());
        let mut guest = Guest::new(client);
        let asked = Instant::now();
        guest.copy(region, 0, 0x1000, 64);
        guest.next().unwrap();
        (guest, served, asked)
    });
    for (mut guest, served, asked) in sessions {
        let error = served.outcome().unwrap_err();
        // Twice the limit: a loaded machine is late, a limit that does not act is not there at all.
        let took = asked.elapsed();
        assert!((limits::REPLY - LATE..limits::REPLY * 2).contains(&took), "{took:?}");
        assert!(
            matches!(
                error,
                ServeError::Session(SessionError::Unanswered { .. } | SessionError::Overdue { .. })
            ),
            "{error}"
        );
        guest.client.expect_end().unwrap();
    }
}
