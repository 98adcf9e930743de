use std::io::{Read, Write};

use nix::sys::socket::{setsockopt, sockopt};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::wire::{Command, RegionWrite};

fn pair() -> (Socket, Socket) {
    let (left, right) = UnixStream::pair().unwrap();
    (Socket::new(left).unwrap(), Socket::new(right).unwrap())
}

fn write_message(id: u16, data: &[u8]) -> Vec<u8> {
    Command::RegionWrite(RegionWrite { offset: 0, region: 0, data }).encode(id, false)
}

/// A file whose content tells which it is.
fn file(content: u8) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[content]).unwrap();
    file.into()
}

fn content(descriptor: &OwnedFd) -> u8 {
    use std::io::Seek;
    let mut file = std::fs::File::from(descriptor.try_clone().unwrap());
    file.rewind().unwrap();
    let mut byte = [0];
    file.read_exact(&mut byte).unwrap();
    byte[0]
}

fn drain(framer: &mut Framer) -> Vec<Message> {
    std::iter::from_fn(|| framer.next_message().unwrap()).collect()
}

fn receive_all(socket: &Socket, framer: &mut Framer, room: usize, until: usize) -> Vec<Message> {
    let mut buffer = vec![0; room];
    let mut messages = Vec::new();
    while messages.len() < until {
        match socket.receive(&mut buffer).unwrap() {
            Received::Data { length, descriptors } => framer.push(&buffer[..length], descriptors),
            Received::WouldBlock => std::thread::yield_now(),
            Received::Closed => panic!("closed after {} messages", messages.len()),
        }
        messages.extend(drain(framer));
    }
    messages
}

proptest! {
    /// However the stream is cut, the same messages come out.
    #[test]
    fn any_split_gives_the_same_messages(
        bodies in vec(vec(any::<u8>(), 0..60), 1..8), cuts in vec(1..50_usize, 1..60),
    ) {
        let stream: Vec<u8> =
            bodies.iter().enumerate().flat_map(|(id, data)| write_message(id as u16, data)).collect();
        let mut framer = Framer::new();
        let mut messages = Vec::new();
        let mut rest = &stream[..];
        for &cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            framer.push(piece, Vec::new());
            messages.extend(drain(&mut framer));
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert!(!framer.is_mid_message());
        prop_assert_eq!(messages.len(), bodies.len());
        for ((id, message), data) in messages.iter().enumerate().zip(&bodies) {
            prop_assert_eq!(message.header.id() as usize, id);
            prop_assert_eq!(&message.body[16..], &data[..]);
        }
    }

    /// Through a real socket with little room at both ends: every message keeps its own descriptors.
    #[test]
    fn descriptors_stay_with_their_messages(
        messages in vec((vec(any::<u8>(), 0..5000), 0..4_u8), 1..10), room in prop_oneof![1..40_usize, 40..20_000_usize],
    ) {
        let (left, right) = pair();
        setsockopt(&left, sockopt::SndBuf, &2048).unwrap();
        let mut outbox = Outbox::new();
        for (id, (data, count)) in messages.iter().enumerate() {
            outbox.push(write_message(id as u16, data), (0..*count).map(|n| file(16 * id as u8 + n)).collect());
        }
        let expected = messages.len();
        let received = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive_all(&right, &mut Framer::new(), room, expected));
            while outbox.flush(&left).unwrap() == Sent::WouldBlock {
                std::thread::yield_now();
            }
            receiver.join().unwrap()
        });
        prop_assert!(outbox.is_empty());
        for ((id, message), (data, count)) in received.iter().enumerate().zip(&messages) {
            prop_assert_eq!(&message.body[16..], &data[..]);
            let contents: Vec<u8> = message.descriptors.iter().map(content).collect();
            let expected: Vec<u8> = (0..*count).map(|n| 16 * id as u8 + n).collect();
            prop_assert_eq!(contents, expected);
        }
    }

    #[test]
    fn random_streams_do_no_harm(pieces in vec(vec(any::<u8>(), 0..100), 0..20)) {
        let mut framer = Framer::new();
        for piece in &pieces {
            framer.push(piece, Vec::new());
            loop {
                let expected = framer.has_message();
                let result = framer.next_message();
                prop_assert_eq!(expected, !matches!(result, Ok(None)));
                if !matches!(result, Ok(Some(_))) {
                    break;
                }
            }
        }
        prop_assert!(framer.bytes.capacity() < 1 << 20);
    }
}

