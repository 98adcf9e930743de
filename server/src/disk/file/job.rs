//! A command on an image as the sequence of operations that carries it out. No system call is made here, so that
//! the same sequences can be run against a model of a disk that loses power.

use std::collections::VecDeque;

use nix::errno::Errno;
use nix::libc::iovec;
use outboard_nvme::Iova;
use outboard_nvme::controller::{Direction, DiskError, Operation, Segment, Tag};

use super::engine::{ImageOp, Vectors};
use super::pages::Pages;
use crate::disk::{PinHost, PinnedBytes};

/// What O_DIRECT demands, in bytes; 1 where nothing is demanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Of memory addresses.
    pub(super) memory: usize,
    /// Of offsets and lengths.
    pub(super) offset: usize,
}

impl Alignment {
    pub(super) const NONE: Self = Self { memory: 1, offset: 1 };
}

/// Zeroes that are written at a time where the file system cannot make them.
const ZEROES: usize = 256 << 10;

/// Where a command's data is while the kernel has it.
enum Memory<P> {
    /// In host memory, which stays mapped.
    Pinned { _pins: Vec<P> },
    /// In a buffer of ours, to be copied when it is read.
    Bounced { pages: Pages, segments: Vec<Segment> },
}

/// Data on its way.
struct Transfer<P> {
    direction: Direction,
    durable: bool,
    /// The offset of what is left.
    offset: u64,
    /// What is left, from `next` on.
    vectors: Vec<iovec>,
    next: usize,
    memory: Memory<P>,
}

/// How a range is made to read as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Punch,
    Zero,
    Write,
}

/// What is to be done next.
enum Step<P> {
    /// Segments that wait for memory: this is where a command holds nothing yet.
    Begin {
        direction: Direction,
        durable: bool,
        offset: u64,
        segments: Vec<Segment>,
    },
    Transfer(Transfer<P>),
    Clear {
        offset: u64,
        length: u64,
        way: Way,
        durable: bool,
        zeroes: Option<(Pages, Box<iovec>)>,
    },
    Deallocate {
        ranges: VecDeque<(u64, u64)>,
    },
    Sync,
}

/// A command under way.
pub(super) struct Job<P> {
    pub(super) tag: Tag,
    step: Step<P>,
}

/// What an operation's result means for its command.
pub(super) enum Outcome {
    /// Another operation is needed: ask for it.
    Again,
    Over(Result<(), DiskError>),
}

impl<P: PinnedBytes> Job<P> {
    pub(super) fn new(tag: Tag, operation: Operation<'_>, block_shift: u32) -> Self {
        let bytes = |blocks: u64| blocks << block_shift;
        let step = match operation {
            Operation::Read { range, data } => Step::Begin {
                direction: Direction::ToHost,
                durable: false,
                offset: bytes(range.start.0),
                segments: data.to_vec(),
            },
            Operation::Write { range, data, durable } => Step::Begin {
                direction: Direction::FromHost,
                durable,
                offset: bytes(range.start.0),
                segments: data.to_vec(),
            },
            Operation::Flush => Step::Sync,
            Operation::WriteZeroes { range, deallocate, durable } => Step::Clear {
                offset: bytes(range.start.0),
                length: bytes(range.blocks),
                way: if deallocate { Way::Punch } else { Way::Zero },
                durable,
                zeroes: None,
            },
            Operation::Deallocate { ranges } => Step::Deallocate {
                ranges: ranges
                    .iter()
                    .filter(|range| range.blocks > 0)
                    .map(|range| (bytes(range.start.0), bytes(range.blocks)))
                    .collect(),
            },
        };
        Self { tag, step }
    }

    /// Takes the memory that the command needs.
    ///
    /// # Errors
    /// Host memory cannot be read.
    pub(super) fn begin<H: PinHost<Pin = P>>(
        &mut self,
        host: &mut H,
        alignment: Alignment,
    ) -> Result<(), DiskError> {
        if let Step::Begin { direction, durable, offset, segments } = &mut self.step {
            let segments = std::mem::take(segments);
            let (vectors, memory) = match pin(host, &segments, *direction, alignment) {
                Some((vectors, pins)) => (vectors, Memory::Pinned { _pins: pins }),
                None => bounce(host, segments, *direction)?,
            };
            self.step = Step::Transfer(Transfer {
                direction: *direction,
                durable: *durable,
                offset: *offset,
                vectors,
                next: 0,
                memory,
            });
        }
        Ok(())
    }

