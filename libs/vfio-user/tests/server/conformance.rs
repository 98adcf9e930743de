//! The protocol's fine print, and what broken or hostile clients do, against a plain device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::EventFd;
use outboard_vfio_user::device::{Description, Device, Ioeventfd, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma::{self, Entry, Iova, Pin};
use outboard_vfio_user::limits;
use outboard_vfio_user::memory::{Access, SharedMemory};
use outboard_vfio_user::server::{Connection, ServeError};
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::transport::FrameError;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaUnmap, IrqAction, IrqData, IrqFlags, IrqIndex, Query, RegionAccess,
    RegionCapability, RegionFlags, RegionWrite, RegionWrites, Reply as WireReply, SetIrqs, SparseArea,
    UnmapTarget, Version,
};

use crate::client::{
    Client, Served, by_messages, connect, copies, descriptors_named, eventfd, eventually, mapping,
    mappings_named, memory, open, raw, serve_at, shrink, unmap,
};

const EINVAL: u32 = Errno::EINVAL as u32;
const ENOENT: u32 = Errno::ENOENT as u32;
const EEXIST: u32 = Errno::EEXIST as u32;
const ENOSYS: u32 = Errno::ENOSYS as u32;

/// Registers that keep what is written, and a region whose reads are answered when the test says so.
pub(crate) struct Plain {
    description: Description,
    registers: Mutex<Vec<u8>>,
    connection: Mutex<Option<Arc<Connection>>>,
    held: Mutex<Vec<Reply<Vec<u8>>>>,
}

const REGISTERS: u32 = 0;
const REGISTERS_SIZE: u64 = 0x4000;
const HELD: u32 = 1;
const ABSENT: u32 = 2;
const MANY_EVENTFDS: u32 = 4;
const READ_ONLY: u32 = 7;
const REGIONS: u32 = 9;
const VECTORS: u32 = 2048;

impl Plain {
    pub(crate) fn new() -> Arc<Self> {
        let shared = SharedMemory::new("plain", REGISTERS_SIZE as usize).unwrap();
        let file: Arc<OwnedFd> = Arc::new(shared.as_fd().try_clone_to_owned().unwrap());
        let areas = vec![SparseArea { offset: 0x1000, size: 0x1000 }];
        let doorbell: Arc<OwnedFd> = Arc::new(eventfd().into());
        let ioeventfd = |offset| Ioeventfd { offset, size: 4, datamatch: None, eventfd: doorbell.clone() };
        let own = |offset| Ioeventfd { eventfd: Arc::new(eventfd().into()), ..ioeventfd(offset) };
        let region = |size| Region { size, readable: true, writable: true, ..Region::default() };
        let mut regions = vec![Region::default(); REGIONS as usize];
        regions[REGISTERS as usize] = Region {
            mappable: Some(Mappable { file, offset: 0, areas, msix: true }),
            ioeventfds: vec![ioeventfd(0x1000), ioeventfd(0x1008)],
            ..region(REGISTERS_SIZE)
        };
        regions[HELD as usize] = region(0x1000);
        regions[MANY_EVENTFDS as usize] =
            Region { ioeventfds: (0..17).map(|at| own(at * 4)).collect(), ..region(0x1000) };
        regions[READ_ONLY as usize] = Region { writable: false, ..region(0x100) };
        let irq = |count| Irq { count, flags: IrqFlags::EVENTFD };
        let description =
            Description { regions, irqs: [1, 0, VECTORS, 1, 1].map(irq).to_vec(), resets: true };
        Arc::new(Self {
            description,
            registers: Mutex::new(vec![0; REGISTERS_SIZE as usize]),
            connection: Mutex::default(),
            held: Mutex::default(),
        })
    }

    fn connection(&self) -> Arc<Connection> {
        self.connection.lock().unwrap().clone().unwrap()
    }

    fn release(&self) {
        for reply in self.held.lock().unwrap().drain(..) {
            reply.ok(vec![0x11; 4]);
        }
    }
}

impl Device for Plain {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        *self.connection.lock().unwrap() = Some(connection.clone());
    }

    fn detach(&self) {
        *self.connection.lock().unwrap() = None;
        self.held.lock().unwrap().clear();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        match region {
            HELD => self.held.lock().unwrap().push(reply),
            REGISTERS => {
                reply.ok(self.registers.lock().unwrap()[offset as usize..][..length].to_vec());
            }
            _ => reply.ok(vec![0; length]),
        }
    }

    fn write(&self, _: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        self.registers.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        self.registers.lock().unwrap().fill(0);
        reply.ok(());
    }

    fn dma_unmap(&self, _: &Arc<Entry<dma::Region>>) {}
}

