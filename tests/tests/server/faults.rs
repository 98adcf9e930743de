//! Public faults of our peers that no other test provokes. docs/faults.md says where each is tested.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{setsockopt, sockopt};
use outboard_tests::conformance::{Client, Process, eventfd, mapping, memory, raw, unmap};
use outboard_tests::in_process::{connect, open, open_with, serve_at};
use outboard_tests::plain::{Plain, region};
use outboard_vfio_user::client::{self as vfio_user, Map, Memory, Options, Sharing};
use outboard_vfio_user::dma::Iova;
use outboard_vfio_user::limits;
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::server::{ServeError, serve};
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaAccess, IrqAction, IrqData, IrqIndex, Offer, Query, RegionAccess, RegionWrite,
    RegionWrites, Reply, SetIrqs, Version,
};

use crate::lost_memory::{in_a_process, mode};

/// There is one place. Who takes it and says nothing, or stops in the middle of a message, loses it.
#[test]
fn fault_79_a_silent_client_does_not_keep_others_out() {
    let version = Command::Version(Version::proposal()).encode(1, false);
    let device = Plain::new();
    let begin = Instant::now();
    let mut silent: Vec<_> = [0, 1, 16, version.len() - 1].map(|length| (length, connect(&device))).into();
    for (length, (client, _)) in &mut silent {
        client.send_bytes(&version[..*length], &[]).unwrap();
    }
    let (mut stopped, stalled) = open(&device);
    stopped.send_bytes(&version[..20], &[]).unwrap();
    for (length, (_client, served)) in silent {
        let error = served.outcome_within(limits::HANDSHAKE * 2).unwrap_err();
        assert!(matches!(error, ServeError::Session(SessionError::Silent { .. })), "{length}: {error}");
    }
    let error = stalled.outcome_within(limits::STALL).unwrap_err();
    assert!(matches!(error, ServeError::Session(SessionError::Stalled { .. })), "{error}");
    assert!(begin.elapsed() >= limits::HANDSHAKE);
}

/// One client cannot take all of this process's mappings; ENOSPC says so, and costs nothing else.
#[test]
fn fault_23_maps_end_in_enospc() {
    let (mut client, _served) = open(&Plain::new());
    let file = memory(0x2000);
    let map = |index: u64| mapping(index << 20, 0x1000, Access::Read, index % 2 * 0x1000);
    let mut maps = 0;
    let error = loop {
        match client.map(&map(maps), Some(file.as_fd())) {
            Ok(()) => maps += 1,
            Err(refusal) => break refusal.errno(),
        }
    };
    assert_eq!(error, Some(Errno::ENOSPC as u32));
    assert!((600..=limits::WATCHED_MAPPINGS as u64 / 2).contains(&maps), "{maps}");
    client.unmap(0, 0x1000).unwrap();
    client.map(&map(maps), Some(file.as_fd())).unwrap();
}

/// Commands of every kind, with their descriptors.
fn every_command<'a>(file: BorrowedFd<'a>, vector: BorrowedFd<'a>) -> Vec<(Vec<u8>, Vec<BorrowedFd<'a>>)> {
    let query = Query { argsz: 256, index: 0 };
    let writes = [RegionWrite { offset: 8, region: 0, data: &[5; 3] }; 2];
    let writes = raw(50, CommandCode::REGION_WRITE_MULTI.0, &RegionWrites::body(&writes).unwrap());
    let set = |data| SetIrqs { index: IrqIndex::MSIX, start: 1, count: 1, data, action: IrqAction::Trigger };
    let access = RegionAccess { offset: 4, region: 0, count: 300 };
    let map = mapping(0x1000, 0x1000, Access::ReadWrite, 0);
    let commands = [
        (Command::Version(Version::proposal()), None),
        (Command::DmaMap(map), Some(file)),
        (Command::DmaMap(map), Some(file)),
        (Command::GetInfo { argsz: 16 }, None),
        (Command::GetRegionInfo(query), None),
        (Command::GetRegionIoFds(query), None),
        (Command::GetIrqInfo(Query { index: 2, ..query }), None),
        (Command::SetIrqs(set(IrqData::Eventfds)), Some(vector)),
        (Command::SetIrqs(set(IrqData::None)), None),
        (Command::RegionWrite(RegionWrite { offset: 5, region: 0, data: &[7; 200] }), None),
        (Command::RegionRead(access), None),
        (Command::RegionRead(RegionAccess { region: 99, ..access }), None),
        (Command::Reset, None),
        (Command::RegionRead(access), None),
        (unmap(0x1000, 0x1000), None),
        (unmap(0x1000, 0x1000), None),
    ];
    let encode = |(id, (command, descriptor)): (u16, (Command<'_>, Option<BorrowedFd<'a>>))| {
        (command.encode(id, false), Vec::from(descriptor.as_slice()))
    };
    let mut messages: Vec<_> = (1..).zip(commands).map(encode).collect();
    messages.insert(10, (writes, vec![]));
    messages.push((raw(77, 999, &[1; 40]), vec![]));
    messages
}

