//! What a command means for an image: one operation after the other, the next chosen when the last is over.

use nix::errno::Errno;
use outboard_nvme::Lba;
use outboard_nvme::controller::{Direction, DiskError, Geometry, LbaRange, Operation, Segment, Tag};

use super::buffers::{Alignment, Buffers};
use super::engine::ImageOp;
use crate::disk::Extent;
use crate::disk::limits::{FALLOCATE_CHUNK, RETRIES, VERIFY_CHUNK, ZERO_CHUNK};
use crate::disk::ram::{compare, gather, scatter};
use crate::disk::{PinHost, PinnedBytes};

/// What an image can do, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Traits {
    /// What transfers must obey.
    pub(super) alignment: Alignment,
    /// Whether the file system zeroes ranges by itself.
    pub(super) zero_range: Support,
    /// Whether a later sync may still be believed.
    pub(super) cache: Cache,
}

/// Whether the file system has an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Support {
    /// It has, or was not asked yet.
    Present,
    /// It has not.
    Absent,
}

/// The state of the page cache under an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cache {
    /// What was written is there until it is on the medium.
    Sound,
    /// A sync failed. The kernel marks the pages clean all the same, and the next sync would report success for
    /// data that is lost: from now on every one fails.
    Lossy,
}

/// A command under way.
pub(super) struct Job {
    /// Its name.
    pub(super) tag: Tag,
    /// log2 of the LBA size that a format brings when it is over.
    pub(super) format: Option<u32>,
    work: Work,
    retries: u32,
}

/// What is left to do.
enum Work {
    Read {
        at: Extent,
        data: Vec<Segment>,
    },
    Write {
        at: Extent,
        data: Vec<Segment>,
        durable: bool,
    },
    Compare {
        at: Extent,
        data: Vec<Segment>,
    },
    Verify {
        left: Extent,
    },
    Zero {
        left: Extent,
        how: Zeroing,
        durable: bool,
    },
    /// The next extent is the last of these.
    Deallocate {
        left: Vec<Extent>,
    },
    Sync,
}

/// How a range becomes zeroes; each falls back to the next.
#[derive(Clone, Copy)]
enum Zeroing {
    Punch,
    ZeroRange,
    Write,
}

/// What follows an operation.
pub(super) enum Outcome<P> {
    /// Another one.
    Next(ImageOp<P>),
    /// Nothing: the command is over.
    Over(Result<(), DiskError>),
}

impl Job {
    /// Plans a command; none if there is nothing to do for it.
    pub(super) fn new(
        tag: Tag,
        geometry: &Geometry,
        operation: Operation<'_>,
    ) -> Result<Option<Job>, DiskError> {
        let extent = |range| Extent::new(geometry, range).ok_or(DiskError::Internal);
        let zeroing =
            |allowed| if allowed && geometry.deallocates { Zeroing::Punch } else { Zeroing::ZeroRange };
        let mut format = None;
        let work = match operation {
            Operation::Read { range, data } => Work::Read { at: extent(range)?, data: data.to_vec() },
            Operation::Write { range, data, durable } => {
                Work::Write { at: extent(range)?, data: data.to_vec(), durable }
            }
            Operation::Compare { range, data } => Work::Compare { at: extent(range)?, data: data.to_vec() },
            Operation::Verify { range } => Work::Verify { left: extent(range)? },
            Operation::Flush => Work::Sync,
            Operation::WriteZeroes { range, deallocate, durable } => {
                Work::Zero { left: extent(range)?, how: zeroing(deallocate), durable }
            }
            Operation::Format { block_shift } => {
                format = Some(block_shift);
                let whole = LbaRange { start: Lba(0), blocks: geometry.blocks };
                Work::Zero { left: extent(whole)?, how: zeroing(true), durable: true }
            }
            Operation::Deallocate { ranges } => {
                let mut left: Vec<Extent> = Vec::with_capacity(ranges.len());
                for &range in ranges {
                    let next = extent(range)?;
                    match left.last_mut() {
                        // Joined, so that a file system block that two ranges share is given back.
                        Some(last) if last.end() == next.offset => {
                            last.length = last.length.saturating_add(next.length);
                        }
                        _ => left.push(next),
                    }
                }
                left.retain(|extent| extent.length > 0);
                left.reverse();
                if left.is_empty() || !geometry.deallocates {
                    return Ok(None);
                }
                Work::Deallocate { left }
            }
        };
        Ok(Some(Job { tag, format, work, retries: 0 }))
    }

