//! The protocol's fine print over a real socket, by the numbers of the project's lists.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::errno::Errno;
use outboard_vfio_user::device::{Description, Device, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma;
use outboard_vfio_user::memory::{Access, SharedMemory};
use outboard_vfio_user::server::Connection;
use outboard_vfio_user::wire::{
    Command, CommandCode, IrqAction, IrqData, IrqFlags, IrqIndex, RegionAccess, RegionWrite, SetIrqs,
    SparseArea, Version,
};

use super::client::*;

const SIZE: usize = 8192;

/// Region 0 is memory, of which the second page can be mapped.
struct Board {
    description: Description,
    memory: Mutex<Vec<u8>>,
    /// Memory that it still uses after an unmap.
    pinned: Mutex<Option<dma::Pin>>,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl Board {
    fn new() -> Arc<Self> {
        let file = SharedMemory::new("board", SIZE).unwrap().as_fd().try_clone_to_owned().unwrap();
        let areas = vec![SparseArea { offset: 4096, size: 4096 }];
        let mappable = Some(Mappable { file: Arc::new(file), offset: 0, areas, msix: false });
        let mut regions = vec![Region::default(); 9];
        regions[0] =
            Region { size: SIZE as u64, readable: true, writable: true, mappable, ..Region::default() };
        regions[7] = Region { size: 256, readable: true, ..Region::default() };
        let irq = |count| Irq { count, flags: IrqFlags::EVENTFD };
        Arc::new(Self {
            description: Description {
                regions,
                irqs: vec![irq(1), irq(0), irq(8), irq(1), irq(1)],
                resets: true,
            },
            memory: Mutex::new(vec![0; SIZE]),
            pinned: Mutex::default(),
            connection: Mutex::default(),
        })
    }
}

impl Device for Board {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        *self.connection.lock().unwrap() = Some(connection.clone());
    }

    fn detach(&self) {
        *self.connection.lock().unwrap() = None;
        *self.pinned.lock().unwrap() = None;
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        let start = offset as usize;
        match region {
            0 => reply.ok(self.memory.lock().unwrap()[start..start + length].to_vec()),
            _ => reply.ok(vec![0x55; length]),
        }
    }

    fn write(&self, _region: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        let start = offset as usize;
        self.memory.lock().unwrap()[start..start + data.len()].copy_from_slice(data);
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        self.memory.lock().unwrap().fill(0);
        reply.ok(());
    }

    fn dma_unmap(&self, _region: &Arc<dma::Entry<dma::Region>>) {}
}

const EINVAL: u32 = Errno::EINVAL as u32;

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Points 1 and 66, fault 1: any fragmentation, and posted writes before a read.
#[test]
fn a_message_may_come_a_byte_at_a_time() {
    let (mut client, _served) = open(&Board::new());
    client.set_buffers(1);
    client.post(&Command::RegionWrite(RegionWrite { offset: 8, region: 0, data: b"posted" }));
    let read = Command::RegionRead(RegionAccess { offset: 8, region: 0, count: 6 });
    for byte in read.encode(77, false) {
        client.send_bytes(&[byte], &[]);
    }
    let reply = client.reply(77, CommandCode::REGION_READ).unwrap();
    assert_eq!(&reply.body[16..], b"posted");
}

/// Points 5 to 7 and 9.
#[test]
fn unknown_commands_leave_the_stream_usable() {
    let (mut client, _served) = open(&Board::new());
    for code in [0, 14, 16, 17, 18, 19, 999] {
        let errno = client.call_raw(CommandCode(code), &[0xaa; 100], &[]).unwrap_err();
        assert!([EINVAL, Errno::ENOSYS as u32].contains(&errno), "command {code}: errno {errno}");
    }
    // The same without a reply: silence, for success and failure.
    for code in [13, 9, 999] {
        let mut message = raw(5, code, &[]);
        message[8] |= 0x10;
        client.send_bytes(&message, &[]);
    }
    assert!(client.receive_within(Duration::from_millis(100)).is_none());
    // One id, twice in flight.
    let read = Command::RegionRead(RegionAccess { offset: 0, region: 7, count: 2 }).encode(9, false);
    client.send_bytes(&[read.clone(), read].concat(), &[]);
    for _ in 0..2 {
        client.reply(9, CommandCode::REGION_READ).unwrap();
    }
}

/// Point 4.
#[test]
fn a_size_that_cannot_be_ends_the_stream() {
    for size in [0_u32, 15, (1 << 20) + 33, u32::MAX] {
        let (mut client, served) = open(&Board::new());
        let mut message = raw(1, 13, &[]);
        message[4..8].copy_from_slice(&size.to_le_bytes());
        client.send_bytes(&message, &[]);
        assert_eq!(client.reply(1, CommandCode::DEVICE_RESET).unwrap_err(), EINVAL);
        assert!(client.is_closed());
        assert!(served.outcome().is_err());
    }
}

/// Points 15 to 17 and 21.
#[test]
fn version_comes_first_and_once() {
    let board = Board::new();
    let (mut client, _served) = connect(&board);
    assert_eq!(client.call(&Command::Reset, &[]).unwrap_err(), EINVAL);
    assert!(client.is_closed());
    for body in [&[0, 0, 0, 0][..], b"\0\0\0\0{}\0", b"\0\0\0\0{\"capabilities\":{}}\0"] {
        let (mut client, _served) = connect(&board);
        let reply = client.call_raw(CommandCode::VERSION, body, &[]).unwrap();
        assert_eq!(&reply.body[..4], [0; 4], "the lesser minor version");
        // Point 19: QEMU's buffer.
        assert!(reply.body.len() <= 4 + 193 && reply.body.ends_with(b"\0"));
        assert_eq!(client.call(&Command::Version(Version::proposal()), &[]).unwrap_err(), EINVAL);
        assert_eq!(client.read(7, 0, 4).unwrap(), [0x55; 4]);
    }
    for body in [&b"\x01\0\0\0"[..], b"\0\0\0\0{}", b"\0\0\0\0{\"capabilities\":3}\0", b"\0\0"] {
        let (mut client, _served) = connect(&board);
        assert_eq!(client.call_raw(CommandCode::VERSION, body, &[]).unwrap_err(), EINVAL);
    }
}

/// Points 12 and 22 to 26, faults 13 and 14.
#[test]
fn region_information_comes_whole_or_says_how_much_it_needs() {
    let (mut client, _served) = open(&Board::new());
    let ask = |client: &mut Client, argsz: u32, index: u32| {
        client.call_raw(CommandCode::DEVICE_GET_REGION_INFO, &u32s(&[argsz, 0, index, 0, 0, 0, 0, 0]), &[])
    };
    let short = ask(&mut client, 32, 0).unwrap();
    assert_eq!((short.body.len(), short.descriptors.len()), (32, 0));
    assert_eq!(
        &short.body[..8],
        u32s(&[64, 7]),
        "the size needed; readable, writable, mappable, no capabilities"
    );
    for argsz in [64, 4064] {
        let whole = ask(&mut client, argsz, 0).unwrap();
        assert_eq!((whole.body.len(), whole.descriptors.len()), (64, 1));
        assert_eq!(&whole.body[4..16], u32s(&[15, 0, 32]));
    }
    let nothing = ask(&mut client, 32, 3).unwrap();
    assert_eq!(&nothing.body[16..24], [0; 8], "a region that is not there has size 0");
    for (argsz, index) in [(31, 0), (32, 9), (u32::MAX, 0)] {
        assert_eq!(ask(&mut client, argsz, index).unwrap_err(), EINVAL);
    }
}

/// Point 60, fault 8.
#[test]
fn accesses_past_the_end_are_refused() {
    let (mut client, _served) = open(&Board::new());
    for (region, offset, count) in [
        (0, SIZE as u64 - 3, 4),
        (0, u64::MAX - 3, 8),
        (0, SIZE as u64, 1),
        (3, 0, 1),
        (9, 0, 1),
        (u32::MAX, 0, 1),
        (7, 0, 257),
    ] {
        assert!(client.read(region, offset, count).is_err(), "region {region}, {count} at {offset:#x}");
    }
    assert!(client.write(7, 0, &[0]).is_err(), "a region that cannot be written");
    assert!(client.read(0, SIZE as u64, 0).unwrap().is_empty());
    let mut body = 0_u64.to_le_bytes().to_vec();
    body.extend(u32s(&[0, u32::MAX]));
    assert!(client.call_raw(CommandCode::REGION_READ, &body, &[]).is_err(), "4 GiB at once");
}

/// Points 46, 47, 50 to 54, faults 11, 20 and 24.
#[test]
fn maps_are_exact() {
    let (mut client, _served) = open(&Board::new());
    let file = memory("exact", 1 << 20);
    let map = |address, size, offset| mapping(address, size, Access::ReadWrite, offset);
    client.map(&map(0x10000, 0x4000, 0), Some(file.as_fd())).unwrap();
    for (address, size) in [(0x10000, 0x4000), (0x12000, 0x1000), (0xf000, 0x2000), (0xf000, 0x10000)] {
        let errno = client.map(&map(address, size, 0), Some(file.as_fd())).unwrap_err();
        assert_eq!(errno, Errno::EEXIST as u32, "{size:#x} at {address:#x}");
    }
    for (address, size, offset) in
        [(0, 0, 0), (u64::MAX - 0xfff, 0x2000, 0), (0, 0x1000, 0x800), (0, 2 << 20, 0), (0, 0x1000, 1 << 20)]
    {
        assert!(client.map(&map(address, size, offset), Some(file.as_fd())).is_err());
    }
    for (address, size) in [(0x10000, 0x1000), (0x11000, 0x1000), (0, 0x100000), (0x40000, 0x1000)] {
        assert_eq!(client.unmap(address, size).unwrap_err(), Errno::ENOENT as u32);
    }
    assert_eq!((mappings_named("exact"), descriptors_named("exact")), (1, 1));
    client.unmap(0x10000, 0x4000).unwrap();
    assert_eq!(mappings_named("exact"), 0);
    for page in 0..1000 {
        client.map(&map(page << 12, 0x1000, 0), Some(file.as_fd())).unwrap();
    }
    assert_eq!((mappings_named("exact"), descriptors_named("exact")), (1000, 1));
    // ALL takes no range.
    let unmap_all = |address: u64| {
        [u32s(&[24, 2]), address.to_le_bytes().to_vec(), 0_u64.to_le_bytes().to_vec()].concat()
    };
    assert_eq!(client.call_raw(CommandCode::DMA_UNMAP, &unmap_all(1), &[]).unwrap_err(), EINVAL);
    let reply = client.call_raw(CommandCode::DMA_UNMAP, &unmap_all(0), &[]).unwrap();
    assert_eq!(reply.body, unmap_all(0));
    assert_eq!(mappings_named("exact"), 0);
}

/// Point 50: an unmap is answered when the last use of the memory has ended.
#[test]
fn an_unmap_waits_for_what_is_pinned() {
    let board = Board::new();
    let (mut client, _served) = open(&board);
    let file = memory("pinned", 0x1000);
    client.map(&mapping(0, 0x1000, Access::ReadWrite, 0), Some(file.as_fd())).unwrap();
    let connection = board.connection.lock().unwrap().clone().unwrap();
    *board.pinned.lock().unwrap() = connection.view().pin(dma::Iova(0), 512, Access::Write);
    let id = client.send(&unmap(0, 0x1000), &[]);
    assert!(client.receive_within(Duration::from_millis(200)).is_none(), "it is in use");
    *board.pinned.lock().unwrap() = None;
    client.reply(id, CommandCode::DMA_UNMAP).unwrap();
    assert_eq!(mappings_named("pinned"), 0);
}

/// Points 34, 36, 38 and 44, faults 4 to 6, through the socket.
#[test]
fn interrupts_are_bound_and_let_go() {
    let board = Board::new();
    let (mut client, _served) = open(&board);
    let connection = board.connection.lock().unwrap().clone().unwrap();
    let fds: Vec<_> = (0..8).map(|_| eventfd()).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let set = |start, count, data| {
        let action = IrqAction::Trigger;
        Command::SetIrqs(SetIrqs { index: IrqIndex::MSIX, start, count, data, action })
    };
    client.call(&set(0, 8, IrqData::Eventfds), &borrowed).unwrap();
    assert_eq!(copies(&fds[5]), 2);
    client.call(&set(5, 1, IrqData::Unbind), &[]).unwrap();
    assert_eq!((copies(&fds[5]), copies(&fds[6])), (1, 2));
    (0..8).for_each(|vector| connection.interrupts().trigger(IrqIndex::MSIX, vector));
    let fired: Vec<bool> = fds.iter().map(|fd| fd.read().is_ok()).collect();
    assert_eq!(fired, [true, true, true, true, true, false, true, true]);
    assert!(client.call(&set(7, 2, IrqData::Unbind), &[]).is_err());
    client.call(&set(0, 0, IrqData::None), &[]).unwrap();
    assert_eq!(copies(&fds[0]), 1);
    // 5 does not exist; a bool too few; both of an eventfd and nothing.
    for body in [u32s(&[20, 0x21, 5, 0, 1]), u32s(&[20, 0x22, 2, 0, 1]), u32s(&[20, 0x25, 2, 0, 1])] {
        assert_eq!(client.call_raw(CommandCode::DEVICE_SET_IRQS, &body, &[]).unwrap_err(), EINVAL);
    }
}

/// Point 12: descriptors on commands that take none are closed.
#[test]
fn unexpected_descriptors_are_closed() {
    let (mut client, _served) = open(&Board::new());
    let file = memory("unexpected", 0x1000);
    let fds = [file.as_fd(); 20];
    for command in [Command::Reset, unmap(0, 0x1000), Command::GetInfo { argsz: 32 }] {
        let _ = client.call(&command, &fds);
    }
    assert!(
        client.map(&mapping(0, 0x1000, Access::Read, 0), None).is_err() || mappings_named("unexpected") == 0
    );
    assert_eq!(descriptors_named("unexpected"), 1);
}

/// Point 71, fault 34: wherever a client stops, nothing of it is left.
#[test]
fn a_client_may_leave_at_any_byte() {
    let board = Board::new();
    let file = memory("leaving", 0x1000);
    let map = Command::DmaMap(mapping(0, 0x1000, Access::ReadWrite, 0)).encode(1, false);
    for length in 0..=map.len() {
        let (mut client, served) = open(&board);
        client.send_bytes(&map[..length], &[file.as_fd()][..usize::from(length > 0)]);
        drop(client);
        served.outcome().unwrap();
        assert_eq!((mappings_named("leaving"), descriptors_named("leaving")), (0, 1), "after {length} bytes");
    }
}
