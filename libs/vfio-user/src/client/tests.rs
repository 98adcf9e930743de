//! The client against our own server, and against servers that lie.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use nix::sys::eventfd::{EfdFlags, EventFd};
use proptest::collection::vec;
use proptest::prelude::*;
use vm_memory::Bytes;
use zerocopy::FromBytes;

use nix::errno::Errno;

use super::*;
use crate::device::{
    Description, Device, Direct, Irq, Mappable, Region as DeviceRegion, Reply as DeviceReply,
};
use crate::dma::{Access, Iova};
use crate::dma::{Entry, Region as MemoryRegion};
use crate::limits;
use crate::memory::SharedMemory;
use crate::server::{self, Connection as ServerConnection};
use crate::wire::{
    Backing, CommandCode, DeviceFlags, DeviceInfo, DmaAccess, DmaWrite, HEADER_SIZE, Header, IrqAction,
    IrqData, IrqFlags, IrqIndex, Offer, RegionCapability, RegionFlags, RegionInfo, RegionWrite, SetIrqs,
    SparseArea, encode_error,
};

mod batch;
mod descriptors;
mod extensions;
mod patience;
mod twin;

const PAGE: usize = 4096;

/// Region 0: a page of registers and one that can be mapped. Writing an address to register 0 has it copy 8
/// bytes there to the 8 bytes after, and signal vector 0.
struct Copier {
    description: Description,
    memory: SharedMemory,
    connection: Mutex<Option<Arc<ServerConnection>>>,
}

impl Copier {
    fn new() -> Self {
        let memory = SharedMemory::new("copier", 2 * PAGE).unwrap();
        let file = Arc::new(memory.as_fd().try_clone_to_owned().unwrap());
        let area = SparseArea { offset: PAGE as u64, size: PAGE as u64 };
        let region = DeviceRegion {
            size: 2 * PAGE as u64,
            readable: true,
            writable: true,
            mappable: Some(Mappable {
                file: Some(file),
                offset: 0,
                areas: vec![area],
                msix: true,
                direct: Direct::Granted,
            }),
            ioeventfds: Vec::new(),
        };
        let irq = Irq { count: 40, flags: IrqFlags::EVENTFD };
        let description = Description { regions: vec![region; 9], irqs: vec![irq; 5], ..Description::pci() };
        Self { description, memory, connection: Mutex::new(None) }
    }
}

impl Device for Copier {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<ServerConnection>) {
        *self.connection.lock().unwrap() = Some(connection.clone());
    }

    fn detach(&self) {
        *self.connection.lock().unwrap() = None;
    }

    fn read(&self, _: u32, offset: u64, length: usize, reply: DeviceReply<Vec<u8>>) {
        let mut data = vec![0; length];
        self.memory.bytes().read_slice(&mut data, offset as usize).unwrap();
        reply.ok(data);
    }

    fn write(&self, _: u32, offset: u64, data: &[u8], reply: DeviceReply<()>) {
        self.memory.bytes().write_slice(data, offset as usize).unwrap();
        if offset == 0 && data.len() == 8 {
            let from = u64::from_le_bytes(data.try_into().unwrap());
            let connection = self.connection.lock().unwrap().clone().unwrap();
            let mut view = connection.view();
            let mut copied = [0; 8];
            if view.read(Iova(from), &mut copied).and_then(|()| view.write(Iova(from + 8), &copied)).is_err()
            {
                return reply.fail(Errno::EFAULT);
            }
            connection.interrupts().trigger(IrqIndex::MSIX, 0);
        }
        reply.ok(());
    }

    fn reset(&self, reply: DeviceReply<()>) {
        self.memory.bytes().write_slice(&vec![0; 2 * PAGE], 0).unwrap();
        reply.ok(());
    }

    fn dma_unmap(&self, _: &Arc<Entry<MemoryRegion>>) {}
}

fn with_server<R>(test: impl FnOnce(&Client) -> R) -> R {
    with_server_and(Options::default(), test)
}

fn with_server_and<R>(options: Options, test: impl FnOnce(&Client) -> R) -> R {
    with_device(&Copier::new(), options, test)
}

