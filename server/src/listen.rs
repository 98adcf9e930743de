//! The socket that clients connect to.

#![expect(unsafe_code, reason = "takes over a descriptor that is named by number")]

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike, SockaddrStorage, getsockname, getsockopt, sockopt,
};

/// sun_path holds 108 bytes, the NUL included (unix(7)).
const PATH_MAX: usize = 107;

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
    /// A socket that listens; its file is removed when this is dropped.
    Listener(UnixListener, Option<SocketFile>),
    /// The one client there will be.
    Client(UnixStream),
}

/// A socket file that is ours: removed when dropped, unless another has taken its place.
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
        let length = path.as_os_str().len();
        if length > PATH_MAX {
            return Err(ListenError::TooLong { length });
        }
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                // If somebody else was quicker now, that one is live: this fails.
                UnixListener::bind(path)
            }
            result => result,
        }
        .map_err(|error| describe(path, error))?;
        let file = fs::symlink_metadata(path).map_err(|error| describe(path, error))?;
        Ok(Self::Listener(listener, Some(SocketFile { path: path.into(), inode: (file.dev(), file.ino()) })))
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
            Ok(true) => Ok(Self::Listener(descriptor.into(), None)),
            _ => Ok(Self::Client(descriptor.into())),
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let file = fs::symlink_metadata(path).map_err(|error| describe(path, error))?;
    if !file.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.into() });
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|error| describe(path, error))
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(ListenError::Permission { path: path.into() })
        }
        // Connected, or its backlog is full: somebody listens.
        _ => Err(ListenError::InUse { path: path.into() }),
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
