//! Who reads the socket, and what is done with what comes.
//!
//! A caller that waits for a reply reads for itself, and meanwhile for the others: being woken costs more than
//! most servers take to answer. Only when no caller waits does a thread of the client's read, for the server's
//! own commands. Whoever stops reading tells one of those who still wait.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::sync::{Arc, PoisonError, TryLockError};
use std::thread;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFlags, PollTimeout};

use super::ClientError;
use super::connection::{Connection, Disconnect, Wake};
use crate::dma::{self, DmaError, Iova, Table, View};
use crate::limits;
use crate::session::client::Event;
use crate::transport::{Message, Received, Sent};
use crate::wire::{Command, Reply, encode_error};

/// What reading needs.
pub(super) struct Incoming {
    buffer: Vec<u8>,
    memory: View,
}

impl Incoming {
    pub(super) fn new(memory: &Arc<Table<dma::Region>>) -> Self {
        Self { buffer: vec![0; limits::RECEIPT], memory: View::new(memory.clone(), Arc::new(NoMessages)) }
    }
}

/// Whether something came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrival {
    Something,
    Nothing,
}

impl Connection {
    /// Reads, by what `read` does, if nobody else does.
    pub(super) fn lead<T>(&self, read: impl FnOnce(&mut Incoming) -> T) -> Option<T> {
        let mut incoming = match self.incoming.try_lock() {
            Ok(incoming) => incoming,
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(TryLockError::WouldBlock) => return None,
        };
        let result = read(&mut incoming);
        incoming.memory.release();
        drop(incoming);
        // Who began to wait meanwhile saw that somebody reads. One whose time is over has gone.
        let _ = self.lock().session.waiters().any(|waiter| waiter.send(Wake::Lead).is_ok());
        Some(result)
    }

