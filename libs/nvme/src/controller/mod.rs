//! Plays an NVMe drive: a controller of the NVM Express Base Specification 1.4 as Linux, OVMF and SeaBIOS use it.
//!
//! [`Registers`] are shared: any thread reads and writes them without waiting. Everything else is owned by
//! the one thread that calls [`Controller::poll`]:
//!
//! * `lifecycle`: what CC asks for: enable, reset, shutdown;
//! * `queue`, `queues`, `doorbells`: rings, their creation and deletion, their doorbells, whom they interrupt;
//! * `command`: raw entries become typed commands; `admin` and `io` carry them out;
//! * `data`, `prp`, `sgl`, `slots`: where a command's data lies, and which commands are under way;
//! * `uncorrectable`: blocks that cannot be read until they are written;
//! * `barrier`, `format`: commands that wait for what is under way, and Format NVM, which is one;
//! * `completion`: the one place where commands end;
//! * `identify`, `features`, `timestamp`, `health`, `events`: what the host can ask.
//!
//! What it does not do: SGLs in admin commands, fused commands, metadata and protection information,
//! arbitration other than round robin, queues that are not contiguous, pages other than 4 KiB, a controller
//! memory buffer, namespace management, firmware update, security, directives, sanitize, reservations.

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

mod admin;
mod barrier;
mod command;
mod completion;
mod counters;
mod data;
mod disk;
mod doorbells;
mod events;
mod features;
mod format;
mod health;
mod host;
mod identify;
mod io;
mod lifecycle;
mod limits;
mod options;
mod prp;
mod queue;
mod queues;
mod registers;
mod sgl;
mod slots;
mod timestamp;
mod uncorrectable;

#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use zerocopy::{FromZeros, IntoBytes};

pub use counters::{Counter, Counters};
pub use disk::{Disk, DiskError, Geometry, LbaRange, Operation, Submission, Tag};
pub use host::{Direction, DmaError, Host, Segment};
pub use options::{InvalidOptions, Options};
pub use registers::{Effect, Registers, Snapshot, doorbell_write};

use crate::spec::{DataPointerType, Status, SubmissionEntry};
use crate::{Lba, Nsid, QueueId};
use admin::Answer;
use barrier::Barriers;
use completion::Origin;
use features::Features;
use health::Health;
use io::{Disks, Progress};
use lifecycle::State;
use limits::BATCH;
use queues::{Patience, Queues};
use registers::Control;
use slots::Owner;

const ADMIN: QueueId = QueueId(0);

/// An NVMe controller and its namespaces: disk `n` of the list is namespace `n + 1`.
pub struct Controller<H: Host, D: Disk<H>> {
    options: Options,
    registers: Arc<Registers>,
    /// CC as it was last acted upon.
    control: Control,
    /// How often the power had come then.
    power_cycles: u32,
    state: State,
    /// A command of this life was confirmed by the host: its memory is what it seems.
    memory_confirmed: bool,
    queues: Queues,
    disks: Disks<D>,
    /// Admin commands that wait for what is under way.
    barriers: Barriers,
    features: Features,
    health: Health,
    batch: Box<[SubmissionEntry; BATCH]>,
    /// Which I/O queue is served first in the next poll.
    turn: usize,
    host: PhantomData<fn(&mut H)>,
}

impl<H: Host, D: Disk<H>> Controller<H, D> {
    /// A controller that is disabled. Its host provides `2 * (options.queue_pairs + 1)` doorbells.
    ///
    /// # Errors
    /// An option is out of its range.
    pub fn new(options: Options, disks: Vec<D>) -> Result<Self, InvalidOptions> {
        options.check(disks.len())?;
        let registers = Arc::new(Registers::new(options.capabilities()));
        let disks = Disks::new(disks, options.max_transfer());
        let limits = options.feature_limits(disks.has_volatile_cache(), disks.namespaces.len());
        let features = Features::new(limits);
        Ok(Self {
            control: registers.control(),
            power_cycles: registers.power_cycles(),
            registers,
            state: State::Disabled,
            memory_confirmed: false,
            queues: Queues::new(options.queue_limits()),
            disks,
            barriers: Barriers::default(),
            features,
            health: Health::new(),
            batch: Box::new([SubmissionEntry::new_zeroed(); BATCH]),
            turn: 0,
            options,
            host: PhantomData,
        })
    }

