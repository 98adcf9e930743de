//! The points of the protocol against our own servers.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use outboard_tests::conformance::{ELSEWHERE, NvmeDrive, Outcome, Subject, checks};
use outboard_tests::in_process::{Served, serve_at};
use outboard_tests::plain::{Copier, Plain, region};
use outboard_tests::process::Server;

/// Runs every check. What failed is told all at once; what is not offered is what is said here, and no more.
fn conforms(subject: &Subject<'_>, not_offered: &[u8]) {
    let mut failures = String::new();
    let mut missing = Vec::new();
    for check in checks() {
        match check.run(subject) {
            Outcome::Passed => {}
            Outcome::Failed(failure) => {
                failures
                    .push_str(&format!("{:3} {} ({}): {failure}\n", check.point, check.title, check.text));
            }
            Outcome::NotOffered(_) => missing.push(check.point),
        }
    }
    assert!(failures.is_empty(), "\n{failures}");
    assert_eq!(missing, not_offered, "what is not offered");
}

/// I/O descriptors and migration: the drive has none.
const DRIVE_LACKS: [u8; 2] = [32, 70];
/// Nor, where its doorbells come as messages, anything that can be mapped.
const POSTED_DRIVE_LACKS: [u8; 6] = [24, 25, 27, 28, 32, 70];
const PLAIN_LACKS: [u8; 1] = [70];

fn drive(doorbells: &str, not_offered: &[u8]) {
    let mut server = Server::nvme(&["--namespace", "ram:64M", "--doorbells", doorbells]);
    let id = server.id();
    conforms(&Subject::new(|| server.connect()).with_process(id).with_engine(NvmeDrive), not_offered);
    assert!(server.is_running());
}

#[test]
fn a_drive_with_mapped_doorbells() {
    drive("mapped", &DRIVE_LACKS);
}

#[test]
fn a_drive_with_posted_doorbells() {
    drive("posted", &POSTED_DRIVE_LACKS);
}

/// One client at a time, as the program has it.
fn plain_device(copies: u32) {
    let device = Plain::new();
    let session: Mutex<Option<Served>> = Mutex::default();
    let connect = || {
        let mut session = session.lock().unwrap();
        for _ in 0..1000 {
            if session.as_ref().is_none_or(Served::is_over) {
                let (ours, theirs) = UnixStream::pair()?;
                *session = Some(serve_at(theirs, &device));
                return Ok(ours);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(io::ErrorKind::ConnectionRefused.into())
    };
    outboard_vfio_user::memory::guard::install().unwrap();
    let subject = Subject::new(connect).with_process(std::process::id()).with_engine(Copier(copies));
    conforms(&subject, &PLAIN_LACKS);
}

#[test]
fn a_plain_device_whose_session_copies() {
    plain_device(region::COPY_HERE);
}

#[test]
fn a_plain_device_whose_threads_copy() {
    plain_device(region::COPY_THERE);
}

/// Nothing is left out, and nothing is offered by none.
#[test]
fn every_point_is_checked_or_said_to_be_elsewhere() {
    let checked: BTreeSet<u8> = checks().map(|check| check.point).collect();
    let elsewhere: BTreeSet<u8> = ELSEWHERE.iter().map(|(point, _)| *point).collect();
    assert!(checked.is_disjoint(&elsewhere));
    let all: BTreeSet<u8> = (1..=74).chain([80]).collect();
    assert_eq!(checked.union(&elsewhere).copied().collect::<BTreeSet<_>>(), all);
    let nowhere = checked.iter().filter(|point| {
        [&DRIVE_LACKS[..], &POSTED_DRIVE_LACKS, &PLAIN_LACKS].iter().all(|lacks| lacks.contains(point))
    });
    // Migration: no server of ours has it yet.
    assert_eq!(nowhere.collect::<Vec<_>>(), [&70]);
}