fn with_device<R>(device: &Copier, options: Options, test: impl FnOnce(&Client) -> R) -> R {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| server::serve(theirs, device, &Arc::default()).unwrap());
        let client = Client::new(ours, options).unwrap();
        test(&client)
    })
}

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Errno {
    match result {
        Err(ClientError::Refused { errno, .. }) => errno,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_is_seen_as_it_is() {
    with_server(|client| {
        let info = client.device_info().unwrap();
        assert!(info.flags.contains(DeviceFlags::PCI.union(DeviceFlags::RESET)));
        assert_eq!((info.regions, info.interrupts), (9, 5));
        assert_eq!(client.irq_info(IrqIndex::MSIX).unwrap().count, 40);
        assert_eq!(refused(client.irq_info(IrqIndex(5))), Errno::EINVAL);
        let region = client.region(0).unwrap();
        assert_eq!(region.size(), 2 * PAGE as u64);
        assert!(region.is_msix_mappable());
        assert_eq!(region.areas().unwrap(), [SparseArea { offset: 4096, size: 4096 }]);
        assert_eq!(refused(client.region(9)), Errno::EINVAL);
        assert_eq!(client.region_io_fds(0).unwrap().0, []);
        assert_eq!(client.sent().of(CommandCode::DEVICE_GET_REGION_INFO), 3);
    });
}

#[test]
fn a_mapped_area_is_the_devices_memory() {
    with_server(|client| {
        let region = client.region(0).unwrap();
        let area = region.areas().unwrap()[0];
        let mapping = region.map(area, Access::ReadWrite).unwrap();
        mapping.bytes().store(0x1234_5678_u32, 16, Ordering::Release).unwrap();
        let mut data = [0; 4];
        client.region_read(0, area.offset + 16, &mut data).unwrap();
        assert_eq!(u32::from_le_bytes(data), 0x1234_5678);
        client.region_write(0, area.offset + 20, &[1, 2, 3, 4], Delivery::Replied).unwrap();
        assert_eq!(mapping.bytes().load::<u32>(20, Ordering::Acquire).unwrap(), 0x0403_0201);
        client.reset().unwrap();
        assert_eq!(mapping.bytes().load::<u32>(16, Ordering::Acquire).unwrap(), 0);
    });
}

#[test]
fn posted_writes_come_before_what_follows() {
    with_server(|client| {
        for value in 0_u32..1000 {
            client.region_write(0, 64, &value.to_le_bytes(), Delivery::Posted).unwrap();
        }
        let mut data = [0; 4];
        client.region_read(0, 64, &mut data).unwrap();
        assert_eq!(u32::from_le_bytes(data), 999);
        let writes = [
            RegionWrite { offset: 64, region: 0, data: &[7] },
            RegionWrite { offset: 65, region: 0, data: &[8, 9, 10] },
        ];
        for delivery in [Delivery::Posted, Delivery::Replied] {
            client.region_write(0, 64, &[0; 4], Delivery::Posted).unwrap();
            client.region_write_multi(&writes, delivery).unwrap();
            client.region_read(0, 64, &mut data).unwrap();
            assert_eq!(data, [7, 8, 9, 10]);
        }
        assert_eq!(client.sent().of(CommandCode::REGION_WRITE), 1002);
        assert_eq!(client.sent().of(CommandCode::REGION_WRITE_MULTI), 2);
    });
}

/// Also while callers wait: the write that starts the copy is answered after it.
#[test]
fn memory_is_reached_directly_and_by_messages() {
    let cases = [(Sharing::Descriptor, 0), (Sharing::Messages, 2)];
    for (twin_socket, (sharing, messages)) in
        [false, true].into_iter().flat_map(|twin| cases.map(|case| (twin, case)))
    {
        with_server_and(Options { twin_socket, ..Options::default() }, |client| {
            assert_eq!(client.has_twin_socket(), twin_socket);
            let memory = SharedMemory::new("guest", PAGE).unwrap();
            let eventfd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
            let part = Memory { file: memory.as_fd(), offset: 0, length: PAGE };
            client.dma_map(Iova(0x10_0000), part, Access::ReadWrite, sharing).unwrap();
            assert!(client.dma_map(Iova(0x10_0000), part, Access::ReadWrite, sharing).is_err());
            client.bind_vectors(IrqIndex::MSIX, 0, &[eventfd.as_fd()]).unwrap();
            memory.bytes().write_obj(0x1122_3344_5566_7788_u64, 0).unwrap();
            let copy = |address: u64| client.region_write(0, 0, &address.to_le_bytes(), Delivery::Replied);
            copy(0x10_0000).unwrap();
            assert_eq!(memory.bytes().read_obj::<u64>(8).unwrap(), 0x1122_3344_5566_7788);
            assert_eq!(eventfd.read().unwrap(), 1);
            assert_eq!(client.received().total(), messages);
            assert_eq!(refused(copy(0x20_0000)), Errno::EFAULT);
            client.dma_unmap(Iova(0x10_0000), PAGE as u64).unwrap();
            assert_eq!(refused(copy(0x10_0000)), Errno::EFAULT);
            assert_eq!(refused(client.dma_unmap(Iova(0x10_0000), PAGE as u64)), Errno::ENOENT);
            // After an unmap the place is free again.
            client.dma_map(Iova(0x10_0000), part, Access::Read, sharing).unwrap();
            assert_eq!(refused(copy(0x10_0000)), Errno::EFAULT, "only to be read");
            client.dma_unmap_all().unwrap();
            client.disable_irqs(IrqIndex::MSIX).unwrap();
        });
    }
}

#[test]
fn many_vectors_are_bound_in_the_servers_portions() {
    with_server(|client| {
        let eventfds: Vec<EventFd> = (0..40).map(|_| EventFd::new().unwrap()).collect();
        let borrowed: Vec<_> = eventfds.iter().map(AsFd::as_fd).collect();
        client.bind_vectors(IrqIndex::MSIX, 0, &borrowed).unwrap();
        assert_eq!(client.sent().of(CommandCode::DEVICE_SET_IRQS), 3);
        let fire = SetIrqs {
            index: IrqIndex::MSIX,
            start: 39,
            count: 1,
            data: IrqData::None,
            action: IrqAction::Trigger,
        };
        client.set_irqs(fire, &[]).unwrap();
        assert_eq!(eventfds[39].read().unwrap(), 1);
    });
}

#[test]
fn several_callers_get_their_own_answers() {
    with_server(|client| {
        let pattern: Vec<u8> = (0..PAGE).map(|n| n as u8).collect();
        client.region_write(0, PAGE as u64, &pattern, Delivery::Replied).unwrap();
        thread::scope(|scope| {
            for caller in 0..4_usize {
                let pattern = &pattern;
                scope.spawn(move || {
                    for round in 0..500 {
                        let (at, length) = ((caller * 97 + round * 13) % 3000, 1 + (round + caller) % 900);
                        let mut data = vec![0; length];
                        client.region_read(0, (PAGE + at) as u64, &mut data).unwrap();
                        assert_eq!(data, pattern[at..at + length]);
                    }
                });
            }
        });
    });
}

#[test]
fn a_server_that_is_gone_is_an_error_at_once() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        read_message(&mut theirs);
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let before = std::time::Instant::now();
    assert!(matches!(client.reset(), Err(ClientError::Disconnected(Disconnect::Server))));
    assert!(matches!(client.reset(), Err(ClientError::Disconnected(Disconnect::Server))));
    assert!(before.elapsed() < Options::default().timeout, "it was not waited for");
    server.join().unwrap();
}

#[test]
fn no_server_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["none".to_owned(), "x".repeat(200)] {
        let result = Client::connect(&folder.path().join(name), Options::default());
        assert!(matches!(result, Err(ClientError::Connect { .. })), "{result:?}");
    }
}