#[test]
fn sizes_are_checked_before_anything_is_kept() {
    for size in [0_u32, 15, limits::MESSAGE + 1, u32::MAX] {
        let mut message = write_message(7, &[]);
        message[4..8].copy_from_slice(&size.to_le_bytes());
        let mut framer = Framer::new();
        framer.push(&message, Vec::new());
        for _ in 0..2 {
            let Err(FrameError::Size { header }) = framer.next_message() else { panic!("size {size} taken") };
            assert_eq!((header.id(), header.size()), (7, size));
        }
    }
    let message = write_message(7, &vec![1; limits::DATA_TRANSFER as usize]);
    assert_eq!(message.len(), limits::MESSAGE as usize);
    let mut framer = Framer::new();
    framer.push(&message, Vec::new());
    assert_eq!(framer.next_message().unwrap().unwrap().body.len(), message.len() - HEADER_SIZE);
    assert!(framer.next_message().unwrap().is_none());
}

#[test]
fn a_message_cannot_hoard_descriptors() {
    let mut framer = Framer::new();
    framer.push(&write_message(0, &[0; 100])[..20], (0..200).map(|_| file(0)).collect());
    assert!(framer.next_message().unwrap().is_none());
    framer.push(&[0], (0..54).map(|_| file(0)).collect());
    assert!(matches!(framer.next_message(), Err(FrameError::Descriptors { count: 254 })));
}

#[test]
fn as_many_descriptors_as_the_kernel_takes_arrive() {
    let (left, right) = pair();
    let files: Vec<_> = (0..limits::DESCRIPTORS).map(|n| file(n as u8)).collect();
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    assert_eq!(left.send(&[1, 2, 3], &borrowed).unwrap(), Some(3));
    let mut buffer = [0; 16];
    let Received::Data { length: 3, descriptors } = right.receive(&mut buffer).unwrap() else { panic!() };
    assert_eq!(descriptors.len(), limits::DESCRIPTORS);
    for (n, descriptor) in descriptors.iter().enumerate() {
        assert_eq!(content(descriptor), n as u8);
        let flags = nix::fcntl::fcntl(descriptor, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }
}

#[test]
fn silence_and_the_end_are_told_apart() {
    let (left, right) = pair();
    let mut buffer = [0; 16];
    assert!(matches!(right.receive(&mut buffer).unwrap(), Received::WouldBlock));
    left.send(&[9], &[]).unwrap();
    drop(left);
    assert!(matches!(right.receive(&mut buffer).unwrap(), Received::Data { length: 1, .. }));
    assert!(matches!(right.receive(&mut buffer).unwrap(), Received::Closed));
    let error = right.send(&[9], &[]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_full_socket_keeps_the_rest() {
    let (left, right) = pair();
    let mut outbox = Outbox::new();
    let message = write_message(3, &vec![5; 900_000]);
    outbox.push(message.clone(), vec![file(1)]);
    outbox.push(message.clone(), vec![file(2)]);
    assert_eq!(outbox.descriptors(), 2);
    assert_eq!(outbox.flush(&left).unwrap(), Sent::WouldBlock);
    assert!(outbox.len() < 2 * message.len());
    assert_eq!(outbox.descriptors(), 1, "the first one's went with its first byte");
    let mut framer = Framer::new();
    let mut buffer = vec![0; 65536];
    let mut messages = Vec::new();
    while messages.len() < 2 {
        outbox.flush(&left).unwrap();
        if let Received::Data { length, descriptors } = right.receive(&mut buffer).unwrap() {
            framer.push(&buffer[..length], descriptors);
        }
        messages.extend(drain(&mut framer));
    }
    assert_eq!((outbox.len(), outbox.descriptors()), (0, 0));
    for (message, expected) in messages.iter().zip([1, 2]) {
        assert_eq!(message.descriptors.iter().map(content).collect::<Vec<_>>(), [expected]);
    }
}
