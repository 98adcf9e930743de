//! `numbered-writes SOCKET COMMAND FIRST LAST`: writes to the first namespace of the drive behind a vfio-user socket
//! of which each has a number, a place and a content of its own, so that it can be told later which of them are there.
//!
//! - `durable`: makes each durable, in turn by Flush and by FUA, and prints `fact durable NUMBER` once that and all
//!   before it are, before it goes on.
//! - `volatile`: makes none durable, prints `fact completed COUNT` when all are complete, and keeps the drive until
//!   it is killed.
//! - `check`: prints `fact lost COUNT`, those of which the drive has anything but the whole content.

use std::io::{self, Write as _};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use outboard_nvme::driver::{Block as _, Command, DataPointer, Fragment, Memory as _, Namespace, QueuePair};
use outboard_nvme::{Lba, Nsid};
use outboard_vfio_user::client::{Client, Options, Sharing};
use outboard_vmm::drive::{Attachment, Block, Doorbell, DoorbellAccess, attach, detach};

/// Bytes of a write: several pages, so that half of one would be seen.
const SIZE: usize = 16 << 10;
/// Writes that are outstanding together.
const BATCH: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Arguments {
    socket: PathBuf,
    command: Task,
    first: u64,
    last: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Task {
    Durable,
    Volatile,
    Check,
}

/// How writes become durable.
#[derive(Clone, Copy)]
enum Durability {
    /// Not at all.
    None,
    /// By a Flush after them.
    Flush,
    /// Each by itself (FUA).
    UnitAccess,
}

fn main() -> anyhow::Result<()> {
    let Arguments { socket, command, first, last } = Arguments::parse();
    let client = Arc::new(Client::connect(&socket, Options::default())?);
    let memory = BATCH as usize * (SIZE + 4096) + (1 << 20);
    let attachment = Attachment { doorbells: DoorbellAccess::Any, sharing: Sharing::Descriptor, memory };
    let mut drive = attach(&client, attachment)?;
    drive.request_queues(NonZeroU16::MIN)?;
    let namespace = drive.namespace(Nsid(1))?;
    let room = (namespace.blocks << namespace.block_shift) / SIZE as u64;
    let buffers = (0..BATCH)
        .map(|_| {
            let block = drive.memory().allocate(SIZE)?;
            let list = drive.memory().allocate(4096)?;
            let data = DataPointer::new(&[Fragment { iova: block.iova(), length: SIZE }], Some(&list))?;
            Ok(Buffer { block, data, _list: list })
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut stand = Stand { queue: drive.create_queue_pair(32)?, namespace, buffers };

    let batches = (first..=last).step_by(BATCH as usize).map(|start| start..(start + BATCH).min(last + 1));
    let mut lost = 0;
    for (batch, durability) in batches.zip([Durability::Flush, Durability::UnitAccess].into_iter().cycle()) {
        ensure!(batch.end <= room, "The drive has room for {room} writes only");
        match command {
            Task::Durable => {
                stand.write(batch.clone(), durability)?;
                tell("durable", batch.end - 1)?;
            }
            Task::Volatile => stand.write(batch, Durability::None)?,
            Task::Check => lost += stand.check(batch)?,
        }
    }
    match command {
        Task::Durable => {}
        Task::Volatile => {
            tell("completed", last + 1 - first)?;
            // What follows an end would be a shutdown in good order.
            loop {
                std::thread::park();
            }
        }
        Task::Check => tell("lost", lost)?,
    }
    drive.delete_queue_pair(stand.queue)?;
    Ok(detach(drive)?)
}

fn tell(name: &str, value: u64) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "fact {name} {value}")?;
    out.flush()
}

struct Buffer {
    block: Block,
    data: DataPointer,
    /// The drive reads it while a command is under way.
    _list: Block,
}

struct Stand {
    queue: QueuePair<Doorbell, Block>,
    namespace: Namespace,
    buffers: Vec<Buffer>,
}

impl Stand {
    fn write(&mut self, numbers: std::ops::Range<u64>, durability: Durability) -> anyhow::Result<()> {
        let durable = matches!(durability, Durability::UnitAccess);
        let writes = numbers.zip(&self.buffers).map(|(number, buffer)| {
            buffer.block.write(0, &content(number));
            let (start, blocks) = place(self.namespace, number);
            Command::Write { nsid: self.namespace.nsid, start, blocks, data: buffer.data, durable }
        });
        let writes: Vec<_> = writes.collect();
        self.execute(&writes)?;
        match durability {
            Durability::Flush => self.execute(&[Command::Flush { nsid: self.namespace.nsid }]),
            Durability::None | Durability::UnitAccess => Ok(()),
        }
    }

    /// How many are not as they were written.
    fn check(&mut self, numbers: std::ops::Range<u64>) -> anyhow::Result<u64> {
        let reads = numbers.clone().zip(&self.buffers).map(|(number, buffer)| {
            buffer.block.write(0, &[0xee; SIZE]);
            let (start, blocks) = place(self.namespace, number);
            Command::Read { nsid: self.namespace.nsid, start, blocks, data: buffer.data }
        });
        let reads: Vec<_> = reads.collect();
        self.execute(&reads)?;
        let mut lost = 0;
        for (number, buffer) in numbers.zip(&self.buffers) {
            let mut bytes = vec![0; SIZE];
            buffer.block.read(0, &mut bytes);
            if bytes != content(number) {
                lost += 1;
                let holds = if bytes.iter().all(|&byte| byte == 0) { "zeroes" } else { "something else" };
                println!("step the place of write {number} holds {holds}");
            }
        }
        Ok(lost)
    }

    /// All at once, and waits for them.
    fn execute(&mut self, commands: &[Command]) -> anyhow::Result<()> {
        for command in commands {
            self.queue.submit(command)?;
        }
        self.queue.ring()?;
        let start = Instant::now();
        while self.queue.outstanding() > 0 {
            let mut outcome = Ok(());
            let done =
                self.queue.poll(|completion| outcome = outcome.and(completion.outcome().map(|_| ())))?;
            outcome.context("A command failed")?;
            ensure!(start.elapsed() < PATIENCE, "{} commands did not end", self.queue.outstanding());
            if done == 0 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

fn place(namespace: Namespace, number: u64) -> (Lba, u32) {
    let blocks = SIZE >> namespace.block_shift;
    (Lba(number * blocks as u64), blocks as u32)
}

/// No two words alike, of no two writes, and none of them zero.
fn content(number: u64) -> Vec<u8> {
    let words = SIZE as u64 / 8;
    let words = (number * words + 1)..=((number + 1) * words);
    // Multiplication by an odd number is a bijection.
    words.flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}