    /// The next operation; `None` when there is nothing (left) to do. The memory that it names stays where it is
    /// for as long as the job does.
    pub(super) fn operation(&mut self) -> Option<ImageOp> {
        match &mut self.step {
            Step::Begin { .. } => None,
            Step::Transfer(transfer) => transfer.operation(),
            Step::Clear { length: 0, .. } => None,
            Step::Clear { offset, length, way, durable, zeroes } => Some(match way {
                Way::Punch => ImageOp::Punch { offset: *offset, length: *length },
                Way::Zero => ImageOp::Zero { offset: *offset, length: *length },
                Way::Write => {
                    let chunk = usize::try_from(*length).unwrap_or(usize::MAX).min(ZEROES);
                    let (pages, vector) = zeroes.get_or_insert_with(|| {
                        let vector = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
                        (Pages::new(ZEROES), Box::new(vector))
                    });
                    **vector = iovec { iov_base: pages.as_mut_ptr().cast(), iov_len: chunk };
                    let from = Vectors { first: &raw const **vector, count: 1 };
                    ImageOp::Write { offset: *offset, from, durable: *durable }
                }
            }),
            Step::Deallocate { ranges } => {
                ranges.front().map(|&(offset, length)| ImageOp::Punch { offset, length })
            }
            Step::Sync => Some(ImageOp::Sync),
        }
    }

    /// Takes the result of the last operation.
    pub(super) fn finish<H: PinHost<Pin = P>>(&mut self, host: &mut H, result: i32) -> Outcome {
        let count = match u32::try_from(result) {
            Ok(count) => count,
            Err(_) => match Errno::from_raw(result.saturating_neg()) {
                Errno::EAGAIN | Errno::EINTR => return Outcome::Again,
                error => return self.fail(error),
            },
        };
        match &mut self.step {
            Step::Begin { .. } | Step::Sync => Outcome::Over(Ok(())),
            Step::Transfer(transfer) => transfer.finish(host, count),
            Step::Clear { offset, length, way: Way::Write, .. } => {
                *offset = offset.saturating_add(count.into());
                *length = length.saturating_sub(count.into());
                match (count, *length) {
                    (0, _) => Outcome::Over(Err(DiskError::Write)),
                    (_, 0) => Outcome::Over(Ok(())),
                    _ => Outcome::Again,
                }
            }
            Step::Clear { durable: false, .. } => Outcome::Over(Ok(())),
            // fallocate(2) has no flag for it.
            Step::Clear { durable: true, .. } => {
                self.step = Step::Sync;
                Outcome::Again
            }
            Step::Deallocate { ranges } => {
                ranges.pop_front();
                if ranges.is_empty() { Outcome::Over(Ok(())) } else { Outcome::Again }
            }
        }
    }

    fn fail(&mut self, error: Errno) -> Outcome {
        let unsupported = matches!(error, Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL);
        match &mut self.step {
            Step::Clear { way: way @ (Way::Punch | Way::Zero), .. } if unsupported => {
                *way = if *way == Way::Punch { Way::Zero } else { Way::Write };
                return Outcome::Again;
            }
            // A hint that this medium cannot take (NVMe 1.4, 6.7): nothing is lost.
            Step::Deallocate { .. } if unsupported => return Outcome::Over(Ok(())),
            _ => {}
        }
        tracing::warn!(%error, "an image's operation failed");
        let reading = matches!(&self.step, Step::Transfer(Transfer { direction: Direction::ToHost, .. }));
        Outcome::Over(Err(match error {
            Errno::EFAULT => DiskError::DataTransfer,
            Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => DiskError::Capacity,
            _ if reading => DiskError::Read,
            _ => DiskError::Write,
        }))
    }
}

