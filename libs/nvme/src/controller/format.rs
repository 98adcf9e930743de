//! Format NVM (Base Specification 1.4, section 5.23): an LBA size for a namespace, or for all of them, and nothing of
//! what they held. Commands to them are refused from its arrival to its end; those before it end first.

use super::barrier::Then;
use super::completion::Origin;
use super::io::{Availability, Disks, Namespace, Progress};
use super::slots::{Owner, Work};
use super::{Controller, Disk, DiskError, Host, Operation, Submission};
use crate::Nsid;
use crate::spec::{FormatNvm, NSID_ALL, SecureErase, Status};

impl<H: Host, D: Disk<H>> Controller<H, D> {
    /// Begins a format. It is completed when its turn has come and the disks are done.
    pub(super) fn format(&mut self, origin: Origin, format: FormatNvm) -> Result<(), Status> {
        if !matches!(format.erase(), SecureErase::NONE | SecureErase::USER_DATA) {
            return Err(Status::INVALID_FIELD);
        }
        // No format has metadata.
        let unsupported = format.extended_lba() || format.protection() != 0 || format.lba_format_upper() != 0;
        let index = usize::from(format.lba_format());
        let disks = &mut self.disks;
        if origin.nsid != NSID_ALL && disks.geometry(origin.nsid).is_none() {
            return Err(Status::INVALID_NAMESPACE);
        }
        for (_, namespace) in disks.selected(origin.nsid) {
            if unsupported || index >= namespace.geometry.formats.len() {
                return Err(Status::INVALID_FORMAT);
            } else if namespace.geometry.read_only {
                return Err(Status::WRITE_PROTECTED);
            } else if namespace.availability == Availability::Formatting {
                return Err(Status::FORMAT_IN_PROGRESS);
            }
        }
        for (_, namespace) in disks.selected(origin.nsid) {
            namespace.availability = Availability::Formatting;
        }
        self.barriers.push(origin, Then::Format { index });
        Ok(())
    }
}

impl<D> Disks<D> {
    /// The namespace of that identifier, or all.
    fn selected(&mut self, nsid: Nsid) -> impl Iterator<Item = (Nsid, &mut Namespace<D>)> {
        let identified = (1..).map(Nsid).zip(&mut self.namespaces);
        identified.filter(move |(other, _)| nsid == NSID_ALL || nsid == *other)
    }

    /// Formats the namespaces of `origin`, which are ready for it.
    pub(super) fn format<H: Host>(
        &mut self,
        host: &mut H,
        origin: Origin,
        index: usize,
    ) -> Result<Progress, Status>
    where
        D: Disk<H>,
    {
        let tag = self.slots.next_tag().ok_or(Status::INTERNAL_ERROR)?;
        let mut pending = 0_u32;
        let mut failure = None;
        for (_, namespace) in self.selected(origin.nsid) {
            // Checked when the command was taken.
            let Some(&block_shift) = namespace.geometry.formats.get(index) else { continue };
            namespace.touched = true;
            match namespace.disk.submit(host, tag, Operation::Format { block_shift }) {
                Submission::Done(result) => failure = failure.or(result.err()),
                Submission::Pending => pending = pending.saturating_add(1),
            }
        }
        if pending != 0 {
            self.slots.take(Owner::Command { origin, work: Work::Format }, pending, failure);
            return Ok(Progress::Pending);
        }
        let result = failure.map_or(Ok(()), Err);
        self.formatted(origin.nsid, result);
        Ok(result.map(|()| Progress::Done)?)
    }

    /// A format is over: commands are taken again. What a disk that failed holds is not defined, its shape is.
    pub(super) fn formatted<H: Host>(&mut self, nsid: Nsid, result: Result<(), DiskError>)
    where
        D: Disk<H>,
    {
        let mut changed = std::mem::take(&mut self.changed);
        for (nsid, namespace) in self.selected(nsid) {
            namespace.availability = Availability::Ready;
            let geometry = namespace.disk.geometry();
            if geometry != namespace.geometry {
                namespace.geometry = geometry;
                changed.push(nsid);
                tracing::info!(nsid = nsid.0, ?geometry, "A namespace has another LBA format");
            } else if result.is_err() {
                continue;
            }
            namespace.forget_uncorrectable();
        }
        self.changed = changed;
    }

    /// A format that has not begun never will.
    pub(super) fn cancel_format(&mut self, nsid: Nsid) {
        for (_, namespace) in self.selected(nsid) {
            namespace.availability = Availability::Ready;
        }
    }
}
