//! The client: a device in another process, as method calls.
//!
//! Any thread may call any method. The server's DMA_READ and DMA_WRITE are served from the memory that
//! [`Client::dma_map`] registered, by a thread of the client's, or by a caller that waits for its reply; where the
//! server offers a twin socket, by a thread that does nothing else.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::counters::Messages;
use crate::wire::{Capabilities, Command, IovaRanges, Reply, TwinSocket, Version};

mod access;
mod connection;
mod device;
mod error;
mod memory;
mod reading;
mod region;
mod twin;

pub use access::Delivery;
pub use connection::Disconnect;
use connection::{Answer, Connection, Patience};
pub use error::ClientError;
pub use memory::{Map, Memory, Sharing};
pub use region::{AreaError, Region};

/// How a client behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long to wait for a connection, and for each answer. QEMU waits for 5 s.
    pub timeout: Duration,
    /// Whether to ask for a second socket for the server's DMA_READ and DMA_WRITE.
    pub twin_socket: bool,
    /// Whether to say that the guest writes the MSI-X table itself. What comes of it says [`Client::msix_direct`].
    pub msix_direct: bool,
    /// Whether to ask for [`Client::iova_ranges`].
    pub iova_ranges: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(5), twin_socket: true, msix_direct: false, iova_ranges: false }
    }
}

/// A connection to a device's server. Clones share it; it ends with the last one.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    timeout: Duration,
}

#[derive(Debug)]
struct Shared {
    connection: Arc<Connection>,
    capabilities: Capabilities,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.connection.end(Disconnect::Here);
        for thread in self.threads.drain(..) {
            // It has no panics of its own; one elsewhere was reported already.
            let _ = thread.join();
        }
    }
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`ClientError::Connect`], and whatever VERSION ends in.
    pub fn connect(path: &Path, options: Options) -> Result<Self, ClientError> {
        let stream = connect_within(path, options.timeout)
            .map_err(|source| ClientError::Connect { path: path.to_owned(), source })?;
        Self::new(stream, options)
    }

    /// Takes over a stream to a server and negotiates.
    ///
    /// # Errors
    /// Whatever VERSION ends in.
    pub fn new(stream: UnixStream, options: Options) -> Result<Self, ClientError> {
        let connection = Arc::new(Connection::new(stream, options.timeout)?);
        let capabilities = Capabilities::default();
        let mut shared = Shared { connection: connection.clone(), capabilities, threads: Vec::new() };
        shared.threads.push(spawn("vfio-user client", connection.clone(), Connection::attend)?);
        let twin = shared.negotiate(options)?;
        if let Some(twin) = twin {
            connection.set_twin(twin)?;
            shared.threads.push(spawn("vfio-user twin", connection, Connection::attend_twin)?);
        }
        Ok(Self { shared: Arc::new(shared), timeout: options.timeout })
    }

    /// The same connection for a caller that waits this long for each answer. A server that takes no message for as
    /// long as [`Options::timeout`] loses the connection, for less it does not.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { shared: self.shared.clone(), timeout }
    }

    /// What the server can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    /// Whether interrupts work when the guest writes the MSI-X table itself, if that was proposed. `None`: the server
    /// does not know the question, so the client writes the table.
    pub fn msix_direct(&self) -> Option<bool> {
        self.capabilities().msix_direct
    }

    /// Where DMA may lie: the first and the last address of each range, none if it does not matter. `None`: nobody
    /// asked, or the server does not know the question.
    pub fn iova_ranges(&self) -> Option<&[(u64, u64)]> {
        match &self.capabilities().iova_ranges {
            Some(IovaRanges::Usable(ranges)) => Some(ranges),
            Some(IovaRanges::Asked(_)) | None => None,
        }
    }

    /// Whether the server's commands come over a socket of their own.
    pub fn has_twin_socket(&self) -> bool {
        self.connection().has_twin()
    }

    /// The commands that we sent.
    pub fn sent(&self) -> &Messages {
        &self.connection().sent
    }

    /// The commands that the server sent.
    pub fn received(&self) -> &Messages {
        &self.connection().received
    }

    /// Why the connection is over, if it is.
    pub fn disconnected(&self) -> Option<Disconnect> {
        self.connection().ended()
    }

    /// Ends the connection; whoever waits gets [`ClientError::Disconnected`].
    pub fn close(&self) {
        self.connection().end(Disconnect::Here);
    }

    fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    /// Sends a question whose answer may come with descriptors.
    fn ask(&self, command: &Command<'_>) -> Result<Answer, ClientError> {
        self.connection().call(command, &[], Patience::new(self.timeout))
    }

    fn call(&self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> Result<Answer, ClientError> {
        self.connection().call(command, descriptors, Patience::new(self.timeout))?.alone()
    }

    /// Sends many commands before the first is answered, and gives all answers.
    fn call_batch<'a>(
        &self,
        commands: impl Iterator<Item = Result<(Command<'a>, Option<BorrowedFd<'a>>), ClientError>>,
    ) -> Vec<Result<Answer, ClientError>> {
        let answers = self.connection().call_batch(commands, self.timeout).into_iter();
        answers.map(|answer| answer.and_then(Answer::alone)).collect()
    }

    /// Sends a command whose reply says no more than "done".
    fn done(&self, command: &Command<'_>, descriptors: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.call(command, descriptors)?.reply().map(drop)
    }

    /// Sends a command that is not answered.
    fn post(&self, command: &Command<'_>) -> Result<(), ClientError> {
        self.connection().post(command, Patience::new(self.timeout))
    }
}

