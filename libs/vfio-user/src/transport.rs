//! The socket: bytes and descriptors, in and out.
//!
//! A [`Socket`] moves what it can and says so; it never waits unless it is told to. [`Framer`] makes messages
//! of what arrives, [`Outbox`] keeps what could not be sent yet. Neither of the two does I/O on its own.

#![expect(unsafe_code, reason = "takes ownership of descriptors that arrive in control messages")]

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use zerocopy::FromBytes;

use crate::limits;
use crate::wire::{HEADER_SIZE, Header};

/// A connected stream socket.
#[derive(Debug)]
pub struct Socket(UnixStream);

/// What came of a receipt.
#[derive(Debug)]
pub enum Received {
    /// Some bytes, and the descriptors that came with them.
    Data {
        /// How many bytes of the buffer were filled, not 0.
        length: usize,
        /// In the order in which they were sent.
        descriptors: Vec<OwnedFd>,
    },
    /// Nothing has arrived.
    WouldBlock,
    /// The peer has closed its end.
    Closed,
}

/// What came of an attempt to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// All of it.
    Done,
    /// The socket's buffer is full.
    WouldBlock,
}

impl Socket {
    /// Takes over a connected stream; from here on it does not block.
    ///
    /// # Errors
    /// What fcntl(2) says.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(stream))
    }

    /// Receives up to a buffer full.
    ///
    /// # Errors
    /// What recvmsg(2) says; EMFILE when descriptors were lost because this process may have no more of them
    /// (MSG_CTRUNC), after which the stream is not to be trusted. Those that did arrive are closed.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut control = Control([0; CONTROL_SIZE]);
        let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: msghdr is a C structure of integers and pointers, for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = CONTROL_SIZE;
        let length = loop {
            // SAFETY: the message points to `buffer` and `control`, which outlive the call, with their lengths.
            let length =
                unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
            match Errno::result(length) {
                Ok(length) => break length.unsigned_abs(),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(Received::WouldBlock),
                Err(Errno::ECONNRESET) => return Ok(Received::Closed),
                Err(error) => return Err(error.into()),
            }
        };
        // SAFETY: recvmsg has filled `message` and what it points to, and nothing else has taken the descriptors.
        let descriptors = unsafe { take_descriptors(&message) };
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(Errno::EMFILE.into());
        }
        Ok(if length == 0 { Received::Closed } else { Received::Data { length, descriptors } })
    }

    /// Sends what fits of `bytes`, and with the first of them the descriptors; how many bytes went, or `None` if
    /// none did.
    ///
    /// # Errors
    /// What sendmsg(2) says, EPIPE when the peer is gone.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<Option<usize>> {
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights };
        loop {
            let flags = MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<UnixAddr>(self.0.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None) {
                Ok(length) => return Ok(Some(length)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Ends both directions: whoever waits on the socket, here or at the peer, sees its end.
    pub fn shut_down(&self) {
        // Fails only where the connection is gone already.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// SCM_RIGHTS for as many descriptors as the kernel lets through at once.
#[expect(clippy::cast_possible_truncation, reason = "about a thousand bytes")]
// SAFETY: CMSG_SPACE only computes.
const CONTROL_SIZE: usize =
    unsafe { libc::CMSG_SPACE((limits::DESCRIPTORS * size_of::<RawFd>()) as libc::c_uint) } as usize;

/// Where control messages are received: aligned as their headers are.
#[repr(C, align(8))]
struct Control([u8; CONTROL_SIZE]);

const _: () = assert!(align_of::<Control>() >= align_of::<libc::cmsghdr>());

/// Owns every descriptor that came with a message.
///
/// # Safety
/// `message` was filled by recvmsg, its control buffer is alive, and this is called once for it.
unsafe fn take_descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    // SAFETY: the control buffer is as recvmsg left it.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: the macros give headers that lie wholly in the control buffer, or null.
        let (level, kind, length, data) = unsafe {
            let cmsg = &*header;
            (cmsg.cmsg_level, cmsg.cmsg_type, cmsg.cmsg_len, libc::CMSG_DATA(header))
        };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: only computes.
            let overhead = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = length.saturating_sub(overhead).checked_div(size_of::<RawFd>()).unwrap_or(0);
            for index in 0..count {
                // SAFETY: the kernel wrote `count` descriptors here, and they are ours alone.
                descriptors
                    .push(unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(index).read_unaligned()) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    descriptors
}

/// A whole message.
#[derive(Debug)]
pub struct Message {
    /// Its header; the size in it is right.
    pub header: Header,
    /// What follows the header.
    pub body: Vec<u8>,
    /// What came with it.
    pub descriptors: Vec<OwnedFd>,
}

/// A stream that cannot be made messages of; there is no way to go on with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A message's size is less than a header's, or more than the limit.
    #[error("A message of {size} bytes is not between {HEADER_SIZE} and {limit} bytes", size = header.size(), limit = limits::MESSAGE)]
    Size {
        /// Its header, for an error reply before the end.
        header: Header,
    },
    /// A message came with more descriptors than can be sent at once.
    #[error("{count} descriptors with one message are more than {limit}", limit = limits::DESCRIPTORS)]
    Descriptors {
        /// How many have come.
        count: usize,
    },
}

/// Makes messages of a stream, however it is cut.
///
/// It holds no more than one message and what was last pushed, if messages are taken until there is none before
/// more is pushed.
#[derive(Debug, Default)]
pub struct Framer {
    bytes: Vec<u8>,
    /// Where in `bytes` the next message begins.
    start: usize,
    /// Descriptors, each with the end of the bytes that it came with, in `bytes`.
    descriptors: VecDeque<(usize, OwnedFd)>,
}

impl Framer {
    /// Nothing has arrived.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what one receipt brought.
    ///
    /// The kernel ends a receipt after the bytes that descriptors came with, so they belong to the message that
    /// the last of `bytes` is part of.
    pub fn push(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>) {
        self.bytes.drain(..self.start.min(self.bytes.len()));
        for (end, _) in &mut self.descriptors {
            *end = end.saturating_sub(self.start);
        }
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
        let end = self.bytes.len();
        self.descriptors.extend(descriptors.into_iter().map(|descriptor| (end, descriptor)));
    }

    /// The next message, if all of it has arrived.
    ///
    /// # Errors
    /// [`FrameError`], and again the same.
    pub fn next_message(&mut self) -> Result<Option<Message>, FrameError> {
        // All that wait belong to this message or to later ones, of which there are few: a receipt is short.
        let pending = self.bytes.get(self.start..).unwrap_or_default();
        let Ok((header, _)) = Header::read_from_prefix(pending) else {
            return self.check_descriptors(usize::MAX).map(|()| None);
        };
        let wrong = FrameError::Size { header };
        if header.size() > limits::MESSAGE {
            return Err(wrong);
        }
        let size = usize::try_from(header.size()).map_err(|_| wrong)?;
        if size < HEADER_SIZE {
            return Err(wrong);
        }
        let end = self.start.saturating_add(size);
        let Some(body) = self.bytes.get(self.start.saturating_add(HEADER_SIZE)..end) else {
            return self.check_descriptors(usize::MAX).map(|()| None);
        };
        self.check_descriptors(end)?;
        let body = body.to_vec();
        let count = self.descriptors.partition_point(|&(received, _)| received <= end);
        let descriptors = self.descriptors.drain(..count).map(|(_, descriptor)| descriptor).collect();
        self.start = end;
        Ok(Some(Message { header, body, descriptors }))
    }

    /// Whether [`Framer::next_message`] gives a message or an error.
    pub fn has_message(&self) -> bool {
        let pending = self.bytes.get(self.start..).unwrap_or_default();
        let Ok((header, _)) = Header::read_from_prefix(pending) else { return false };
        let size = usize::try_from(header.size()).unwrap_or(usize::MAX);
        header.size() > limits::MESSAGE || size <= pending.len()
    }

    /// Whether some bytes of a message have arrived, but not all.
    pub fn is_mid_message(&self) -> bool {
        self.start < self.bytes.len()
    }

    /// Counts what came with the message that ends at `end`.
    fn check_descriptors(&self, end: usize) -> Result<(), FrameError> {
        let count = self.descriptors.partition_point(|&(received, _)| received <= end);
        if count > limits::DESCRIPTORS { Err(FrameError::Descriptors { count }) } else { Ok(()) }
    }
}

/// Messages that wait to be sent, in order.
#[derive(Debug, Default)]
pub struct Outbox {
    messages: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// How much of the first one is gone; then its descriptors are gone, too.
    sent: usize,
    /// How many bytes wait.
    length: usize,
    /// How many descriptors wait.
    descriptors: usize,
}

impl Outbox {
    /// Nothing to send.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a message, whole, behind those that wait; its descriptors are closed once they are sent.
    pub fn push(&mut self, message: Vec<u8>, descriptors: Vec<OwnedFd>) {
        self.length = self.length.saturating_add(message.len());
        self.descriptors = self.descriptors.saturating_add(descriptors.len());
        self.messages.push_back((message, descriptors));
    }

    /// Whether all is sent.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// How many bytes wait.
    pub fn len(&self) -> usize {
        self.length
    }

    /// How many descriptors wait.
    pub fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// Sends until all is gone or the socket is full. Each message is one sendmsg unless the socket cuts it.
    ///
    /// # Errors
    /// What sendmsg(2) says.
    pub fn flush(&mut self, socket: &Socket) -> io::Result<Sent> {
        while let Some((bytes, descriptors)) = self.messages.front_mut() {
            let rest = bytes.get(self.sent..).unwrap_or_default();
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            let Some(length) = socket.send(rest, &borrowed)? else { return Ok(Sent::WouldBlock) };
            drop(borrowed);
            self.descriptors = self.descriptors.saturating_sub(descriptors.len());
            descriptors.clear();
            self.sent = self.sent.saturating_add(length);
            self.length = self.length.saturating_sub(length);
            if self.sent >= bytes.len() {
                self.messages.pop_front();
                self.sent = 0;
            }
        }
        Ok(Sent::Done)
    }
}

#[cfg(test)]
mod tests;
