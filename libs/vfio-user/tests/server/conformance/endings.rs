//! How sessions end.

use super::*;

/// Point 71, faults 34 and 53: a client that dies at whatever step leaves nothing behind.
#[test]
fn a_client_may_die_at_every_step() {
    let device = Plain::new();
    let name = "dying";
    let file = memory(name, 0x1000);
    let vector = eventfd();
    let version = Command::Version(Version::proposal()).encode(1, false);
    for cut in [0, 1, 15, 16, 17, version.len() - 1] {
        let (mut client, served) = connect(&device);
        client.send_bytes(&version[..cut], &[]);
        drop(client);
        served.outcome().unwrap();
    }
    let map = Command::DmaMap(mapping(0, 0x1000, Access::ReadWrite, 0)).encode(2, false);
    let bind = Command::SetIrqs(bind(0, 1)).encode(3, false);
    let held = Command::RegionRead(RegionAccess { offset: 0, region: HELD, count: 4 });
    for step in 0..6 {
        let (mut client, served) = open(&device);
        if step > 0 {
            client.send_bytes(&map[..if step == 1 { 20 } else { map.len() }], &[file.as_fd()]);
        }
        if step > 2 {
            client.send_bytes(&bind[..if step == 3 { 30 } else { bind.len() }], &[vector.as_fd()]);
        }
        if step > 4 {
            // While a command is being executed, and others wait behind it.
            client.send(&held, &[]);
            client.send_bytes(&map, &[file.as_fd()]);
            eventually("it is executed", || !device.held.lock().unwrap().is_empty());
        }
        drop(client);
        served.outcome().unwrap();
        assert_eq!(
            (descriptors_named(name), mappings_named(name), copies(&vector)),
            (1, 0, 1),
            "step {step}"
        );
    }
    let (mut client, _served) = open(&device);
    alive(&mut client);
}

/// Point 14: what is late is not sent at all, whichever thread is late.
#[test]
fn nothing_is_sent_after_the_limit() {
    let device = Plain::new();
    let (mut client, served) = open(&device);
    client.send(&Command::RegionRead(RegionAccess { offset: 0, region: HELD, count: 4 }), &[]);
    client.send(&read(0, 4), &[]);
    let begin = Instant::now();
    eventually("it is executed", || !device.held.lock().unwrap().is_empty());
    let late = std::mem::take(&mut *device.held.lock().unwrap());
    assert!(client.receive_within(Duration::from_secs(8)).is_none());
    let took = begin.elapsed();
    assert!((limits::REPLY..Duration::from_millis(4500)).contains(&took), "{took:?}");
    late.into_iter().for_each(|reply| reply.ok(vec![0; 4]));
    assert!(client.is_closed());
    let error = served.outcome().unwrap_err();
    assert!(
        matches!(
            error,
            ServeError::Session(SessionError::Overdue {
                code: CommandCode::REGION_READ,
                limit: limits::REPLY
            })
        ),
        "{error}"
    );
}
