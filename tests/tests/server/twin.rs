//! The twin socket, for a client that asks for one. (Point 20.)

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use outboard_vfio_user::device::Device;
use outboard_vfio_user::server::ServeError;
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaAccess, DmaWrite, Kind, RegionAccess, RegionWrite, Reply, TwinSocket, Version,
};

use outboard_tests::conformance::{Client, by_messages};
use outboard_tests::in_process::{Served, connect};
use outboard_tests::plain::{Copy, Plain, region};

/// A client past VERSION, and its twin socket.
fn open<D: Device + 'static>(device: &Arc<D>) -> (Client, Client, Served) {
    let (mut client, served) = connect(device);
    let (answer, descriptors) = negotiate(&mut client, Some(true), Some(8));
    assert_eq!(answer, Some(TwinSocket { supported: true, fd_index: Some(0) }));
    let [twin] = descriptors.try_into().unwrap();
    (client, Client::new(twin).unwrap(), served)
}

fn negotiate(
    client: &mut Client,
    supported: Option<bool>,
    max_msg_fds: Option<u32>,
) -> (Option<TwinSocket>, Vec<UnixStream>) {
    let mut version = Version::proposal();
    version.capabilities.twin_socket = supported.map(|supported| TwinSocket { supported, fd_index: None });
    version.capabilities.max_msg_fds = max_msg_fds;
    let reply = client.call(&Command::Version(version), &[]).unwrap();
    let Ok(Reply::Version(answer)) = Reply::decode(CommandCode::VERSION, &reply.body) else { panic!() };
    let descriptors = reply.descriptors.into_iter().map(UnixStream::from).collect();
    (answer.capabilities.twin_socket, descriptors)
}

#[test]
fn only_who_asks_and_takes_descriptors_gets_one() {
    for (asked, descriptors, gets) in [
        (None, Some(16), false),
        (Some(false), Some(16), false),
        (Some(true), Some(0), false),
        (Some(true), None, true),
        (Some(true), Some(1), true),
    ] {
        let (mut client, _served) = connect(&Plain::new());
        let (answer, sockets) = negotiate(&mut client, asked, descriptors);
        assert_eq!((answer.is_some(), sockets.len()), (gets, usize::from(gets)), "{asked:?} {descriptors:?}");
    }
}

/// The copy is done on the session's own thread, and on another.
#[test]
fn dma_goes_over_the_twin_and_nothing_else() {
    for region in [region::COPY_HERE, region::COPY_THERE] {
        let (mut client, mut twin, served) = open(&Plain::new());
        client.map(&by_messages(0, 0x1000), None).unwrap();
        let copy = Copy::bytes(0x10, 0x20, 4);
        let id =
            client.send(&Command::RegionWrite(RegionWrite { offset: 0, region, data: &copy }), &[]).unwrap();
        let question = twin.receive().unwrap();
        assert_eq!(question.header.code(), CommandCode::DMA_READ);
        // An answer on the other socket is none.
        let lie = Reply::DmaRead { address: 0x10, data: &[9; 4] }.encode(question.header.id());
        client.send_bytes(&lie, &[]).unwrap();
        twin.expect_silence(Duration::from_millis(50)).unwrap();
        let answer = Reply::DmaRead { address: 0x10, data: &[1, 2, 3, 4] }.encode(question.header.id());
        for byte in answer {
            twin.send_bytes(&[byte], &[]).unwrap();
        }
        let question = twin.receive().unwrap();
        match Command::decode(&question.header, &question.body, 0) {
            Ok(Command::DmaWrite(DmaWrite { address: 0x20, data: [1, 2, 3, 4] })) => {}
            other => panic!("{other:?}"),
        }
        let access = DmaAccess { address: 0x20, count: 4 };
        twin.send_bytes(&Reply::DmaWrite(Some(access)).encode(question.header.id()), &[]).unwrap();
        client.reply(id, CommandCode::REGION_WRITE).unwrap();
        drop((client, twin));
        served.outcome().unwrap();
    }
}

#[test]
fn a_command_over_the_twin_ends_the_session() {
    let (_client, mut twin, served) = open(&Plain::new());
    twin.send(&Command::Reset, &[]).unwrap();
    let error = served.outcome().unwrap_err();
    let on_twin = SessionError::OnTwin(CommandCode::DEVICE_RESET);
    assert_eq!(error.to_string(), on_twin.to_string());
    assert!(matches!(error, ServeError::Session(SessionError::OnTwin(_))));
    // And so does what is no message.
    let (_client, mut twin, served) = open(&Plain::new());
    twin.send_bytes(&[0xff; 16], &[]).unwrap();
    assert!(matches!(served.outcome(), Err(ServeError::Session(SessionError::Frame(_)))));
}

/// Closing either socket is leaving, but not before what was sent has been done.
#[test]
fn either_sockets_end_is_the_end() {
    let device = Plain::new();
    let (client, twin, served) = open(&device);
    drop(twin);
    served.outcome().unwrap();
    drop(client);
    for round in 0..100_u64 {
        let (mut client, twin, served) = open(&device);
        let read = RegionAccess { offset: 0, region: 0, count: 4 };
        for _ in 0..round {
            client.send_bytes(&Command::RegionRead(read).encode(1, true), &[]).unwrap();
        }
        drop((twin, client));
        let messages = served.messages.clone();
        served.outcome().unwrap();
        assert_eq!(messages.of(CommandCode::REGION_READ), round);
    }
}

/// A question that the client does not answer ends the session; a twin that is not read is no different.
#[test]
fn questions_over_the_twin_are_answered_in_time() {
    let (mut client, twin, served) = open(&Plain::new());
    client.map(&by_messages(0, 0x1000), None).unwrap();
    let copy = Copy::bytes(0x10, 0x20, 4);
    let id = client
        .send(&Command::RegionWrite(RegionWrite { offset: 0, region: region::COPY_THERE, data: &copy }), &[])
        .unwrap();
    // Or the end of the connection.
    let reply = client.receive_within(Duration::from_secs(8)).ok().flatten();
    let refused = |kind| matches!(kind, Kind::Reply { error: Some(_) });
    assert!(reply.is_none_or(|reply| reply.header.id() == id && refused(reply.header.kind())));
    let error = served.outcome().unwrap_err();
    let expected = [CommandCode::DMA_READ, CommandCode::REGION_WRITE];
    match error {
        ServeError::Session(SessionError::Unanswered { code, .. } | SessionError::Overdue { code, .. }) => {
            assert!(expected.contains(&code));
        }
        other => panic!("{other}"),
    }
    drop(twin);
}
