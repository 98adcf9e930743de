//! Clients that take memory away while it is mapped: it costs them their session, and nobody else anything.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::Command as Program;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{Signal, raise};
use nix::unistd::ftruncate;
use outboard_vfio_user::limits;
use outboard_vfio_user::memory::guard::{self, Alarm};
use outboard_vfio_user::memory::{Access, Mapping};
use outboard_vfio_user::server::ServeError;
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::wire::{Command, Kind, RegionWrite};
use vm_memory::Bytes;

use outboard_tests::conformance::{Process, mapping, memory, unmap};
use outboard_tests::in_process::{eventually, open};
use outboard_tests::plain::{Copy, Plain, region};

use crate::devices::{Late, STUCK};

const EFAULT: u32 = Errno::EFAULT as u32;

/// Point 56. The memory is accessed on the session's own thread, and on another.
#[test]
fn a_client_that_shrinks_its_memory_loses_its_session_alone() {
    guard::install().unwrap();
    let (mut honest, _served) = open(&Plain::new());
    let ram = memory(0x2000);
    honest.map(&mapping(0, 0x2000, Access::ReadWrite, 0), Some(ram.as_fd())).unwrap();
    for region in [region::COPY_HERE, region::COPY_THERE] {
        let (mut guilty, served) = open(&Plain::new());
        let file = memory(0x3000);
        guilty.map(&mapping(0x10_0000, 0x1000, Access::ReadWrite, 0), Some(file.as_fd())).unwrap();
        guilty.map(&mapping(0x20_0000, 0x2000, Access::ReadWrite, 0x1000), Some(file.as_fd())).unwrap();
        let within = Copy::bytes(0x20_0000, 0x10_0000, 64);
        guilty.write(region, 0, &within).unwrap();
        ftruncate(&file, 0x1000).unwrap();
        let command = Command::RegionWrite(RegionWrite { offset: 0, region, data: &within });
        guilty.send(&command, &[]).unwrap();
        // Or the end of the connection.
        let failed = match guilty.receive_within(Duration::from_secs(1)) {
            Ok(Some(reply)) => reply.header.kind() == (Kind::Reply { error: Some(EFAULT) }),
            _ => true,
        };
        assert!(failed, "zeros are not taken for the client's data");
        let error = served.outcome().unwrap_err();
        match &error {
            ServeError::Session(SessionError::MemoryLost { range: Some(range) }) => {
                assert_eq!(*range, 0x20_0000..=0x20_1fff);
                assert!(error.to_string().contains("at 0x200000 to 0x201fff"), "{error}");
            }
            _ => panic!("{error}"),
        }
        // The device's own thread may be a little behind.
        eventually("nothing of it is mapped", || Process::this().mappings(&file) == 0);
        honest.write(region, 0, &Copy::bytes(0, 0x1000, 64)).unwrap();
    }
}

/// The memory of an unmap that still waits is named as such.
#[test]
fn memory_that_is_lost_while_its_unmap_waits_ends_the_session() {
    guard::install().unwrap();
    let device = Late::new();
    let (mut client, served) = open(&device);
    let file = memory(0x1000);
    client.map(&mapping(STUCK, 0x1000, Access::ReadWrite, 0), Some(file.as_fd())).unwrap();
    client.send(&unmap(STUCK, 0x1000), &[]).unwrap();
    eventually("the device keeps it", || device.kept.lock().unwrap().is_some());
    let kept = device.kept.lock().unwrap().take().unwrap();
    ftruncate(&file, 0).unwrap();
    assert!(!kept.value.is_lost());
    let mut bytes = [1; 8];
    kept.value.bytes().unwrap().read_slice(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 8]);
    assert!(kept.value.is_lost());
    let error = served.outcome().unwrap_err();
    assert!(matches!(error, ServeError::Session(SessionError::MemoryLost { range: None })), "{error}");
}

/// What has to run in a process of its own, since it ends or fills it.
const MODE: &str = "OUTBOARD_LOST_MEMORY_TEST";

pub(crate) fn in_a_process(test: &str, mode: &str) -> std::process::ExitStatus {
    let mut process = Program::new(std::env::current_exe().unwrap());
    process.args(["--exact", test, "--test-threads=1"]).env(MODE, mode).output().unwrap().status
}

pub(crate) fn mode() -> Option<String> {
    std::env::var(MODE).ok()
}

#[test]
fn a_sigbus_elsewhere_still_ends_the_process() {
    match mode().as_deref() {
        None => {
            for mode in ["unwatched", "raised"] {
                let status = in_a_process("lost_memory::a_sigbus_elsewhere_still_ends_the_process", mode);
                assert_eq!(status.signal(), Some(libc::SIGBUS), "{mode}: {status}");
            }
        }
        Some("unwatched") => {
            guard::install().unwrap();
            let file = memory(4096);
            let mapping = Mapping::new(&file, 0, 4096, Access::Read).unwrap();
            ftruncate(&file, 0).unwrap();
            mapping.bytes().read_slice(&mut [0; 8], 0).unwrap();
        }
        Some(_) => {
            guard::install().unwrap();
            raise(Signal::SIGBUS).unwrap();
        }
    }
}

/// One client cannot take all the mappings that the kernel gives a process: it leaves as many as it has. What is
/// given back can be had again.
#[test]
fn watched_mappings_are_shared() {
    if mode().is_none() {
        let status = in_a_process("lost_memory::watched_mappings_are_shared", "full");
        assert!(status.success(), "{status}");
        return;
    }
    const ALL: usize = limits::WATCHED_MAPPINGS;
    let file = memory(8192);
    // Every other page, so that the kernel does not make one mapping of them.
    let map = |index: usize, alarm: &Arc<Alarm>| {
        Mapping::watched(&file, (index as u64 % 2) * 4096, 4096, Access::Read, alarm.clone())
    };
    let fill = |alarm: &Arc<Alarm>| -> (Vec<Mapping>, String) {
        let mut mappings = Vec::new();
        loop {
            match map(mappings.len(), alarm) {
                Ok(mapping) => mappings.push(mapping),
                Err(error) => return (mappings, error.to_string()),
            }
        }
    };
    let [first, second, third] = [(); 3].map(|()| Arc::new(Alarm::new().unwrap()));
    let (mut ours, refusal) = fill(&first);
    assert_eq!(ours.len(), ALL / 2);
    assert_eq!(
        refusal,
        "16384 mappings are this client's share: it leaves 16384 of this process's 32768 to others"
    );
    let (theirs, _) = fill(&second);
    assert_eq!(theirs.len(), ALL / 4);
    assert_eq!(fill(&third).0.len(), ALL / 8);
    assert!(map(0, &first).is_err(), "more than its share by now");
    drop(theirs);
    ours.truncate(100);
    ours.push(map(0, &first).unwrap());
    assert_eq!(fill(&second).0.len(), (ALL - 101) / 2 + 1);
    // And each is still watched, old or new.
    guard::install().unwrap();
    ftruncate(&file, 0).unwrap();
    for mapping in [&ours[0], &ours[99], &ours[100]] {
        mapping.bytes().read_slice(&mut [0; 8], 0).unwrap();
        assert!(mapping.is_lost() && first.memory_lost());
    }
    assert!(!ours[50].is_lost() && !second.memory_lost());
}