fn dwords<const N: usize>(values: [u32; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn read(offset: u64, count: u32) -> Command<'static> {
    Command::RegionRead(RegionAccess { offset, region: REGISTERS, count })
}

/// Still cuts the stream where we do, and still answers.
fn alive(client: &mut Client) {
    client.write(REGISTERS, 8, &[1, 2, 3, 4]).unwrap();
    assert_eq!(client.read(REGISTERS, 8, 4), Ok(vec![1, 2, 3, 4]));
}

// Framing

/// Points 1 and 2, fault 1: one byte at a time through the smallest buffers, both ways.
#[test]
fn any_fragmentation_is_taken() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    shrink(theirs.as_fd(), 1);
    let (mut client, _served) = serve_at(theirs, &Plain::new(), ours);
    client.set_buffers(1);
    let commands = [
        Command::Version(Version::proposal()),
        Command::GetRegionInfo(Query { argsz: 256, index: REGISTERS }),
        Command::RegionWrite(RegionWrite { offset: 0, region: REGISTERS, data: &[9; 100] }),
        read(0, 100),
    ];
    for (command, id) in commands.iter().zip(1..) {
        for byte in command.encode(id, false) {
            client.send_bytes(&[byte], &[]);
            thread::yield_now();
        }
        let reply = client.reply(id, command.code()).unwrap();
        assert_eq!(reply.descriptors.len(), usize::from(id == 2));
        assert!(id != 4 || reply.body[16..] == [9; 100]);
    }
    // Several in one segment, the last one cut: point 1.
    let mut bytes: Vec<u8> = (10..20).flat_map(|id| read(0, 4).encode(id, false)).collect();
    let rest = bytes.split_off(bytes.len() - 5);
    client.send_bytes(&bytes, &[]);
    (10..19).for_each(|id| drop(client.reply(id, CommandCode::REGION_READ).unwrap()));
    client.send_bytes(&rest, &[]);
    client.reply(19, CommandCode::REGION_READ).unwrap();
    // A megabyte, both ways.
    let big = vec![0x5a; 0x4000];
    client.write(REGISTERS, 0, &big).unwrap();
    assert_eq!(client.read(REGISTERS, 0, 0x4000).unwrap(), big);
}

/// Point 4: a size that cannot be is answered, and ends the session; nothing is allocated for it.
#[test]
fn impossible_sizes_end_the_session() {
    for size in [0, 15, limits::MESSAGE + 1, u32::MAX] {
        let (mut client, served) = open(&Plain::new());
        let mut bytes = raw(3, 9, &[0; 16]);
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        client.send_bytes(&bytes, &[]);
        assert_eq!(client.reply(3, CommandCode::REGION_READ).unwrap_err(), EINVAL);
        assert!(client.is_closed());
        let error = served.outcome().unwrap_err();
        assert!(
            matches!(error, ServeError::Session(SessionError::Frame(FrameError::Size { .. }))),
            "{error}"
        );
    }
}

