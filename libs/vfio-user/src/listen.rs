//! The socket that clients connect to, and a program that serves them there.

#![expect(unsafe_code, reason = "takes over a descriptor that is named by number")]

use std::error::Error;
use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{
    self, AddressFamily, Backlog, SockFlag, SockType, SockaddrLike, SockaddrStorage, UnixAddr, bind,
    getsockname, getsockopt, socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};

use crate::counters::Messages;
use crate::device::Device;
use crate::server::serve;

/// sun_path holds 108 bytes, the NUL included (unix(7)).
const PATH_MAX: usize = 107;
/// How long we wait for others that replace a stale socket file in the same directory.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// Why there is no socket to listen on: what is wrong, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Longer than a UNIX address.
    #[error(
        "The socket's path has {length} bytes, and {PATH_MAX} is the most; choose a shorter one, or a path relative to the working directory"
    )]
    TooLong {
        /// In bytes.
        length: usize,
    },
    /// A server answers there.
    #[error("The socket {} is in use by a running server; stop it, or choose another path", path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// A file that is not ours to replace.
    #[error("{} exists and is not a socket; remove it, or choose another path", path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// No directory.
    #[error("The directory of the socket {} does not exist; create it, or choose another path", path.display())]
    NoDirectory {
        /// Where.
        path: PathBuf,
    },
    /// No permission.
    #[error("No permission to create the socket {}; choose a directory that this user may write to", path.display())]
    Permission {
        /// Where.
        path: PathBuf,
    },
    /// Anything else about the path.
    #[error("The socket {} cannot be created: {source}", path.display())]
    Other {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `--fd` names no open UNIX stream socket.
    #[error(
        "Descriptor {fd} is not an open UNIX stream socket; pass one that listens, or one that is connected to the client"
    )]
    Descriptor {
        /// Which.
        fd: RawFd,
    },
}

/// Where clients come from.
#[derive(Debug)]
pub enum Source {
    /// A socket that listens, and its file if that is ours. The file has to go first: while it is there,
    /// somebody answers, and so another server does not take it for a stale one and replace it meanwhile.
    Listener {
        /// Removed when dropped.
        file: Option<SocketFile>,
        /// For clients to connect to.
        socket: UnixListener,
    },
    /// The one client there will be.
    Client(UnixStream),
}

/// A socket file that is ours: removed when dropped, unless another has taken its place. (An inode is not used
/// anew while its socket is open.)
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Source {
    /// Listens at `path`. A socket file at which nobody listens is replaced; anything else is left alone.
    ///
    /// # Errors
    /// [`ListenError`]
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        Self::bind_as(path, None)
    }

    /// [`Source::bind`], the file with these permissions (its mode) from the start on; with none, as the umask says.
    ///
    /// # Errors
    /// [`ListenError`]
    pub fn bind_as(path: &Path, mode: Option<u32>) -> Result<Self, ListenError> {
        let length = path.as_os_str().len();
        if length > PATH_MAX {
            return Err(ListenError::TooLong { length });
        }
        let socket = match listen(path, mode) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => replace_stale(path, mode),
            result => result.map_err(|error| describe(path, error)),
        }?;
        let file = fs::symlink_metadata(path).map_err(|error| describe(path, error))?;
        let file = SocketFile { path: path.into(), inode: (file.dev(), file.ino()) };
        Ok(Self::Listener { file: Some(file), socket })
    }

    /// Takes over an inherited descriptor.
    ///
    /// # Errors
    /// [`ListenError::Descriptor`]
    pub fn inherited(fd: RawFd) -> Result<Self, ListenError> {
        let descriptor = own(fd).ok_or(ListenError::Descriptor { fd })?;
        let unix = getsockname::<SockaddrStorage>(fd)
            .is_ok_and(|address| address.family() == Some(AddressFamily::Unix));
        let stream = getsockopt(&descriptor, sockopt::SockType) == Ok(SockType::Stream);
        if !unix || !stream {
            return Err(ListenError::Descriptor { fd });
        }
        match getsockopt(&descriptor, sockopt::AcceptConn) {
            Ok(true) => Ok(Self::Listener { file: None, socket: descriptor.into() }),
            _ => Ok(Self::Client(descriptor.into())),
        }
    }
}

