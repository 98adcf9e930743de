//! A server under test, and what is known of it besides its socket.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::stat::fstat;
use outboard_vfio_user::wire::{Command, Version};

use super::client::PATIENCE;
use super::{Checked, Client, Engine, failed, holds};

/// A server under test.
pub struct Subject<'a> {
    connect: Box<dyn Fn() -> io::Result<UnixStream> + 'a>,
    process: Option<Process>,
    engine: Option<Box<dyn Engine + 'a>>,
}

impl<'a> Subject<'a> {
    /// A server that `connect` gives fresh connections to. One client at a time is connected, but for the check
    /// of two.
    pub fn new(connect: impl Fn() -> io::Result<UnixStream> + 'a) -> Self {
        Self { connect: Box::new(connect), process: None, engine: None }
    }

    /// The server's process, whose descriptors and mappings can then be counted.
    pub fn with_process(self, id: u32) -> Self {
        Self { process: Some(Process(id)), ..self }
    }

    /// How to make the device use memory.
    pub fn with_engine(self, engine: impl Engine + 'a) -> Self {
        Self { engine: Some(Box::new(engine)), ..self }
    }

    pub(super) fn engine(&self) -> Option<&(dyn Engine + 'a)> {
        self.engine.as_deref()
    }

    /// A client that has not said a word.
    pub fn connect(&self) -> Checked<Client> {
        match (self.connect)() {
            Ok(stream) => Client::new(stream),
            Err(error) => failed("connect", "a connection", error.to_string()),
        }
    }

    /// A client past VERSION.
    pub fn open(&self) -> Checked<Client> {
        self.open_with(&Version::proposal())
    }

    /// A client past VERSION, with capabilities of its own.
    pub fn open_with(&self, version: &Version) -> Checked<Client> {
        let mut client = self.connect()?;
        client.call(&Command::Version(version.clone()), &[])?;
        Ok(client)
    }

    /// Watches what the server keeps of `file`. Without its process there is nothing to see.
    pub fn watch(&self, file: &impl AsFd) -> Watch {
        let id = Identity::of(file);
        let count =
            |count: fn(Process, &Identity) -> usize| self.process.map_or(0, |process| count(process, &id));
        let (descriptors, mappings) = (count(Process::descriptors_of), count(Process::mappings_of));
        Watch { process: self.process, id, descriptors, mappings }
    }

    /// Watches what the server keeps of `file`, of which it has one descriptor now.
    pub fn watch_held(&self, file: &impl AsFd) -> Watch {
        let watch = self.watch(file);
        Watch { descriptors: watch.descriptors.saturating_sub(1), ..watch }
    }
}

/// What a process has open.
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

/// What tells one file from another, or one eventfd.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Identity {
    File { device: u64, inode: u64 },
    Eventfd(String),
}

impl Identity {
    fn of(file: &impl AsFd) -> Self {
        let descriptor = file.as_fd().as_raw_fd();
        match eventfd_id(&PathBuf::from(format!("/proc/self/fdinfo/{descriptor}"))) {
            Some(id) => Self::Eventfd(id),
            None => {
                let stat = fstat(file).expect("an open descriptor");
                Self::File { device: stat.st_dev, inode: stat.st_ino }
            }
        }
    }
}

fn eventfd_id(fdinfo: &PathBuf) -> Option<String> {
    let text = fs::read_to_string(fdinfo).ok()?;
    text.lines().find(|line| line.starts_with("eventfd-id")).map(str::to_owned)
}

impl Process {
    /// The one that this runs in.
    pub fn this() -> Self {
        Self(std::process::id())
    }

    /// How many of its descriptors are of that file or eventfd.
    pub fn descriptors(self, file: &impl AsFd) -> usize {
        self.descriptors_of(&Identity::of(file))
    }

    /// How many of its mappings are of that memfd.
    pub fn mappings(self, file: &impl AsFd) -> usize {
        self.mappings_of(&Identity::of(file))
    }

    fn path(self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.0))
    }

    fn descriptors_of(self, id: &Identity) -> usize {
        use std::os::unix::fs::MetadataExt;
        let entries = fs::read_dir(self.path("fd")).into_iter().flatten().flatten();
        entries
            .filter(|entry| match id {
                Identity::Eventfd(_) => {
                    let info = self.path("fdinfo").join(entry.file_name());
                    eventfd_id(&info).is_some_and(|other| Identity::Eventfd(other) == *id)
                }
                Identity::File { device, inode } => {
                    fs::metadata(entry.path()).is_ok_and(|file| (file.dev(), file.ino()) == (*device, *inode))
                }
            })
            .count()
    }

    fn mappings_of(self, id: &Identity) -> usize {
        let Identity::File { inode, .. } = id else { return 0 };
        let maps = fs::read_to_string(self.path("maps")).unwrap_or_default();
        // Address, permissions, offset, device, inode. Anonymous files of one kind share a device.
        let same = |line: &&str| {
            line.contains("/memfd:") && line.split_whitespace().nth(4) == Some(inode.to_string().as_str())
        };
        maps.lines().filter(same).count()
    }
}

/// What the server keeps of a file, besides what there was when the watch began.
pub struct Watch {
    process: Option<Process>,
    id: Identity,
    descriptors: usize,
    mappings: usize,
}

impl Watch {
    /// How many descriptors of the file there are more than at the beginning, where that can be seen.
    pub fn descriptors(&self) -> Option<usize> {
        Some(self.process?.descriptors_of(&self.id).saturating_sub(self.descriptors))
    }

    /// Waits until the server has this many descriptors and mappings of the file more than at the beginning.
    pub fn settles(&self, descriptors: usize, mappings: usize, when: &str) -> Checked {
        let Some(process) = self.process else { return Ok(()) };
        let begin = Instant::now();
        loop {
            let kept = (
                process.descriptors_of(&self.id).saturating_sub(self.descriptors),
                process.mappings_of(&self.id).saturating_sub(self.mappings),
            );
            if kept == (descriptors, mappings) {
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                let expected = format!("{descriptors} descriptors and {mappings} mappings in the server");
                return holds(false, when, &expected, kept);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
