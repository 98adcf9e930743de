//! DMA_MAP and DMA_UNMAP, and what the device does with the memory.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::ftruncate;
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::transport::Message;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaUnmap, IrqIndex, RegionAccess, Reply, UnmapTarget, Version,
};

use super::client::{Client, PATIENCE, Sharing, by_messages, mapping, memory, raw, unmap};
use super::config::{self, CONFIG};
use super::engine::{self, Direction, Transfers};
use super::{Check, Checked, EEXIST, EINVAL, ENOENT, Stop, Subject, alive, dwords, holds, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 45,
        title: "memory can be mapped before anything else is asked",
        text: "QEMU maps before GET_INFO",
        run: map_first,
    },
    Check {
        point: 46,
        title: "maps that cannot be are refused",
        text: "libvfio-user; what lies beyond the file would be SIGBUS",
        run: impossible_maps,
    },
    Check {
        point: 47,
        title: "a map over another one is EEXIST, and changes nothing",
        text: "specification, \"VFIO_USER_DMA_MAP\"; libvfio-user takes an identical one",
        run: overlaps,
    },
    Check {
        point: 48,
        title: "what is read-only is never written, what is write-only never read",
        text: "specification, \"VFIO_USER_DMA_MAP\"",
        run: permissions,
    },
    Check {
        point: 49,
        title: "memory without a descriptor is reached by messages, whatever the length of their replies",
        text: "specification, \"VFIO_USER_DMA_READ\"; QEMU 10.1 answers in 12 bytes",
        run: messages,
    },
    Check {
        point: 50,
        title: "an unmap takes exactly one mapping, and no access comes after its reply",
        text: "specification, \"VFIO_USER_DMA_UNMAP\"; SPDK #2100",
        run: exact_unmaps,
    },
    Check {
        point: 51,
        title: "ALL unmaps all, and nothing else goes with it",
        text: "kernel's VFIO_DMA_UNMAP_FLAG_ALL, as QEMU and libvfio-user have it",
        run: unmap_all,
    },
    Check {
        point: 52,
        title: "the reply to an unmap repeats its 24 bytes",
        text: "rust-vmm reads 40",
        run: unmap_reply,
    },
    Check {
        point: 53,
        title: "an unmap of what was never mapped is an error, and no more",
        text: "QEMU does that while it boots; libvfio-user #544",
        run: unmap_unmapped,
    },
    Check {
        point: 54,
        title: "1000 maps of one file do not cost 1000 descriptors",
        text: "libvfio-user #841",
        run: thousand_maps,
    },
    Check {
        point: 55,
        title: "a file that does not allow what is asked for is an error",
        text: "mmap(2)",
        run: forbidden_maps,
    },
    Check {
        point: 56,
        title: "a file that shrinks under its mapping harms nobody but its client",
        text: "ours; SPDK stops for good",
        run: shrunk_file,
    },
    Check {
        point: 57,
        title: "DMA messages are no longer than the client takes, nor than 64 KiB, and their data is right",
        text: "specification, \"Version Data\"; QEMU cuts long replies; libvfio-user #788",
        run: chunks,
    },
    Check {
        point: 58,
        title: "commands that overtake a DMA reply are answered in their turn",
        text: "libvfio-user #279",
        run: overtaking_commands,
    },
    Check {
        point: 59,
        title: "DMA into the device's own BAR does not lock it up",
        text: "QEMU maps BARs without descriptor; CVE-2021-3929",
        run: own_bar,
    },
];

fn map_body(argsz: u32, flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    let wide: Vec<u8> = [offset, address, size].iter().flat_map(|value| value.to_le_bytes()).collect();
    [dwords([argsz, flags]), wide].concat()
}

fn unmap_body(argsz: u32, flags: u32, address: u64, size: u64) -> Vec<u8> {
    [dwords([argsz, flags]), address.to_le_bytes().to_vec(), size.to_le_bytes().to_vec()].concat()
}

fn map_first(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x1_0000);
    client.map(&mapping(0, 0x1_0000, Access::ReadWrite, 0), Some(file.as_fd()))?;
    client.info()?;
    client.unmap(0, 0x1_0000)
}

