//! Messages and the stream that they come in.

use super::*;

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
