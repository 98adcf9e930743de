//! Messages and the stream that they come in.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use outboard_vfio_user::limits;
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::wire::{Command, CommandCode, HEADER_SIZE, Query, Version};

use super::client::{mapping, memory, raw, raw_message, unmap};
use super::{Check, Checked, EINVAL, ENOSYS, Stop, Subject, alive, config, dwords, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 1,
        title: "a message split at any byte, and several in one segment",
        text: "specification: a stream of bytes; libvfio-user #306",
        run: fragments,
    },
    Check {
        point: 2,
        title: "each reply in one piece, its descriptors on the first byte",
        text: "QEMU recv_hdr takes no split header; rust-vmm reads once",
        run: whole_replies,
    },
    Check {
        point: 3,
        title: "messages that are neither command nor reply, and replies to nothing",
        text: "specification, \"Header\"; libvfio-user refuses or drops them",
        run: stray_messages,
    },
    Check {
        point: 4,
        title: "a size that cannot be is answered, and the stream ends or goes on, but nothing is allocated",
        text: "libvfio-user is_valid_header",
        run: impossible_sizes,
    },
    Check {
        point: 5,
        title: "a body that is missing or cut short is EINVAL; RESET has none",
        text: "libvfio-user",
        run: missing_bodies,
    },
    Check {
        point: 6,
        title: "unknown commands are refused, their bodies skipped",
        text: "libvfio-user says EINVAL, QEMU ENOSYS",
        run: unknown_commands,
    },
    Check {
        point: 7,
        title: "id and command come back; one id many times in flight is answered in order",
        text: "specification, \"Header\"; SPDK sends id 0 always",
        run: repeated_ids,
    },
    Check {
        point: 8,
        title: "a reply is a reply also when it tells of an error",
        text: "specification, \"Header\"; rust-vmm #143",
        run: error_type,
    },
    Check {
        point: 9,
        title: "no_reply is silence, for success and for failure",
        text: "specification, \"Header\"; rust-vmm #141",
        run: posted_commands,
    },
    Check {
        point: 10,
        title: "an error reply is a header with a positive errno",
        text: "specification, \"Header\"",
        run: error_shape,
    },
    Check {
        point: 11,
        title: "the error field and the reserved flags of commands mean nothing",
        text: "specification, \"Header\"",
        run: reserved_fields,
    },
    Check {
        point: 12,
        title: "descriptors that nobody asked for are closed",
        text: "libvfio-user test_bad_request_closes_fds; SPDK's DMA_UNMAP brings one",
        run: unwanted_descriptors,
    },
];

fn fragments(subject: &Subject<'_>) -> Checked {
    // One byte at a time, from the first.
    let mut client = subject.connect()?;
    client.shrink_buffers();
    let commands = [
        Command::Version(Version::proposal()),
        Command::GetInfo { argsz: 16 },
        Command::GetRegionInfo(Query { argsz: 256, index: 0 }),
        config::read(0, 64),
    ];
    for (command, id) in commands.iter().zip(1..) {
        client.says(format!("{command:?}, a byte at a time"));
        for byte in command.encode(id, false) {
            client.send_bytes(&[byte], &[])?;
            std::thread::yield_now();
        }
        client.reply(id, command.code())?;
    }
    let whole = config::read(0, 4).encode(9, false);
    for cut in 1..whole.len() {
        client.says(format!("REGION_READ in two pieces, cut at {cut}"));
        client.send_bytes(&whole[..cut], &[])?;
        std::thread::sleep(Duration::from_micros(200));
        client.send_bytes(&whole[cut..], &[])?;
        client.reply(9, CommandCode::REGION_READ)?;
    }
    client.says("ten REGION_READs in one segment, the last one cut");
    let mut bytes: Vec<u8> = (10..20).flat_map(|id| config::read(0, 4).encode(id, false)).collect();
    let rest = bytes.split_off(bytes.len() - 5);
    client.send_bytes(&bytes, &[])?;
    for id in 10..19 {
        client.reply(id, CommandCode::REGION_READ)?;
    }
    client.send_bytes(&rest, &[])?;
    client.reply(19, CommandCode::REGION_READ).map(|_| ())
}

fn whole_replies(subject: &Subject<'_>) -> Checked {
    let mut client = subject.connect()?;
    let mut commands = vec![
        Command::Version(Version::proposal()),
        Command::GetInfo { argsz: 16 },
        config::read(0, 256),
        config::read(0, 0),
        Command::GetRegionInfo(Query { argsz: 32, index: u32::MAX }),
    ];
    commands.extend((0..9).map(|index| Command::GetRegionInfo(Query { argsz: 4096, index })));
    for command in commands {
        client.send(&command, &[])?;
        let (bytes, _) = client.receive_once()?;
        let size = bytes.get(4..8).and_then(|size| size.try_into().ok()).map(u32::from_le_bytes);
        let came = format!("{} bytes of {size:?}", bytes.len());
        if size.map(|size| size as usize) != Some(bytes.len()) {
            return client.wrong("the whole reply at once", came);
        }
    }
    Ok(())
}