fn impossible_maps(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x10_0000);
    let watch = subject.watch(&file);
    let one = [file.as_fd()];
    let two = [file.as_fd(); 2];
    let socket = UnixStream::pair().expect("sockets");
    let stranger = [socket.0.as_fd()];
    let cases: [(Vec<u8>, &[BorrowedFd<'_>]); 16] = [
        (map_body(31, 3, 0, 0, 0x1000), &one),
        (map_body(32, 3, 0, 0, 0x1000)[..31].to_vec(), &one),
        (map_body(32, 3 | 16, 0, 0, 0x1000), &one),
        (map_body(32, 3 | 4, 0, 0, 0x1000), &[]),
        (map_body(32, 3 | 8, 0, 0, 0x1000), &[]),
        (map_body(32, 3 | 4 | 8, 0, 0, 0x1000), &one),
        (map_body(32, 0, 0, 0, 0x1000), &one),
        (map_body(32, 3, 0, 0, 0x1000), &two),
        (map_body(32, 3, 0, 0, 0), &one),
        (map_body(32, 3, 0, 0, 0), &[]),
        (map_body(32, 3, 0, u64::MAX - 0xffe, 0x1000), &[]),
        (map_body(32, 3, 0, 0, 0x10_1000), &one),
        (map_body(32, 3, 0xf_f000, 0, 0x2000), &one),
        (map_body(32, 3, u64::MAX - 0xfff, 0, 0x2000), &one),
        (map_body(32, 3, 1, 0, 0x1000), &one),
        (map_body(32, 3, 0, 0, 0x1000), &stranger),
    ];
    for (body, descriptors) in cases {
        match client.call_raw(CommandCode::DMA_MAP, &body, descriptors) {
            Err(Stop::Refused { .. }) => {}
            Err(other) => return Err(other),
            Ok(_) => return client.wrong("an error", "success"),
        }
    }
    watch.settles(0, 0, "maps that cannot be")?;
    alive(&mut client)
}

fn overlaps(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x10_0000);
    let watch = subject.watch(&file);
    let at = |address, size| mapping(address, size, Access::ReadWrite, 0);
    client.map(&at(0x10_0000, 0x4000), Some(file.as_fd()))?;
    let held = subject.watch(&file);
    for (address, size) in [
        (0x10_0000, 0x4000),
        (0x10_0000, 0x1000),
        (0x10_3000, 0x1000),
        (0x0f_f000, 0x2000),
        (0x10_3000, 0x2000),
        (0x0f_0000, 0x2_0000),
    ] {
        let sent = format!("DMA_MAP of {address:#x}+{size:#x} over 0x100000+0x4000");
        refused(client.map(&at(address, size), Some(file.as_fd())), &sent, &[EEXIST])?;
        refused(client.map(&by_messages(address, size), None), &sent, &[EEXIST])?;
    }
    held.settles(0, 0, "maps over another one")?;
    client.unmap(0x10_0000, 0x4000)?;
    watch.settles(0, 0, "the unmap of what they were over")
}

/// A device that is ready, and two pages of memory for it: one at 0 that it loads from, one at [`TARGET`].
struct Ready {
    client: Client,
    transfers: Box<dyn Transfers>,
    source: Arc<OwnedFd>,
    target: Arc<OwnedFd>,
}

const SOURCE: u64 = 0x10_0000;
const TARGET: u64 = 0x20_0000;
const SIZE: u64 = 0x8_0000;

impl Ready {
    fn new(
        subject: &Subject<'_>,
        version: &Version,
        how: Sharing,
        access: (Access, Access),
    ) -> Checked<Self> {
        let mut client = subject.open_with(version)?;
        let transfers = engine::start(subject, &mut client, how, IrqIndex::MSIX)?;
        let (source, target) = (Arc::new(memory(SIZE)), Arc::new(memory(SIZE)));
        client.share(SOURCE, SIZE, access.0, how, &source)?;
        client.share(TARGET, SIZE, access.1, how, &target)?;
        Ok(Self { client, transfers, source, target })
    }

    fn load(&mut self, at: u64, length: usize) -> Checked<bool> {
        engine::transfer(&mut *self.transfers, &mut self.client, Direction::Load, at, length)
    }

    fn store(&mut self, at: u64, length: usize) -> Checked<bool> {
        engine::transfer(&mut *self.transfers, &mut self.client, Direction::Store, at, length)
    }