    /// The first operation. Takes hold of the host's memory.
    pub(super) fn start<H: PinHost>(
        &mut self,
        host: &mut H,
        traits: &Traits,
    ) -> Result<ImageOp<H::Pin>, DiskError> {
        let (at, data, direction) = match &self.work {
            Work::Read { at, data } => (at, data, Some(Direction::ToHost)),
            Work::Write { at, data, .. } => (at, data, Some(Direction::FromHost)),
            // What is read is for us alone.
            Work::Compare { at, data } => (at, data, None),
            Work::Verify { .. } | Work::Zero { .. } | Work::Deallocate { .. } | Work::Sync => {
                return self.next(traits);
            }
        };
        let total = data.iter().try_fold(0usize, |sum, segment| sum.checked_add(segment.length));
        let length = usize::try_from(at.length).ok().filter(|&length| Some(length) == total);
        let length = length.ok_or(DiskError::Internal)?;
        let pinned = direction.and_then(|direction| Buffers::pinned(host, data, direction, traits.alignment));
        let mut buffers = pinned.unwrap_or_else(|| Buffers::bounced(length));
        let offset = at.offset;
        match self.work {
            Work::Write { ref data, durable, .. } => {
                if durable && traits.cache == Cache::Lossy {
                    return Err(DiskError::Write);
                }
                if let Some(bounce) = buffers.bounce() {
                    gather(host, data, bounce)?;
                }
                Ok(ImageOp::Write { offset, buffers, durable })
            }
            _ => Ok(ImageOp::Read { offset, buffers }),
        }
    }

    /// The next operation of a command that moves no data of the host.
    fn next<P>(&self, traits: &Traits) -> Result<ImageOp<P>, DiskError> {
        let sync = || match traits.cache {
            Cache::Sound => Ok(ImageOp::Sync),
            Cache::Lossy => Err(DiskError::Write),
        };
        match &self.work {
            Work::Zero { left, .. } if left.length == 0 => sync(),
            Work::Zero { left, how, .. } => Ok(match (how, traits.zero_range) {
                (Zeroing::Punch, _) => ImageOp::Punch(left.first(FALLOCATE_CHUNK)),
                (Zeroing::ZeroRange, Support::Present) => ImageOp::Zero(left.first(FALLOCATE_CHUNK)),
                (Zeroing::ZeroRange, Support::Absent) | (Zeroing::Write, _) => ImageOp::Write {
                    offset: left.offset,
                    buffers: Buffers::zeroes(left.first(ZERO_CHUNK).length),
                    durable: false,
                },
            }),
            Work::Deallocate { left } => {
                left.last().map(|extent| ImageOp::Punch(*extent)).ok_or(DiskError::Internal)
            }
            Work::Sync => sync(),
            Work::Verify { left } => {
                let length = usize::try_from(left.first(VERIFY_CHUNK).length);
                let buffers = Buffers::bounced(length.map_err(|_| DiskError::Internal)?);
                Ok(ImageOp::Read { offset: left.offset, buffers })
            }
            Work::Read { .. } | Work::Write { .. } | Work::Compare { .. } => Err(DiskError::Internal),
        }
    }

    /// What follows when `op` is over.
    pub(super) fn advance<H: PinHost>(
        &mut self,
        host: &mut H,
        traits: &mut Traits,
        op: ImageOp<H::Pin>,
        result: Result<usize, Errno>,
    ) -> Outcome<H::Pin> {
        match result {
            Ok(count) => self.succeeded(host, traits, op, count),
            Err(Errno::EINTR | Errno::EAGAIN) if self.retries < RETRIES => {
                self.retries = self.retries.saturating_add(1);
                Outcome::Next(op)
            }
            Err(errno) => self.failed(traits, &op, errno),
        }
    }