/// Points 3, 5, 6, 7, 11 and 68: what is wrong with one message is no matter to the next.
#[test]
fn malformed_messages_leave_the_stream_usable() {
    let (mut client, _served) = open(&Plain::new());
    for code in [0, 14, 19, 20, 999, u16::MAX] {
        for length in [0, 1, 64, 4096] {
            assert_eq!(client.call_raw(CommandCode(code), &vec![1; length], &[]).unwrap_err(), ENOSYS);
        }
    }
    // Migration is an optional feature: QEMU takes EINVAL for "no".
    for code in [16, 17, 18] {
        assert_eq!(client.call_raw(CommandCode(code), &[0; 64], &[]).unwrap_err(), EINVAL);
    }
    // The server's own commands, and bodies that are too short.
    for code in [11, 12] {
        assert_eq!(client.call_raw(CommandCode(code), &dwords([0, 0, 0, 0]), &[]).unwrap_err(), EINVAL);
    }
    for code in (2..=10).chain([15]) {
        for length in [0, 1, 7] {
            assert_eq!(client.call_raw(CommandCode(code), &vec![0; length], &[]).unwrap_err(), EINVAL);
        }
    }
    // No type, and replies to nothing, are no commands.
    for kind in 2..16 {
        let mut bytes = read(0, 4).encode(7, false);
        bytes[8] = kind;
        client.send_bytes(&bytes, &[]);
        assert_eq!(client.reply(7, CommandCode::REGION_READ).unwrap_err(), EINVAL);
    }
    client.send_bytes(&WireReply::DmaRead { address: 0, data: &[0; 64] }.encode(1), &[]);
    // Reserved flags and the error field of commands mean nothing.
    let mut bytes = read(0, 4).encode(8, false);
    bytes[8..16].copy_from_slice(&[0xe0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    client.send_bytes(&bytes, &[]);
    client.reply(8, CommandCode::REGION_READ).unwrap();
    client.call(&Command::Reset, &[]).unwrap();
    alive(&mut client);
}

/// Point 9, fault 67: no_reply is silence, for success and for failure, for every command.
#[test]
fn posted_commands_are_never_answered() {
    let (mut client, _served) = open(&Plain::new());
    for code in (0..=20).chain([999]) {
        for length in [0, 16, 64] {
            let mut bytes = raw(code, code, &vec![0; length]);
            bytes[8] = 0x10;
            client.send_bytes(&bytes, &[]);
        }
    }
    client.post(&Command::RegionWrite(RegionWrite { offset: 0, region: REGISTERS, data: &[7; 4] }));
    client.post(&Command::RegionWrite(RegionWrite { offset: u64::MAX - 8, region: 99, data: &[7; 4] }));
    // Point 66: what was posted is done before what follows.
    assert_eq!(client.read(REGISTERS, 0, 4), Ok(vec![7; 4]));
}

/// Point 7: an id may be in flight twice.
#[test]
fn pipelined_commands_with_one_id_are_answered_in_order() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let held = Command::RegionRead(RegionAccess { offset: 0, region: HELD, count: 4 });
    let mut bytes = held.encode(0, false);
    (1..=200_u32).for_each(|count| bytes.extend(read(0, count).encode(0, false)));
    client.send_bytes(&bytes, &[]);
    eventually("the slow one is begun", || !device.held.lock().unwrap().is_empty());
    assert!(client.receive_within(Duration::from_millis(30)).is_none());
    device.release();
    assert_eq!(client.reply(0, CommandCode::REGION_READ).unwrap().body[16..], [0x11; 4]);
    for count in 1..=200 {
        assert_eq!(client.reply(0, CommandCode::REGION_READ).unwrap().body.len(), 16 + count);
    }
}

/// Point 12: descriptors are closed wherever they are not wanted.
#[test]
fn unwanted_descriptors_are_closed() {
    let name = "unwanted";
    let (mut client, _served) = open(&Plain::new());
    let file = memory(name, 0x1000);
    let two: [BorrowedFd<'_>; 2] = [file.as_fd(); 2];
    let many: Vec<BorrowedFd<'_>> = vec![file.as_fd(); limits::DESCRIPTORS];
    for code in (0..=20).chain([999]) {
        let _ = client.call_raw(CommandCode(code), &[0; 64], &two);
        let _ = client.call_raw(CommandCode(code), &[0; 64], &many);
        let _ = client.call_raw(CommandCode(code), &[], &two);
        let mut posted = raw(1, code, &[0; 64]);
        posted[8] = 0x10;
        client.send_bytes(&posted, &two);
    }
    // SPDK's DMA_UNMAP has a descriptor.
    client.map(&mapping(0, 0x1000, Access::Read, 0), Some(file.as_fd())).unwrap();
    client.call(&unmap(0, 0x1000), &[file.as_fd()]).unwrap();
    // With a reply to nothing, and with a message that is never finished.
    client.send_bytes(&WireReply::DmaRead { address: 0, data: &[] }.encode(1), &two);
    alive(&mut client);
    assert_eq!(descriptors_named(name), 1);
    client.send_bytes(&read(0, 4).encode(1, false)[..20], &two);
    eventually("they have arrived", || descriptors_named(name) == 3);
    drop(client);
    eventually("they are closed", || descriptors_named(name) == 1);
}

/// More descriptors than a message can have, a few with each byte.
#[test]
fn a_message_does_not_collect_descriptors() {
    let (mut client, served) = open(&Plain::new());
    let file = memory("collected", 0x1000);
    for byte in &read(0, 4).encode(1, false)[..20] {
        if !client.try_send(&[*byte], &[file.as_fd(); 100]) {
            break;
        }
        if served_is_over(&served) {
            break;
        }
    }
    let error = served.outcome().unwrap_err();
    assert!(
        matches!(error, ServeError::Session(SessionError::Frame(FrameError::Descriptors { .. }))),
        "{error}"
    );
    eventually("they are closed", || descriptors_named("collected") == 1);
}

fn served_is_over(served: &Served) -> bool {
    thread::sleep(Duration::from_millis(5));
    served.is_over()
}

/// A client that sends and does not read gets no memory for it, and can go on when it reads in time.
#[test]
fn a_client_that_does_not_read_is_left_alone() {
    let (mut client, _served) = open(&Plain::new());
    let command = read(0, 0x4000).encode(5, false);
    let mut sent = 0_u32;
    while client.try_send(&command, &[]) {
        sent += 1;
        assert!(sent < 200_000, "all of it is taken");
    }
    // What waits: replies of 4 MiB, some thousand commands, and two sockets full.
    assert!(sent > 256, "{sent}");
    for _ in 0..sent {
        client.reply(5, CommandCode::REGION_READ).unwrap();
    }
}

// VERSION

/// Points 15 to 18.
#[test]
fn a_session_begins_with_a_valid_version() {
    let version = |json: &str| [&[0, 0, 1, 0], json.as_bytes()].concat();
    let deep = format!("{}{}\0", "[".repeat(10_000), "]".repeat(10_000));
    let long = format!("{{\"capabilities\":{{}}}}{}\0", " ".repeat(1 << 20));
    let bad = [
        vec![],
        vec![0, 0],
        vec![1, 0, 0, 0],
        version("{}"),
        version("{\"capabilities\":\0"),
        version("\0"),
        version("[]\0"),
        version("{\"capabilities\":[]}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":-1}}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":1e99}}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":\"8\"}}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":5000}}\0"),
        version("{\"capabilities\":{\"max_data_xfer_size\":0}}\0"),
        version(&deep),
        version(&long[long.len() - (1 << 20) + 20..]),
    ];
    for body in bad {
        let (mut client, served) = connect(&Plain::new());
        let text = String::from_utf8_lossy(&body);
        assert_eq!(client.call_raw(CommandCode::VERSION, &body, &[]).err(), Some(EINVAL), "{text:.60}");
        assert!(client.is_closed());
        assert!(matches!(
            served.outcome(),
            Err(ServeError::Session(SessionError::NotNegotiated(CommandCode::VERSION)))
        ));
    }
    for code in [2, 4, 9, 13, 999] {
        let (mut client, _served) = connect(&Plain::new());
        assert_eq!(client.call_raw(CommandCode(code), &[0; 32], &[]).unwrap_err(), EINVAL);
        assert!(client.is_closed());
    }
    // A descriptor.
    let (mut client, _served) = connect(&Plain::new());
    let file = memory("version", 1);
    assert_eq!(client.call_raw(CommandCode::VERSION, &version("{}\0"), &[file.as_fd()]).unwrap_err(), EINVAL);
}

/// Points 16, 17 and 19.
#[test]
fn our_version_is_one_that_every_client_takes() {
    for (minor, json, answer) in [
        (0, "", 0),
        (1, "{}\0", 1),
        (7, "{\"capabilities\":{}}\0", 1),
        (
            1,
            "{\"capabilities\":{\"max_msg_fds\":16,\"migration\":{\"pgsize\":4096},\"new\":[1]},\"x\":0}\0",
            1,
        ),
    ] {
        let (mut client, _served) = connect(&Plain::new());
        let body = [&[0, 0, minor, 0], json.as_bytes()].concat();
        let reply = client.call_raw(CommandCode::VERSION, &body, &[]).unwrap();
        assert!(reply.body.len() <= 4 + 193 && reply.body.ends_with(b"}}\0") && reply.descriptors.is_empty());
        assert_eq!(reply.body[..4], [0, 0, answer, 0]);
        let text = std::str::from_utf8(&reply.body[4..reply.body.len() - 1]).unwrap();
        assert!(text.contains("\"pgsizes\":4096") && text.contains("\"max_msg_fds\":16"), "{text}");
        assert!(!text.contains("twin_socket") && !text.contains("write_multiple"), "{text}");
        alive(&mut client);
    }
}

