//! Commands to namespaces, from the entry to the disk and back.

use zerocopy::IntoBytes;

use super::command::{IoCommand, check_fused, check_range};
use super::completion::Origin;
use super::counters::Counters;
use super::data::{DataPointer, Walker};
use super::limits::{MAX_DEALLOCATE_RANGES, MAX_IN_FLIGHT};
use super::slots::{Owner, Slots, Work};
use super::uncorrectable::Uncorrectable;
use super::{Direction, Disk, DiskError, Geometry, Host, LbaRange, Operation, Submission, Tag};
use crate::spec::{DsmRange, NSID_ALL, NvmOpcode, Status, SubmissionEntry};
use crate::{Lba, Nsid};

/// A disk under the namespace identifier that is its place in the list, from 1.
pub(super) struct Namespace<D> {
    pub(super) disk: D,
    pub(super) geometry: Geometry,
    pub(super) availability: Availability,
    uncorrectable: Uncorrectable,
    /// Operations were submitted since the last commit.
    pub(super) touched: bool,
}

/// Whether a namespace takes commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Availability {
    Ready,
    /// From a Format's arrival to its end.
    Formatting,
}

impl<D> Namespace<D> {
    /// All blocks were written.
    pub(super) fn forget_uncorrectable(&mut self) {
        self.uncorrectable = Uncorrectable::default();
    }

    /// A command at `start` was successful: what it wrote can be read again.
    #[inline]
    fn written(&mut self, start: Lba, work: Work) {
        if !self.uncorrectable.is_empty()
            && let Some(bytes) = work.written()
        {
            let blocks = bytes.checked_shr(self.geometry.block_shift).unwrap_or(0);
            self.uncorrectable.clear(LbaRange { start, blocks });
        }
    }
}

/// How far a command came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    /// It will be reported by [`Disks::reap`].
    Pending,
}

/// The namespaces, and the commands under way at their disks.
pub(super) struct Disks<D> {
    pub(super) namespaces: Vec<Namespace<D>>,
    pub(super) slots: Slots,
    pub(super) walker: Walker,
    pub(super) max_transfer: usize,
    /// Namespaces whose shape has changed since this was looked at last.
    pub(super) changed: Vec<Nsid>,
    fetched: Box<[DsmRange; MAX_DEALLOCATE_RANGES]>,
    ranges: Vec<LbaRange>,
    done: Vec<(Tag, Result<(), DiskError>)>,
}

impl<D> Disks<D> {
    pub(super) fn new<H: Host>(disks: Vec<D>, max_transfer: usize) -> Self
    where
        D: Disk<H>,
    {
        let namespace = |disk: D| Namespace {
            geometry: disk.geometry(),
            disk,
            availability: Availability::Ready,
            uncorrectable: Uncorrectable::default(),
            touched: false,
        };
        Self {
            namespaces: disks.into_iter().map(namespace).collect(),
            slots: Slots::new(MAX_IN_FLIGHT),
            walker: Walker::new(max_transfer),
            max_transfer,
            changed: Vec::new(),
            fetched: Box::new([DsmRange::default(); MAX_DEALLOCATE_RANGES]),
            ranges: Vec::with_capacity(MAX_DEALLOCATE_RANGES),
            done: Vec::with_capacity(usize::from(MAX_IN_FLIGHT)),
        }
    }

    /// The namespace's geometry; None when there is no such namespace.
    pub(super) fn geometry(&self, nsid: Nsid) -> Option<&Geometry> {
        self.namespaces.get(index(nsid)?).map(|namespace| &namespace.geometry)
    }

    /// Whether some disk may lose completed writes in a power cut.
    pub(super) fn has_volatile_cache(&self) -> bool {
        self.namespaces.iter().any(|namespace| namespace.geometry.volatile_cache)
    }

    /// Whether some disk deallocates: without one there is no Dataset Management (ONCS bit 2).
    pub(super) fn deallocate(&self) -> bool {
        self.namespaces.iter().any(|namespace| namespace.geometry.deallocates)
    }

