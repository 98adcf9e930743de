//! What one message costs. `cargo test --release -p outboard-tests --test server round_trips -- --ignored --nocapture`

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use outboard_vfio_user::wire::{Command, CommandCode, RegionAccess, Version};

use outboard_tests::conformance::Client;
use outboard_tests::in_process::connect;
use outboard_tests::plain::Plain;

fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core).unwrap();
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

fn reads(client: &mut Client, time: Duration, depth: usize) -> f64 {
    let read = Command::RegionRead(RegionAccess { offset: 0, region: 0, count: 4 });
    let (begin, mut count) = (Instant::now(), 0_u32);
    while begin.elapsed() < time {
        let bytes: Vec<u8> = (0..depth).flat_map(|_| read.encode(1, false)).collect();
        client.send_bytes(&bytes, &[]).unwrap();
        for _ in 0..depth {
            client.reply(1, CommandCode::REGION_READ).unwrap();
            count += 1;
        }
    }
    f64::from(count) / begin.elapsed().as_secs_f64()
}

/// The same bytes through a socket with nothing behind it: what the kernel costs.
fn bare(server: usize, client: usize, looks: bool, time: Duration) -> f64 {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let echo = thread::spawn(move || {
        pin(server);
        let mut bytes = [0; 64];
        while let Ok(length @ 1..) = theirs.read(&mut bytes) {
            theirs.write_all(&bytes[..length]).unwrap();
        }
    });
    pin(client);
    ours.set_nonblocking(looks).unwrap();
    let (begin, mut count) = (Instant::now(), 0_u32);
    while begin.elapsed() < time {
        ours.write_all(&[0; 32]).unwrap();
        while ours.read(&mut [0; 64]).is_err() {
            std::hint::spin_loop();
        }
        count += 1;
    }
    drop(ours);
    echo.join().unwrap();
    f64::from(count) / time.as_secs_f64()
}

#[test]
#[ignore = "a measurement"]
fn region_reads_per_second() {
    for (name, server, client, depth, looks) in [
        ("two cores, the client sleeps", 0, 1, 1, false),
        ("two cores, the client looks", 0, 1, 1, true),
        ("one core, the client sleeps", 0, 0, 1, false),
        ("two cores, 64 in flight", 0, 1, 64, true),
    ] {
        thread::spawn(move || {
            // The session's thread inherits this.
            pin(server);
            let device: Arc<Plain> = Plain::new();
            let (mut connection, _served) = connect(&device);
            connection.looks = looks;
            connection.call(&Command::Version(Version::proposal()), &[]).unwrap();
            pin(client);
            reads(&mut connection, Duration::from_millis(200), depth);
            let rate = reads(&mut connection, Duration::from_secs(1), depth);
            let bare = bare(server, client, looks, Duration::from_secs(1));
            println!("{name}: {rate:.0} /s; a bare socket, one at a time: {bare:.0} /s");
        })
        .join()
        .unwrap();
    }
}