/// Point 21.
#[test]
fn a_second_version_changes_nothing() {
    let (mut client, _served) = open(&Plain::new());
    client.map(&by_messages(0, 0x1000), None).unwrap();
    assert_eq!(client.call(&Command::Version(Version::proposal()), &[]).unwrap_err(), EINVAL);
    client.unmap(0, 0x1000).unwrap();
    alive(&mut client);
}

// Regions

/// Points 22, 23, 31 and 33, and the sizes of point 13.
#[test]
fn information_comes_in_its_exact_size() {
    let (mut client, _served) = open(&Plain::new());
    for argsz in [0, 15, u32::MAX] {
        let body = dwords([argsz, 0, 0, 0]);
        assert_eq!(client.call_raw(CommandCode::DEVICE_GET_INFO, &body, &[]).unwrap_err(), EINVAL);
        assert_eq!(client.call_raw(CommandCode::DEVICE_GET_IRQ_INFO, &body, &[]).unwrap_err(), EINVAL);
    }
    for argsz in [16, 32] {
        let reply = client.call_raw(CommandCode::DEVICE_GET_INFO, &dwords([argsz, 0, 0, 0]), &[]).unwrap();
        assert_eq!(reply.body, dwords([16, 3, REGIONS, 5]));
    }
    for (index, count) in [1, 0, VECTORS, 1, 1].into_iter().enumerate() {
        let query = Query { argsz: 16, index: index as u32 };
        let reply = client.call(&Command::GetIrqInfo(query), &[]).unwrap();
        assert_eq!(reply.body, dwords([16, 1, index as u32, count]));
    }
    for index in [5, u32::MAX] {
        assert_eq!(client.call(&Command::GetIrqInfo(Query { argsz: 16, index }), &[]).unwrap_err(), EINVAL);
    }
    for index in [REGIONS, u32::MAX] {
        let query = Query { argsz: 32, index };
        assert_eq!(client.call(&Command::GetRegionInfo(query), &[]).unwrap_err(), EINVAL);
    }
    let absent = client.call(&Command::GetRegionInfo(Query { argsz: 32, index: ABSENT }), &[]).unwrap();
    assert_eq!(absent.body, dwords([32, 0, ABSENT, 0, 0, 0, 0, 0]));
}

/// Points 24 to 29, faults 13, 14 and 70.
#[test]
fn capabilities_and_the_descriptor_come_when_there_is_room() {
    let (mut client, _served) = open(&Plain::new());
    let needed = 32 + 8 + 8 + 16 + 8;
    let mut ask = |argsz: u32, padding: usize| {
        let mut body = dwords([argsz, 0, REGISTERS, 0, 0, 0, 0, 0]);
        body.resize(32 + padding, 0);
        client.call_raw(CommandCode::DEVICE_GET_REGION_INFO, &body, &[])
    };
    for argsz in [0, 31] {
        assert_eq!(ask(argsz, 0).unwrap_err(), EINVAL);
    }
    for argsz in [32, 33, needed - 1] {
        let reply = ask(argsz, 0).unwrap();
        assert_eq!(reply.body[..16], dwords([needed, 7, REGISTERS, 0]), "MMAP, but no CAPS");
        assert!(reply.body.len() == 32 && reply.descriptors.is_empty());
    }
    // SPDK's request is padded to 4064 bytes.
    for (argsz, padding) in [(needed, 0), (needed + 1, 0), (64 << 10, 0), (4064, 4032)] {
        let reply = ask(argsz, padding).unwrap();
        assert_eq!((reply.body.len(), reply.descriptors.len()), (needed as usize, 1));
        assert_eq!(reply.body[..16], dwords([needed, 7 | 8, REGISTERS, 32]));
        let decoded = WireReply::decode(CommandCode::DEVICE_GET_REGION_INFO, &reply.body).unwrap();
        let WireReply::RegionInfo { info, argsz } = decoded else { panic!("{decoded:?}") };
        assert_eq!((argsz, info.size, info.file_offset), (needed, REGISTERS_SIZE, 0));
        assert!(info.flags.contains(RegionFlags::MMAP));
        assert_eq!(
            info.capabilities,
            [
                RegionCapability::SparseMmap(vec![SparseArea { offset: 0x1000, size: 0x1000 }]),
                RegionCapability::MsixMappable
            ]
        );
    }
    let plain = client.call(&Command::GetRegionInfo(Query { argsz: 32, index: HELD }), &[]).unwrap();
    assert_eq!((plain.body[4], plain.descriptors.len()), (3, 0));
}