fn stray_messages(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for kind in 2..16 {
        client.says(format!("a message of type {kind}, then a REGION_READ"));
        client.send_bytes(&raw_message(7, 9, kind, &[0; 16]), &[])?;
        client.send_bytes(&config::read(0, 4).encode(8, false), &[])?;
        let mut message = client.receive()?;
        if message.header.id() == 7 {
            message = client.receive()?;
        }
        same(format!("a message of type {kind}, then a REGION_READ"), message.header.id(), 8)?;
    }
    for code in [1, 9, 11, 12, 999] {
        client.says(format!("a reply to no {code}"));
        client.send_bytes(&raw_message(1, code, 1, &[0; 80]), &[])?;
        client.send_bytes(&raw_message(1, code, 1 | 1 << 5, &[]), &[])?;
    }
    client.expect_silence(Duration::from_millis(20))?;
    alive(&mut client)
}

fn impossible_sizes(subject: &Subject<'_>) -> Checked {
    for size in [0, 15, limits::MESSAGE + 1, u32::MAX] {
        let mut client = subject.open()?;
        let mut bytes = raw(3, 9, &[0; 16]);
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        client.says(format!("a message that says it has {size} bytes"));
        client.send_bytes(&bytes[..HEADER_SIZE], &[])?;
        refused(client.reply(3, CommandCode::REGION_READ), &format!("size {size}"), &[EINVAL])?;
        drop(client);
        // Whatever became of that stream, the server is there for the next.
        alive(&mut subject.open()?)?;
    }
    Ok(())
}

fn missing_bodies(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for code in (2..=10).chain([15]) {
        for length in [0, 1, 7] {
            let result = client.call_raw(CommandCode(code), &vec![0; length], &[]);
            refused(result, &format!("command {code} with {length} bytes"), &[EINVAL, ENOSYS])?;
        }
    }
    match client.call_raw(CommandCode::DEVICE_RESET, &[], &[]) {
        // The server says that it cannot reset.
        Err(Stop::Refused { .. }) if !client.can_reset()? => {}
        result => drop(result?),
    }
    alive(&mut client)
}

fn unknown_commands(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for code in [0, 14, 19, 20, 999, u16::MAX] {
        for length in [0, 1, 64, 4096] {
            let result = client.call_raw(CommandCode(code), &vec![1; length], &[]);
            refused(result, &format!("command {code} with {length} bytes"), &[EINVAL, ENOSYS])?;
        }
    }
    // The server's own commands are none of the client's.
    for code in [11, 12] {
        let result = client.call_raw(CommandCode(code), &[0; 16], &[]);
        refused(result, &format!("command {code}"), &[EINVAL, ENOSYS])?;
    }
    alive(&mut client)
}

fn repeated_ids(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let bytes: Vec<u8> = (1..=200_u32).flat_map(|count| config::read(0, count).encode(0, false)).collect();
    client.says("REGION_READs of 1 to 200 bytes, all with id 0");
    client.send_bytes(&bytes, &[])?;
    for count in 1..=200 {
        let reply = client.reply(0, CommandCode::REGION_READ)?;
        same("REGION_READs of 1 to 200 bytes, all with id 0", reply.body.len(), 16 + count)?;
    }
    Ok(())
}

/// Commands that cannot succeed, of every kind.
fn failing() -> Vec<(u16, Vec<u8>)> {
    let beyond = [u64::MAX.to_le_bytes().to_vec(), dwords([0, 1])].concat();
    vec![
        (999, vec![]),
        (2, dwords([0; 8])),
        (
            3,
            [dwords([24, 0]), 0xdead_0000_u64.to_le_bytes().to_vec(), 4096_u64.to_le_bytes().to_vec()]
                .concat(),
        ),
        (4, dwords([0; 4])),
        (5, dwords([32, 0, u32::MAX, 0, 0, 0, 0, 0])),
        (6, dwords([16, 0, u32::MAX, 0])),
        (7, dwords([16, 0, u32::MAX, 0])),
        (8, dwords([20, 1 | 32, u32::MAX, 0, 1])),
        (9, beyond.clone()),
        (10, [beyond, vec![0]].concat()),
        (15, vec![0; 8]),
    ]
}

/// A reply to a command that cannot succeed.
#[derive(Debug)]
struct ErrorReply {
    flags: u32,
    errno: u32,
    length: usize,
    descriptors: usize,
}

