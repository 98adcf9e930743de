//! Scatter gather lists: a command's data in runs of any length (Base Specification 1.4, section 4.4).

use zerocopy::FromBytes;

use super::data::Walker;
use super::limits::{MAX_SGL_DESCRIPTORS, MAX_SGL_SEGMENTS, PAGE_SIZE};
use super::{Direction, Host};
use crate::Iova;
use crate::spec::{SglDescriptor, SglSubtype, SglType, Status};

#[cfg(test)]
mod tests;

const DESCRIPTOR: usize = size_of::<SglDescriptor>();

/// A segment that a descriptor points to.
#[derive(Clone, Copy)]
struct Link {
    at: Iova,
    descriptors: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Its last descriptor may point to a further segment.
    Inner,
    /// It holds no pointers to segments.
    Last,
}

/// What is left to find, and to spend on it.
struct Left {
    bytes: usize,
    descriptors: usize,
    direction: Direction,
}

impl Walker {
    /// The segments of `length` bytes, at least one, that an SGL describes whose first segment is `first`. The
    /// SGL may be longer (SGLS bit 18); what follows is not looked at.
    ///
    /// # Errors
    /// * SGL Descriptor Type Invalid: a type or subtype that SGLS does not announce;
    /// * Invalid SGL Segment Descriptor: a segment of no or broken descriptors, or not at a qword, or a pointer to
    ///   a segment in the last one;
    /// * Invalid Number of SGL Descriptors: a pointer to a segment before the end of its own, or more
    ///   descriptors or segments than the limits allow;
    /// * Data SGL Length Invalid: too short, or data beyond the end of the address space;
    /// * Data Transfer Error: a segment that cannot be read.
    pub(super) fn walk_sgl<H: Host>(
        &mut self,
        host: &mut H,
        first: SglDescriptor,
        length: usize,
        direction: Direction,
    ) -> Result<(), Status> {
        let mut left = Left { bytes: length, descriptors: MAX_SGL_DESCRIPTORS, direction };
        let mut next = self.take(first, &mut left)?;
        for _ in 0..MAX_SGL_SEGMENTS {
            if left.bytes == 0 {
                return Ok(());
            }
            let link = next.ok_or(Status::INVALID_SGL_LENGTH)?;
            next = self.walk_segment(host, link, &mut left)?;
        }
        match (left.bytes, next) {
            (0, _) => Ok(()),
            (_, None) => Err(Status::INVALID_SGL_LENGTH),
            (_, Some(_)) => Err(Status::INVALID_SGL_COUNT),
        }
    }

    /// Takes the descriptors of a segment until the data is complete; gives the segment that it points to.
    fn walk_segment<H: Host>(
        &mut self,
        host: &mut H,
        link: Link,
        left: &mut Left,
    ) -> Result<Option<Link>, Status> {
        let Link { at: Iova(mut at), descriptors: mut rest, kind } = link;
        while rest != 0 && left.bytes != 0 {
            let count = rest.min(PAGE_SIZE / DESCRIPTOR).min(left.descriptors);
            if count == 0 {
                return Err(Status::INVALID_SGL_COUNT);
            }
            left.descriptors = left.descriptors.saturating_sub(count);
            let size = count.saturating_mul(DESCRIPTOR);
            let bytes = self.page.get_mut(..size).unwrap_or_default();
            host.read(Iova(at), bytes).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            for index in 0..count {
                rest = rest.saturating_sub(1);
                if let Some(next) = self.take(self.descriptor(index), left)? {
                    return match kind {
                        _ if rest != 0 => Err(Status::INVALID_SGL_COUNT),
                        Kind::Last => Err(Status::INVALID_SGL_SEGMENT),
                        Kind::Inner => Ok(Some(next)),
                    };
                }
                if left.bytes == 0 {
                    return Ok(None);
                }
            }
            // Checked where the link was made: it does not wrap.
            at = at.saturating_add(size as u64);
        }
        Ok(None)
    }

    fn descriptor(&self, index: usize) -> SglDescriptor {
        let bytes = self.page.get(index.saturating_mul(DESCRIPTOR)..).unwrap_or_default();
        SglDescriptor::read_from_prefix(bytes).map_or_else(|_| SglDescriptor::default(), |(found, _)| found)
    }

    /// Takes one descriptor: its data, or the segment that it points to.
    fn take(&mut self, descriptor: SglDescriptor, left: &mut Left) -> Result<Option<Link>, Status> {
        let at = descriptor.address.get();
        let length = descriptor.length.get() as usize;
        let now = length.min(left.bytes);
        if descriptor.identifier.subtype() != SglSubtype::ADDRESS {
            return Err(Status::INVALID_SGL_TYPE);
        }
        match descriptor.identifier.kind() {
            SglType::DATA_BLOCK => {
                at.checked_add(length as u64).ok_or(Status::INVALID_SGL_LENGTH)?;
                if now != 0 {
                    self.push(Iova(at), now);
                }
                left.bytes = left.bytes.saturating_sub(now);
                Ok(None)
            }
            SglType::BIT_BUCKET => {
                // Without effect where data comes from the host (4.4).
                if left.direction == Direction::ToHost && now != 0 {
                    self.drop_bytes(now);
                    left.bytes = left.bytes.saturating_sub(now);
                }
                Ok(None)
            }
            kind @ (SglType::SEGMENT | SglType::LAST_SEGMENT) => {
                let whole = length != 0 && length.is_multiple_of(DESCRIPTOR);
                if !whole || !at.is_multiple_of(8) || at.checked_add(length as u64).is_none() {
                    return Err(Status::INVALID_SGL_SEGMENT);
                }
                let kind = if kind == SglType::SEGMENT { Kind::Inner } else { Kind::Last };
                Ok(Some(Link { at: Iova(at), descriptors: length / DESCRIPTOR, kind }))
            }
            _ => Err(Status::INVALID_SGL_TYPE),
        }
    }
}