    /// Through the device and back, with guards on both sides.
    fn copy(&mut self, offset: u64, length: usize) -> Checked {
        let (from, to) = (SOURCE + offset, TARGET + 0x1000 + offset);
        let data: Vec<u8> = (0..length).map(|at| (at as u64 * 7 + offset + length as u64) as u8).collect();
        self.client.ram.poke(from, &data);
        self.client.ram.poke(to - 8, &vec![0xee; length + 16]);
        holds(self.load(from, length)?, "a load", "success", "an error")?;
        holds(self.store(to, length)?, "a store", "success", "an error")?;
        let came = self.client.ram.peek(to - 8, length + 16);
        let expected = [vec![0xee; 8], data, vec![0xee; 8]].concat();
        let wrong = came.iter().zip(&expected).position(|(came, expected)| came != expected);
        same(format!("{length} bytes through the device and back, with guards"), wrong, None)
    }
}

const BOTH: (Access, Access) = (Access::ReadWrite, Access::ReadWrite);

fn permissions(subject: &Subject<'_>) -> Checked {
    for how in [Sharing::Descriptor, Sharing::Messages] {
        let mut ready = Ready::new(subject, &Version::proposal(), how, (Access::Read, Access::Write))?;
        let unit = ready.transfers.unit();
        ready.client.ram.poke(SOURCE, &vec![0x11; unit]);
        ready.client.ram.poke(TARGET, &vec![0x22; unit]);
        holds(ready.load(SOURCE, unit)?, "a load of what may be read", "success", "an error")?;
        holds(!ready.load(TARGET, unit)?, "a load of what may only be written", "an error", "success")?;
        holds(!ready.store(SOURCE, unit)?, "a store to what may only be read", "an error", "success")?;
        same("a store to what may only be read", ready.client.ram.peek(SOURCE, unit), vec![0x11; unit])?;
        holds(ready.store(TARGET, unit)?, "a store to what may be written", "success", "an error")?;
        same("a store to what may be written", ready.client.ram.peek(TARGET, unit), vec![0x11; unit])?;
    }
    Ok(())
}

fn messages(subject: &Subject<'_>) -> Checked {
    let mut ready = Ready::new(subject, &Version::proposal(), Sharing::Messages, BOTH)?;
    for length in [16, 12, 0] {
        ready.client.ram.write_reply = Some(length);
        ready.copy(0, 0x1000)?;
    }
    let served = &ready.client.ram.served;
    let of = |wanted| served.iter().filter(|(code, _)| *code == wanted).count();
    let both = of(CommandCode::DMA_READ) > 0 && of(CommandCode::DMA_WRITE) > 0;
    holds(both, "transfers in memory without a descriptor", "DMA_READ and DMA_WRITE", served.len())
}

fn exact_unmaps(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x4000);
    client.map(&mapping(0x10_0000, 0x4000, Access::ReadWrite, 0), Some(file.as_fd()))?;
    for (address, size) in [
        (0x10_0000, 0x1000),
        (0x10_1000, 0x3000),
        (0x10_0000, 0x5000),
        (0x80_0000, 0x1000),
        (0, 0),
        (0, u64::MAX),
    ] {
        let result = client.call_raw(CommandCode::DMA_UNMAP, &unmap_body(24, 0, address, size), &[]);
        refused(result, &format!("DMA_UNMAP of {address:#x}+{size:#x}"), &[ENOENT, EINVAL])?;
    }
    client.unmap(0x10_0000, 0x4000)?;
    drop(client);
    let mut ready = Ready::new(subject, &Version::proposal(), Sharing::Descriptor, BOTH)?;
    let unit = ready.transfers.unit();
    for round in 0..20_u8 {
        for part in 0..8 {
            ready.transfers.begin(&mut ready.client, Direction::Store, TARGET + part * 0x1000, unit)?;
        }
        ready.client.unmap(TARGET, SIZE)?;
        // From here on it is the client's alone.
        let alone = vec![round | 0x80; SIZE as usize];
        ready.client.ram.poke(TARGET, &alone);
        for _ in 0..8 {
            engine::finish(&mut *ready.transfers, &mut ready.client)?;
        }
        same("an unmap under eight stores", ready.client.ram.peek(TARGET, SIZE as usize) == alone, true)?;
        holds(!ready.store(TARGET, unit)?, "a store to what was unmapped", "an error", "success")?;
        let target = ready.target.clone();
        ready.client.share(TARGET, SIZE, Access::ReadWrite, Sharing::Descriptor, &target)?;
        holds(ready.store(TARGET, unit)?, "a store to what was mapped again", "success", "an error")?;
    }
    Ok(())
}