/// Point 32, fault 15.
#[test]
fn io_descriptors_are_listed_when_there_is_room() {
    let (mut client, _served) = open(&Plain::new());
    let needed = 16 + 2 * 40;
    let mut ask = |body: [u32; 4]| client.call_raw(CommandCode::DEVICE_GET_REGION_IO_FDS, &dwords(body), &[]);
    for body in [
        [needed, 1, REGISTERS, 0],
        [needed, 0, REGISTERS, 1],
        [15, 0, REGISTERS, 0],
        [(1 << 20) + 1, 0, REGISTERS, 0],
        [needed, 0, REGIONS, 0],
        [needed, 0, ABSENT, 0],
    ] {
        assert_eq!(ask(body).unwrap_err(), EINVAL, "{body:?}");
    }
    for argsz in [16, needed - 1] {
        let reply = ask([argsz, 0, REGISTERS, 0]).unwrap();
        assert_eq!(reply.body, dwords([needed, 0, REGISTERS, 2]));
        assert!(reply.descriptors.is_empty());
    }
    let reply = ask([needed, 0, REGISTERS, 0]).unwrap();
    assert_eq!(
        (reply.body.len(), reply.descriptors.len()),
        (needed as usize, 1),
        "a shared one is sent once"
    );
    let none = ask([16, 0, HELD, 0]).unwrap();
    assert_eq!(none.body, dwords([16, 0, HELD, 0]));
    // 17 are more than the client said that it takes.
    assert_eq!(ask([4096, 0, MANY_EVENTFDS, 0]).unwrap_err(), Errno::E2BIG as u32);
}

/// Points 60, 61 and 64, faults 8 and 19.
#[test]
fn accesses_stay_in_their_region() {
    let (mut client, _served) = open(&Plain::new());
    let size = REGISTERS_SIZE;
    for (region, offset, count) in [
        (REGISTERS, size, 1),
        (REGISTERS, size - 3, 4),
        (REGISTERS, u64::MAX, 1),
        (REGISTERS, u64::MAX - 3, 8),
        (REGISTERS, 0, (1 << 20) + 1),
        (REGISTERS, 0, u32::MAX),
        (REGISTERS, size + 1, 0),
        (ABSENT, 0, 1),
        (REGIONS, 0, 1),
        (u32::MAX, 0, 4),
    ] {
        let body = [&offset.to_le_bytes()[..], &dwords([region, count])].concat();
        assert_eq!(client.call_raw(CommandCode::REGION_READ, &body, &[]).unwrap_err(), EINVAL);
        let data = [body, vec![0; count.min(64) as usize]].concat();
        assert_eq!(client.call_raw(CommandCode::REGION_WRITE, &data, &[]).unwrap_err(), EINVAL);
    }
    // A length that is not the data's.
    for (count, length) in [(4, 3), (4, 5), (0, 1), (4, 0)] {
        let body = [&0_u64.to_le_bytes()[..], &dwords([REGISTERS, count]), &vec![0; length]].concat();
        assert_eq!(client.call_raw(CommandCode::REGION_WRITE, &body, &[]).unwrap_err(), EINVAL);
    }
    assert_eq!(client.write(READ_ONLY, 0, &[0]), Err(EINVAL));
    assert_eq!(client.read(READ_ONLY, 0, 0x100).unwrap().len(), 0x100);
    for offset in [0, 5, size] {
        assert_eq!(client.read(REGISTERS, offset, 0), Ok(vec![]));
        client.write(REGISTERS, offset, &[]).unwrap();
    }
    assert_eq!(client.read(REGISTERS, size - 1, 1), Ok(vec![0]));
    alive(&mut client);
}

/// Point 67.
#[test]
fn many_writes_in_one_message() {
    let (mut client, _served) = open(&Plain::new());
    let code = CommandCode::REGION_WRITE_MULTI;
    let write = |offset, data| RegionWrite { offset, region: REGISTERS, data };
    for count in [1_u64, 200] {
        let writes: Vec<_> = (0..count).map(|at| write(at * 8, &[1, 2, 3, 4, 5, 6, 7, 8][..])).collect();
        let reply = client.call_raw(code, &RegionWrites::body(&writes).unwrap(), &[]).unwrap();
        assert_eq!(reply.body, count.to_le_bytes());
        assert_eq!(client.read(REGISTERS, (count - 1) * 8, 2), Ok(vec![1, 2]));
    }
    // Those after one that is out of place are not done.
    let writes = [write(0, &[9; 1]), write(REGISTERS_SIZE, &[9; 4]), write(16, &[9; 4])];
    let body = RegionWrites::body(&writes).unwrap();
    assert_eq!(client.call_raw(code, &body, &[]).unwrap().body, 1_u64.to_le_bytes());
    assert_eq!(client.read(REGISTERS, 0, 2), Ok(vec![9, 2]));
    assert_eq!(client.read(REGISTERS, 16, 1), Ok(vec![1]));
    for wrong in [0_u64, 4, 201, u64::MAX] {
        let mut body = body.clone();
        body[..8].copy_from_slice(&wrong.to_le_bytes());
        assert_eq!(client.call_raw(code, &body, &[]).unwrap_err(), EINVAL);
    }
    let mut long = body.clone();
    long[20] = 9;
    assert_eq!(client.call_raw(code, &long, &[]).unwrap_err(), EINVAL);
    let mut posted = raw(1, code.0, &body);
    posted[8] = 0x10;
    client.send_bytes(&posted, &[]);
    alive(&mut client);
}

// Interrupts

fn bind(start: u32, count: u32) -> SetIrqs<'static> {
    let (data, action) = (IrqData::Eventfds, IrqAction::Trigger);
    SetIrqs { index: IrqIndex::MSIX, start, count, data, action }
}

fn signalled(eventfd: &EventFd) -> u64 {
    eventfd.read().unwrap_or(0)
}

