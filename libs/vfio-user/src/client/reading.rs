//! Who reads the socket, and what is done with what comes.
//!
//! A caller that waits for a reply reads for itself, and meanwhile for the others: being woken costs more than
//! most servers take to answer. Only when no caller waits does a thread of the client's read, for the server's
//! own commands. Whoever stops reading tells one of those who still wait.

use std::convert::Infallible;
use std::sync::mpsc;
use std::sync::{Arc, PoisonError, TryLockError};
use std::thread;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFlags, PollTimeout};

use super::ClientError;
use super::connection::{Connection, Disconnect, Patience, Waiter, Wake};
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
        Self { buffer: vec![0; limits::RECEIPT], memory: view(memory) }
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
        patience: Patience,
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
            if patience.is_over() {
                return Ok(None);
            }
            let now = Instant::now();
            let result = match self.step(incoming) {
                Ok(Arrival::Something) => {
                    last = now;
                    Ok(())
                }
                Ok(Arrival::Nothing) if now.saturating_duration_since(last) < limits::LOOK => {
                    thread::yield_now();
                    Ok(())
                }
                Ok(Arrival::Nothing) => self.sleep(incoming, patience.poll()),
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
            if let Some(events) = self.interest()? {
                self.wait_or_nudge(events).map_err(Disconnect::Socket)?;
            }
            match self.lead(|incoming| self.read_a_while(incoming)) {
                Some(result) => result?,
                // A caller reads, and may call again.
                None => thread::sleep(limits::LINGER),
            }
        }
    }

    /// Has the client's own thread do what a caller has left undone.
    pub(super) fn hand_over(&self) {
        if self.lock().session.has_event() {
            self.nudge();
        }
    }

    /// Reads until nothing has come for a moment, or a caller waits, who reads for itself.
    fn read_a_while(&self, incoming: &mut Incoming) -> Result<(), Disconnect> {
        let mut last = Instant::now();
        while last.elapsed() < limits::LOOK {
            match self.step(incoming)? {
                Arrival::Something => last = Instant::now(),
                Arrival::Nothing if self.lock().session.pending() > 0 => break,
                Arrival::Nothing => thread::yield_now(),
            }
        }
        Ok(())
    }

    /// Waits for the socket, if that is what there is to do, with no memory held.
    fn sleep(&self, incoming: &mut Incoming, patience: PollTimeout) -> Result<(), Disconnect> {
        incoming.memory.release();
        match self.interest()? {
            Some(events) => self.wait(events, patience).map_err(Disconnect::Socket),
            None => Ok(()),
        }
    }

    /// What to wait for, unless something can be done already. A server that asks and does not listen is not
    /// listened to either.
    fn interest(&self) -> Result<Option<PollFlags>, Disconnect> {
        let mut state = self.lock();
        let sent = state.outbox.flush(&self.socket)?;
        Ok(match sent {
            Sent::WouldBlock if state.is_flooded() => Some(PollFlags::POLLOUT),
            _ if state.session.has_event() => None,
            Sent::WouldBlock => Some(PollFlags::POLLIN | PollFlags::POLLOUT),
            Sent::Done => Some(PollFlags::POLLIN),
        })
    }

    /// Does the next thing that the server wants, or else receives; never waits.
    fn step(&self, incoming: &mut Incoming) -> Result<Arrival, Disconnect> {
        let mut state = self.lock();
        if state.is_flooded() && state.outbox.flush(&self.socket)? == Sent::WouldBlock {
            return Ok(Arrival::Nothing);
        }
        let event = state.session.next_event()?;
        drop(state);
        if let Some(event) = event {
            self.handle(event, &mut incoming.memory)?;
            return Ok(Arrival::Something);
        }
        incoming.memory.refresh();
        match self.socket.receive(&mut incoming.buffer)? {
            Received::Data { length, descriptors } => {
                let bytes = incoming.buffer.get(..length).unwrap_or_default();
                self.lock().session.receive(bytes, descriptors);
                Ok(Arrival::Something)
            }
            Received::WouldBlock => Ok(Arrival::Nothing),
            Received::Closed => Err(Disconnect::Server),
        }
    }

    fn handle(&self, event: Event<Waiter>, memory: &mut View) -> Result<(), Disconnect> {
        match event {
            // The caller may have gone, after its time-out.
            Event::Reply { waiter, message, error } => drop(waiter.send(Wake::Reply(message, error))),
            Event::Command { message, no_reply } => {
                self.received.count(message.header.code());
                let answer = serve(&message, memory);
                if !no_reply {
                    let mut state = self.lock();
                    state.outbox.push(answer, Vec::new());
                    state.outbox.flush(&self.socket)?;
                }
            }
        }
        Ok(())
    }
}

/// A way into our own memory.
pub(super) fn view(memory: &Arc<Table<dma::Region>>) -> View {
    View::new(memory.clone(), Arc::new(NoMessages))
}

/// Does what the server asks, and gives the reply.
pub(super) fn serve(message: &Message, memory: &mut View) -> Vec<u8> {
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

    fn are_served(&self) -> bool {
        false
    }
}
