//! A program under test, and what all of them have in common.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outboard_vfio_user::client::{Client, Delivery, Options};
use outboard_vfio_user::device::CONFIG;
use outboard_vfio_user::wire::{IrqAction, IrqData, IrqIndex, SetIrqs};

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A device server that listens. Its standard output goes to `output`.
pub(crate) struct Program {
    process: Child,
    socket: PathBuf,
    output: PathBuf,
    _directory: tempfile::TempDir,
}

impl Program {
    pub(crate) fn start(path: &str, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (socket, output) = (directory.path().join("s"), directory.path().join("output"));
        let process = Command::new(path)
            .arg("--socket-path")
            .arg(&socket)
            .args(arguments)
            .env("RUST_LOG", "warn")
            .stdin(Stdio::piped())
            .stdout(std::fs::File::create(&output).unwrap())
            .spawn()
            .unwrap();
        eventually("the socket is there", || UnixStream::connect(&socket).is_ok());
        Self { process, socket, output, _directory: directory }
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(&self.socket, Options::default()).unwrap()
    }

    pub(crate) fn input(&mut self) -> &mut ChildStdin {
        self.process.stdin.as_mut().unwrap()
    }

    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap()
    }

    /// As an operator ends it.
    pub(crate) fn terminate(mut self) {
        kill(Pid::from_raw(self.process.id() as i32), Signal::SIGTERM).unwrap();
        assert_eq!(wait(&mut self.process).code(), Some(0));
        assert!(!self.socket.exists(), "the socket's file goes with the program");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn wait(process: &mut Child) -> ExitStatus {
    let mut status = None;
    eventually("the program ends", || {
        status = process.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

pub(crate) fn read<const LENGTH: usize>(client: &Client, region: u32, offset: u64) -> [u8; LENGTH] {
    let mut bytes = [0xee; LENGTH];
    client.region_read(region, offset, &mut bytes).unwrap();
    bytes
}

pub(crate) fn write(client: &Client, region: u32, offset: u64, bytes: &[u8]) {
    client.region_write(region, offset, bytes, Delivery::Replied).unwrap();
}

/// The interrupt pin, as a VMM has it.
pub(crate) struct Pin<'a> {
    client: &'a Client,
    eventfd: EventFd,
}

impl<'a> Pin<'a> {
    pub(crate) fn bind(client: &'a Client) -> Self {
        let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap();
        client.bind_vectors(IrqIndex::INTX, 0, &[eventfd.as_fd()]).unwrap();
        Self { client, eventfd }
    }

    /// Waits until the device interrupts. It masks itself then, until [`Pin::unmask`].
    pub(crate) fn interrupts(&self) {
        let mut descriptors = [PollFd::new(self.eventfd.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut descriptors, PollTimeout::try_from(PATIENCE).unwrap()).unwrap();
        assert_eq!(ready, 1, "no interrupt within {PATIENCE:?}");
        assert_eq!(self.eventfd.read(), Ok(1));
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.eventfd.read().is_err()
    }

    pub(crate) fn unmask(&self) {
        let (index, data, action) = (IrqIndex::INTX, IrqData::None, IrqAction::Unmask);
        self.client.set_irqs(SetIrqs { index, start: 0, count: 1, data, action }, &[]).unwrap();
    }
}

/// Sizes BAR `index` as firmware does: what reads back after all ones were written.
pub(crate) fn size_bar(client: &Client, index: u64) -> u32 {
    let register = 0x10 + 4 * index;
    write(client, CONFIG, register, &[0xff; 4]);
    let sized = u32::from_le_bytes(read(client, CONFIG, register));
    write(client, CONFIG, register, &[0; 4]);
    sized
}

/// Passes an end of a socket pair on as `--fd`.
fn start_connected(path: &str, theirs: OwnedFd) -> Child {
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let fd = theirs.as_raw_fd().to_string();
    Command::new(path).args(["--fd", &fd]).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_connected_descriptor_ends_with_its_client() {
    for path in [env!("CARGO_BIN_EXE_gpio"), env!("CARGO_BIN_EXE_serial")] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut process = start_connected(path, theirs.into());
        let client = Client::new(ours, Options::default()).unwrap();
        assert_eq!(client.device_info().unwrap().regions, 9);
        drop(client);
        assert_eq!(wait(&mut process).code(), Some(0));
    }
}

#[test]
fn a_mistake_earns_a_line_that_says_what_to_do() {
    for path in [env!("CARGO_BIN_EXE_gpio"), env!("CARGO_BIN_EXE_serial")] {
        let complaint = |arguments: &[&str]| {
            let output = Command::new(path).args(arguments).stdin(Stdio::null()).output().unwrap();
            assert!(!output.status.success());
            String::from_utf8(output.stderr).unwrap()
        };
        assert!(complaint(&["--socket-path", "/no/such/directory/s"]).contains("create it"));
        assert!(complaint(&["--fd", "0"]).contains("UNIX stream socket"));
        assert!(complaint(&[]).contains("--socket-path"));
    }
}
