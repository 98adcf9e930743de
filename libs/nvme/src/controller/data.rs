//! Where a command's data lies, as its data pointer tells (Base Specification 1.4, sections 4.3 and 4.4).

use super::limits::PAGE_SIZE;
use super::{Direction, Host, Segment};
use crate::Iova;
use crate::spec::{DataPointerType, SglDescriptor, Status, SubmissionEntry};

/// DPTR of a command, in the shape that PSDT says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataPointer {
    Prp { first: u64, second: u64 },
    Sgl(SglDescriptor),
}

impl DataPointer {
    /// PRP entries 1 and 2.
    #[inline]
    pub(super) fn prp(entry: &SubmissionEntry) -> Self {
        Self::Prp { first: entry.prp1.get(), second: entry.prp2.get() }
    }

    /// What PSDT says. No format has metadata, so that the two kinds of SGLs differ in nothing.
    #[inline]
    pub(super) fn of(entry: &SubmissionEntry) -> Result<Self, Status> {
        match entry.flags.data_pointer() {
            DataPointerType::PRP => Ok(Self::prp(entry)),
            DataPointerType::SGL | DataPointerType::SGL_METADATA_SGL => Ok(Self::Sgl(entry.sgl())),
            _ => Err(Status::INVALID_FIELD),
        }
    }
}

/// Turns data pointers into segments; its buffers are reused from command to command.
pub(super) struct Walker {
    segments: Vec<Segment>,
    /// What was read of a list.
    pub(super) page: Box<[u8; PAGE_SIZE]>,
}

impl Walker {
    /// `most` bytes are the longest transfer to expect.
    pub(super) fn new(most: usize) -> Self {
        let pages = most.div_ceil(PAGE_SIZE).saturating_add(1);
        Self { segments: Vec::with_capacity(pages), page: Box::new([0; PAGE_SIZE]) }
    }

    /// The segments of `length` bytes at `pointer`, contiguous ones merged; they sum up to `length`. Whatever the
    /// host's memory holds, and whoever changes it meanwhile, each entry is read once and the walk is bounded.
    ///
    /// # Errors
    /// Those of [`Walker::walk_prps`] and [`Walker::walk_sgl`].
    #[inline]
    pub(super) fn walk<H: Host>(
        &mut self,
        host: &mut H,
        pointer: DataPointer,
        length: usize,
        direction: Direction,
    ) -> Result<&[Segment], Status> {
        self.segments.clear();
        if length != 0 {
            match pointer {
                DataPointer::Prp { first, second } => self.walk_prps(host, first, second, length)?,
                DataPointer::Sgl(descriptor) => self.walk_sgl(host, descriptor, length, direction)?,
            }
        }
        Ok(&self.segments)
    }

    pub(super) fn push(&mut self, at: Iova, length: usize) {
        if let Some(Segment { iova: Some(last), length: before }) = self.segments.last_mut()
            && last.0.checked_add(*before as u64) == Some(at.0)
        {
            *before = before.saturating_add(length);
        } else {
            self.segments.push(Segment { iova: Some(at), length });
        }
    }

    /// Bytes of the drive that go nowhere.
    pub(super) fn drop_bytes(&mut self, length: usize) {
        if let Some(Segment { iova: None, length: before }) = self.segments.last_mut() {
            *before = before.saturating_add(length);
        } else {
            self.segments.push(Segment { iova: None, length });
        }
    }
}