// Servers that lie.

fn read_message(stream: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut header = [0; HEADER_SIZE];
    stream.read_exact(&mut header).ok()?;
    let header = Header::read_from_bytes(&header).unwrap();
    let mut body = vec![0; header.size() as usize - HEADER_SIZE];
    stream.read_exact(&mut body).ok()?;
    Some((header, body))
}

fn answer_version(stream: &mut UnixStream) {
    let (header, _) = read_message(stream).unwrap();
    stream
        .write_all(&Reply::Version(Version::proposal().answer(&Offer::default())).encode(header.id()))
        .unwrap();
}

const IMPATIENT: Options =
    Options { timeout: Duration::from_secs(1), twin_socket: false, msix_direct: false, iova_ranges: false };

type Lie = fn(&Header, &[u8]) -> Vec<u8>;

/// A client whose server answers every message with what `lie` makes of it, after VERSION.
fn against<R>(
    lie: impl Fn(&Header, &[u8]) -> Vec<u8> + Send + 'static,
    test: impl FnOnce(&Client) -> R,
) -> R {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        while let Some((header, body)) = read_message(&mut theirs) {
            if theirs.write_all(&lie(&header, &body)).is_err() {
                break;
            }
        }
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let result = test(&client);
    drop(client);
    server.join().unwrap();
    result
}