/// Point 34, fault 4.
#[test]
fn set_irqs_refuses_what_has_no_meaning() {
    let (mut client, _served) = open(&Plain::new());
    let bound = eventfd();
    client.call(&Command::SetIrqs(bind(284, 1)), &[bound.as_fd()]).unwrap();
    let (none, boolean, eventfds, mask, unmask, trigger) = (1, 2, 4, 8, 16, 32);
    for body in [
        [20, none | trigger, 2, 284, u32::MAX],
        [20, none | trigger, 2, u32::MAX, 1],
        [20, none | trigger, 2, 1, u32::MAX],
        [20, none | trigger, 2, VECTORS, 1],
        [20, none | trigger, 2, VECTORS - 1, 2],
        [20, none | trigger, 2, 1, 0],
        [20, none | mask, 2, 0, 0],
        [20, eventfds | trigger, 2, 0, 0],
        [20, none | trigger, 5, 0, 1],
        [20, none | trigger, 1, 0, 1],
        [19, none | trigger, 2, 0, 1],
        [20, none, 2, 0, 1],
        [20, trigger, 2, 0, 1],
        [20, none | boolean | trigger, 2, 0, 1],
        [20, none | mask | unmask, 2, 0, 1],
        [20, boolean | trigger, 2, 0, 1],
        [20, none | mask, 3, 0, 1],
        [20, none | trigger, 4, 0, 2],
        [20, 64 | none | trigger, 2, 0, 1],
    ] {
        let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &dwords(body), &[]);
        assert_eq!(result.unwrap_err(), EINVAL, "{body:?}");
    }
    for (flags, count, given) in
        [(none | trigger, 1, 1), (eventfds | trigger, 2, 1), (eventfds | trigger, 1, 2)]
    {
        let spare = eventfd();
        let body = dwords([20, flags, 2, 0, count]);
        let result = client.call_raw(CommandCode::DEVICE_SET_IRQS, &body, &vec![spare.as_fd(); given]);
        assert_eq!(result.unwrap_err(), EINVAL);
        assert_eq!(copies(&spare), 1);
    }
    assert_eq!((signalled(&bound), copies(&bound)), (0, 2), "nothing was changed");
}

/// Points 35 to 42 and 44, faults 5 and 6, over the socket.
#[test]
fn vectors_are_bound_and_let_go() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let set =
        |index, start, count, data, action| Command::SetIrqs(SetIrqs { index, start, count, data, action });
    let vectors: Vec<EventFd> = (0..64).map(|_| eventfd()).collect();
    // In runs of 1, 8, and of 16 more than that: points 40 and 41.
    for run in [0..1, 1..9, 9..25, 25..64] {
        let borrowed: Vec<_> = vectors[run.clone()].iter().map(AsFd::as_fd).collect();
        client.call(&Command::SetIrqs(bind(run.start as u32, run.len() as u32)), &borrowed).unwrap();
    }
    let (err, req, intx) = (eventfd(), eventfd(), eventfd());
    for (index, eventfd) in [(IrqIndex::ERR, &err), (IrqIndex::REQ, &req), (IrqIndex::INTX, &intx)] {
        let command = set(index, 0, 1, IrqData::Eventfds, IrqAction::Trigger);
        client.call(&command, &[eventfd.as_fd()]).unwrap();
    }
    let fired = |vector: usize| signalled(&vectors[vector]);
    let interrupts = device.connection();
    let raise = |index, vector| interrupts.interrupts().trigger(index, vector);
    for vector in 0..64 {
        raise(IrqIndex::MSIX, vector);
        assert_eq!(fired(vector), 1);
    }
    raise(IrqIndex::ERR, 0);
    assert_eq!((signalled(&err), signalled(&req), fired(0)), (1, 0, 0));
    raise(IrqIndex::REQ, 0);
    assert_eq!((signalled(&err), signalled(&req), fired(0)), (0, 1, 0));
    // Loop-back by NONE and BOOL; unbound ones are nobody's.
    client.call(&set(IrqIndex::MSIX, 62, 4, IrqData::None, IrqAction::Trigger), &[]).unwrap();
    client.call(&set(IrqIndex::MSIX, 61, 3, IrqData::Bool(&[1, 0, 1]), IrqAction::Trigger), &[]).unwrap();
    assert_eq!([61, 62, 63].map(fired), [1, 1, 2]);
    // Masked vectors wait.
    client.call(&set(IrqIndex::MSIX, 3, 1, IrqData::None, IrqAction::Mask), &[]).unwrap();
    raise(IrqIndex::MSIX, 3);
    assert_eq!(fired(3), 0);
    client.call(&set(IrqIndex::MSIX, 3, 1, IrqData::None, IrqAction::Unmask), &[]).unwrap();
    assert_eq!(fired(3), 1);
    // Letting go of some: exactly those.
    client.call(&set(IrqIndex::MSIX, 5, 2, IrqData::Unbind, IrqAction::Trigger), &[]).unwrap();
    assert_eq!([4, 5, 6, 7].map(|vector| copies(&vectors[vector])), [2, 1, 1, 2]);
    client.call(&set(IrqIndex::MSIX, 100, 1, IrqData::Unbind, IrqAction::Trigger), &[]).unwrap();
    // Another one instead: the old one is closed.
    let other = eventfd();
    client.call(&Command::SetIrqs(bind(7, 1)), &[other.as_fd()]).unwrap();
    raise(IrqIndex::MSIX, 7);
    assert_eq!((fired(7), signalled(&other), copies(&vectors[7])), (0, 1, 1));
    // Disabling an index leaves the others alone.
    client.call(&set(IrqIndex::INTX, 0, 0, IrqData::None, IrqAction::Trigger), &[]).unwrap();
    assert_eq!((copies(&intx), copies(&vectors[0]), copies(&err)), (1, 2, 2));
    client.call(&set(IrqIndex::MSIX, 0, 0, IrqData::None, IrqAction::Trigger), &[]).unwrap();
    assert!(vectors.iter().all(|vector| copies(vector) == 1));
    assert_eq!((copies(&err), copies(&req)), (2, 2));
}