/// Any cut of the stream gives the same replies, through the smallest sockets that the kernel gives.
#[test]
fn fault_1_messages_in_pieces_are_the_same_messages() {
    let file = memory(0x1000);
    let vector = eventfd();
    let messages = every_command(file.as_fd(), vector.as_fd());
    let run = |piece: usize, buffers: Option<usize>| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        if let Some(size) = buffers {
            shrink(ours.as_fd(), size);
            shrink(theirs.as_fd(), size);
        }
        let _served = serve_at(theirs, &Plain::new());
        let mut client = Client::new(ours).unwrap();
        let mut replies = Vec::new();
        for (bytes, descriptors) in &messages {
            let mut descriptors = &descriptors[..];
            for piece in bytes.chunks(piece) {
                client.send_bytes(piece, std::mem::take(&mut descriptors)).unwrap();
            }
            let reply = client.receive().unwrap();
            replies.push((reply.header, reply.body, reply.descriptors.len()));
        }
        replies
    };
    let whole = run(usize::MAX, None);
    assert_eq!(whole.len(), 18);
    for (piece, buffers) in [(1, None), (1, Some(0)), (7, Some(0)), (usize::MAX, Some(0))] {
        assert_eq!(run(piece, buffers), whole, "pieces of {piece}, buffers of {buffers:?}");
    }
}

/// A region that cannot be mapped may still have doorbells that are eventfds.
#[test]
fn fault_15_eventfds_of_a_region_that_is_not_mapped() {
    let mut version = Version::proposal();
    version.capabilities.max_msg_fds = Some(32);
    let (mut client, _served) = open_with(&Plain::new(), &version);
    let query = Query { argsz: 4096, index: region::MANY_EVENTFDS };
    let info = client.call(&Command::GetRegionInfo(query), &[]).unwrap();
    assert_eq!((info.body[4], info.descriptors.len()), (3, 0), "to be read and written, not mapped");
    let reply = client.call(&Command::GetRegionIoFds(query), &[]).unwrap();
    assert_eq!(reply.descriptors.len(), 17);
    let Ok(Reply::RegionIoFds { fds, .. }) = Reply::decode(reply.header.code(), &reply.body) else {
        panic!()
    };
    let entries: Vec<_> = fds.entries.iter().map(|entry| (entry.offset, entry.descriptor)).collect();
    assert_eq!(entries, (0..17).map(|at| (u64::from(at) * 4, at)).collect::<Vec<_>>());
}