#[test]
fn lies_are_errors_to_the_caller() {
    let echo = |header: &Header, _: &[u8]| Reply::Done(header.code()).encode(header.id());
    against(echo, |client| {
        assert!(matches!(client.device_info(), Err(ClientError::Malformed { .. })));
        assert!(matches!(client.region(0), Err(ClientError::Malformed { .. })));
        assert!(matches!(client.region_read(0, 0, &mut [0; 4]), Err(ClientError::Malformed { .. })));
        client.reset().unwrap();
    });
    // More or other data than asked for.
    let more = |header: &Header, _: &[u8]| {
        Reply::RegionRead { offset: 0, region: 0, data: &[0; 5] }.encode(header.id())
    };
    against(more, |client| {
        assert!(matches!(client.region_read(0, 0, &mut [0; 4]), Err(ClientError::Mismatch { .. })));
        assert!(matches!(client.region_read(1, 0, &mut [0; 5]), Err(ClientError::Mismatch { .. })));
        client.region_read(0, 0, &mut [0; 5]).unwrap();
    });
    // No end of room that it needs.
    let greedy = |header: &Header, body: &[u8]| {
        let argsz = u32::from_le_bytes(body[..4].try_into().unwrap()) + 8;
        Reply::RegionInfo { info: RegionInfo::default(), argsz }.encode(header.id())
    };
    against(greedy, |client| {
        assert!(matches!(client.region(0), Err(ClientError::Mismatch { .. })));
        assert_eq!(client.sent().of(CommandCode::DEVICE_GET_REGION_INFO), 2);
    });
    let huge = |header: &Header, _: &[u8]| {
        let info = DeviceInfo { flags: DeviceFlags::PCI, regions: u32::MAX, interrupts: 5 };
        Reply::Info(info).encode(header.id())
    };
    against(huge, |client| {
        assert!(matches!(client.device_info(), Err(ClientError::TooMany { count: u32::MAX, .. })));
    });
    let no_errno = |header: &Header, _: &[u8]| encode_error(header.id(), header.code(), 0);
    against(no_errno, |client| assert_eq!(refused(client.reset()), Errno::UnknownErrno));
}

#[test]
fn what_breaks_the_stream_ends_the_connection() {
    let lies: [Lie; 5] = [
        |header, _| Reply::Done(header.code()).encode(header.id().wrapping_add(1)),
        |header, _| Reply::Done(CommandCode::DMA_MAP).encode(header.id()),
        |_, _| vec![0xff; 16],
        |header, _| {
            let mut message = Reply::Done(header.code()).encode(header.id());
            message[8] = 9;
            message
        },
        |header, _| {
            let mut message = Reply::Done(header.code()).encode(header.id());
            message[4..8].copy_from_slice(&15_u32.to_le_bytes());
            message
        },
    ];
    for lie in lies {
        against(lie, |client| {
            let result = client.reset();
            assert!(matches!(result, Err(ClientError::Disconnected(Disconnect::Session(_)))), "{result:?}");
            assert!(client.disconnected().is_some());
        });
    }
}

#[test]
fn a_late_reply_is_dropped() {
    let (given_up, late) = std::sync::mpsc::channel();
    let slow = move |header: &Header, _: &[u8]| {
        if header.code() == CommandCode::DEVICE_RESET {
            late.recv().unwrap();
        }
        Reply::RegionRead { offset: 0, region: 0, data: &[header.code().0 as u8] }
            .encode(header.id())
            .into_iter()
            .enumerate()
            .map(|(at, byte)| if at == 2 { header.code().0 as u8 } else { byte })
            .collect()
    };
    against(slow, |client| {
        let hasty = client.with_timeout(IMPATIENT.timeout);
        assert!(matches!(hasty.reset(), Err(ClientError::TimedOut { .. })));
        given_up.send(()).unwrap();
        let mut data = [0];
        client.region_read(0, 0, &mut data).unwrap();
        assert_eq!(data, [9]);
    });
}

