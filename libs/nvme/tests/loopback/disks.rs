//! Disks for the controller.

use outboard_nvme::Lba;
use outboard_nvme::controller::{
    Disk, DiskError, Geometry, Host, LbaRange, Operation, Segment, Submission, Tag,
};

const SHIFT: u32 = 9;

fn geometry(blocks: u64) -> Geometry {
    Geometry {
        block_shift: SHIFT,
        formats: &[9, 12],
        blocks,
        read_only: false,
        volatile_cache: true,
        deallocates: true,
    }
}

/// Moves no data.
pub(crate) struct Null(pub(crate) u64);

impl<H: Host> Disk<H> for Null {
    fn geometry(&self) -> Geometry {
        geometry(self.0)
    }
    fn submit(&mut self, _: &mut H, _: Tag, _: Operation<'_>) -> Submission {
        Submission::Done(Ok(()))
    }
    fn commit(&mut self, _: &mut H) {}
    fn reap(&mut self, _: &mut H, _: &mut Vec<(Tag, Result<(), DiskError>)>) {}
}

/// When a disk's operations are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As soon as they are submitted.
    AtOnce,
    /// Later, some of them at a time, in any order.
    Late(u64),
}

#[derive(Debug)]
enum Owned {
    Read(LbaRange, Vec<Segment>),
    Write(LbaRange, Vec<Segment>),
    Compare(LbaRange, Vec<Segment>),
    Verify(LbaRange),
    Flush,
    Format(u32),
    Zero(Vec<LbaRange>),
}

/// Keeps its data in memory. Its last block is broken.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    geometry: Geometry,
    pace: Pace,
    pending: Vec<(Tag, Owned)>,
}

impl Memory {
    pub(crate) fn new(blocks: usize, pace: Pace) -> Self {
        Self { bytes: vec![0; blocks << SHIFT], geometry: geometry(blocks as u64), pace, pending: Vec::new() }
    }

    fn bytes(&mut self, range: LbaRange) -> Result<&mut [u8], DiskError> {
        let LbaRange { start: Lba(start), blocks } = range;
        if start + blocks == self.geometry.blocks {
            return Err(DiskError::Read);
        }
        Ok(&mut self.bytes[(start << self.geometry.block_shift) as usize..]
            [..(blocks << self.geometry.block_shift) as usize])
    }

    fn perform<H: Host>(&mut self, host: &mut H, operation: &Owned) -> Result<(), DiskError> {
        match operation {
            Owned::Read(range, segments) => {
                let mut bytes = &*self.bytes(*range)?;
                for segment in segments {
                    let (here, rest) = bytes.split_at(segment.length);
                    if let Some(iova) = segment.iova {
                        host.write(iova, here).map_err(|_| DiskError::DataTransfer)?;
                    }
                    bytes = rest;
                }
                assert!(bytes.is_empty(), "segments shorter than {range:?}");
            }
            Owned::Write(range, segments) => {
                let mut bytes = self.bytes(*range).map_err(|_| DiskError::Write)?;
                for segment in segments {
                    let (here, rest) = bytes.split_at_mut(segment.length);
                    host.read(segment.iova.unwrap(), here).map_err(|_| DiskError::DataTransfer)?;
                    bytes = rest;
                }
                assert!(bytes.is_empty(), "segments shorter than {range:?}");
            }
            Owned::Compare(range, segments) => {
                let mut bytes = &*self.bytes(*range)?;
                for segment in segments {
                    let (here, rest) = bytes.split_at(segment.length);
                    let mut theirs = vec![0; segment.length];
                    host.read(segment.iova.unwrap(), &mut theirs).map_err(|_| DiskError::DataTransfer)?;
                    if theirs != here {
                        return Err(DiskError::Mismatch);
                    }
                    bytes = rest;
                }
            }
            Owned::Verify(range) => {
                self.bytes(*range)?;
            }
            Owned::Flush => {}
            Owned::Format(shift) => {
                self.bytes.fill(0);
                self.geometry = self.geometry.formatted(*shift);
            }
            Owned::Zero(ranges) => {
                for &range in ranges {
                    self.bytes(range).map_err(|_| DiskError::Write)?.fill(0);
                }
            }
        }
        Ok(())
    }
}

impl<H: Host> Disk<H> for Memory {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, host: &mut H, tag: Tag, operation: Operation<'_>) -> Submission {
        let owned = match operation {
            Operation::Read { range, data } => Owned::Read(range, data.to_vec()),
            Operation::Write { range, data, .. } => Owned::Write(range, data.to_vec()),
            Operation::Compare { range, data } => Owned::Compare(range, data.to_vec()),
            Operation::Verify { range } => Owned::Verify(range),
            Operation::Flush => Owned::Flush,
            Operation::Format { block_shift } => Owned::Format(block_shift),
            Operation::WriteZeroes { range, .. } => Owned::Zero(vec![range]),
            Operation::Deallocate { ranges } => Owned::Zero(ranges.to_vec()),
        };
        match self.pace {
            Pace::AtOnce => Submission::Done(self.perform(host, &owned)),
            Pace::Late(_) => {
                self.pending.push((tag, owned));
                Submission::Pending
            }
        }
    }

    fn commit(&mut self, _: &mut H) {}

    fn reap(&mut self, host: &mut H, done: &mut Vec<(Tag, Result<(), DiskError>)>) {
        // Two at a time: the controller sees deep queues at the disk.
        for _ in 0..self.pending.len().min(2) {
            let (tag, operation) = self.pending.swap_remove(self.pace.choose(self.pending.len()));
            done.push((tag, self.perform(host, &operation)));
        }
    }
}

impl Pace {
    /// One of `count`.
    fn choose(&mut self, count: usize) -> usize {
        match self {
            Self::AtOnce => 0,
            Self::Late(random) => {
                // Knuth's MMIX generator.
                *random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (*random >> 33) as usize % count
            }
        }
    }
}