impl<P: PinnedBytes> Transfer<P> {
    fn operation(&self) -> Option<ImageOp> {
        let left = self.vectors.get(self.next..).filter(|left| !left.is_empty())?;
        let vectors = Vectors { first: left.as_ptr(), count: u32::try_from(left.len()).unwrap_or(u32::MAX) };
        Some(match self.direction {
            Direction::ToHost => ImageOp::Read { offset: self.offset, into: vectors },
            Direction::FromHost => {
                ImageOp::Write { offset: self.offset, from: vectors, durable: self.durable }
            }
        })
    }

    fn finish<H: PinHost<Pin = P>>(&mut self, host: &mut H, count: u32) -> Outcome {
        if count == 0 {
            // The image ends before its blocks do: somebody has shrunk it.
            tracing::warn!(offset = self.offset, "the image ends too early");
            return Outcome::Over(Err(match self.direction {
                Direction::ToHost => DiskError::Read,
                Direction::FromHost => DiskError::Write,
            }));
        }
        self.offset = self.offset.saturating_add(count.into());
        let mut done = usize::try_from(count).unwrap_or(usize::MAX);
        while let Some(vector) = self.vectors.get_mut(self.next).filter(|_| done > 0) {
            let step = done.min(vector.iov_len);
            done = done.saturating_sub(step);
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(step).cast();
            vector.iov_len = vector.iov_len.saturating_sub(step);
            if vector.iov_len == 0 {
                self.next = self.next.saturating_add(1);
            }
        }
        if self.next < self.vectors.len() {
            return Outcome::Again;
        }
        match (&mut self.memory, self.direction) {
            (Memory::Bounced { pages, segments }, Direction::ToHost) => {
                Outcome::Over(scatter(host, pages, segments))
            }
            _ => Outcome::Over(Ok(())),
        }
    }
}

/// Pins host memory, if all of it can be and suits the image.
fn pin<H: PinHost>(
    host: &mut H,
    segments: &[Segment],
    direction: Direction,
    alignment: Alignment,
) -> Option<(Vec<iovec>, Vec<H::Pin>)> {
    // preadv2(2) takes no more vectors than this.
    if segments.len() > 1024
        || segments.iter().any(|segment| !segment.length.is_multiple_of(alignment.offset))
    {
        return None;
    }
    let mut vectors = Vec::with_capacity(segments.len());
    let mut pins = Vec::with_capacity(segments.len());
    for segment in segments {
        let pin = host.pin(segment.iova, segment.length, direction)?;
        let start = pin.bytes()?.ptr_guard_mut().as_ptr();
        if !start.addr().is_multiple_of(alignment.memory) {
            return None;
        }
        vectors.push(iovec { iov_base: start.cast(), iov_len: segment.length });
        pins.push(pin);
    }
    Some((vectors, pins))
}

/// A buffer in place of host memory, filled if the image is to be written.
fn bounce<H: PinHost>(
    host: &mut H,
    segments: Vec<Segment>,
    direction: Direction,
) -> Result<(Vec<iovec>, Memory<H::Pin>), DiskError> {
    let mut pages = Pages::new(segments.iter().map(|segment| segment.length).fold(0, usize::saturating_add));
    if direction == Direction::FromHost {
        each_part(&mut pages, &segments, |iova, bytes| host.read(iova, bytes))
            .map_err(|_| DiskError::DataTransfer)?;
    }
    let vector = iovec { iov_base: pages.as_mut_ptr().cast(), iov_len: pages.len() };
    Ok((vec![vector], Memory::Bounced { pages, segments }))
}

fn scatter<H: PinHost>(host: &mut H, pages: &mut Pages, segments: &[Segment]) -> Result<(), DiskError> {
    each_part(pages, segments, |iova, bytes| host.write(iova, bytes)).map_err(|_| DiskError::DataTransfer)
}

fn each_part<E>(
    pages: &mut Pages,
    segments: &[Segment],
    mut each: impl FnMut(Iova, &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut start = 0_usize;
    for segment in segments {
        pages.visit(start, segment.length, |at, bytes| {
            each(Iova(segment.iova.0.wrapping_add(at as u64)), bytes)
        })?;
        start = start.saturating_add(segment.length);
    }
    Ok(())
}
