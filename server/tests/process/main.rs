//! The real program: what a user gets wrong, clients that come and go, signals.

#![expect(unsafe_code, reason = "passes a descriptor on under a number of its choice")]

use std::fs;
use std::io::{BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outboard_vfio_user::client::{Client, Delivery, Memory, Options, Sharing};
use outboard_vfio_user::dma::{Access, Iova};
use outboard_vfio_user::memory::SharedMemory;

mod serve;

const PROGRAM: &str = env!("CARGO_BIN_EXE_outboard-server");

fn nvme(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("nvme").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A server that listens.
struct Server {
    process: Child,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let process =
            nvme(&[&["--socket-path", socket.to_str().unwrap()], arguments].concat()).spawn().unwrap();
        eventually("an answer at the socket", || UnixStream::connect(&socket).is_ok());
        Self { process, socket, _directory: directory }
    }

    fn connect(&self) -> Client {
        Client::connect(&self.socket, Options::default()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).unwrap();
    }

    /// Open descriptors, and mappings of files, as clients' memory is (the allocator's and the stacks come and go).
    fn resources(&self) -> (usize, usize) {
        let proc = Path::new("/proc").join(self.process.id().to_string());
        let maps = fs::read_to_string(proc.join("maps")).unwrap();
        let maps = maps.lines().filter(|line| line.split_whitespace().nth(4) != Some("0")).count();
        (fs::read_dir(proc.join("fd")).unwrap().count(), maps)
    }

    /// `resources` with one idle client, once what earlier clients held has had its time to go: ten looks alike.
    fn settled(&self) -> (usize, usize) {
        let mut client = None;
        eventually("a welcome", || {
            client = Client::connect(&self.socket, Options::default()).ok();
            client.is_some()
        });
        let (mut seen, mut alike) = (self.resources(), 0);
        eventually("ten looks alike", || {
            let now = self.resources();
            alike = if now == seen { alike + 1 } else { 0 };
            seen = now;
            alike == 10
        });
        seen
    }

    /// Ends it by SIGTERM; what it printed.
    fn stop(mut self) -> String {
        self.signal(Signal::SIGTERM);
        let status = self.process.wait().unwrap();
        assert_eq!(status.code(), Some(0));
        assert!(!self.socket.exists(), "the socket's file goes with the server");
        let mut text = String::new();
        self.process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within 20 s");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a server that must not start: its complaint.
fn complaint(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = nvme(arguments).output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{arguments:?}");
    if status.code() == Some(1) {
        assert_eq!(text.trim_end().lines().count(), 1, "one line for {arguments:?}, not: {text}");
    }
    text
}

#[test]
fn each_mistake_earns_a_line_that_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_string();
    let (socket, file, odd) = (path("s"), path("file"), path("odd"));
    fs::write(&file, "precious").unwrap();
    fs::write(&odd, [0; 1000]).unwrap();
    let namespace = |spec: String| format!("--namespace={spec}");
    let live = UnixListener::bind(path("live")).unwrap();
    let cases: Vec<(Vec<String>, &str)> = vec![
        (
            vec!["--socket-path".into(), socket.clone(), namespace(format!("file:{}", path("none")))],
            "truncate",
        ),
        (
            vec!["--socket-path".into(), socket.clone(), namespace(format!("file:{}", path("")))],
            "is a directory",
        ),
        (vec!["--socket-path".into(), socket.clone(), namespace(format!("file:{odd}"))], "block-size"),
        (vec!["--socket-path".into(), socket.clone(), namespace("tape:1G".into())], "file:PATH"),
        (vec!["--socket-path".into(), socket.clone(), namespace("ram:lots".into())], "not a size"),
        (vec!["--socket-path".into(), path("live"), namespace("null:1M".into())], "running server"),
        (vec!["--socket-path".into(), file.clone(), namespace("null:1M".into())], "not a socket"),
        (vec!["--socket-path".into(), path(&"x".repeat(108)), namespace("null:1M".into())], "107"),
        (vec!["--socket-path".into(), path("no/dir"), namespace("null:1M".into())], "does not exist"),
        (vec!["--fd".into(), "77".into(), namespace("null:1M".into())], "Descriptor 77"),
        (vec![namespace("null:1M".into())], "--socket-path"),
        (vec!["--socket-path".into(), socket.clone()], "--namespace"),
    ];
    for (arguments, expected) in &cases {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let text = complaint(&arguments);
        assert!(text.contains(expected), "{arguments:?} is answered: {text}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    drop(live);
}

#[test]
fn an_image_in_use_is_refused_both_to_us_and_to_qemu() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let image = directory.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let namespace = format!("--namespace=file:{}", image.to_str().unwrap());
    let server = Server::start(&[&namespace]);
    let other = directory.path().join("s2");
    let text = complaint(&["--socket-path", other.to_str().unwrap(), &namespace]);
    assert!(text.contains("in use by outboard-server"), "{text}");
    // qemu-utils is on the machines that we are developed on; elsewhere our own lock test stands alone.
    if let Ok(Output { status, stderr, .. }) =
        Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&image).output()
    {
        let text = String::from_utf8_lossy(&stderr);
        assert!(!status.success() && text.contains("lock"), "qemu-io ended with {status}: {text}");
    }
    server.stop();
}

#[test]
fn a_killed_server_is_replaced_at_once() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let image = directory.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let namespace = format!("--namespace=file:{}", image.to_str().unwrap());
    let mut server = Server::start(&[&namespace]);
    server.process.kill().unwrap();
    server.process.wait().unwrap();
    assert!(server.socket.exists(), "SIGKILL leaves the socket's file");
    let process = nvme(&["--socket-path", server.socket.to_str().unwrap(), &namespace]).spawn().unwrap();
    server.process = process;
    eventually("an answer", || Client::connect(&server.socket, Options::default()).is_ok());
    server.stop();
}

#[test]
fn one_client_at_a_time_and_the_next_when_it_left() {
    let server = Server::start(&["--namespace=ram:1M"]);
    let first = server.connect();
    let mut second = UnixStream::connect(&server.socket).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(second.read(&mut [0; 16]).unwrap(), 0, "a second one is refused at once");
    assert!(first.device_info().is_ok(), "and the first is not disturbed");
    drop(first);
    eventually("a welcome", || Client::connect(&server.socket, Options::default()).is_ok());
    server.stop();
}

/// However clients leave: orderly, in the middle of a message, with a command unanswered, with memory mapped.
#[test]
fn nothing_is_left_of_clients_that_came_and_went() {
    let server = Server::start(&["--namespace=ram:1M"]);
    let mut before = None;
    for round in 0..40 {
        match round % 4 {
            0 => {
                let client = server.connect();
                let memory = SharedMemory::new("guest", 1 << 20).unwrap();
                let memory = Memory { file: memory.as_fd(), offset: 0, length: 1 << 20 };
                client.dma_map(Iova(0), memory, Access::ReadWrite, Sharing::Descriptor).unwrap();
            }
            1 => drop(server.connect()),
            2 => {
                let mut stream = UnixStream::connect(&server.socket).unwrap();
                stream.write_all(&[1, 0, 1, 0, 200, 0, 0]).unwrap();
            }
            _ => {
                let client = server.connect();
                client.reset().unwrap();
            }
        }
        if round == 3 {
            before = Some(server.settled());
        }
    }
    let before = before.unwrap();
    eventually("no more descriptors and mappings than before", || {
        let now = server.settled();
        now.0 <= before.0 && now.1 <= before.1
    });
    server.stop();
}

/// Conformance point 56: a client that takes its memory away loses its session, and nobody else anything.
#[test]
fn a_client_that_shrinks_its_memory_loses_its_session_only() {
    let server = Server::start(&["--namespace=ram:1M", "--doorbells=posted"]);
    let client = server.connect();
    let file = memfd_create("guest", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&file, 1 << 20).unwrap();
    let memory = Memory { file: file.as_fd(), offset: 0, length: 1 << 20 };
    client.dma_map(Iova(0), memory, Access::ReadWrite, Sharing::Descriptor).unwrap();
    let write = |offset: u64, bytes: &[u8]| client.region_write(0, offset, bytes, Delivery::Replied);
    // AQA, ASQ, ACQ, CC: two queues of 32 entries, and CC.EN.
    write(0x24, &0x001f_001f_u32.to_le_bytes()).unwrap();
    write(0x28, &0x1000_u64.to_le_bytes()).unwrap();
    write(0x30, &0x2000_u64.to_le_bytes()).unwrap();
    write(0x14, &0x0046_0001_u32.to_le_bytes()).unwrap();
    eventually("CSTS.RDY", || {
        let mut status = [0; 4];
        client.region_read(0, 0x1c, &mut status).unwrap();
        status[0] == 1
    });
    nix::unistd::ftruncate(&file, 0).unwrap();
    // The doorbell of the admin queue: the drive reads an entry that is not there any more.
    let _ = write(0x1000, &1_u32.to_le_bytes());
    eventually("the end of the session", || client.disconnected().is_some() || client.device_info().is_err());
    eventually("a welcome", || Client::connect(&server.socket, Options::default()).is_ok());
    server.stop();
}

#[test]
fn counters_are_printed_on_request_and_at_the_end() {
    let mut server = Server::start(&["--namespace=ram:1M", "--doorbells=posted"]);
    let client = server.connect();
    for _ in 0..5 {
        client.region_read(0, 0x1c, &mut [0; 4]).unwrap();
    }
    server.signal(Signal::SIGUSR1);
    let mut text = String::new();
    let mut stdout = server.process.stdout.take().unwrap();
    while !text.contains("counter resets") {
        let mut bytes = [0; 4096];
        let count = stdout.read(&mut bytes).unwrap();
        text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
    }
    assert!(text.contains("counter messages.region_read 5\n"), "{text}");
    assert!(text.lines().all(|line| line.split(' ').count() == 3), "{text}");
    client.region_read(0, 0x1c, &mut [0; 4]).unwrap();
    server.process.stdout = Some(stdout);
    drop(client);
    assert!(server.stop().contains("counter messages.region_read 6\n"));
}

/// Whoever read what we print may be gone; that costs the text, not the clients.
#[test]
fn nobody_has_to_listen_to_what_it_says() {
    let mut server = Server::start(&["--namespace=ram:1M", "-v"]);
    drop(server.process.stdout.take());
    drop(server.process.stderr.take());
    let client = server.connect();
    // Something for each: counters, and a warning.
    server.signal(Signal::SIGUSR1);
    let mut second = UnixStream::connect(&server.socket).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(second.read(&mut [0; 16]).unwrap(), 0);
    assert!(client.device_info().is_ok());
    server.signal(Signal::SIGTERM);
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

#[test]
fn a_signal_ends_it_with_a_client_connected() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut server = Server::start(&["--namespace=ram:1M"]);
        let client = server.connect();
        server.signal(signal);
        assert_eq!(server.process.wait().unwrap().code(), Some(0), "{signal}");
        assert!(!server.socket.exists());
        assert!(client.device_info().is_err(), "the client is told");
    }
}

