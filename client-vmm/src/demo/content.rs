//! What is written to the drive: no two words alike, so that nothing can be lost or mixed up unseen.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use outboard_nvme::Lba;
use outboard_nvme::driver::{
    self, Block as _, Command, DataPointer, Fragment, Memory as _, Namespace, QueuePair,
};

use super::DemoError;
use crate::drive::{Block, Doorbell, NvmeDrive};

/// Bytes of an I/O.
const CHUNK: usize = 64 << 10;
/// Outstanding I/Os.
const DEPTH: u16 = 16;
/// The memory that it takes: the buffers, a PRP list for each, the queues.
pub(super) const MEMORY: usize = DEPTH as usize * (CHUNK + 4096) + (1 << 20);
/// How long a pass over the drive may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The content of a drive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Content {
    seed: u64,
    chunks: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Write,
    Verify,
}

struct Buffer {
    block: Block,
    data: DataPointer,
}

impl Content {
    /// At least `size` bytes.
    pub(super) fn new(seed: u64, size: usize) -> Self {
        Self { seed, chunks: size.div_ceil(CHUNK).max(1) as u64 }
    }

    /// In bytes.
    pub(super) fn size(&self) -> u64 {
        self.chunks.saturating_mul(CHUNK as u64)
    }

    /// Fills the namespace, makes it durable, reads it back and compares.
    pub(super) fn write_and_verify(
        &self,
        drive: &mut NvmeDrive,
        namespace: Namespace,
    ) -> Result<(), DemoError> {
        let mut queue = drive.create_queue_pair(DEPTH.saturating_add(1))?;
        let buffers = (0..DEPTH).map(|_| Buffer::new(drive)).collect::<Result<Vec<_>, _>>()?;
        self.pass(&mut queue, namespace, &buffers, Pass::Write)?;
        let flush = Command::Flush { nsid: namespace.nsid }.entry().map_err(driver::Error::from)?;
        queue.execute(flush, PATIENCE, std::thread::yield_now)?;
        self.pass(&mut queue, namespace, &buffers, Pass::Verify)?;
        Ok(drive.delete_queue_pair(queue)?)
    }

    /// Goes over the whole namespace.
    fn pass(
        &self,
        queue: &mut QueuePair<Doorbell, Block>,
        namespace: Namespace,
        buffers: &[Buffer],
        pass: Pass,
    ) -> Result<(), DemoError> {
        let nsid = namespace.nsid;
        let blocks = u32::try_from(CHUNK >> namespace.block_shift).unwrap_or(u32::MAX);
        let mut bytes = vec![0; CHUNK];
        let mut free: Vec<usize> = (0..buffers.len()).collect();
        let mut flights: Vec<Option<(usize, u64)>> = vec![None; queue.depth()];
        let mut waiting = 0..self.chunks;
        let start = Instant::now();
        loop {
            while let Some(index) = free.pop() {
                let (Some(chunk), Some(buffer)) = (waiting.next(), buffers.get(index)) else { break };
                let start = Lba(chunk.saturating_mul(blocks.into()));
                let data = buffer.data;
                let command = match pass {
                    Pass::Write => {
                        self.fill(chunk, &mut bytes);
                        buffer.block.write(0, &bytes);
                        Command::Write { nsid, start, blocks, data, durable: false }
                    }
                    Pass::Verify => Command::Read { nsid, start, blocks, data },
                };
                let id = queue.submit(&command).map_err(driver::Error::from)?;
                if let Some(flight) = flights.get_mut(id.slot()) {
                    *flight = Some((index, chunk));
                }
            }
            queue.ring()?;
            let mut completed = Vec::new();
            queue.poll(|completion| completed.push(completion))?;
            for completion in &completed {
                completion.outcome()?;
                let flight = flights.get_mut(completion.id.slot()).and_then(Option::take);
                let Some((index, chunk)) = flight else { continue };
                if let (Pass::Verify, Some(buffer)) = (pass, buffers.get(index)) {
                    buffer.block.read(0, &mut bytes);
                    self.compare(chunk, &bytes, "The drive")?;
                }
                free.push(index);
            }
            if queue.outstanding() == 0 && waiting.is_empty() {
                return Ok(());
            }
            if completed.is_empty() {
                std::thread::yield_now();
                if start.elapsed() > PATIENCE {
                    return Err(DemoError::Lost { count: queue.outstanding() });
                }
            }
        }
    }

    /// Compares the file behind the drive.
    pub(super) fn verify_image(&self, path: &Path) -> Result<(), DemoError> {
        let mut file = File::open(path).map_err(DemoError::Image)?;
        let mut bytes = vec![0; CHUNK];
        for chunk in 0..self.chunks {
            file.read_exact(&mut bytes).map_err(DemoError::Image)?;
            self.compare(chunk, &bytes, "The image")?;
        }
        match file.read(&mut bytes).map_err(DemoError::Image)? {
            0 => Ok(()),
            _ => Err(DemoError::Image(io::Error::other("it has grown"))),
        }
    }

    /// The words of a chunk.
    fn words(&self, chunk: u64) -> impl Iterator<Item = u64> {
        let words = CHUNK as u64 / 8;
        let first = self.seed.wrapping_shl(56).wrapping_add(chunk.wrapping_mul(words));
        (first..first.wrapping_add(words)).map(mix)
    }

    fn fill(&self, chunk: u64, bytes: &mut [u8]) {
        for (place, word) in bytes.chunks_exact_mut(8).zip(self.words(chunk)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn compare(&self, chunk: u64, bytes: &[u8], place: &'static str) -> Result<(), DemoError> {
        let wrong =
            bytes.chunks_exact(8).zip(self.words(chunk)).position(|(b, word)| b != word.to_le_bytes());
        match wrong {
            None => Ok(()),
            Some(word) => {
                let offset =
                    chunk.saturating_mul(CHUNK as u64).saturating_add((word as u64).saturating_mul(8));
                Err(DemoError::Corrupt { place, offset })
            }
        }
    }
}

/// SplitMix64's output function: a bijection.
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

impl Buffer {
    fn new(drive: &mut NvmeDrive) -> Result<Self, DemoError> {
        let block = drive.memory().allocate(CHUNK).map_err(driver::Error::from)?;
        let list = drive.memory().allocate(4096).map_err(driver::Error::from)?;
        let fragment = Fragment { iova: block.iova(), length: CHUNK };
        let data = DataPointer::new(&[fragment], Some(&list))
            .map_err(|error| driver::Error::from(io::Error::other(error)))?;
        Ok(Self { block, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_found() {
        let content = Content::new(1, 2 * CHUNK);
        let mut bytes = vec![0; CHUNK];
        content.fill(1, &mut bytes);
        content.compare(1, &bytes, "The drive").unwrap();
        assert!(content.compare(0, &bytes, "The drive").is_err(), "another chunk");
        assert!(Content::new(2, CHUNK).compare(1, &bytes, "The drive").is_err(), "another run");
        bytes[4099] ^= 1;
        match content.compare(1, &bytes, "The drive") {
            Err(DemoError::Corrupt { offset, .. }) => assert_eq!(offset, CHUNK as u64 + 4096),
            other => panic!("{other:?}"),
        }
    }
}
