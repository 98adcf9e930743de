//! The real program as a process.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// outboard-server, listening.
pub struct Server {
    process: Child,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Server {
    /// Starts `outboard-server nvme` with these arguments, and waits until it listens.
    ///
    /// # Panics
    /// If it does not, within 20 s.
    pub fn nvme(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let socket = directory.path().join("s");
        let mut command = Command::new(program());
        command.arg("nvme").arg("--socket-path").arg(&socket).args(arguments).stdin(Stdio::null());
        let process = command.spawn().expect("outboard-server starts");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            assert!(Instant::now() < deadline, "outboard-server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { process, socket, _directory: directory }
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.socket
    }

    /// A connection.
    ///
    /// # Errors
    /// What connect(2) says.
    pub fn connect(&self) -> std::io::Result<UnixStream> {
        UnixStream::connect(&self.socket)
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The program of this build. It belongs to another package, so cargo may not have built it for us.
///
/// # Panics
/// If it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let this = std::env::current_exe().expect("a path");
        let profile = this.ancestors().nth(2).expect("target/PROFILE/deps");
        let mut build = Command::new(env!("CARGO"));
        build.args([
            "build",
            "--locked",
            "--quiet",
            "--package",
            "outboard-server",
            "--bin",
            "outboard-server",
        ]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        build.arg("--target-dir").arg(profile.parent().expect("target"));
        assert!(build.status().expect("cargo").success(), "outboard-server does not build");
        profile.join("outboard-server")
    })
}