    /// Starts a command; `write_cache` is the feature's value. The caller has seen that a slot is available.
    #[inline]
    pub(super) fn start<H: Host>(
        &mut self,
        host: &mut H,
        origin: Origin,
        entry: &SubmissionEntry,
        write_cache: bool,
    ) -> Result<(Work, Progress), Status>
    where
        D: Disk<H>,
    {
        if NvmOpcode(entry.opcode) == NvmOpcode::DATASET_MANAGEMENT && !self.deallocate() {
            return Err(Status::INVALID_OPCODE);
        }
        let tag = self.slots.next_tag().ok_or(Status::INTERNAL_ERROR)?;
        let namespace = index(origin.nsid).and_then(|index| self.namespaces.get_mut(index));
        let Some(namespace) = namespace else {
            return self.start_without_namespace(host, origin, entry);
        };
        if namespace.availability == Availability::Formatting {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let write_through = !write_cache;
        let (operation, work) = match IoCommand::parse(entry, &namespace.geometry, self.max_transfer)? {
            IoCommand::Read { range, bytes, data } => {
                namespace.uncorrectable.check(range)?;
                let data = self.walker.walk(host, data, bytes, Direction::ToHost)?;
                (Operation::Read { range, data }, Work::Read { bytes: bytes as u64 })
            }
            IoCommand::Write { range, bytes, data, durable } => {
                let data = self.walker.walk(host, data, bytes, Direction::FromHost)?;
                let durable = durable || write_through;
                (Operation::Write { range, data, durable }, Work::Write { bytes: bytes as u64 })
            }
            IoCommand::Compare { range, bytes, data } => {
                namespace.uncorrectable.check(range)?;
                let data = self.walker.walk(host, data, bytes, Direction::FromHost)?;
                (Operation::Compare { range, data }, Work::Compare { bytes: bytes as u64 })
            }
            IoCommand::Verify { range } => {
                namespace.uncorrectable.check(range)?;
                (Operation::Verify { range }, Work::Verify { bytes: namespace.geometry.bytes(range) })
            }
            IoCommand::WriteUncorrectable { range } => {
                namespace.uncorrectable.mark(range)?;
                return Ok((Work::WriteUncorrectable, Progress::Done));
            }
            IoCommand::Flush => (Operation::Flush, Work::Flush),
            IoCommand::WriteZeroes { range, deallocate, durable } => {
                let durable = durable || write_through;
                let bytes = namespace.geometry.bytes(range);
                (Operation::WriteZeroes { range, deallocate, durable }, Work::WriteZeroes { bytes })
            }
            IoCommand::Deallocate { ranges, data } => {
                let fetched = self.fetched.get_mut(..ranges).unwrap_or_default();
                fetch(host, &mut self.walker, data, fetched.as_mut_bytes())?;
                self.ranges.clear();
                for range in fetched {
                    let range = LbaRange { start: Lba(range.start.get()), blocks: range.blocks.get().into() };
                    check_range(range, &namespace.geometry)?;
                    self.ranges.push(range);
                }
                (Operation::Deallocate { ranges: &self.ranges }, Work::Deallocate)
            }
            IoCommand::Hint => return Ok((Work::Deallocate, Progress::Done)),
        };
        namespace.touched = true;
        match namespace.disk.submit(host, tag, operation) {
            Submission::Done(result) => {
                result?;
                namespace.written(origin.lba, work);
                Ok((work, Progress::Done))
            }
            Submission::Pending => {
                self.slots.take(Owner::Command { origin, work }, 1, None);
                Ok((work, Progress::Pending))
            }
        }
    }

    /// Flush takes "all namespaces"; anything else without a namespace is an error, of the opcode first.
    #[cold]
    fn start_without_namespace<H: Host>(
        &mut self,
        host: &mut H,
        origin: Origin,
        entry: &SubmissionEntry,
    ) -> Result<(Work, Progress), Status>
    where
        D: Disk<H>,
    {
        check_fused(entry)?;
        match NvmOpcode(entry.opcode) {
            NvmOpcode::FLUSH if origin.nsid == NSID_ALL => {
                let progress = self.flush_all(host, Owner::Command { origin, work: Work::Flush })?;
                Ok((Work::Flush, progress))
            }
            NvmOpcode::FLUSH
            | NvmOpcode::READ
            | NvmOpcode::WRITE
            | NvmOpcode::WRITE_UNCORRECTABLE
            | NvmOpcode::COMPARE
            | NvmOpcode::VERIFY
            | NvmOpcode::WRITE_ZEROES
            | NvmOpcode::DATASET_MANAGEMENT => Err(Status::INVALID_NAMESPACE),
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Flushes all disks for `owner`.
    pub(super) fn flush_all<H: Host>(&mut self, host: &mut H, owner: Owner) -> Result<Progress, Status>
    where
        D: Disk<H>,
    {
        let tag = self.slots.next_tag().ok_or(Status::INTERNAL_ERROR)?;
        let mut pending = 0_u32;
        let mut failure = None;
        for namespace in &mut self.namespaces {
            namespace.touched = true;
            match namespace.disk.submit(host, tag, Operation::Flush) {
                Submission::Done(result) => failure = failure.or(result.err()),
                Submission::Pending => pending = pending.saturating_add(1),
            }
        }
        if pending != 0 {
            self.slots.take(owner, pending, failure);
            return Ok(Progress::Pending);
        }
        failure.map_or(Ok(Progress::Done), |error| Err(error.into()))
    }

    /// Ends a batch of submissions.
    pub(super) fn commit<H: Host>(&mut self, host: &mut H)
    where
        D: Disk<H>,
    {
        for namespace in &mut self.namespaces {
            if std::mem::take(&mut namespace.touched) {
                namespace.disk.commit(host);
            }
        }
    }

    /// Hands each command that is over to `finished`; true if any was.
    pub(super) fn reap<H: Host>(
        &mut self,
        host: &mut H,
        mut finished: impl FnMut(&mut H, Owner, Result<(), DiskError>),
    ) -> bool
    where
        D: Disk<H>,
    {
        if self.slots.in_flight() == 0 {
            return false;
        }
        for namespace in &mut self.namespaces {
            namespace.disk.reap(host, &mut self.done);
        }
        let any = !self.done.is_empty();
        let mut done = std::mem::take(&mut self.done);
        for (tag, result) in done.drain(..) {
            let Some((owner, result)) = self.slots.finish(tag, result) else { continue };
            match owner {
                Owner::Command { origin, work: Work::Format } => self.formatted(origin.nsid, result),
                Owner::Command { origin, work } if result.is_ok() => {
                    let namespace = index(origin.nsid).and_then(|index| self.namespaces.get_mut(index));
                    if let Some(namespace) = namespace {
                        namespace.written(origin.lba, work);
                    }
                }
                _ => {}
            }
            finished(host, owner, result);
        }
        self.done = done;
        any
    }

    /// Copies the data of an admin command to the host.
    pub(super) fn send<H: Host>(
        &mut self,
        host: &mut H,
        to: DataPointer,
        bytes: &[u8],
    ) -> Result<(), Status> {
        let mut rest = bytes;
        for segment in self.walker.walk(host, to, bytes.len(), Direction::ToHost)? {
            let (now, later) = rest.split_at_checked(segment.length).unwrap_or((rest, &[]));
            if let Some(iova) = segment.iova {
                host.write(iova, now).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Copies the data of a command from the host.
    pub(super) fn receive<H: Host>(
        &mut self,
        host: &mut H,
        from: DataPointer,
        into: &mut [u8],
    ) -> Result<(), Status> {
        fetch(host, &mut self.walker, from, into)
    }
}

fn fetch<H: Host>(
    host: &mut H,
    walker: &mut Walker,
    from: DataPointer,
    into: &mut [u8],
) -> Result<(), Status> {
    let mut rest = into;
    for segment in walker.walk(host, from, rest.len(), Direction::FromHost)? {
        let (now, later) = rest.split_at_mut_checked(segment.length).ok_or(Status::INTERNAL_ERROR)?;
        let iova = segment.iova.ok_or(Status::INTERNAL_ERROR)?;
        host.read(iova, now).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        rest = later;
    }
    Ok(())
}

/// The place of a namespace in the list.
#[inline]
fn index(nsid: Nsid) -> Option<usize> {
    usize::try_from(nsid.0.checked_sub(1)?).ok()
}

/// Counts an I/O command that succeeded.
#[inline]
pub(super) fn count(counters: &Counters, work: Work) {
    match work {
        Work::Read { bytes } => {
            counters.reads.add(1);
            counters.bytes_read.add(bytes);
        }
        Work::Write { bytes } => {
            counters.writes.add(1);
            counters.bytes_written.add(bytes);
        }
        Work::Compare { bytes } => {
            counters.compares.add(1);
            counters.bytes_checked.add(bytes);
        }
        Work::Verify { bytes } => {
            counters.verifies.add(1);
            counters.bytes_checked.add(bytes);
        }
        Work::WriteUncorrectable => counters.write_uncorrectables.add(1),
        Work::Flush => counters.flushes.add(1),
        Work::WriteZeroes { .. } => counters.write_zeroes.add(1),
        Work::Deallocate => counters.dataset_management.add(1),
        Work::Format | Work::CacheOff => {}
    }
}
