//! The protocol's fine print as checks over a connected socket, each with the number of its point in the project's
//! list. They can be pointed at any server: a [`Subject`] says how to connect, and what else is known of it.
//!
//! A check passes, fails with what was sent, what the text asks for and what came, or does not apply because the
//! server does not offer what it is about.

mod client;
mod framing;
mod subject;
mod version;

use std::fmt;

use outboard_vfio_user::wire::{Command, RegionAccess};

pub use client::{Client, by_messages, eventfd, mapping, memory, raw, raw_message, unmap};
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
    [framing::CHECKS, version::CHECKS].into_iter().flatten()
}

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
/// What QEMU refuses unknown commands with.
const ENOSYS: u32 = nix::errno::Errno::ENOSYS as u32;

/// The configuration space: every PCI device has it, and what a client may do there is known.
const CONFIG: u32 = 7;

fn config_read(offset: u64, count: u32) -> Command<'static> {
    Command::RegionRead(RegionAccess { offset, region: CONFIG, count })
}

/// The server still cuts the stream where we do, and still answers.
fn alive(client: &mut Client) -> Checked {
    let mut identity = client.read(CONFIG, 0, 4)?;
    identity.dedup();
    holds(identity != [0xff], "a read of the vendor ID", "an ID", identity)
}

fn dwords<const N: usize>(values: [u32; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
