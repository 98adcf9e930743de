//! The server as a child process.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outboard_vfio_user::client::{Client, ClientError};

use super::{DemoError, ServerDoorbells};
use crate::bench;
use crate::drive::DriveError;
use crate::limits;

/// How long to wait between two looks.
const INTERVAL: Duration = Duration::from_millis(10);

/// A server that runs; it is killed if it is dropped before it is stopped.
#[derive(Debug)]
pub(super) struct Server(Child);

impl Server {
    pub(super) fn start(
        program: &Path,
        socket: &Path,
        image: &Path,
        doorbells: ServerDoorbells,
    ) -> Result<Self, DemoError> {
        let mut namespace = std::ffi::OsString::from("file:");
        namespace.push(image);
        namespace.push(",block-size=4096");
        let doorbells = doorbells.to_possible_value().map(|value| value.get_name().to_owned());
        let child = Command::new(program)
            .arg("nvme")
            .arg("--socket-path")
            .arg(socket)
            .arg("--namespace")
            .arg(namespace)
            .arg("--doorbells")
            .arg(doorbells.unwrap_or_default())
            // Its counters, which it prints at the end.
            .stdout(Stdio::null())
            .spawn()
            .map_err(DemoError::Start)?;
        Ok(Self(child))
    }

    /// Connects as soon as the server takes clients.
    pub(super) fn connect(&self, socket: &Path) -> Result<Arc<Client>, DemoError> {
        let start = Instant::now();
        loop {
            match bench::connect(socket) {
                Err(DriveError::Client(ClientError::Connect { .. })) if start.elapsed() < limits::SERVER => {
                    self.check_alive()?;
                    thread::sleep(INTERVAL);
                }
                result => return Ok(result?),
            }
        }
    }

    /// Looks, without taking the exit status away from [`Server::stop`].
    fn check_alive(&self) -> Result<(), DemoError> {
        use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid()), flags) {
            Ok(WaitStatus::StillAlive) => Ok(()),
            _ => Err(DemoError::Server("ended before it took a client".to_owned())),
        }
    }

    /// Has it end in good order.
    pub(super) fn stop(mut self) -> Result<(), DemoError> {
        // Fails only where it has ended already, which the wait shows.
        let _ = kill(self.pid(), Signal::SIGTERM);
        let start = Instant::now();
        while start.elapsed() < limits::SERVER {
            match self.0.try_wait() {
                Ok(Some(status)) => return judge(status),
                Ok(None) => thread::sleep(INTERVAL),
                Err(error) => return Err(DemoError::Server(format!("cannot be waited for: {error}"))),
            }
        }
        Err(DemoError::Server(format!("did not end within {:?} of SIGTERM", limits::SERVER)))
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.0.id()).unwrap_or(i32::MAX))
    }
}

fn judge(status: ExitStatus) -> Result<(), DemoError> {
    if status.success() { Ok(()) } else { Err(DemoError::Server(format!("failed: {status}"))) }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
