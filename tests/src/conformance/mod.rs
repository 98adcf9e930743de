//! The protocol's fine print as checks over a connected socket, each with the number of its point in the project's
//! list. They can be pointed at any server: a [`Subject`] says how to connect, and what else is known of it.
//!
//! A check passes, fails with what was sent, what the text asks for and what came, or does not apply because the
//! server does not offer what it is about.

mod access;
mod client;
mod config;
mod dma;
mod engine;
mod framing;
mod interrupts;
mod lifecycle;
mod nvme;
mod ram;
mod regions;
mod subject;
mod version;

use std::fmt;

pub use client::{Client, Sharing, by_messages, eventfd, mapping, memory, raw, raw_message, unmap};
pub use engine::{Direction, Engine, Transfers};
pub use nvme::NvmeDrive;
pub use ram::Ram;
pub use subject::{Process, Subject, Watch};

/// One point, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its number.
    pub point: u8,
    /// What holds.
    pub title: &'static str,
    /// Who asks for it: the specification, or the peer that would stumble.
    pub text: &'static str,
    run: fn(&Subject<'_>) -> Checked,
}

/// What came of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds.
    Passed,
    /// It does not.
    Failed(Failure),
    /// The server lacks what it is about.
    NotOffered(&'static str),
}

/// What was sent, and what was expected, and what came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The last thing that the client did.
    pub sent: String,
    /// What should have come of it.
    pub expected: String,
    /// What came of it.
    pub came: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sent: {}; expected: {}; came: {}", self.sent, self.expected, self.came)
    }
}

/// Why a check, or a step of one, goes no further.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The server answered with an error.
    Refused {
        /// To what.
        sent: String,
        /// As it came.
        errno: u32,
    },
    /// Something else than what was expected came.
    Failed(Failure),
    /// The server lacks what the check is about.
    NotOffered(&'static str),
}

/// What a step of a check gives.
pub type Checked<T = ()> = Result<T, Stop>;

impl Stop {
    /// The errno of a refusal.
    pub fn errno(&self) -> Option<u32> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

impl Check {
    /// Does what the check says to a server.
    pub fn run(&self, subject: &Subject<'_>) -> Outcome {
        match (self.run)(subject) {
            Ok(()) => Outcome::Passed,
            Err(Stop::NotOffered(what)) => Outcome::NotOffered(what),
            Err(Stop::Failed(failure)) => Outcome::Failed(failure),
            Err(Stop::Refused { sent, errno }) => {
                Outcome::Failed(Failure { sent, expected: "success".into(), came: format!("errno {errno}") })
            }
        }
    }
}

/// Every check of a server.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    [
        framing::CHECKS,
        version::CHECKS,
        regions::CHECKS,
        interrupts::CHECKS,
        dma::CHECKS,
        access::CHECKS,
        lifecycle::CHECKS,
    ]
    .into_iter()
    .flatten()
}

/// The points that are no check over a server's socket, and the tests that hold them instead.
pub const ELSEWHERE: [(u8, &str); 4] = [
    (
        30,
        "about clients: `areas_are_checked_before_they_are_mapped` of vfio-user's client, and the wire's region \
         information with unknown capabilities",
    ),
    (
        73,
        "about clients: `a_server_that_is_gone_is_an_error_at_once` of vfio-user's client; what a vCPU then reads is \
         the VMM's matter",
    ),
    (
        74,
        "about the program's socket, not what goes through it: vfio-user's `listen` tests, server/tests/process",
    ),
    (
        80,
        "about clients: `lies_are_errors_to_the_caller`, `what_breaks_the_stream_ends_the_connection`, \
         `a_late_reply_is_dropped`, `descriptors_that_nobody_asked_for_are_an_error_and_closed` and \
         `random_answers_do_no_harm` of vfio-user's client",
    ),
];

fn failed<T>(sent: impl Into<String>, expected: impl Into<String>, came: impl Into<String>) -> Checked<T> {
    Err(Stop::Failed(Failure { sent: sent.into(), expected: expected.into(), came: came.into() }))
}

/// Fails unless what came is what was expected.
fn same<T: PartialEq + fmt::Debug>(sent: impl Into<String>, came: T, expected: T) -> Checked {
    if came == expected {
        return Ok(());
    }
    failed(sent, format!("{expected:?}"), format!("{came:?}"))
}

/// Fails unless it `holds`.
fn holds(holds: bool, sent: &str, expected: &str, came: impl fmt::Debug) -> Checked {
    if holds { Ok(()) } else { failed(sent, expected, format!("{came:?}")) }
}

/// Fails unless the server refused with one of `errnos`.
fn refused<T>(result: Checked<T>, sent: &str, errnos: &[u32]) -> Checked {
    match result {
        Err(Stop::Refused { errno, .. }) if errnos.contains(&errno) => Ok(()),
        Err(Stop::Refused { errno, .. }) => {
            failed(sent, format!("errno {errnos:?}"), format!("errno {errno}"))
        }
        Err(other) => Err(other),
        Ok(_) => failed(sent, format!("errno {errnos:?}"), "success"),
    }
}

/// What the commands refuse malformed ones with (libvfio-user).
const EINVAL: u32 = nix::errno::Errno::EINVAL as u32;
/// What a mapping over another one is refused with (specification, "VFIO_USER_DMA_MAP").
const EEXIST: u32 = nix::errno::Errno::EEXIST as u32;
/// What an unmap of what is not mapped is refused with (libvfio-user).
const ENOENT: u32 = nix::errno::Errno::ENOENT as u32;
/// What QEMU refuses unknown commands with.
const ENOSYS: u32 = nix::errno::Errno::ENOSYS as u32;

/// The server still cuts the stream where we do, and still answers.
fn alive(client: &mut Client) -> Checked {
    let mut identity = client.read(config::CONFIG, 0, 4)?;
    identity.dedup();
    holds(identity != [0xff], "a read of the vendor ID", "an ID", identity)
}

fn dwords<const N: usize>(values: [u32; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