impl Shared {
    /// Learns what the server can do; gives its twin socket, if it has one for us.
    fn negotiate(&mut self, options: Options) -> Result<Option<UnixStream>, ClientError> {
        let mut proposal = Version::proposal();
        proposal.capabilities.write_multiple = Some(true);
        if options.twin_socket {
            proposal.capabilities.twin_socket = Some(TwinSocket { supported: true, fd_index: None });
        }
        proposal.capabilities.msix_direct = options.msix_direct.then_some(true);
        proposal.capabilities.iova_ranges = options.iova_ranges.then_some(IovaRanges::Asked(true));
        let highest = proposal.minor;
        let patience = Patience::new(options.timeout);
        let mut answer = self.connection.call(&Command::Version(proposal), &[], patience)?;
        let descriptors = answer.take_descriptors();
        let Reply::Version(version) = answer.reply()? else { return Err(answer.mismatch()) };
        if version.minor > highest {
            return Err(answer.mismatch());
        }
        self.capabilities = version.capabilities;
        let count = descriptors.len();
        match self.capabilities.twin_socket.filter(|twin| twin.supported) {
            Some(twin) if options.twin_socket => twin_socket(twin, descriptors).map(Some),
            Some(_) => Err(ClientError::TwinSocket { reason: "nobody asked for it" }),
            None if count > 0 => Err(answer.unwanted(count, 0)),
            None => Ok(None),
        }
    }
}

/// The one of the descriptors that is said to be the twin socket.
fn twin_socket(twin: TwinSocket, descriptors: Vec<OwnedFd>) -> Result<UnixStream, ClientError> {
    let wrong = |reason| ClientError::TwinSocket { reason };
    let (index, count) =
        (twin.fd_index.ok_or(wrong("it is not said which descriptor it is"))?, descriptors.len());
    let descriptor = descriptors
        .into_iter()
        .nth(usize::try_from(index).unwrap_or(usize::MAX))
        .ok_or(wrong("the descriptor did not come"))?;
    if count > 1 {
        return Err(wrong("other descriptors came along"));
    }
    twin::stream(descriptor).ok_or(wrong("the descriptor is no stream socket"))
}

fn spawn(
    name: &str,
    connection: Arc<Connection>,
    run: fn(&Connection),
) -> Result<JoinHandle<()>, ClientError> {
    Ok(thread::Builder::new().name(name.to_owned()).spawn(move || run(&connection))?)
}

/// connect(2) that gives up: a server with a client may let others queue up for ever.
fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let milliseconds = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
    setsockopt(&stream, sockopt::SendTimeout, &TimeVal::milliseconds(milliseconds))?;
    connect(stream.as_fd().as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(stream.into())
}

#[cfg(test)]
mod tests;
