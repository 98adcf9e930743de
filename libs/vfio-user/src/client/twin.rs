//! The twin socket: the server's commands, and nothing else, with a thread of their own.

use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike, SockaddrStorage, getsockname, getsockopt, sockopt,
};

use super::connection::{Connection, Disconnect};
use super::reading::{serve, view};
use crate::dma::View;
use crate::limits;
use crate::session::client::{Event, Session};
use crate::transport::{Outbox, Received, Sent, Socket};

/// The descriptor as a UNIX stream socket, if it is one.
pub(super) fn stream(descriptor: OwnedFd) -> Option<UnixStream> {
    let kind = getsockopt(&descriptor, sockopt::SockType).ok()?;
    let name: SockaddrStorage = getsockname(descriptor.as_raw_fd()).ok()?;
    let fits = kind == SockType::Stream && name.family() == Some(AddressFamily::Unix);
    fits.then(|| descriptor.into())
}

/// What serving needs.
struct Twin<'a> {
    connection: &'a Connection,
    socket: &'a Socket,
    session: Session<Infallible>,
    outbox: Outbox,
    buffer: Vec<u8>,
    memory: View,
}

impl Connection {
    /// Serves the server's commands until the end.
    pub(super) fn attend_twin(&self) {
        let Some(socket) = self.twin.get() else { return };
        let mut twin = Twin {
            connection: self,
            socket,
            session: Session::new(),
            outbox: Outbox::new(),
            buffer: vec![0; limits::RECEIPT],
            memory: view(&self.memory),
        };
        let Err(cause) = twin.run();
        self.end(cause);
    }
}

impl Twin<'_> {
    fn run(&mut self) -> Result<Infallible, Disconnect> {
        let mut last = Instant::now();
        loop {
            self.serve()?;
            if self.is_flooded() {
                self.sleep(PollFlags::POLLOUT)?;
                continue;
            }
            match self.socket.receive(&mut self.buffer)? {
                Received::Data { length, descriptors } => {
                    let bytes = self.buffer.get(..length).unwrap_or_default();
                    self.session.receive(bytes, descriptors);
                    last = Instant::now();
                }
                Received::WouldBlock if last.elapsed() < limits::LOOK => thread::yield_now(),
                Received::WouldBlock if self.outbox.is_empty() => self.sleep(PollFlags::POLLIN)?,
                Received::WouldBlock => self.sleep(PollFlags::POLLIN | PollFlags::POLLOUT)?,
                Received::Closed => return Err(Disconnect::Server),
            }
        }
    }

    /// Does what has come, unless the server does not take its replies.
    fn serve(&mut self) -> Result<(), Disconnect> {
        self.memory.refresh();
        while self.outbox.flush(self.socket)? == Sent::Done || !self.is_flooded() {
            match self.session.next_event()? {
                None => break,
                Some(Event::Reply { waiter, .. }) => match waiter {},
                Some(Event::Command { message, no_reply }) => {
                    self.connection.received.count(message.header.code());
                    let answer = serve(&message, &mut self.memory);
                    if !no_reply {
                        self.outbox.push(answer, Vec::new());
                    }
                }
            }
        }
        Ok(())
    }

    fn is_flooded(&self) -> bool {
        self.outbox.len() > limits::WAITING_BYTES
    }

    /// Waits with no memory held.
    fn sleep(&mut self, events: PollFlags) -> Result<(), Disconnect> {
        self.memory.release();
        let mut descriptors = [PollFd::new(self.socket.as_fd(), events)];
        match poll(&mut descriptors, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(Disconnect::Socket(error)),
        }
    }
}
