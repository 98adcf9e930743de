//! Descriptors that come with replies.

use super::*;
use crate::transport::Socket;
use crate::wire::{IoFd, IoFdKind, IoFds, Shadow};

/// A file that tells whether anybody still has it.
struct Watched(UnixStream);

impl Watched {
    fn new() -> (OwnedFd, Self) {
        let (given, kept) = UnixStream::pair().unwrap();
        (given.into(), Self(kept))
    }

    fn is_closed(&mut self) -> bool {
        self.0.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        matches!(self.0.read(&mut [0]), Ok(0))
    }
}

/// Calls, answered with `reply` and `count` descriptors. Gives the result, and the descriptors' other ends.
fn answered_with<R>(
    reply: impl Fn(&Header) -> Vec<u8> + Send + 'static,
    counts: &[usize],
    call: impl FnOnce(&Client) -> R,
) -> (R, Vec<Watched>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let counts = counts.to_vec();
    let server = thread::spawn(move || {
        let mut theirs = theirs;
        answer_version(&mut theirs);
        let mut all = Vec::new();
        for count in counts {
            let (header, _) = read_message(&mut theirs).unwrap();
            let (given, kept): (Vec<_>, Vec<_>) = (0..count).map(|_| Watched::new()).unzip();
            let borrowed: Vec<_> = given.iter().map(AsFd::as_fd).collect();
            let socket = Socket::new(theirs.try_clone().unwrap()).unwrap();
            let message = reply(&header);
            assert_eq!(socket.send(&message, &borrowed).unwrap(), Some(message.len()));
            theirs.set_nonblocking(false).unwrap();
            all.extend(kept);
        }
        all
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let result = call(&client);
    (result, server.join().unwrap())
}

#[test]
fn descriptors_that_nobody_asked_for_are_an_error_and_closed() {
    let done = |header: &Header| Reply::Done(header.code()).encode(header.id());
    let (result, mut ends) = answered_with(done, &[2], |client| client.reset());
    assert!(matches!(result, Err(ClientError::Descriptors { count: 2, most: 0, .. })), "{result:?}");
    assert!(ends.iter_mut().all(Watched::is_closed));
    // With an error reply, they are closed as well.
    let error = |header: &Header| encode_error(header.id(), header.code(), 22);
    let (result, mut ends) = answered_with(error, &[1], |client| client.reset());
    assert_eq!(refused(result), Errno::EINVAL);
    assert!(ends.iter_mut().all(Watched::is_closed));
    // A region has one file, or one for each area.
    for (areas, count, fits) in [(0_u64, 1, true), (0, 2, false), (3, 3, true), (3, 4, false), (1, 2, false)]
    {
        let info = move |header: &Header| {
            let area = |index: u64| SparseArea { offset: index * 4096, size: 4096 };
            let capabilities = vec![RegionCapability::SparseMmap((0..areas).map(area).collect())];
            let info =
                RegionInfo { flags: RegionFlags(7), size: 1 << 20, capabilities, ..RegionInfo::default() };
            Reply::region_info(info, u32::MAX).encode(header.id())
        };
        let (result, mut ends) = answered_with(info, &[count], |client| client.region(0));
        match result {
            Ok(region) => assert!(fits && region.file().is_some()),
            Err(ClientError::Descriptors { count: came, .. }) => assert!(!fits && came == count),
            Err(other) => panic!("{other}"),
        }
        assert!(ends.iter_mut().all(Watched::is_closed));
    }
}

fn entry(descriptor: u32, shadow: Option<Shadow>) -> IoFd {
    IoFd { offset: 0x1000, size: 4, descriptor, kind: IoFdKind::IOEVENTFD, flags: 0, datum: 0, shadow }
}

#[test]
fn io_descriptors_are_those_that_are_named() {
    let list = |entries: Vec<IoFd>| {
        move |header: &Header| {
            Reply::region_io_fds(IoFds::new(0, entries.clone()), u32::MAX).encode(header.id())
        }
    };
    let both = vec![entry(0, None), entry(1, None), entry(0, None)];
    let (result, mut ends) = answered_with(list(both.clone()), &[2], |client| client.region_io_fds(0));
    let (entries, descriptors) = result.unwrap();
    assert_eq!((entries, descriptors.len()), (both.clone(), 2));
    drop(descriptors);
    assert!(ends.iter_mut().all(Watched::is_closed));
    for (count, entries) in [(1, both.clone()), (3, both), (1, vec![]), (1, vec![entry(u32::MAX, None)])] {
        let (result, mut ends) = answered_with(list(entries), &[count], |client| client.region_io_fds(0));
        assert!(
            matches!(result, Err(ClientError::Mismatch { .. } | ClientError::Descriptors { .. })),
            "{result:?}"
        );
        assert!(ends.iter_mut().all(Watched::is_closed));
    }
}

/// libvfio-user's entries of 48 bytes, one of which has its value in memory of another descriptor.
#[test]
fn libvfio_users_io_descriptors_are_named_in_two_places() {
    let reply = |header: &Header| {
        let mut message = Reply::region_io_fds(IoFds::new(0, Vec::new()), 0).encode(header.id());
        message[4..8].copy_from_slice(&(16_u32 + 16 + 2 * 48).to_le_bytes());
        message[16..20].copy_from_slice(&(16_u32 + 2 * 48).to_le_bytes());
        message[28..32].copy_from_slice(&2_u32.to_le_bytes());
        for field in [0x1000_u64, 4, 0, 0, 0, 7, 0x1004, 4, 2 << 32 | 1, 2 << 32, 0x40, 9] {
            message.extend_from_slice(&field.to_le_bytes());
        }
        message
    };
    let (result, _ends) = answered_with(reply, &[3], |client| client.region_io_fds(0));
    let (entries, descriptors) = result.unwrap();
    assert_eq!(descriptors.len(), 3);
    assert_eq!((entries[0].shadow, entries[0].datum), (None, 7));
    assert_eq!((entries[1].shadow, entries[1].datum), (Some(Shadow { descriptor: 2, offset: 0x40 }), 9));
}

/// The list does not come although there was room for it, or no end of room is asked for.
#[test]
fn a_list_that_does_not_come_is_an_error() {
    for (argsz, count) in [(16_u32, 1_u32), (u32::MAX, 1), (96, u32::MAX)] {
        let reply = move |header: &Header| {
            let mut message = Reply::region_io_fds(IoFds::new(0, Vec::new()), 0).encode(header.id());
            message[16..20].copy_from_slice(&argsz.to_le_bytes());
            message[28..32].copy_from_slice(&count.to_le_bytes());
            message
        };
        let messages = if argsz == 96 { 2 } else { 1 };
        let (result, _) = answered_with(reply, &vec![0; messages], |client| client.region_io_fds(0));
        assert!(matches!(result, Err(ClientError::Mismatch { .. })), "{argsz} {count}: {result:?}");
    }
}
