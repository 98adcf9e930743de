//! The interrupts that a client listens to: eventfds by index and vector, masks, and the level of the pin.
//!
//! A device raises them from any of its threads while the session changes them. No lock is held over the write
//! to an eventfd: a client that fills one up and makes it block stops nobody else, and [`Interrupts::close`]
//! lets the blocked writer go.

#![expect(unsafe_code, reason = "preadv2, which nix does not have")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};

use crate::wire::{IrqAction, IrqData, IrqIndex, SetIrqs};

/// Why a SET_IRQS is refused: always EINVAL to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IrqError {
    /// No such index.
    #[error("Interrupt index {} does not exist", .0.0)]
    Index(IrqIndex),
    /// The range leaves the index.
    #[error("Vectors {start}+{count} lie outside the {vectors} of index {}", index.0)]
    Range {
        /// Interrupt index.
        index: IrqIndex,
        /// First vector asked for.
        start: u32,
        /// How many were asked for.
        count: u32,
        /// How many there are.
        vectors: u32,
    },
    /// The specification gives this combination no meaning.
    #[error("Action {action:?} on index {} does not go with such data", index.0)]
    Combination {
        /// Interrupt index.
        index: IrqIndex,
        /// What was asked for.
        action: IrqAction,
    },
    /// The descriptors or bytes are not one for each vector.
    #[error("{given} values came for {count} vectors")]
    Count {
        /// How many came.
        given: usize,
        /// How many vectors were named.
        count: u32,
    },
    /// A descriptor of another kind, which could block whoever writes to it.
    #[error("A descriptor is not an eventfd")]
    NotEventfd,
}

/// An eventfd of the client's.
#[derive(Debug)]
struct Eventfd {
    descriptor: OwnedFd,
    /// It came without O_NONBLOCK: a write waits while the counter is full.
    blocks: bool,
}

