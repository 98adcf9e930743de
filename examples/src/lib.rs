//! What every backend program has: a command line that says where its clients come from, a log, and an end when it
//! is told to (SIGTERM, SIGINT). The devices themselves are the programs in `bin/`, a file each.

use std::io::{IsTerminal, stderr};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use nix::sys::signalfd::SignalFd;
use outboard_vfio_user::device::Device;
use outboard_vfio_user::listen::{Source, termination};
use outboard_vfio_user::memory::guard;
use tracing_subscriber::EnvFilter;

/// Where clients come from: to be flattened into a program's arguments.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct Socket {
    /// Listen on this UNIX socket. A stale socket file is replaced.
    #[arg(long, value_name = "PATH")]
    socket_path: Option<PathBuf>,
    /// Use this inherited descriptor: a socket that listens, or one that is connected to the client.
    #[arg(long, value_name = "FDNUM")]
    fd: Option<RawFd>,
}

/// A program that is about to serve.
#[derive(Debug)]
pub struct Backend {
    source: Source,
    stop: SignalFd,
}

impl Socket {
    /// Opens the socket and the log. To be called before any thread is started, so that signals come here.
    ///
    /// # Errors
    /// A line that says what is wrong with the socket.
    pub fn open(self) -> anyhow::Result<Backend> {
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(stderr)
            .with_ansi(stderr().is_terminal())
            // It would panic when nobody reads the log any more.
            .log_internal_errors(false)
            .init();
        // A client that shrinks its memory under a device loses its session, and nobody else anything.
        guard::install().context("The SIGBUS handler cannot be installed")?;
        let stop = termination().context("Signals cannot be waited for")?;
        let source = match (self.socket_path, self.fd) {
            (Some(path), _) => Source::bind(&path)?,
            (None, Some(fd)) => Source::inherited(fd)?,
            (None, None) => anyhow::bail!("Say --socket-path or --fd"),
        };
        Ok(Backend { source, stop })
    }
}

impl Backend {
    /// Serves `device` until SIGTERM or SIGINT, or until the one client of `--fd` has left.
    ///
    /// # Errors
    /// What the socket says.
    pub fn serve(self, device: &dyn Device) -> anyhow::Result<()> {
        self.source.serve(device, &Arc::default(), &self.stop).context("No more clients can be served")
    }
}

/// The guide's own programs are compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/writing-a-device.md")]
struct Guide;
