//! One thread with one queue pair, which keeps a number of I/Os outstanding.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use outboard_nvme::Lba;
use outboard_nvme::driver::{
    self, Block as _, Command, CommandError, DataPointer, Fragment, Memory as _, Namespace, PrpError,
    QueuePair,
};

use outboard_vfio_user::client::{Client, Disconnect};

use super::Pattern;
use super::histogram::Histogram;
use crate::drive::{Block, Doorbell, NvmeDrive};
use crate::limits;

/// What each job does.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Where, and whether it reads or writes.
    pub pattern: Pattern,
    /// Bytes of an I/O.
    pub block: usize,
    /// How many are outstanding.
    pub depth: u16,
    /// How long.
    pub time: Duration,
    /// The core of the first job.
    pub cpu: Option<usize>,
}

/// Why a job gives no figure.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The queue failed.
    #[error("The drive failed")]
    Driver(#[from] driver::Error),
    /// An I/O failed.
    #[error("An I/O failed")]
    Io(#[from] CommandError),
    /// The I/Os cannot be described.
    #[error("No I/O of this size")]
    Prp(#[from] PrpError),
    /// The I/Os do not fit the namespace or the drive.
    #[error("An I/O of {block} bytes is no multiple of the drive's {unit} bytes, or more than {most}")]
    Block {
        /// What was wanted.
        block: usize,
        /// A block of the namespace.
        unit: u64,
        /// What drive and program can do, and the namespace holds.
        most: u64,
    },
    /// The drive's queues are shorter.
    #[error("The drive's queues hold {most} commands, not {depth}")]
    Depth {
        /// What was wanted.
        depth: u16,
        /// What they hold.
        most: u16,
    },
    /// I/Os that never ended.
    #[error("{count} I/Os did not end within {within:?}", within = limits::DRAIN)]
    Lost {
        /// How many.
        count: usize,
    },
    /// The server is gone.
    #[error("The connection is over")]
    Disconnected(#[from] Disconnect),
    /// The core is not there, or not ours.
    #[error("Cannot run on core {cpu}")]
    Pin {
        /// Which.
        cpu: usize,
        /// What sched_setaffinity(2) says.
        source: nix::Error,
    },
    /// A bug.
    #[error("A job panicked")]
    Panicked,
}

impl Workload {
    /// The memory that a job needs, in bytes.
    pub fn memory(&self) -> usize {
        let page = driver::limits::PAGE_SIZE;
        let buffer = self.block.next_multiple_of(page).saturating_add(page);
        // A submission entry and a completion entry for each, and the ends of their pages.
        let queue =
            usize::from(self.queue_entries()).saturating_mul(64 + 16).saturating_add(page.saturating_mul(2));
        usize::from(self.depth).saturating_mul(buffer).saturating_add(queue)
    }

    /// As many as the commands need, and no fewer than is usual: each turn of a queue with shadow doorbells
    /// costs a message.
    fn queue_entries(&self) -> u16 {
        self.depth.saturating_add(1).max(limits::QUEUE_ENTRIES)
    }
}

/// What a job has seen.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) latencies: Histogram,
    pub(super) elapsed: Duration,
}

/// An I/O that is outstanding.
#[derive(Clone, Copy, Debug)]
struct Flight {
    buffer: usize,
    since: Instant,
}

/// A job that is ready to run.
#[derive(Debug)]
pub(super) struct Job {
    client: Arc<Client>,
    queue: QueuePair<Doorbell, Block>,
    buffers: Vec<DataPointer>,
    namespace: Namespace,
    /// Blocks of an I/O.
    blocks: u32,
    /// How many I/Os lie side by side in the namespace.
    places: u64,
    place: u64,
    random: u64,
    workload: Workload,
    number: u16,
}

impl Job {
    /// The job with the number `number` of those that run together.
    ///
    /// # Errors
    /// [`JobError`]
    pub(super) fn new(
        client: &Arc<Client>,
        drive: &mut NvmeDrive,
        namespace: Namespace,
        workload: Workload,
        number: u16,
    ) -> Result<Self, JobError> {
        let unit = 1_u64.checked_shl(namespace.block_shift.into()).unwrap_or(u64::MAX);
        let size = unit.saturating_mul(namespace.blocks);
        let most = size.min(drive.max_transfer().min(limits::BLOCK) as u64);
        let wrong = JobError::Block { block: workload.block, unit, most };
        let block = workload.block as u64;
        if block > most || block.checked_rem(unit) != Some(0) {
            return Err(wrong);
        }
        let Some(Ok(blocks)) = block.checked_div(unit).map(u32::try_from) else { return Err(wrong) };
        let places = size.checked_div(block).unwrap_or(1).max(1);
        let (depth, most) = (workload.depth, drive.max_queue_entries().saturating_sub(1));
        if depth > most {
            return Err(JobError::Depth { depth, most });
        }
        let queue = drive.create_queue_pair(workload.queue_entries().min(drive.max_queue_entries()))?;
        let buffers = (0..workload.depth).map(|_| buffer(drive, workload.block)).collect::<Result<_, _>>()?;
        // Any odd number that differs from job to job.
        let random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(u64::from(number).wrapping_add(1));
        // Jobs that go from start to end begin at different places.
        let place = places.wrapping_mul(number.into()).checked_div(u64::from(limits::JOBS)).unwrap_or(0);
        Ok(Self {
            client: client.clone(),
            queue,
            buffers,
            namespace,
            blocks,
            places,
            place,
            random,
            workload,
            number,
        })
    }

    /// Does I/O until the time is over.
    ///
    /// # Errors
    /// [`JobError`]
    pub(super) fn run(mut self) -> Result<Outcome, JobError> {
        if let Some(first) = self.workload.cpu {
            pin(first.saturating_add(self.number.into()))?;
        }
        let depth = self.buffers.len();
        let mut free: Vec<usize> = (0..depth).rev().collect();
        let mut flights: Vec<Option<Flight>> = vec![None; self.queue.depth()];
        let mut latencies = Histogram::default();
        let start = Instant::now();
        let end = start.checked_add(self.workload.time).unwrap_or(start);
        let mut now = start;
        let mut last = start;
        let mut idle = 0_u32;
        while now < end || self.queue.outstanding() > 0 {
            if now < end && !free.is_empty() {
                while let Some(buffer) = free.pop() {
                    let command = self.next_command(buffer);
                    let id = self.queue.submit(&command).map_err(driver::Error::from)?;
                    if let Some(flight) = flights.get_mut(id.slot()) {
                        *flight = Some(Flight { buffer, since: now });
                    }
                }
                self.queue.ring()?;
            }
            let mut seen = None;
            let mut failed = None;
            let count = self.queue.poll(|completion| {
                // One look at the clock for all that were completed together.
                let now = *seen.get_or_insert_with(Instant::now);
                if let Err(error) = completion.outcome() {
                    failed = Some(error);
                }
                if let Some(flight) = flights.get_mut(completion.id.slot()).and_then(Option::take) {
                    latencies.record(now.saturating_duration_since(flight.since));
                    free.push(flight.buffer);
                }
            })?;
            if let Some(error) = failed {
                return Err(error.into());
            }
            match seen {
                Some(at) => (now, last, idle) = (at, at, 0),
                None => idle = idle.wrapping_add(1),
            }
            if count == 0 && idle & LOOKS == 0 {
                // Nothing for a while: perhaps the server waits for this very core.
                std::thread::yield_now();
                now = Instant::now();
                if now.saturating_duration_since(end) > limits::DRAIN {
                    return Err(JobError::Lost { count: self.queue.outstanding() });
                }
                if now.saturating_duration_since(last) > limits::PATIENCE {
                    last = now;
                    // A store to a doorbell does not tell that nobody is left to see it.
                    if let Some(cause) = self.client.disconnected() {
                        return Err(cause.into());
                    }
                }
            }
        }
        Ok(Outcome { latencies, elapsed: now.saturating_duration_since(start) })
    }

    #[inline]
    fn next_command(&mut self, buffer: usize) -> Command {
        let nsid = self.namespace.nsid;
        let data = self.buffers.get(buffer).copied().unwrap_or(DataPointer::NONE);
        let place = match self.workload.pattern {
            Pattern::Read | Pattern::Write => {
                self.place = self.place.wrapping_add(1).checked_rem(self.places).unwrap_or(0);
                self.place
            }
            Pattern::Randread | Pattern::Randwrite | Pattern::Randrw => self.random_place(),
        };
        let start = Lba(place.wrapping_mul(self.blocks.into()));
        let read = match self.workload.pattern {
            Pattern::Read | Pattern::Randread => true,
            Pattern::Write | Pattern::Randwrite => false,
            Pattern::Randrw => self.random & 1 << 32 != 0,
        };
        let blocks = self.blocks;
        if read {
            Command::Read { nsid, start, blocks, data }
        } else {
            Command::Write { nsid, start, blocks, data, durable: false }
        }
    }

    /// Xorshift, and a multiplication that brings it into the range.
    #[inline]
    fn random_place(&mut self) -> u64 {
        let mut random = self.random;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        self.random = random;
        let place = u128::from(random).wrapping_mul(self.places.into()) >> 64;
        u64::try_from(place).unwrap_or(0)
    }
}

/// How often to look, less one, before others may run: a power of two less one.
const LOOKS: u32 = 0xff;

/// Memory for one I/O.
fn buffer(drive: &mut NvmeDrive, length: usize) -> Result<DataPointer, JobError> {
    let data = drive.memory().allocate(length).map_err(driver::Error::from)?;
    let list = drive.memory().allocate(driver::limits::PAGE_SIZE).map_err(driver::Error::from)?;
    Ok(DataPointer::new(&[Fragment { iova: data.iova(), length }], Some(&list))?)
}

fn pin(cpu: usize) -> Result<(), JobError> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &cpus))
        .map_err(|source| JobError::Pin { cpu, source })
}
