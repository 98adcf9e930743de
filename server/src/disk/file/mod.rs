//! The disk in an image file or on a block device.
//!
//! [`plan`] says what a command means for the image; an [`engine`] carries it there: [`uring`], or [`threads`].

mod buffers;
mod engine;
mod image;
mod lock;
mod plan;
mod threads;
mod uring;

#[cfg(test)]
mod power_cut;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::path::Path;

use outboard_nvme::controller::{DiskError, Geometry, Operation, Submission, Tag};

use super::limits::DEPTH;
use super::{PinHost, PinnedBytes, Storage};
use engine::{Completion, Engine};
use image::{Caching, Opened};
use plan::{Job, Outcome, Traits};

pub use image::OpenError;
pub(super) use threads::Threads;
pub(super) use uring::Uring;

/// How an image is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// By io_uring.
    IoUring,
    /// By a pool of threads.
    Threads,
}

/// Opens an image. Without an `engine`, io_uring is taken where the kernel allows it.
pub(super) fn open<P: PinnedBytes>(
    path: &Path,
    block_shift: u32,
    read_only: bool,
    engine: Option<EngineKind>,
) -> Result<Storage<P>, OpenError> {
    let Opened { image, geometry, traits } = Opened::new(path, block_shift, read_only, Caching::Direct)?;
    if engine != Some(EngineKind::Threads) {
        match Uring::new(&image) {
            Ok(engine) => return Ok(Storage::Uring(FileDisk::new(geometry, traits, engine))),
            Err(error) if engine.is_none() => {
                tracing::warn!(path = %path.display(), %error, "No io_uring: threads do its work, slower");
            }
            Err(error) => return Err(OpenError::IoUring { path: path.into(), error }),
        }
    }
    let engine = Threads::new(&image).map_err(|error| OpenError::Threads { path: path.into(), error })?;
    Ok(Storage::Threads(FileDisk::new(geometry, traits, engine)))
}

/// Keeps the blocks in a file.
pub(super) struct FileDisk<P, E> {
    engine: E,
    geometry: Geometry,
    traits: Traits,
    /// Commands with an operation in the engine, by place.
    running: Vec<Option<Job>>,
    /// Places that are free.
    free: Vec<usize>,
    /// Commands that wait for a place.
    waiting: VecDeque<Job>,
    /// Room for the engine's reports.
    completions: Vec<Completion<P>>,
}

impl<P: PinnedBytes, E: Engine<P>> FileDisk<P, E> {
    /// A disk of this shape, on an engine that knows its medium.
    fn new(geometry: Geometry, traits: Traits, engine: E) -> FileDisk<P, E> {
        FileDisk {
            engine,
            geometry,
            traits,
            running: (0..DEPTH).map(|_| None).collect(),
            free: (0..usize::from(DEPTH)).rev().collect(),
            waiting: VecDeque::new(),
            completions: Vec::new(),
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(super) fn event(&self) -> Option<BorrowedFd<'_>> {
        self.engine.event()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.running.len().saturating_sub(self.free.len()).saturating_add(self.waiting.len())
    }

    pub(super) fn submit<H: PinHost<Pin = P>>(
        &mut self,
        host: &mut H,
        tag: Tag,
        operation: Operation<'_>,
    ) -> Submission {
        match Job::new(tag, &self.geometry, operation) {
            Err(error) => Submission::Done(Err(error)),
            Ok(None) => Submission::Done(Ok(())),
            Ok(Some(job)) if self.free.is_empty() => {
                self.waiting.push_back(job);
                Submission::Pending
            }
            Ok(Some(job)) => match self.start(host, job) {
                Ok(()) => Submission::Pending,
                Err(error) => Submission::Done(Err(error)),
            },
        }
    }

    pub(super) fn commit(&mut self) {
        self.engine.commit();
    }

    pub(super) fn reap<H: PinHost<Pin = P>>(
        &mut self,
        host: &mut H,
        done: &mut Vec<(Tag, Result<(), DiskError>)>,
    ) {
        let mut completions = std::mem::take(&mut self.completions);
        self.engine.reap(&mut completions);
        for Completion { place, op, result } in completions.drain(..) {
            let Some(job) = self.running.get_mut(place) else { continue };
            let Some(running) = job else { continue };
            match running.advance(host, &mut self.traits, op, result) {
                Outcome::Next(op) => self.engine.push(place, op),
                Outcome::Over(result) => {
                    if let (Ok(()), Some(shift)) = (result, running.format) {
                        self.geometry = self.geometry.formatted(shift);
                        let block = 1u64.checked_shl(shift).unwrap_or(0);
                        tracing::warn!(
                            block,
                            "An image was formatted: open it with this block-size from now on"
                        );
                    }
                    done.push((running.tag, result));
                    *job = None;
                    self.free.push(place);
                }
            }
        }
        self.completions = completions;
        while !self.free.is_empty() {
            let Some(job) = self.waiting.pop_front() else { break };
            let tag = job.tag;
            if let Err(error) = self.start(host, job) {
                done.push((tag, Err(error)));
            }
        }
        self.engine.commit();
    }

    /// Starts a command in a free place.
    fn start<H: PinHost<Pin = P>>(&mut self, host: &mut H, mut job: Job) -> Result<(), DiskError> {
        let op = job.start(host, &self.traits)?;
        let place = self.free.pop().ok_or(DiskError::Internal)?;
        let running = self.running.get_mut(place).ok_or(DiskError::Internal)?;
        *running = Some(job);
        self.engine.push(place, op);
        Ok(())
    }
}