#[test]
fn a_server_that_does_not_negotiate_is_left() {
    for lie in [&b"\0\0\x01\0{"[..], b"\x01\0\0\0", b"\0\0\x63\0", b""] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            let (header, _) = read_message(&mut theirs).unwrap();
            let mut message = Reply::Done(CommandCode::DMA_MAP).encode(header.id());
            message[2] = 1;
            message[4] += lie.len() as u8;
            message.extend_from_slice(lie);
            theirs.write_all(&message).unwrap();
            assert!(read_message(&mut theirs).is_none());
        });
        assert!(Client::new(ours, IMPATIENT).is_err(), "{lie:?}");
        server.join().unwrap();
    }
    // And one that says nothing at all.
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert!(matches!(Client::new(ours, IMPATIENT), Err(ClientError::TimedOut { .. })));
}

#[test]
fn a_server_that_does_not_read_is_left() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        theirs
    });
    let client = Client::new(ours, IMPATIENT).unwrap();
    let _theirs = server.join().unwrap();
    let data = vec![0; 1 << 20];
    let error = (0..10).find_map(|_| client.region_write(0, 0, &data, Delivery::Posted).err()).unwrap();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
    assert_eq!(client.disconnected(), Some(Disconnect::Stuck));
}

#[test]
fn the_server_gets_no_more_than_what_is_mapped() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        let (header, body) = read_message(&mut theirs).unwrap();
        let Command::DmaMap(map) = Command::decode(&header, &body, 0).unwrap() else { panic!() };
        assert_eq!(map.backing, Backing::Messages);
        theirs.write_all(&Reply::Done(CommandCode::DMA_MAP).encode(header.id())).unwrap();
        let mut poster = theirs.try_clone().unwrap();
        let mut ask = |command: Command<'_>| {
            theirs.write_all(&command.encode(77, false)).unwrap();
            let (header, body) = read_message(&mut theirs).unwrap();
            assert_eq!((header.id(), header.code()), (77, command.code()));
            match header.kind() {
                crate::wire::Kind::Reply { error: None } => Ok(body[16..].to_vec()),
                crate::wire::Kind::Reply { error: Some(errno) } => Err(errno as i32),
                other => panic!("{other:?}"),
            }
        };
        let read = |address, count| Command::DmaRead(DmaAccess { address, count });
        let write = |address, data| Command::DmaWrite(DmaWrite { address, data });
        assert_eq!(ask(write(map.address, &[1, 2, 3])), Ok(vec![]));
        assert_eq!(ask(read(map.address, 4)), Ok(vec![1, 2, 3, 0]));
        assert_eq!(ask(read(map.address + 4095, 1)), Ok(vec![0]));
        assert_eq!(ask(read(map.address + 4095, 2)), Err(Errno::EFAULT as i32));
        assert_eq!(ask(read(0, 1)), Err(Errno::EFAULT as i32));
        assert_eq!(ask(write(u64::MAX - 8, &[1])), Err(Errno::EFAULT as i32));
        assert_eq!(ask(Command::Reset), Err(Errno::ENOSYS as i32));
        let posted = write(map.address, &[9]).encode(1, true);
        poster.write_all(&posted).unwrap();
        assert_eq!(ask(read(map.address, 1)), Ok(vec![9]));
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let memory = SharedMemory::new("guest", PAGE).unwrap();
    let part = Memory { file: memory.as_fd(), offset: 0, length: PAGE };
    client.dma_map(Iova(0x4000), part, Access::ReadWrite, Sharing::Messages).unwrap();
    server.join().unwrap();
    assert_eq!(client.received().total(), 9);
}

/// The caller takes its reply and leaves the rest to the client's own thread.
#[test]
fn what_comes_with_a_reply_is_served_after_it() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (served, was_served) = std::sync::mpsc::channel();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        for round in 0..200_u16 {
            let (header, _) = read_message(&mut theirs).unwrap();
            let mut bytes = Reply::Done(header.code()).encode(header.id());
            for id in 0..3 {
                let question = Command::DmaRead(DmaAccess { address: 0, count: 8 });
                bytes.extend_from_slice(&question.encode(3 * round + id, false));
            }
            theirs.write_all(&bytes).unwrap();
            for id in 0..3 {
                assert_eq!(read_message(&mut theirs).unwrap().0.id(), 3 * round + id);
            }
            served.send(()).unwrap();
        }
    });
    let client = Client::new(ours, Options::default()).unwrap();
    for _ in 0..200 {
        client.reset().unwrap();
        was_served.recv_timeout(Duration::from_secs(5)).unwrap();
    }
    server.join().unwrap();
}