fn each_failure(subject: &Subject<'_>, expected: &str, fits: fn(&ErrorReply) -> bool) -> Checked {
    let mut client = subject.open()?;
    for (code, body) in failing() {
        client.says(format!("command {code} that cannot succeed"));
        client.send_bytes(&raw(5, code, &body), &[])?;
        let (bytes, descriptors) = client.receive_once()?;
        let dword = |at: usize| {
            bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes)
        };
        let (length, descriptors) = (bytes.len(), descriptors.len());
        let reply = ErrorReply { flags: dword(8), errno: dword(12), length, descriptors };
        if !fits(&reply) {
            return client.wrong(expected, format!("{reply:?}"));
        }
    }
    alive(&mut client)
}

fn error_type(subject: &Subject<'_>) -> Checked {
    each_failure(subject, "type 1", |reply| reply.flags & 0xf == 1)
}

fn error_shape(subject: &Subject<'_>) -> Checked {
    each_failure(subject, "16 bytes with the error bit and an errno", |reply| {
        reply.flags & 1 << 5 != 0
            && (1..4096).contains(&reply.errno)
            && (reply.length, reply.descriptors) == (HEADER_SIZE, 0)
    })
}

fn posted_commands(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    // Not VERSION, whose second one a server may end the session for; not RESET, which may take its time.
    for code in (2..=12).chain([0, 14, 15, 16, 17, 18, 19, 999]) {
        for length in [0, 16, 64] {
            client.says(format!("a posted command {code} with {length} bytes"));
            client.send_bytes(&raw_message(code, code, 1 << 4, &vec![0; length]), &[])?;
        }
    }
    client.says("posted commands, then one that is answered");
    client.post(&config::read(0, 4))?;
    for (code, body) in failing() {
        client.send_bytes(&raw_message(code, code, 1 << 4, &body), &[])?;
    }
    alive(&mut client)?;
    client.expect_silence(Duration::from_millis(20))
}

fn reserved_fields(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let mut bytes = config::read(0, 4).encode(8, false);
    bytes[8..16].copy_from_slice(&[0xe0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    client.says("REGION_READ with every reserved flag, the error bit and an errno");
    client.send_bytes(&bytes, &[])?;
    client.reply(8, CommandCode::REGION_READ).map(|_| ())
}

fn unwanted_descriptors(subject: &Subject<'_>) -> Checked {
    let file = memory(0x1000);
    let watch = subject.watch(&file);
    let two: [BorrowedFd<'_>; 2] = [file.as_fd(); 2];
    let many: Vec<BorrowedFd<'_>> = vec![file.as_fd(); limits::DESCRIPTORS];
    let mut client = subject.connect()?;
    let body = Version::proposal();
    // With VERSION: refused (libvfio-user), or taken without them.
    let _ = client.call(&Command::Version(body), &two);
    drop(client);
    watch.settles(0, 0, "VERSION with two descriptors")?;
    let mut client = subject.open()?;
    for code in (2..=20).chain([0, 999]) {
        for (length, descriptors) in [(64, &two[..]), (64, &many), (0, &two)] {
            match client.call_raw(CommandCode(code), &vec![0; length], descriptors) {
                Ok(_) | Err(Stop::Refused { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        client.says(format!("a posted command {code} with two descriptors"));
        client.send_bytes(&raw_message(1, code, 1 << 4, &[0; 64]), &two)?;
    }
    // SPDK's initiator sends one with DMA_UNMAP.
    client.map(&mapping(0, 0x1000, Access::Read, 0), Some(file.as_fd()))?;
    client.call(&unmap(0, 0x1000), &[file.as_fd()])?;
    client.says("a reply to nothing with two descriptors");
    client.send_bytes(&raw_message(1, 11, 1, &[0; 16]), &two)?;
    alive(&mut client)?;
    watch.settles(0, 0, "commands of every kind with descriptors")?;
    client.says("a part of a message with two descriptors");
    client.send_bytes(&config::read(0, 4).encode(1, false)[..20], &two)?;
    drop(client);
    watch.settles(0, 0, "half a message with two descriptors, and no more")?;
    // More than a message can have, a few with each byte: they are not collected.
    let mut client = subject.open()?;
    for byte in &config::read(0, 4).encode(1, false)[..20] {
        match client.try_send(&[*byte], &[file.as_fd(); 100], Duration::from_millis(300)) {
            Ok(true) => std::thread::sleep(Duration::from_millis(2)),
            _ => break,
        }
    }
    drop(client);
    watch.settles(0, 0, "hundreds of descriptors with the bytes of one message")?;
    alive(&mut subject.open()?)
}