/// Point 42: the client's resample descriptor unmasks the pin, which fires again while it is asserted.
#[test]
fn the_pin_is_resampled_through_its_descriptor() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let (trigger, unmask) = (eventfd(), eventfd());
    for (action, eventfd) in [(IrqAction::Trigger, &trigger), (IrqAction::Unmask, &unmask)] {
        let set = SetIrqs { index: IrqIndex::INTX, start: 0, count: 1, data: IrqData::Eventfds, action };
        client.call(&Command::SetIrqs(set), &[eventfd.as_fd()]).unwrap();
    }
    let connection = device.connection();
    connection.interrupts().set_line(true);
    assert_eq!(signalled(&trigger), 1);
    connection.interrupts().set_line(true);
    assert_eq!(signalled(&trigger), 0, "masked until it is unmasked");
    // Also while the socket is busy all the time.
    unmask.write(1).unwrap();
    eventually("it fires again", || {
        client.read(REGISTERS, 0, 4).unwrap();
        signalled(&trigger) == 1
    });
    connection.interrupts().set_line(false);
    unmask.write(1).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(signalled(&trigger), 0);
}

// DMA

/// Points 45 to 47, 53 and 55, faults 11 and 20.
#[test]
fn maps_and_unmaps_that_cannot_be_change_nothing() {
    let (mut client, _served) = open(&Plain::new());
    let file = memory("maps", 0x10_0000);
    let at = |address, size| mapping(address, size, Access::ReadWrite, 0);
    client.map(&at(0x10_0000, 0x4000), Some(file.as_fd())).unwrap();
    for (address, size) in [
        (0x10_0000, 0x4000),
        (0x10_0000, 0x1000),
        (0x10_3000, 0x1000),
        (0x0f_f000, 0x2000),
        (0x10_3000, 0x2000),
        (0x0f_0000, 0x2_0000),
    ] {
        assert_eq!(client.map(&at(address, size), Some(file.as_fd())), Err(EEXIST), "{address:#x}+{size:#x}");
        assert_eq!(client.map(&by_messages(address, size), None), Err(EEXIST));
    }
    let map = |argsz: u32, flags: u32, offset: u64, address: u64, size: u64| {
        let wide: Vec<u8> = [offset, address, size].iter().flat_map(|value| value.to_le_bytes()).collect();
        [dwords([argsz, flags]), wide].concat()
    };
    let one = [file.as_fd()];
    let two = [file.as_fd(); 2];
    let socket = std::os::unix::net::UnixStream::pair().unwrap();
    let bad: [(Vec<u8>, &[BorrowedFd<'_>]); 14] = [
        (map(31, 3, 0, 0, 0x1000), &one),
        (map(32, 3 | 16, 0, 0, 0x1000), &one),
        (map(32, 3 | 4, 0, 0, 0x1000), &[]),
        (map(32, 3 | 8, 0, 0, 0x1000), &[]),
        (map(32, 3 | 4 | 8, 0, 0, 0x1000), &one),
        (map(32, 0, 0, 0, 0x1000), &one),
        (map(32, 3, 0, 0, 0x1000), &two),
        (map(32, 3, 0, 0, 0), &one),
        (map(32, 3, 0, 0, 0), &[]),
        (map(32, 3, 0, u64::MAX - 0xffe, 0x1000), &[]),
        (map(32, 3, 0, 0, 0x10_1000), &one),
        (map(32, 3, 0xf_f000, 0, 0x2000), &one),
        (map(32, 3, u64::MAX - 0xfff, 0, 0x2000), &one),
        (map(32, 3, 1, 0, 0x1000), &one),
    ];
    for (body, descriptors) in bad {
        assert_eq!(
            client.call_raw(CommandCode::DMA_MAP, &body, descriptors).unwrap_err(),
            EINVAL,
            "{body:?}"
        );
    }
    let body = map(32, 3, 0, 0, 0x1000);
    assert_eq!(client.call_raw(CommandCode::DMA_MAP, &body, &[socket.0.as_fd()]).unwrap_err(), EINVAL);
    let read_only = std::fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
    let read_only = read_only.unwrap();
    assert_eq!(client.map(&at(0, 0x1000), Some(read_only.as_fd())), Err(Errno::EACCES as u32));
    client.map(&mapping(0, 0x1000, Access::Read, 0), Some(read_only.as_fd())).unwrap();

    let unmap_body = |argsz: u32, flags: u32, address: u64, size: u64| {
        [dwords([argsz, flags]), address.to_le_bytes().to_vec(), size.to_le_bytes().to_vec()].concat()
    };
    for (address, size) in [
        (0x10_0000, 0x1000),
        (0x10_1000, 0x3000),
        (0x10_0000, 0x5000),
        (0x80_0000, 0x1000),
        (0, 0),
        (0, u64::MAX),
    ] {
        let result = client.call_raw(CommandCode::DMA_UNMAP, &unmap_body(24, 0, address, size), &[]);
        assert_eq!(result.unwrap_err(), ENOENT);
    }
    for (argsz, flags, address, size) in [
        (23, 0, 0x10_0000, 0x4000),
        (u32::MAX, 0, 0x10_0000, 0x4000),
        (24, 2, 0x10_0000, 0x4000),
        (24, 3, 0, 0),
        (24, 4, 0x10_0000, 0x4000),
        // Fault 9.
        (u32::MAX, 1, 0x10_0000, 0x4000),
        (40, 1, 0x10_0000, 0x4000),
    ] {
        let result = client.call_raw(CommandCode::DMA_UNMAP, &unmap_body(argsz, flags, address, size), &[]);
        assert_eq!(result.unwrap_err(), EINVAL);
    }
    assert_eq!(mappings_named("maps"), 2, "both that were mapped, and nothing else");
    client.unmap(0x10_0000, 0x4000).unwrap();
    client.unmap(0, 0x1000).unwrap();
    assert_eq!((mappings_named("maps"), descriptors_named("maps")), (0, 2));
}

/// Point 54, fault 24: maps cost no descriptors. Point 51: all at once.
#[test]
fn a_thousand_maps_of_one_file() {
    let (mut client, _served) = open(&Plain::new());
    let file = memory("thousand", 0x1000 * 1000);
    for index in (0..1000).rev() {
        let map = mapping(index * 0x2000, 0x1000, Access::ReadWrite, index * 7 % 1000 * 0x1000);
        client.map(&map, Some(file.as_fd())).unwrap();
    }
    assert_eq!(descriptors_named("thousand"), 1);
    assert!(mappings_named("thousand") >= 900);
    let reply = client.call(&Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), &[]).unwrap();
    assert_eq!(reply.body.len(), 24);
    assert_eq!(mappings_named("thousand"), 0);
    client.call(&Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), &[]).unwrap();
}