impl Eventfd {
    fn new(descriptor: OwnedFd) -> Result<Self, IrqError> {
        // Anonymous inodes have no file type; pipes, sockets and files, whose writes may block, do.
        match fstat(&descriptor) {
            Ok(stat) if stat.st_mode & SFlag::S_IFMT.bits() == 0 => {
                let flags = fcntl(&descriptor, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
                let blocks = !flags.is_ok_and(|flags| flags.contains(OFlag::O_NONBLOCK));
                Ok(Self { descriptor, blocks })
            }
            _ => Err(IrqError::NotEventfd),
        }
    }

    /// Adds 1, on a thread of the device's. O_NONBLOCK is the client's to change, so it can still make this wait:
    /// until it leaves, as [`Interrupts::close`] has it.
    fn signal(&self) {
        if self.blocks {
            return self.signal_if_room();
        }
        self.add();
    }

    /// Adds 1 unless the counter is full, on the session's thread, which nobody else would set free.
    fn signal_if_room(&self) {
        let mut descriptors = [PollFd::new(self.descriptor.as_fd(), PollFlags::POLLOUT)];
        if poll(&mut descriptors, PollTimeout::ZERO).is_ok_and(|ready| ready > 0) {
            self.add();
        }
    }

    /// A full counter already wakes its reader, so nothing is lost when it refuses.
    fn add(&self) {
        loop {
            match nix::unistd::write(&self.descriptor, &1_u64.to_ne_bytes()) {
                Err(Errno::EINTR) => {}
                Err(error) if error != Errno::EAGAIN => {
                    return tracing::debug!(%error, "an interrupt's eventfd refused");
                }
                _ => return,
            }
        }
    }

    /// Takes what is in the counter, without waiting for it even if the client takes it first: true if there was
    /// anything. The descriptor's own O_NONBLOCK is the client's to set.
    fn drain(&self) -> bool {
        let mut counter = [0_u8; 8];
        let part = libc::iovec { iov_base: counter.as_mut_ptr().cast(), iov_len: counter.len() };
        // SAFETY: reads at most 8 bytes into `counter`, from a descriptor that we own.
        let length =
            unsafe { libc::preadv2(self.descriptor.as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
        length > 0
    }
}

#[derive(Debug, Default)]
struct Vector {
    trigger: Option<Arc<Eventfd>>,
    /// Signalled by the client (KVM's resample descriptor) to unmask.
    unmask: Option<Arc<Eventfd>>,
    masked: bool,
    /// Raised while masked.
    pending: bool,
}

#[derive(Debug)]
struct Index {
    vectors: Mutex<Vec<Vector>>,
}

/// All interrupts of a client.
#[derive(Debug)]
pub struct Interrupts {
    indexes: Vec<Index>,
    /// The level of the pin.
    line: Mutex<bool>,
    /// Eventfds that were unbound while a device thread was about to write to them.
    unbound: Mutex<Vec<Weak<Eventfd>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Interrupts {
    /// Nothing bound, nothing masked; `counts` is how many vectors each index has.
    pub fn new(counts: &[u32]) -> Self {
        let index =
            |&count: &u32| Index { vectors: Mutex::new((0..count).map(|_| Vector::default()).collect()) };
        Self {
            indexes: counts.iter().map(index).collect(),
            line: Mutex::new(false),
            unbound: Mutex::default(),
        }
    }

    /// Does what a client asks for; `fds` are the descriptors that came with it.
    ///
    /// # Errors
    /// [`IrqError`]; nothing is changed then.
    pub fn set(&self, request: &SetIrqs<'_>, fds: Vec<OwnedFd>) -> Result<(), IrqError> {
        let &SetIrqs { index, start, count, action, data } = request;
        let mut vectors = lock(&self.index(index).ok_or(IrqError::Index(index))?.vectors);
        let total = u32::try_from(vectors.len()).unwrap_or(u32::MAX);
        let outside = IrqError::Range { index, start, count, vectors: total };
        if start >= total {
            return Err(outside);
        }
        if count == 0 {
            // The one meaning of 0 that decoding lets through: disable the index.
            vectors.iter_mut().for_each(|vector| self.unbind(std::mem::take(vector).trigger));
            return Ok(());
        }
        let end = start.checked_add(count).ok_or(outside)?;
        let range = vectors.get_mut(start as usize..end as usize).ok_or(outside)?;
        let mut fire = Vec::new();
        match (action, data) {
            (IrqAction::Trigger, IrqData::Unbind) => {
                range.iter_mut().for_each(|vector| self.unbind(vector.trigger.take()));
            }
            (IrqAction::Trigger, IrqData::Eventfds) => {
                for (vector, eventfd) in range.iter_mut().zip(eventfds(fds, count)?) {
                    self.unbind(vector.trigger.replace(eventfd));
                    if index == IrqIndex::INTX {
                        fire.extend(self.raise_pin(vector));
                    }
                }
            }
            (IrqAction::Unmask, IrqData::Unbind) if index == IrqIndex::INTX => {
                range.iter_mut().for_each(|vector| vector.unmask = None);
            }
            (IrqAction::Unmask, IrqData::Eventfds) if index == IrqIndex::INTX => {
                for (vector, eventfd) in range.iter_mut().zip(eventfds(fds, count)?) {
                    vector.unmask = Some(eventfd);
                }
            }
            (_, IrqData::Unbind | IrqData::Eventfds) => return Err(IrqError::Combination { index, action }),
            (action, IrqData::None) => {
                range.iter_mut().for_each(|vector| fire.extend(self.act(index, action, vector)));
            }
            (action, IrqData::Bool(chosen)) => {
                if chosen.len() != range.len() {
                    return Err(IrqError::Count { given: chosen.len(), count });
                }
                for (vector, _) in range.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen != 0) {
                    fire.extend(self.act(index, action, vector));
                }
            }
        }
        drop(vectors);
        fire.iter().for_each(|eventfd| eventfd.signal_if_room());
        Ok(())
    }

    /// Does one action to one vector; the eventfd to signal, if it interrupts.
    fn act(&self, index: IrqIndex, action: IrqAction, vector: &mut Vector) -> Option<Arc<Eventfd>> {
        match action {
            IrqAction::Mask => {
                vector.masked = true;
                None
            }
            IrqAction::Unmask => self.unmask(index, vector),
            // Loop-back: the client's own, so no mask holds it.
            IrqAction::Trigger => vector.trigger.clone(),
        }
    }

    fn index(&self, index: IrqIndex) -> Option<&Index> {
        self.indexes.get(index.0 as usize)
    }

    /// Unmasks; the eventfd to signal if something was held back.
    fn unmask(&self, index: IrqIndex, vector: &mut Vector) -> Option<Arc<Eventfd>> {
        vector.masked = false;
        if index == IrqIndex::INTX {
            return self.raise_pin(vector);
        }
        if std::mem::take(&mut vector.pending) { vector.trigger.clone() } else { None }
    }

    /// The eventfd to signal if the pin is asserted, not masked, and listened to. It is masked then (AUTOMASKED).
    fn raise_pin(&self, vector: &mut Vector) -> Option<Arc<Eventfd>> {
        if vector.masked || !*lock(&self.line) {
            return None;
        }
        vector.masked = vector.trigger.is_some();
        vector.trigger.clone()
    }

    /// Raises a message interrupt (MSI, MSI-X) or the events ERR and REQ. Masked ones wait; unbound ones are
    /// nobody's.
    pub fn trigger(&self, index: IrqIndex, vector: usize) {
        let Some(vectors) = self.index(index).map(|index| &index.vectors) else { return };
        let bound = || {
            let mut vectors = lock(vectors);
            let vector = vectors.get_mut(vector)?;
            if vector.masked {
                vector.pending = true;
                return None;
            }
            vector.trigger.clone()
        };
        let mut current = bound();
        while let Some(eventfd) = current {
            eventfd.signal();
            // Rebound in between: the client may not look at the old one any more. Twice is harmless.
            current = bound().filter(|now| !Arc::ptr_eq(now, &eventfd));
        }
    }

    /// Sets the level of the interrupt pin.
    pub fn set_line(&self, asserted: bool) {
        let Some(intx) = self.index(IrqIndex::INTX) else { return };
        let eventfd = {
            let mut vectors = lock(&intx.vectors);
            *lock(&self.line) = asserted;
            vectors.first_mut().and_then(|vector| self.raise_pin(vector))
        };
        if let Some(eventfd) = eventfd {
            eventfd.signal();
        }
    }

    /// The descriptors whose signal means "unmask", for who polls: pass it to [`Interrupts::unmasked`].
    pub fn with_unmask_descriptor<T>(&self, visit: impl FnOnce(Option<BorrowedFd<'_>>) -> T) -> T {
        let eventfd = self.index(IrqIndex::INTX).and_then(|intx| lock(&intx.vectors).first()?.unmask.clone());
        visit(eventfd.as_ref().map(|eventfd| eventfd.descriptor.as_fd()))
    }

    /// The unmask descriptor became readable.
    pub fn unmasked(&self) {
        let Some(intx) = self.index(IrqIndex::INTX) else { return };
        let eventfd = {
            let mut vectors = lock(&intx.vectors);
            let Some(vector) = vectors.first_mut() else { return };
            match &vector.unmask {
                Some(unmask) if unmask.drain() => self.unmask(IrqIndex::INTX, vector),
                _ => None,
            }
        };
        if let Some(eventfd) = eventfd {
            eventfd.signal_if_room();
        }
    }

    /// Whether a vector has an eventfd.
    pub fn is_bound(&self, index: IrqIndex, vector: usize) -> bool {
        self.index(index)
            .is_some_and(|index| lock(&index.vectors).get(vector).is_some_and(|v| v.trigger.is_some()))
    }

    fn unbind(&self, eventfd: Option<Arc<Eventfd>>) {
        let Some(eventfd) = eventfd.filter(|eventfd| Arc::strong_count(eventfd) > 1) else { return };
        let mut unbound = lock(&self.unbound);
        unbound.retain(|other| other.strong_count() > 0);
        unbound.push(Arc::downgrade(&eventfd));
    }

    /// Unbinds everything, and frees a device thread that a client holds in a write to a full eventfd.
    pub fn close(&self) {
        for index in &self.indexes {
            lock(&index.vectors).iter_mut().for_each(|vector| self.unbind(std::mem::take(vector).trigger));
        }
        for eventfd in lock(&self.unbound).drain(..).filter_map(|eventfd| eventfd.upgrade()) {
            eventfd.drain();
        }
    }
}

fn eventfds(fds: Vec<OwnedFd>, count: u32) -> Result<Vec<Arc<Eventfd>>, IrqError> {
    if fds.len() != count as usize {
        return Err(IrqError::Count { given: fds.len(), count });
    }
    fds.into_iter().map(|fd| Eventfd::new(fd).map(Arc::new)).collect()
}

#[cfg(test)]
mod tests;