    /// The registers, for whoever serves BAR0.
    pub fn registers(&self) -> Arc<Registers> {
        Arc::clone(&self.registers)
    }

    /// The counters, for whoever shows them.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.health.counters)
    }

    /// Commands under way at the disks: they hold host memory.
    pub fn in_flight(&self) -> usize {
        self.disks.slots.in_flight()
    }

    /// Resets the controller, whatever it does: [`Registers::reset`] and the first poll after it. From here on
    /// nothing is posted; it is over when [`Controller::is_quiet`] says so, after further polls.
    pub fn reset(&mut self, host: &mut H) {
        let _ = self.registers.reset();
        self.poll(host);
    }

    /// Whether the controller is disabled and no disk holds host memory for it.
    pub fn is_quiet(&self) -> bool {
        self.state == State::Disabled && self.control == self.registers.control() && self.in_flight() == 0
    }

    /// Does what there is to do, in bounded time; true if there was something.
    pub fn poll(&mut self, host: &mut H) -> bool {
        let mut progress = self.follow_registers(host);
        if self.state == State::Ready {
            progress |= self.serve(host);
        }
        if !self.barriers.is_empty() && self.state.posts() {
            progress |= self.pass_barriers(host);
        }
        self.disks.commit(host);
        progress |= self.reap(host);
        if self.state.posts() {
            self.signal(host, Patience::Polls);
            if !progress && self.state == State::Ready {
                self.queues.find_stray_doorbell(host, &mut self.health);
            }
        }
        progress
    }

    /// Raises the interrupts that are due.
    fn signal(&mut self, host: &mut H, patience: Patience) {
        let mask = self.registers.interrupt_mask();
        self.queues.signal(host, &mut self.health, mask, patience, self.features.coalescing());
    }

    /// When the controller has to be polled again at the latest, whatever else happens: then interrupts are due
    /// that the host wants coalesced.
    pub fn deadline(&self) -> Option<Instant> {
        self.queues.deadline()
    }

    /// Makes ready for a sleep that ends at [`Controller::deadline`], or before, when a register or a doorbell is
    /// written or a disk has something to report: raises the interrupts that were withheld, asks through shadow
    /// doorbells to be rung, looks again. False when there is something to do: then poll on.
    pub fn prepare_sleep(&mut self, host: &mut H) -> bool {
        if self.state.posts() {
            self.signal(host, Patience::None);
        }
        if self.in_flight() == 0 {
            self.health.rest();
        }
        let quiet = match self.state {
            State::Ready => self.queues.arm(host) && !self.has_work(host),
            _ => true,
        };
        quiet && self.control == self.registers.control()
    }

    /// Whether commands could be taken or events reported right now.
    fn has_work(&mut self, host: &mut H) -> bool {
        self.queues.find_stray_doorbells(host, &mut self.health);
        let slots = self.disks.slots.available() != 0;
        let commands = self.queues.any_takeable(host, &mut self.health, slots);
        commands || (self.health.events.is_due() && self.queues.has_admin_room(host, &mut self.health))
    }

    /// Serves each queue once: the admin queue first, the others round robin.
    fn serve(&mut self, host: &mut H) -> bool {
        let mut progress = self.report_events(host);
        progress |= self.serve_admin(host);
        let count = self.queues.io_queues();
        if count == 0 {
            return progress;
        }
        let first = if self.turn < count { self.turn } else { 0 };
        self.turn = first.saturating_add(1);
        for place in (first..count).chain(0..first) {
            let Some(id) = self.queues.io_queue(place) else { break };
            progress |= self.serve_io(host, id);
            if self.state != State::Ready {
                break;
            }
        }
        progress
    }

    /// Takes a batch of commands from an I/O queue and starts them.
    fn serve_io(&mut self, host: &mut H, id: QueueId) -> bool {
        let Self { queues, disks, features, health, batch, .. } = self;
        let batch_size = features.burst().map_or(BATCH, |burst| burst.min(BATCH));
        let most = u32::try_from(disks.slots.available().min(batch_size)).unwrap_or(0);
        let takeable = queues.takeable(host, health, id, most);
        let Some((at, count)) = queues.submission(id).map(|queue| queue.run(takeable)) else { return false };
        if count == 0 {
            return false;
        }
        health.work();
        let batch = batch.get_mut(..count as usize).unwrap_or_default();
        let write_cache = features.write_cache();
        let mut outcome = host.read(at, batch.as_mut_bytes());
        if outcome.is_ok() {
            for entry in batch {
                let origin = Origin {
                    queue: id,
                    command: entry.command_id.get(),
                    nsid: Nsid(entry.nsid.get()),
                    lba: Lba(entry.starting_lba()),
                };
                queues.take(id);
                if entry.flags.data_pointer() != DataPointerType::PRP {
                    health.counters.sgls.add(1);
                }
                let result = match disks.start(host, origin, entry, write_cache) {
                    Ok((_, Progress::Pending)) => continue,
                    Ok((work, Progress::Done)) => {
                        io::count(&health.counters, work);
                        Ok(0)
                    }
                    Err(status) => Err(status),
                };
                outcome = queues.complete(host, health, origin, result);
                if outcome.is_err() {
                    break;
                }
            }
        }
        if let Err(error) = outcome {
            self.fail(host, &error);
        }
        true
    }

    /// Takes the admin commands that are there, at most a batch.
    fn serve_admin(&mut self, host: &mut H) -> bool {
        let mut progress = false;
        for _ in 0..BATCH {
            // Writing the cache back may need a slot.
            let most = u32::from(self.disks.slots.available() != 0);
            let takeable = self.queues.takeable(host, &mut self.health, ADMIN, most);
            let Some((at, 1)) = self.queues.submission(ADMIN).map(|queue| queue.run(takeable)) else { break };
            progress = true;
            let mut entry = SubmissionEntry::new_zeroed();
            if let Err(error) = host.read(at, entry.as_mut_bytes()) {
                self.fail(host, &error);
                break;
            }
            if !self.memory_confirmed && !host.confirm(at, entry.as_bytes()) {
                self.stop(host);
                break;
            }
            self.memory_confirmed = true;
            let origin = Origin {
                queue: ADMIN,
                command: entry.command_id.get(),
                nsid: Nsid(entry.nsid.get()),
                lba: Lba(0),
            };
            self.queues.take(ADMIN);
            let result = match self.admin(host, origin, &entry) {
                Ok(Answer::Pending) => continue,
                Ok(Answer::Parked) => {
                    self.queues.park();
                    continue;
                }
                Ok(Answer::Done(result)) => Ok(result),
                Err(failure) => Err(failure),
            };
            self.health.counters.admin.add(1);
            if let Err(error) = self.queues.complete(host, &mut self.health, origin, result) {
                self.fail(host, &error);
                break;
            }
        }
        progress
    }

    /// Completes the Asynchronous Event Requests that have an event.
    fn report_events(&mut self, host: &mut H) -> bool {
        let mut progress = false;
        while self.health.events.is_due()
            && self.queues.has_admin_room(host, &mut self.health)
            && let Some((command, event)) = self.health.events.next()
        {
            progress = true;
            self.queues.unpark();
            let origin = Origin { queue: ADMIN, command, nsid: Nsid(0), lba: Lba(0) };
            let result = event.map(|event| event.bits());
            self.health.counters.admin.add(1);
            if let Err(error) = self.queues.complete(host, &mut self.health, origin, result) {
                self.fail(host, &error);
                break;
            }
        }
        progress
    }

    /// Completes what the disks report; after a reset nothing is posted any more.
    fn reap(&mut self, host: &mut H) -> bool {
        let Self { queues, disks, health, state, .. } = self;
        let mut outcome = Ok(());
        let progress = disks.reap(host, |host, owner, result| match owner {
            Owner::Command { origin, work } if state.posts() && outcome.is_ok() => {
                if result.is_ok() {
                    io::count(&health.counters, work);
                }
                if origin.queue == ADMIN {
                    health.counters.admin.add(1);
                }
                let result = result.map(|()| 0).map_err(Status::from);
                outcome = queues.complete(host, health, origin, result);
            }
            Owner::Command { .. } => {}
            Owner::Shutdown => {
                if let Err(error) = result {
                    tracing::warn!(%error, "A disk could not be flushed at shutdown");
                }
            }
        });
        self.report_changes();
        if let Err(error) = outcome {
            self.fail(host, &error);
        }
        progress
    }

    /// Tells the host which namespaces have changed.
    fn report_changes(&mut self) {
        for nsid in self.disks.changed.drain(..) {
            self.health.events.namespace_changed(nsid, self.features.async_events().namespace_attributes());
        }
    }
}
