//! The twin socket.

use super::*;
use crate::transport::{Framer, Message, Received, Socket};
use crate::wire::{Capabilities, Kind};

const TWIN: Options =
    Options { timeout: Duration::from_secs(5), twin_socket: true, msix_direct: false, iova_ranges: false };

fn send(socket: &Socket, message: &[u8], descriptors: &[OwnedFd]) {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    assert_eq!(socket.send(message, &borrowed).unwrap(), Some(message.len()));
}

fn receive(socket: &Socket) -> Option<Message> {
    let mut framer = Framer::new();
    let mut buffer = [0; 1];
    loop {
        if let Some(message) = framer.next_message().unwrap() {
            return Some(message);
        }
        match socket.receive(&mut buffer).unwrap() {
            Received::Data { length, descriptors } => framer.push(&buffer[..length], descriptors),
            Received::WouldBlock => thread::yield_now(),
            Received::Closed => return None,
        }
    }
}

fn offer(header: &Header, twin_socket: Option<TwinSocket>) -> Vec<u8> {
    let capabilities = Capabilities { twin_socket, ..Capabilities::ours() };
    Reply::Version(Version { minor: 1, capabilities }).encode(header.id())
}

/// A client, and both sockets of its server.
fn connected() -> (Client, Socket, Socket) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let main = Socket::new(theirs).unwrap();
        let version = receive(&main).unwrap();
        let (end, given) = UnixStream::pair().unwrap();
        let twin = TwinSocket { supported: true, fd_index: Some(0) };
        send(&main, &offer(&version.header, Some(twin)), &[given.into()]);
        (main, Socket::new(end).unwrap())
    });
    let client = Client::new(ours, TWIN).unwrap();
    let (main, twin) = server.join().unwrap();
    assert!(client.has_twin_socket());
    (client, main, twin)
}

/// The server's questions and the client's do not get into each other's way.
#[test]
fn the_server_asks_over_the_twin_socket() {
    let (client, main, twin) = connected();
    let memory = SharedMemory::new("guest", PAGE).unwrap();
    memory.bytes().write_obj(0x55_u8, 16).unwrap();
    let server = thread::spawn(move || {
        let map = receive(&main).unwrap();
        send(&main, &Reply::Done(map.header.code()).encode(map.header.id()), &[]);
        let reset = receive(&main).unwrap();
        // The same id as the command that waits.
        for id in [reset.header.id(), 7] {
            send(&twin, &Command::DmaRead(DmaAccess { address: 0x1010, count: 1 }).encode(id, false), &[]);
            let reply = receive(&twin).unwrap();
            assert_eq!((reply.header.id(), reply.header.kind()), (id, Kind::Reply { error: None }));
            assert_eq!(reply.body[16..], [0x55]);
        }
        send(&twin, &Command::DmaRead(DmaAccess { address: 0, count: 1 }).encode(1, false), &[]);
        let reply = receive(&twin).unwrap();
        assert_eq!(reply.header.kind(), Kind::Reply { error: Some(Errno::EFAULT as u32) });
        send(&main, &Reply::Done(reset.header.code()).encode(reset.header.id()), &[]);
        (main, twin)
    });
    let part = Memory { file: memory.as_fd(), offset: 0, length: PAGE };
    client.dma_map(Iova(0x1000), part, Access::Read, Sharing::Messages).unwrap();
    client.reset().unwrap();
    let (main, twin) = server.join().unwrap();
    assert_eq!(client.received().of(CommandCode::DMA_READ), 3);
    // Either socket's end is the end.
    drop(twin);
    assert!(matches!(client.reset(), Err(ClientError::Disconnected(Disconnect::Server))));
    assert!(receive(&main).is_none_or(|message| message.header.code() == CommandCode::DEVICE_RESET));
}