/// Fault 19: nothing is cut to 32 bits.
#[test]
fn big_maps_are_reached_to_their_end() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let size = 5 << 30;
    let file = memory("big", size);
    client.map(&mapping(1 << 40, size, Access::ReadWrite, 0), Some(file.as_fd())).unwrap();
    let mut view = device.connection().view();
    for offset in [0, (4 << 30) + 4097, size - 8] {
        view.write(Iova((1 << 40) + offset), b"far away").unwrap();
        let mut bytes = [0; 8];
        nix::sys::uio::pread(&file, &mut bytes, offset as i64).unwrap();
        assert_eq!(&bytes, b"far away");
    }
    assert!(view.write(Iova((1 << 40) + size - 4), b"far away").is_err());
    view.release();
    client.unmap(1 << 40, size).unwrap();
}

/// Point 50: an unmap is answered when the last I/O has let go.
#[test]
fn an_unmap_waits_for_pins() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let file = memory("pinned", 0x2000);
    for address in [0, 0x1000] {
        client.map(&mapping(address, 0x1000, Access::ReadWrite, address), Some(file.as_fd())).unwrap();
    }
    let pin = |address| -> Pin {
        device.connection().view().pin(Iova(address), 512, Access::Write).expect("it is mapped")
    };
    for command in [unmap(0x1000, 0x1000), Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All))] {
        let pin = pin(if command == unmap(0x1000, 0x1000) { 0x1000 } else { 0 });
        let id = client.send(&command, &[]);
        assert!(client.receive_within(Duration::from_millis(50)).is_none());
        let begin = Instant::now();
        drop(pin);
        client.reply(id, CommandCode::DMA_UNMAP).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(1));
    }
    assert_eq!(mappings_named("pinned"), 0);
}

// The end

/// Point 71, faults 34 and 53: a client that dies at whatever step leaves nothing behind.
#[test]
fn a_client_may_die_at_every_step() {
    let device = Plain::new();
    let name = "dying";
    let file = memory(name, 0x1000);
    let vector = eventfd();
    let version = Command::Version(Version::proposal()).encode(1, false);
    for cut in [0, 1, 15, 16, 17, version.len() - 1] {
        let (mut client, served) = connect(&device);
        client.send_bytes(&version[..cut], &[]);
        drop(client);
        served.outcome().unwrap();
    }
    let map = Command::DmaMap(mapping(0, 0x1000, Access::ReadWrite, 0)).encode(2, false);
    let bind = Command::SetIrqs(bind(0, 1)).encode(3, false);
    let held = Command::RegionRead(RegionAccess { offset: 0, region: HELD, count: 4 });
    for step in 0..6 {
        let (mut client, served) = open(&device);
        if step > 0 {
            client.send_bytes(&map[..if step == 1 { 20 } else { map.len() }], &[file.as_fd()]);
        }
        if step > 2 {
            client.send_bytes(&bind[..if step == 3 { 30 } else { bind.len() }], &[vector.as_fd()]);
        }
        if step > 4 {
            // While a command is being executed, and others wait behind it.
            client.send(&held, &[]);
            client.send_bytes(&map, &[file.as_fd()]);
            eventually("it is executed", || !device.held.lock().unwrap().is_empty());
        }
        drop(client);
        served.outcome().unwrap();
        assert_eq!(
            (descriptors_named(name), mappings_named(name), copies(&vector)),
            (1, 0, 1),
            "step {step}"
        );
    }
    let (mut client, _served) = open(&device);
    alive(&mut client);
}

/// Point 14: what is late is not sent at all, whichever thread is late.
#[test]
fn nothing_is_sent_after_the_limit() {
    let device = Plain::new();
    let (mut client, served) = open(&device);
    client.send(&Command::RegionRead(RegionAccess { offset: 0, region: HELD, count: 4 }), &[]);
    client.send(&read(0, 4), &[]);
    let begin = Instant::now();
    eventually("it is executed", || !device.held.lock().unwrap().is_empty());
    let late = std::mem::take(&mut *device.held.lock().unwrap());
    assert!(client.receive_within(Duration::from_secs(8)).is_none());
    let took = begin.elapsed();
    assert!((limits::REPLY..Duration::from_millis(4500)).contains(&took), "{took:?}");
    late.into_iter().for_each(|reply| reply.ok(vec![0; 4]));
    assert!(client.is_closed());
    let error = served.outcome().unwrap_err();
    assert!(
        matches!(
            error,
            ServeError::Session(SessionError::Overdue {
                code: CommandCode::REGION_READ,
                limit: limits::REPLY
            })
        ),
        "{error}"
    );
}