fn unmap_all(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x4000);
    let watch = subject.watch(&file);
    for at in 0..4 {
        client.map(&mapping(at * 0x10_0000, 0x1000, Access::ReadWrite, at * 0x1000), Some(file.as_fd()))?;
    }
    for (argsz, flags, address, size) in [
        (23, 0, 0, 0x1000),
        (u32::MAX, 0, 0, 0x1000),
        (24, 2, 0, 0x1000),
        (24, 2, 0x1000, 0),
        (24, 3, 0, 0),
        (24, 4, 0, 0x1000),
    ] {
        let result = client.call_raw(CommandCode::DMA_UNMAP, &unmap_body(argsz, flags, address, size), &[]);
        let sent = format!("DMA_UNMAP of {address:#x}+{size:#x} with flags {flags} and an argsz of {argsz}");
        refused(result, &sent, &[EINVAL])?;
    }
    let all = Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All));
    client.call(&all, &[])?;
    watch.settles(0, 0, "DMA_UNMAP of all")?;
    refused(client.unmap(0, 0x1000), "DMA_UNMAP after DMA_UNMAP of all", &[ENOENT, EINVAL])?;
    client.call(&all, &[]).map(|_| ())
}

fn unmap_reply(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    client.map(&by_messages(0x1000, 0x1000), None)?;
    let body = unmap_body(24, 0, 0x1000, 0x1000);
    let reply = client.call_raw(CommandCode::DMA_UNMAP, &body, &[])?;
    same("DMA_UNMAP", reply.body, body)
}

fn unmap_unmapped(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    client.map(&by_messages(0xc_0000, 0x1000), None)?;
    for at in 0..100 {
        let result = client.unmap(0xd_0000 + at * 0x1000, 0x1000);
        refused(result, "DMA_UNMAP of what was never mapped", &[ENOENT, EINVAL])?;
    }
    client.unmap(0xc_0000, 0x1000)
}

fn thousand_maps(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x1000 * 1000);
    let watch = subject.watch(&file);
    let mut mapped = 0;
    for index in (0..1000).rev() {
        // Neighbours in memory are none in the file, so they do not become one.
        let map = mapping(index * 0x2000, 0x1000, Access::ReadWrite, index * 7 % 1000 * 0x1000);
        match client.map(&map, Some(file.as_fd())) {
            Ok(()) => mapped += 1,
            Err(Stop::Refused { .. }) => break,
            Err(other) => return Err(other),
        }
    }
    holds(mapped >= 16, "1000 maps", "some of them", mapped)?;
    if let Some(descriptors) = watch.descriptors() {
        holds(descriptors < 100, &format!("{mapped} maps of one file"), "few descriptors", descriptors)?;
    }
    client.call(&Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), &[])?;
    watch.settles(0, 0, "DMA_UNMAP of all")
}

fn forbidden_maps(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let file = memory(0x1000);
    let watch = subject.watch(&file);
    let read_only = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("our own file");
    let map = |access| mapping(0, 0x1000, access, 0);
    for access in [Access::ReadWrite, Access::Write] {
        match client.map(&map(access), Some(read_only.as_fd())) {
            Err(Stop::Refused { .. }) => {}
            Err(other) => return Err(other),
            Ok(()) => return client.wrong("an error", "success"),
        }
    }
    client.map(&map(Access::Read), Some(read_only.as_fd()))?;
    client.unmap(0, 0x1000)?;
    drop(read_only);
    watch.settles(0, 0, "maps of a file that is only to be read")
}

fn shrunk_file(subject: &Subject<'_>) -> Checked {
    let mut ready = Ready::new(subject, &Version::proposal(), Sharing::Descriptor, BOTH)?;
    let unit = ready.transfers.unit();
    holds(ready.load(SOURCE, unit)?, "a load", "success", "an error")?;
    ftruncate(&ready.source, 0).expect("a memfd that shrinks");
    match ready.load(SOURCE, unit) {
        Ok(false) => {}
        Ok(true) => return ready.client.wrong("an error, or the end of the connection", "success"),
        Err(_) if ready.client.has_ended() => {}
        Err(other) => return Err(other),
    }
    drop(ready);
    Ready::new(subject, &Version::proposal(), Sharing::Descriptor, BOTH)?.copy(0, unit)
}