    /// Reads until `woken` has its reply, or its time is over.
    pub(super) fn read_for(
        &self,
        incoming: &mut Incoming,
        woken: &mpsc::Receiver<Wake>,
        deadline: Instant,
    ) -> Result<Option<(Message, Option<u32>)>, ClientError> {
        let mut last = Instant::now();
        loop {
            // The reply may have come before we read, and behind calls to lead.
            loop {
                match woken.try_recv() {
                    Ok(Wake::Reply(message, error)) => return Ok(Some((message, error))),
                    Ok(Wake::Lead) => {}
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return Err(self.why().into()),
                }
            }
            let now = Instant::now();
            let patience = deadline.saturating_duration_since(now);
            if patience.is_zero() {
                return Ok(None);
            }
            let result = match self.receive(incoming) {
                Ok(Arrival::Something) => {
                    last = now;
                    Ok(())
                }
                Ok(Arrival::Nothing) if now.saturating_duration_since(last) < limits::LOOK => {
                    thread::yield_now();
                    Ok(())
                }
                Ok(Arrival::Nothing) => {
                    self.sleep(incoming, PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX))
                }
                Err(cause) => Err(cause),
            };
            if let Err(cause) = result {
                self.end(cause);
            }
        }
    }

    /// Reads while no caller does, until the end.
    pub(super) fn attend(&self) {
        let Err(cause) = self.attend_on();
        tracing::debug!(%cause, "the connection is over");
        self.end(cause);
    }

    fn attend_on(&self) -> Result<Infallible, Disconnect> {
        loop {
            self.wait(self.interest()?, PollTimeout::NONE).map_err(Disconnect::Socket)?;
            match self.lead(|incoming| self.read_a_while(incoming)) {
                Some(result) => result?,
                // A caller reads, and may call again.
                None => thread::sleep(limits::LINGER),
            }
        }
    }

    /// Reads until nothing has come for a moment, or a caller waits, who reads for itself.
    fn read_a_while(&self, incoming: &mut Incoming) -> Result<(), Disconnect> {
        let mut last = Instant::now();
        while last.elapsed() < limits::LOOK {
            match self.receive(incoming)? {
                Arrival::Something => last = Instant::now(),
                Arrival::Nothing if self.lock().session.pending() > 0 => break,
                Arrival::Nothing => thread::yield_now(),
            }
        }
        Ok(())
    }

    /// Waits for the socket with nothing held.
    fn sleep(&self, incoming: &mut Incoming, patience: PollTimeout) -> Result<(), Disconnect> {
        incoming.memory.release();
        self.wait(self.interest()?, patience).map_err(Disconnect::Socket)
    }

    /// What to wait for: also to get rid of replies that the socket did not take.
    fn interest(&self) -> Result<PollFlags, Disconnect> {
        Ok(if self.flush()? { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT })
    }

    /// Takes what is there.
    fn receive(&self, incoming: &mut Incoming) -> Result<Arrival, Disconnect> {
        match self.socket.receive(&mut incoming.buffer)? {
            Received::Data { length, descriptors } => {
                let bytes = incoming.buffer.get(..length).unwrap_or_default();
                self.take(bytes, descriptors, &mut incoming.memory)?;
                incoming.memory.refresh();
                Ok(Arrival::Something)
            }
            Received::WouldBlock => Ok(Arrival::Nothing),
            Received::Closed => Err(Disconnect::Server),
        }
    }

    /// How many bytes the server has yet to take.
    pub(super) fn waiting(&self) -> usize {
        self.lock().outbox.len()
    }

    /// Whether the socket has taken all.
    fn flush(&self) -> io::Result<bool> {
        Ok(self.lock().outbox.flush(&self.socket)? == Sent::Done)
    }

    /// A server that asks and does not listen is not listened to either, and not for ever.
    fn hold_back(&self, memory: &mut View) -> Result<(), Disconnect> {
        let start = Instant::now();
        while self.waiting() > limits::WAITING_BYTES && !self.flush()? {
            let patience = self.timeout.saturating_sub(start.elapsed());
            if patience.is_zero() {
                return Err(Disconnect::Stuck);
            }
            memory.release();
            let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
            self.wait(PollFlags::POLLOUT, patience).map_err(Disconnect::Socket)?;
        }
        Ok(())
    }

    /// Takes what came from the socket.
    fn take(&self, bytes: &[u8], descriptors: Vec<OwnedFd>, memory: &mut View) -> Result<(), Disconnect> {
        self.lock().session.receive(bytes, descriptors);
        loop {
            self.hold_back(memory)?;
            let event = self.lock().session.next_event()?;
            match event {
                // The caller may have gone, after its time-out.
                Some(Event::Reply { waiter, message, error }) => {
                    drop(waiter.send(Wake::Reply(message, error)));
                }
                Some(Event::Command { message, no_reply }) => {
                    self.received.count(message.header.code());
                    let answer = serve(&message, memory);
                    if !no_reply {
                        let mut state = self.lock();
                        state.outbox.push(answer, Vec::new());
                        state.outbox.flush(&self.socket)?;
                    }
                }
                None => return Ok(()),
            }
        }
    }
}

/// Does what the server asks, and gives the reply.
fn serve(message: &Message, memory: &mut View) -> Vec<u8> {
    let (id, code) = (message.header.id(), message.header.code());
    let refuse = |errno: Errno| encode_error(id, code, (errno as i32).unsigned_abs());
    match Command::decode(&message.header, &message.body, message.descriptors.len()) {
        // Nothing that a server may ask for takes a descriptor.
        Ok(_) if !message.descriptors.is_empty() => refuse(Errno::EINVAL),
        Ok(Command::DmaRead(access)) => {
            let mut data = vec![0; usize::try_from(access.count).unwrap_or_default()];
            match memory.read(Iova(access.address), &mut data) {
                Ok(()) => Reply::DmaRead { address: access.address, data: &data }.encode(id),
                Err(_) => refuse(Errno::EFAULT),
            }
        }
        Ok(Command::DmaWrite(write)) => match memory.write(Iova(write.address), write.data) {
            Ok(()) => Reply::DmaWrite(Some(write.access())).encode(id),
            Err(_) => refuse(Errno::EFAULT),
        },
        Ok(_) => refuse(Errno::ENOSYS),
        Err(error) => refuse(error.errno()),
    }
}

/// Our own memory is all mapped.
struct NoMessages;

impl dma::Messages for NoMessages {
    fn read(&self, from: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        Err(DmaError::Refused { iova: from, length: into.len() })
    }

    fn write(&self, to: Iova, from: &[u8]) -> Result<(), DmaError> {
        Err(DmaError::Refused { iova: to, length: from.len() })
    }
}