/// 64-bit counts are not cut to 32: our client refuses a DMA_READ or DMA_WRITE of 4 GiB and a byte.
#[test]
fn fault_19_counts_beyond_32_bits_are_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let mut server = Client::new(theirs).unwrap();
        let version = server.receive().unwrap();
        server
            .send_bytes(
                &Reply::Version(Version::proposal().answer(&Offer::default())).encode(version.header.id()),
                &[],
            )
            .unwrap();
        let map = server.receive().unwrap();
        server.send_bytes(&Reply::Done(map.header.code()).encode(map.header.id()), &[]).unwrap();
        for count in [(1_u64 << 32) + 1, 1 << 32, u64::MAX, (1 << 20) + 1] {
            let refused = Some(Errno::EINVAL as u32);
            let mut body = [0x1000_u64.to_le_bytes(), count.to_le_bytes()].concat();
            let answer = server.call_raw(CommandCode::DMA_READ, &body, &[]);
            assert_eq!(answer.unwrap_err().errno(), refused, "{count:#x}");
            body.push(1);
            let answer = server.call_raw(CommandCode::DMA_WRITE, &body, &[]);
            assert_eq!(answer.unwrap_err().errno(), refused, "{count:#x}");
        }
        let access = DmaAccess { address: 0x1000, count: 1 };
        assert_eq!(server.call(&Command::DmaRead(access), &[]).unwrap().body.len(), 17);
    });
    let options = Options { twin_socket: false, ..Options::default() };
    let client = vfio_user::Client::new(ours, options).unwrap();
    let file = memory(0x1000);
    let part = Memory { file: file.as_fd(), offset: 0, length: 0x1000 };
    client.dma_map(Iova(0x1000), part, Access::ReadWrite, Sharing::Messages).unwrap();
    server.join().unwrap();
}

/// In bytes, of this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Maps and unmaps leave nothing behind. (Dirty pages are not logged: there is no migration.)
#[test]
fn fault_22_maps_and_unmaps_cost_no_memory() {
    const TEST: &str = "faults::fault_22_maps_and_unmaps_cost_no_memory";
    if mode().is_none() {
        return assert!(in_a_process(TEST, "alone").success());
    }
    with_our_client(|client| {
        let file = memory(64 * 0x1000);
        let maps = maps(file.as_fd(), 64);
        let ranges: Vec<_> = maps.iter().map(|map| (map.iova, 0x1000)).collect();
        let cycle = || {
            client.dma_map_batch(&maps).into_iter().for_each(|result| result.unwrap());
            client.dma_unmap_batch(&ranges).into_iter().for_each(|result| result.unwrap());
        };
        (0..50).for_each(|_| cycle());
        let before = resident();
        let cycles = 400;
        (0..cycles).for_each(|_| cycle());
        let grown = resident().saturating_sub(before);
        // Less than 16 bytes for each map.
        assert!(grown < cycles * 64 * 16, "{grown} bytes more");
    });
}

/// Slices of one memfd: each is sent with a descriptor, and none is kept.
#[test]
fn fault_24_maps_cost_no_descriptors() {
    const TEST: &str = "faults::fault_24_maps_cost_no_descriptors";
    if mode().is_none() {
        return assert!(in_a_process(TEST, "alone").success());
    }
    setrlimit(Resource::RLIMIT_NOFILE, 256, 256).unwrap();
    with_our_client(|client| {
        let file = memory(4000 * 0x1000);
        let results = client.dma_map_batch(&maps(file.as_fd(), 4000));
        assert_eq!(results.len(), 4000);
        results.into_iter().for_each(|result| result.unwrap());
        assert_eq!(Process::this().descriptors(&file), 1);
        client.dma_unmap_all().unwrap();
        assert_eq!(Process::this().mappings(&file), 0);
    });
}

fn with_our_client(test: impl FnOnce(&vfio_user::Client)) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let device = Plain::new();
    let server = thread::spawn(move || serve(theirs, &*device, &Arc::default()));
    let client = vfio_user::Client::new(ours, Options::default()).unwrap();
    test(&client);
    drop(client);
    server.join().unwrap().unwrap();
}

/// Pages of a file, each apart from the others in both places.
fn maps(file: BorrowedFd<'_>, count: u64) -> Vec<Map<'_>> {
    let map = |index: u64| Map {
        iova: Iova(index << 20),
        memory: Memory { file, offset: (index * 7 % count) * 0x1000, length: 0x1000 },
        access: Access::ReadWrite,
        sharing: Sharing::Descriptor,
    };
    (0..count).map(map).collect()
}

/// The smallest buffers that the kernel gives.
fn shrink(socket: BorrowedFd<'_>, size: usize) {
    setsockopt(&socket, sockopt::SndBuf, &size).unwrap();
    setsockopt(&socket, sockopt::RcvBuf, &size).unwrap();
}
