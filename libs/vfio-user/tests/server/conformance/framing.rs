//! Messages and the stream that they come in.

use super::*;

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