#[test]
fn each_socket_is_for_what_it_is_for() {
    let question = Command::DmaRead(DmaAccess { address: 0, count: 1 }).encode(1, false);
    let (client, main, twin) = connected();
    send(&main, &question, &[]);
    let result = client.reset();
    assert!(
        matches!(
            result,
            Err(ClientError::Disconnected(Disconnect::Session(
                crate::session::client::SessionError::BesideTwin { code: CommandCode::DMA_READ }
            )))
        ),
        "{result:?}"
    );
    assert!(receive(&twin).is_none(), "both are closed");
    let (client, main, twin) = connected();
    let answer = thread::spawn(move || {
        let reset = receive(&main).unwrap();
        send(&twin, &Reply::Done(reset.header.code()).encode(reset.header.id()), &[]);
        assert!(receive(&main).is_none());
    });
    let result = client.reset();
    assert!(matches!(result, Err(ClientError::Disconnected(Disconnect::Session(_)))), "{result:?}");
    answer.join().unwrap();
}

/// An offer and what comes with it have to agree.
#[test]
fn an_inconsistent_offer_ends_it() {
    let twin = |fd_index| Some(TwinSocket { supported: true, fd_index });
    let no_twin = Some(TwinSocket { supported: false, fd_index: None });
    let stream = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let datagrams = || OwnedFd::from(std::os::unix::net::UnixDatagram::pair().unwrap().0);
    let other_family = || OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let cases: [(Option<TwinSocket>, Vec<OwnedFd>, bool); 12] = [
        (twin(Some(0)), vec![], true),
        (twin(None), vec![stream()], true),
        (twin(Some(1)), vec![stream()], true),
        (twin(Some(u32::MAX)), vec![stream()], true),
        (twin(Some(0)), vec![stream(), stream()], true),
        (twin(Some(0)), vec![file()], true),
        (twin(Some(0)), vec![datagrams()], true),
        (twin(Some(0)), vec![other_family()], true),
        (None, vec![stream()], true),
        (no_twin, vec![stream()], true),
        // One that nobody asked for.
        (twin(Some(0)), vec![stream()], false),
        (None, vec![stream()], false),
    ];
    for (number, (offered, descriptors, twin_socket)) in cases.into_iter().enumerate() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            let main = Socket::new(theirs).unwrap();
            let version = receive(&main).unwrap();
            send(&main, &offer(&version.header, offered), &descriptors);
            receive(&main).is_none()
        });
        let error = Client::new(ours, Options { twin_socket, ..TWIN }).unwrap_err();
        let wrong =
            matches!(error, ClientError::TwinSocket { .. } | ClientError::Descriptors { most: 0, .. });
        assert!(wrong, "{number}: {error}");
        assert!(server.join().unwrap(), "{number}: the connection is over");
    }
    // Not to offer it is fine.
    with_server_and(Options { twin_socket: false, ..TWIN }, |client| assert!(!client.has_twin_socket()));
}

/// It takes its time over its replies: then its questions wait, and nothing else.
#[test]
fn a_server_that_does_not_take_its_replies_waits_alone() {
    const COUNT: u32 = 1 << 20;
    let (client, main, twin) = connected();
    let memory = SharedMemory::new("guest", COUNT as usize).unwrap();
    let server = thread::spawn(move || {
        let map = receive(&main).unwrap();
        send(&main, &Reply::Done(map.header.code()).encode(map.header.id()), &[]);
        for id in 0..40 {
            send(&twin, &Command::DmaRead(DmaAccess { address: 0, count: COUNT }).encode(id, false), &[]);
        }
        for _ in 0..10 {
            let reset = receive(&main).unwrap();
            send(&main, &Reply::Done(reset.header.code()).encode(reset.header.id()), &[]);
        }
        let mut framer = Framer::new();
        let mut buffer = vec![0; 1 << 16];
        for id in 0..40 {
            let reply = loop {
                if let Some(message) = framer.next_message().unwrap() {
                    break message;
                }
                match twin.receive(&mut buffer).unwrap() {
                    Received::Data { length, descriptors } => framer.push(&buffer[..length], descriptors),
                    Received::WouldBlock => thread::yield_now(),
                    Received::Closed => panic!("closed"),
                }
            };
            assert_eq!((reply.header.id(), reply.body.len()), (id, 16 + COUNT as usize));
        }
        (main, twin)
    });
    let part = Memory { file: memory.as_fd(), offset: 0, length: COUNT as usize };
    client.dma_map(Iova(0), part, Access::Read, Sharing::Messages).unwrap();
    for _ in 0..10 {
        client.reset().unwrap();
    }
    drop(server.join().unwrap());
}
