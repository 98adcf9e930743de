//! `steady-client SOCKET RATE`: writes a block of a drive and reads another one, RATE times a second, and verifies
//! every byte. It says `ready`, and then does what its input tells it:
//!
//! * `report`: prints how it went since the last report: `ios=N failed=N wrong=N p50=US p99=US max=US`;
//! * `truncate`: takes the memory of its buffers away, goes on until the drive does not, and says `over`;
//! * the input's end: reads back all that it ever wrote, prints a last report, and leaves the drive in good order.

use std::error::Error;
use std::io::BufRead;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use outboard_nvme::driver::{Command, DataPointer, Fragment, Namespace, QueuePair};
use outboard_nvme::{Iova, Lba};
use outboard_vfio_user::client::{Client, Memory, Options, Sharing};
use outboard_vfio_user::dma;
use outboard_vfio_user::memory::{Access, Mapping};
use outboard_vmm::drive::{Attachment, Block, Doorbell, DoorbellAccess, attach, detach};
use vm_memory::Bytes;

const BLOCK: usize = 4096;
/// How many blocks of the drive are used.
const PLACES: usize = 1024;
/// Where the drive sees the buffers: one to write from, one to read into.
const BUFFERS: u64 = 1 << 40;
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it spins for a completion; then others may need the core.
const LOOK: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

struct Steady {
    queue: QueuePair<Doorbell, Block>,
    namespace: Namespace,
    buffers: Mapping,
    /// What was last written to each place; 0 is nothing.
    generations: Vec<u32>,
    random: u64,
    patience: Duration,
    latencies: Vec<Duration>,
    failed: u64,
    wrong: u64,
}

/// The bytes of a place in a generation.
fn content(place: usize, generation: u32) -> Vec<u8> {
    let seed = (place as u64) << 32 | u64::from(generation);
    let word = |at: u64| (seed ^ at << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..BLOCK as u64 / 8).flat_map(word).collect()
}

impl Steady {
    fn place(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random as usize % PLACES
    }

    /// Runs a command with the block of `place` and one of the buffers; false if it failed.
    fn run(&mut self, place: usize, write: bool) -> bool {
        let blocks = (BLOCK >> self.namespace.block_shift) as u32;
        let (nsid, start) = (self.namespace.nsid, Lba(place as u64 * u64::from(blocks)));
        let iova = Iova(BUFFERS + if write { 0 } else { BLOCK as u64 });
        let data = DataPointer::new(&[Fragment { iova, length: BLOCK }], None::<&Block>)
            .expect("a block is described");
        let command = if write {
            Command::Write { nsid, start, blocks, data, durable: false }
        } else {
            Command::Read { nsid, start, blocks, data }
        };
        let since = Instant::now();
        let entry = command.entry().expect("the command is whole");
        let result = self.queue.execute(entry, self.patience, || match since.elapsed() {
            waited if waited < LOOK => thread::yield_now(),
            _ => thread::sleep(NAP),
        });
        self.latencies.push(since.elapsed());
        self.failed += u64::from(result.is_err());
        result.is_ok()
    }

    fn write(&mut self, place: usize) {
        let generation = self.generations[place] + 1;
        self.buffers.bytes().write_slice(&content(place, generation), 0).expect("the buffer");
        if self.run(place, true) {
            self.generations[place] = generation;
        }
    }

    fn verify(&mut self, place: usize) {
        if self.generations[place] == 0 {
            return;
        }
        self.buffers.bytes().write_slice(&[0xee; BLOCK], BLOCK).expect("the buffer");
        if self.run(place, false) {
            let mut bytes = vec![0; BLOCK];
            self.buffers.bytes().read_slice(&mut bytes, BLOCK).expect("the buffer");
            self.wrong += u64::from(bytes != content(place, self.generations[place]));
        }
    }

    fn report(&mut self) {
        let mut latencies = std::mem::take(&mut self.latencies);
        latencies.sort_unstable();
        let at = |percent: usize| {
            let rank = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
            latencies.get(rank).map_or(0.0, |latency| latency.as_secs_f64() * 1e6)
        };
        let (failed, wrong) = (std::mem::take(&mut self.failed), std::mem::take(&mut self.wrong));
        println!(
            "ios={} failed={failed} wrong={wrong} p50={:.1} p99={:.1} max={:.1}",
            latencies.len(),
            at(50),
            at(99),
            at(100),
        );
    }
}

fn commands() -> Receiver<String> {
    let (send, receive) = channel();
    thread::spawn(move || {
        std::io::stdin().lock().lines().map_while(Result::ok).try_for_each(|line| send.send(line))
    });
    receive
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(rate)) = (arguments.next(), arguments.next()) else {
        return Err("usage: steady-client SOCKET RATE".into());
    };
    let period = Duration::from_secs_f64(1.0 / rate.parse::<f64>()?);
    nix::sys::prctl::set_timerslack(1)?;
    let client = Arc::new(Client::connect(Path::new(&socket), Options::default())?);
    let attachment =
        Attachment { doorbells: DoorbellAccess::Any, sharing: Sharing::Descriptor, memory: 1 << 20 };
    let mut drive = attach(&client, attachment)?;
    // Not sealed, unlike the memory that the driver's queues are in.
    let file = memfd_create("steady-client", MFdFlags::MFD_CLOEXEC)?;
    nix::unistd::ftruncate(&file, 2 * BLOCK as i64)?;
    let memory = Memory { file: file.as_fd(), offset: 0, length: 2 * BLOCK };
    client.dma_map(dma::Iova(BUFFERS), memory, Access::ReadWrite, Sharing::Descriptor)?;
    let nsid = drive.namespaces()?[0];
    let namespace = drive.namespace(nsid)?;
    drive.request_queues(1.try_into()?)?;
    let mut steady = Steady {
        queue: drive.create_queue_pair(64)?,
        namespace,
        buffers: Mapping::new(&file, 0, 2 * BLOCK, Access::ReadWrite)?,
        generations: vec![0; PLACES],
        random: 0x2545_f491_4f6c_dd1d ^ u64::from(std::process::id()),
        patience: PATIENCE,
        latencies: Vec::new(),
        failed: 0,
        wrong: 0,
    };
    let commands = commands();
    println!("ready");
    let mut next = Instant::now();
    loop {
        match commands.try_recv().as_deref() {
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => break,
            Ok("report") => steady.report(),
            Ok("truncate") => {
                nix::unistd::ftruncate(&file, 0)?;
                // A store to a doorbell does not tell that nobody looks at it any more.
                steady.patience = Duration::from_secs(1);
                let mut place = 0;
                while client.disconnected().is_none() && steady.run(place, place % 2 == 0) {
                    place = (place + 1) % PLACES;
                }
                println!("over");
                return Ok(());
            }
            Ok(other) => return Err(format!("'{other}' is none of report, truncate").into()),
        }
        let place = steady.place();
        steady.write(place);
        let place = steady.place();
        steady.verify(place);
        // What was missed is not made up for: that would be a load that depends on the latency.
        let now = Instant::now();
        next = (next + period).max(now);
        thread::sleep(next - now);
    }
    for place in 0..PLACES {
        steady.verify(place);
    }
    steady.report();
    drive.delete_queue_pair(steady.queue)?;
    detach(drive)?;
    Ok(())
}