/// A log in a file has no colours in it, unless asked for.
#[test]
fn a_log_that_no_terminal_shows_is_plain() {
    let mut server = Server::start(&["--namespace=ram:1M", "-v"]);
    let mut log = server.process.stderr.take().unwrap();
    server.stop();
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert!(text.contains("ready") && !text.contains('\x1b'), "{text}");
}

#[test]
fn a_descriptor_in_place_of_a_path() {
    for connected in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let passed = if connected { theirs.as_raw_fd() } else { listener.as_raw_fd() };
        let mut command = nvme(&["--fd", "9", "--namespace=ram:1M"]);
        let duplicate = move || {
            // SAFETY: dup2 is async-signal-safe, as everything between fork and exec has to be.
            if unsafe { nix::libc::dup2(passed, 9) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        };
        // SAFETY: the closure only calls dup2.
        unsafe { command.pre_exec(duplicate) };
        let mut process = command.spawn().unwrap();
        drop(theirs);
        let client = if connected {
            Client::new(ours, Options::default()).unwrap()
        } else {
            Client::connect(&path, Options::default()).unwrap()
        };
        assert_eq!(client.device_info().unwrap().regions, 9);
        drop(client);
        if !connected {
            kill(Pid::from_raw(process.id() as i32), Signal::SIGTERM).unwrap();
        }
        // With a connected descriptor the server ends when its client has left.
        assert_eq!(process.wait().unwrap().code(), Some(0));
    }
}
