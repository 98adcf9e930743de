//! Public faults of our peers that no other test provokes. docs/faults.md says where each is tested.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use outboard_vfio_user::limits;
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::server::ServeError;
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::wire::{Command, Version};

use outboard_tests::conformance::{mapping, memory};
use outboard_tests::in_process::{connect, open};
use outboard_tests::plain::Plain;

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
        let error = served.outcome_within(limits::HANDSHAKE + Duration::from_secs(2)).unwrap_err();
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
    assert_eq!(error, Some(nix::errno::Errno::ENOSPC as u32));
    assert!((600..=limits::WATCHED_MAPPINGS as u64 / 2).contains(&maps), "{maps}");
    client.unmap(0, 0x1000).unwrap();
    client.map(&map(maps), Some(file.as_fd())).unwrap();
}