impl Source {
    /// Serves `device` to one client after the other, until `stop` is readable, or until the one client of a
    /// connected descriptor has left. A client that connects meanwhile waits. Why a session ended is in the log.
    ///
    /// # Errors
    /// What the listening socket says, or that there is no thread or descriptor for a session.
    pub fn serve(self, device: &dyn Device, messages: &Arc<Messages>, stop: impl AsFd) -> io::Result<()> {
        match &self {
            Self::Client(stream) => serve_until(stream, device, messages, &stop),
            Self::Listener { socket, .. } => {
                while !is_first(&stop, socket)? {
                    match socket.accept() {
                        Ok((stream, _)) => serve_until(&stream, device, messages, &stop)?,
                        // It left before we came, or another process that has this socket took it.
                        Err(error)
                            if matches!(
                                error.kind(),
                                io::ErrorKind::ConnectionAborted | io::ErrorKind::WouldBlock
                            ) => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(())
            }
        }
    }
}

/// SIGTERM and SIGINT as something to stop at: readable when one of them has come. Blocks them in this thread and in
/// those that it will start, so call it first.
///
/// # Errors
/// What signalfd(2) says.
pub fn termination() -> io::Result<SignalFd> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    Ok(SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?)
}

/// Serves one client until it leaves, or until `stop` is readable.
fn serve_until(
    stream: &UnixStream,
    device: &dyn Device,
    messages: &Arc<Messages>,
    stop: &impl AsFd,
) -> io::Result<()> {
    let theirs = stream.try_clone()?;
    // Its writer is dropped when the session is over, however it ends.
    let (over, alive) = io::pipe()?;
    thread::scope(|scope| {
        let session = thread::Builder::new().name("session".into()).spawn_scoped(scope, move || {
            let _alive = alive;
            serve(theirs, device, messages)
        })?;
        let stopped = is_first(stop, &over);
        // The session ends then, if it has not yet.
        let _ = stream.shutdown(Shutdown::Both);
        match session.join().unwrap_or_else(|panic| resume_unwind(panic)) {
            Ok(()) => tracing::info!("the client left"),
            Err(error) => tracing::warn!(error = &error as &dyn Error, "the session ended"),
        }
        stopped.map(|_| ())
    })
}

/// Waits until one of both is readable; whether the first one is.
fn is_first(first: &impl AsFd, second: &impl AsFd) -> io::Result<bool> {
    let mut both =
        [PollFd::new(first.as_fd(), PollFlags::POLLIN), PollFd::new(second.as_fd(), PollFlags::POLLIN)];
    loop {
        match poll(&mut both, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(both.first().and_then(PollFd::any).unwrap_or(false)),
        }
    }
}

fn listen(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // The file is made with what both the socket's mode and the umask allow: never too much.
    if let Some(mode) = mode {
        fchmod(&socket, Mode::from_bits_truncate(mode))?;
    }
    bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    if let Some(mode) = mode {
        fs::set_permissions(path, Permissions::from_mode(mode))?;
    }
    socket::listen(&socket, Backlog::MAXCONN)?;
    Ok(socket.into())
}

/// Binds where a file is already, if nobody has that socket open.
fn replace_stale(path: &Path, mode: Option<u32>) -> Result<UnixListener, ListenError> {
    // Between our look at the file and its removal nobody else may replace it: we would remove theirs.
    let _lock = lock_directory(path);
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.into() });
        }
        // It went meanwhile, or will not be looked at, as binding will say.
        Err(_) => {}
        Ok(_) => match connect_as_datagram(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(|error| describe(path, error))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(ListenError::Permission { path: path.into() });
            }
            _ => return Err(ListenError::InUse { path: path.into() }),
        },
    }
    // If somebody was quicker now, that one is live, and this fails.
    listen(path, mode).map_err(|error| describe(path, error))
}

/// Is refused if nobody has the socket open. To an open stream socket it fails otherwise (EPROTOTYPE), without
/// disturbing who listens there, without waiting for room in its backlog, and also before it listens.
fn connect_as_datagram(path: &Path) -> io::Result<()> {
    UnixDatagram::unbound()?.connect(path)
}

/// Locks the directory that `path` is in, until dropped. Without permission to read it, or if somebody else keeps
/// it locked, we go on without.
fn lock_directory(path: &Path) -> Option<File> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(parent.unwrap_or(Path::new("."))).ok()?;
    let start = Instant::now();
    loop {
        match directory.try_lock() {
            Ok(()) => return Some(directory),
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_WAIT => {
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                tracing::debug!(%error, "the socket's directory cannot be locked");
                return None;
            }
        }
    }
}

fn describe(path: &Path, error: io::Error) -> ListenError {
    let path = path.to_path_buf();
    match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse { path },
        io::ErrorKind::NotFound => ListenError::NoDirectory { path },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ListenError::Permission { path }
        }
        _ => ListenError::Other { path, source: error },
    }
}

/// Owns an inherited descriptor; `None` if it is not open, or one of the standard three.
fn own(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: fcntl(2) answers EBADF for a number that is no descriptor.
    if fd <= 2 || unsafe { nix::libc::fcntl(fd, nix::libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, and whoever started us passed it on for us to own, by its number (--fd).
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests;