/// Its replies wait, but not without bound: then its questions wait, too.
#[test]
fn a_server_that_asks_and_does_not_listen_is_served_later() {
    const COUNT: u32 = 256 << 10;
    const QUESTIONS: u16 = 300;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (flooded, listen) = std::sync::mpsc::channel();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        let (header, _) = read_message(&mut theirs).unwrap();
        theirs.write_all(&Reply::Done(CommandCode::DMA_MAP).encode(header.id())).unwrap();
        let mut asker = theirs.try_clone().unwrap();
        let asking = thread::spawn(move || {
            for id in 0..QUESTIONS {
                let question = Command::DmaRead(DmaAccess { address: 0, count: COUNT });
                asker.write_all(&question.encode(id, false)).unwrap();
            }
        });
        listen.recv().unwrap();
        for id in 0..QUESTIONS {
            let (header, body) = read_message(&mut theirs).unwrap();
            assert_eq!((header.id(), body.len()), (id, 16 + COUNT as usize));
        }
        asking.join().unwrap();
        theirs
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let memory = SharedMemory::new("guest", COUNT as usize).unwrap();
    let part = Memory { file: memory.as_fd(), offset: 0, length: COUNT as usize };
    client.dma_map(Iova(0), part, Access::Read, Sharing::Messages).unwrap();
    let waiting = || client.connection().lock().outbox.len();
    let begin = std::time::Instant::now();
    while waiting() <= limits::WAITING_BYTES {
        assert!(begin.elapsed() < Duration::from_secs(20), "the flood has begun");
        thread::sleep(Duration::from_millis(1));
    }
    // Time for more of it.
    thread::sleep(Duration::from_millis(150));
    assert!(waiting() < 2 * limits::WAITING_BYTES, "{}", waiting());
    flooded.send(()).unwrap();
    let _theirs = server.join().unwrap();
}

fn region(size: u64, areas: Vec<SparseArea>, file: Option<OwnedFd>) -> Region {
    let capabilities = vec![RegionCapability::Unknown { id: 9 }, RegionCapability::SparseMmap(areas)];
    Region::new(RegionInfo { index: 0, flags: RegionFlags(7), size, file_offset: 0, capabilities }, file)
}

#[test]
fn areas_are_checked_before_they_are_mapped() {
    let memory = SharedMemory::new("region", 2 * PAGE).unwrap();
    let file = || Some(memory.as_fd().try_clone_to_owned().unwrap());
    let area = |offset, size| SparseArea { offset, size };
    assert_eq!(region(8192, vec![area(0, 4096)], None).areas().unwrap(), [], "a flag without a descriptor");
    let unsorted = region(8192, vec![area(4096, 4096), area(0, 0), area(0, 4096)], file());
    assert_eq!(unsorted.areas().unwrap(), [area(0, 4096), area(4096, 4096)]);
    for (areas, overlap) in [
        (vec![area(0, 8192), area(4096, 4096)], true),
        (vec![area(4096, 8192)], false),
        (vec![area(u64::MAX, 2)], false),
    ] {
        match region(8192, areas, file()).areas() {
            Err(AreaError::Overlap { .. }) => assert!(overlap),
            Err(AreaError::Outside { .. }) => assert!(!overlap),
            other => panic!("{other:?}"),
        }
    }
    let long = region(1 << 30, vec![area(0, 1 << 20)], file());
    let area = long.areas().unwrap()[0];
    assert!(matches!(long.map(area, Access::Read), Err(AreaError::File { file: 8192, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a server answers, a caller gets an answer or an error, soon.
    #[test]
    fn random_answers_do_no_harm(body in vec(any::<u8>(), 0..120), size_lies: bool) {
        let lie = move |header: &Header, _: &[u8]| {
            let mut message = Reply::Done(header.code()).encode(header.id());
            message.extend_from_slice(&body);
            let size = if size_lies { 16 + body.len() as u32 / 2 } else { 16 + body.len() as u32 };
            message[4..8].copy_from_slice(&size.to_le_bytes());
            message
        };
        against(lie, |client| {
            let _ = client.device_info();
            let _ = client.region(0).map(|region| region.areas().map(drop));
            let _ = client.region_io_fds(0);
            let _ = client.irq_info(IrqIndex::MSIX);
            let _ = client.region_read(0, 0, &mut [0; 8]);
            let _ = client.region_write(0, 0, &[0; 8], Delivery::Replied);
            let _ = client.dma_unmap(Iova(0), 4096);
        });
    }
}
