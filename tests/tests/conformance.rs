//! The points of the protocol against our own servers.

use outboard_tests::conformance::{Outcome, Subject, checks};
use outboard_tests::process::Server;

/// Runs every check; what failed is told all at once, and what was not offered is what is said here.
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

fn drive(doorbells: &str, not_offered: &[u8]) {
    let mut server = Server::nvme(&["--namespace", "ram:64M", "--doorbells", doorbells]);
    let id = server.id();
    conforms(&Subject::new(|| server.connect()).with_process(id), not_offered);
    assert!(server.is_running());
}

#[test]
fn a_drive_with_mapped_doorbells() {
    drive("mapped", &[]);
}

#[test]
fn a_drive_with_posted_doorbells() {
    drive("posted", &[]);
}