    fn succeeded<H: PinHost>(
        &mut self,
        host: &mut H,
        traits: &Traits,
        op: ImageOp<H::Pin>,
        count: usize,
    ) -> Outcome<H::Pin> {
        match op {
            // The image has become shorter.
            ImageOp::Read { .. } if count == 0 => Outcome::Over(Err(DiskError::Read)),
            ImageOp::Write { .. } if count == 0 => Outcome::Over(Err(DiskError::Write)),
            ImageOp::Read { offset, mut buffers } => {
                if let Work::Verify { left } = &mut self.work {
                    *left = left.after(count as u64);
                    return if left.length == 0 { Outcome::Over(Ok(())) } else { outcome(self.next(traits)) };
                }
                buffers.advance(count);
                if buffers.left() > 0 {
                    let offset = offset.saturating_add(count as u64);
                    return Outcome::Next(ImageOp::Read { offset, buffers });
                }
                Outcome::Over(match (buffers.bounce(), &self.work) {
                    (Some(bounce), Work::Read { data, .. }) => scatter(host, data, bounce),
                    (Some(bounce), Work::Compare { data, .. }) => compare(host, data, bounce),
                    _ => Ok(()),
                })
            }
            ImageOp::Write { offset, mut buffers, durable } => {
                if let Work::Zero { left, .. } = &mut self.work {
                    *left = left.after(count as u64);
                    return self.zeroed(traits);
                }
                buffers.advance(count);
                if buffers.left() > 0 {
                    let offset = offset.saturating_add(count as u64);
                    return Outcome::Next(ImageOp::Write { offset, buffers, durable });
                }
                Outcome::Over(Ok(()))
            }
            ImageOp::Sync => Outcome::Over(Ok(())),
            ImageOp::Punch(done) | ImageOp::Zero(done) => match &mut self.work {
                Work::Deallocate { left } => {
                    left.pop();
                    if left.is_empty() { Outcome::Over(Ok(())) } else { outcome(self.next(traits)) }
                }
                Work::Zero { left, .. } => {
                    *left = left.after(done.length);
                    self.zeroed(traits)
                }
                _ => Outcome::Over(Err(DiskError::Internal)),
            },
        }
    }

    /// What follows when some of a Write Zeroes is done: more, or the sync of a durable one, or nothing.
    fn zeroed<P>(&self, traits: &Traits) -> Outcome<P> {
        match self.work {
            Work::Zero { left, durable: false, .. } if left.length == 0 => Outcome::Over(Ok(())),
            _ => outcome(self.next(traits)),
        }
    }

    fn failed<P: PinnedBytes>(&mut self, traits: &mut Traits, op: &ImageOp<P>, errno: Errno) -> Outcome<P> {
        let syncs = matches!(op, ImageOp::Sync | ImageOp::Write { durable: true, .. });
        if syncs && traits.alignment == Alignment::Any {
            traits.cache = Cache::Lossy;
        }
        // EINVAL: a block device whose blocks are bigger than the range.
        if let (Work::Zero { how, .. }, Errno::EOPNOTSUPP | Errno::EINVAL) = (&mut self.work, errno) {
            let next = match op {
                ImageOp::Punch(_) => Some(Zeroing::ZeroRange),
                ImageOp::Zero(_) => Some(Zeroing::Write),
                _ => None,
            };
            if let Some(next) = next {
                *how = next;
                if matches!((op, errno), (ImageOp::Zero(_), Errno::EOPNOTSUPP)) {
                    traits.zero_range = Support::Absent;
                }
                return outcome(self.next(traits));
            }
        }
        let error = disk_error(op, errno);
        tracing::warn!(%errno, %error, "An operation on an image failed");
        Outcome::Over(Err(error))
    }
}

fn outcome<P>(next: Result<ImageOp<P>, DiskError>) -> Outcome<P> {
    match next {
        Ok(op) => Outcome::Next(op),
        Err(error) => Outcome::Over(Err(error)),
    }
}

/// What the kernel's error means to the host.
pub(super) fn disk_error<P>(op: &ImageOp<P>, errno: Errno) -> DiskError {
    match (errno, op) {
        // The host's memory is not what it was when it was pinned.
        (Errno::EFAULT, _) => DiskError::DataTransfer,
        (Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG, _) => DiskError::Capacity,
        (Errno::ENOMEM | Errno::EAGAIN | Errno::EINTR | Errno::EBADF | Errno::ECANCELED, _) => {
            DiskError::Internal
        }
        (_, ImageOp::Read { .. }) => DiskError::Read,
        (_, ImageOp::Write { .. } | ImageOp::Sync | ImageOp::Punch(_) | ImageOp::Zero(_)) => DiskError::Write,
    }
}