fn chunks(subject: &Subject<'_>) -> Checked {
    for announced in [1000, 4096, 1 << 20] {
        let mut version = Version::proposal();
        version.capabilities.max_data_xfer_size = Some(announced);
        let mut ready = Ready::new(subject, &version, Sharing::Messages, BOTH)?;
        let unit = ready.transfers.unit();
        // Not so many messages that a busy machine runs into the limit of time.
        let most = ready.transfers.most().min(announced as usize * 64) / unit * unit;
        for length in [unit, 0x1000, 0x1000 + unit, most] {
            ready.copy(0, length)?;
        }
        let longest = ready.client.ram.served.iter().map(|(_, access)| access.count).max();
        holds(
            longest.is_some_and(|longest| u64::from(longest) <= announced.min(64 << 10)),
            &format!("transfers for a client that takes {announced} bytes"),
            "DMA messages of at most as much, and 64 KiB",
            longest,
        )?;
    }
    Ok(())
}

/// The DMA message of a transfer, which is not answered yet.
fn first_message(ready: &mut Ready, direction: Direction, at: u64) -> Checked<Message> {
    let (client, unit) = (&mut ready.client, ready.transfers.unit());
    client.withhold = Some(at);
    ready.transfers.begin(client, direction, at, unit)?;
    client.says(format!("a transfer ({direction:?}) at {at:#x}"));
    let begin = Instant::now();
    loop {
        if let Some(message) = client.withheld.take() {
            client.withhold = None;
            return Ok(message);
        }
        if begin.elapsed() > PATIENCE {
            return client.wrong("a DMA message about it", "none");
        }
        client.serve_for(Duration::from_millis(1))?;
    }
}

fn overtaking_commands(subject: &Subject<'_>) -> Checked {
    let mut ready = Ready::new(subject, &Version::proposal(), Sharing::Messages, BOTH)?;
    for direction in [Direction::Load, Direction::Store] {
        let message = first_message(&mut ready, direction, TARGET)?;
        // With the very id of the DMA message, and with others.
        let id = message.header.id();
        let client = &mut ready.client;
        client.says("REGION_READs before the reply to a DMA message");
        let access = |count| [0_u64.to_le_bytes().to_vec(), dwords([CONFIG, count])].concat();
        for (id, count) in [(id, 4), (id.wrapping_add(1), 5), (id.wrapping_add(2), 6)] {
            client.send_bytes(&raw(id, CommandCode::REGION_READ.0, &access(count)), &[])?;
        }
        client.answer(&message)?;
        for (id, count) in [(id, 4), (id.wrapping_add(1), 5), (id.wrapping_add(2), 6)] {
            let reply = client.reply(id, CommandCode::REGION_READ)?;
            same("REGION_READs before the reply to a DMA message", reply.body.len(), 16 + count)?;
        }
        let success = engine::finish(&mut *ready.transfers, &mut ready.client)?;
        holds(success, "a transfer with commands in between", "success", "an error")?;
    }
    Ok(())
}

/// The client does with the DMA what QEMU does: an access to the BAR, within the DMA message.
fn own_bar(subject: &Subject<'_>) -> Checked {
    let mut ready = Ready::new(subject, &Version::proposal(), Sharing::Descriptor, BOTH)?;
    let (info, ..) = ready.client.region_info(0, 4096)?;
    if info.size == 0 {
        return Err(Stop::NotOffered("no BAR 0"));
    }
    let bar = 0xfe00_0000;
    ready.client.map(&by_messages(bar, info.size), None)?;
    for direction in [Direction::Load, Direction::Store] {
        let message = first_message(&mut ready, direction, bar)?;
        let client = &mut ready.client;
        client.says("an access to BAR 0 within a DMA message about it");
        let inner = Command::RegionRead(RegionAccess { offset: 0, region: 0, count: 8 });
        let id = client.send(&inner, &[])?;
        // Answered now or after the DMA message: that is the server's choice, but not never.
        let early = match client.receive_within(Duration::from_millis(300))? {
            Some(reply) => {
                same("an access to BAR 0 within a DMA message", reply.header.id(), id)?;
                true
            }
            None => false,
        };
        let unit = ready.transfers.unit();
        let reply = match direction {
            Direction::Load => Reply::DmaRead { address: bar, data: &vec![0; unit] },
            Direction::Store => Reply::DmaWrite(None),
        };
        ready.client.send_bytes(&reply.encode(message.header.id()), &[])?;
        if !early {
            ready.client.reply(id, CommandCode::REGION_READ)?;
        }
        engine::finish(&mut *ready.transfers, &mut ready.client)?;
    }
    ready.client.call(&unmap(bar, info.size), &[])?;
    ready.client.call(&config::read(0, 4), &[])?;
    ready.copy(0, ready.transfers.unit())
}
