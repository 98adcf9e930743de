//! Memory that the device may access.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use super::connection::Answer;
use super::{Client, ClientError};
use crate::dma::{Access, Iova, Region};
use crate::memory::Mapping;
use crate::wire::{Backing, Command, CommandCode, DecodeError, DmaMap, DmaUnmap, Reply, UnmapTarget};

/// How the server is to reach memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// It gets the descriptor and maps it.
    Descriptor,
    /// It does not: DMA_READ and DMA_WRITE.
    Messages,
}

/// A part of a file that is memory of ours.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// The file: a memfd, say.
    pub file: BorrowedFd<'a>,
    /// Where the part begins, in bytes; a multiple of the page size.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: usize,
}

/// What a device may access.
#[derive(Clone, Copy, Debug)]
pub struct Map<'a> {
    /// Where the device finds it.
    pub iova: Iova,
    /// What it finds there.
    pub memory: Memory<'a>,
    /// What it may do.
    pub access: Access,
    /// How it gets there.
    pub sharing: Sharing,
}

impl<'a> Map<'a> {
    fn size(&self) -> u64 {
        self.memory.length as u64
    }

    fn command(&self) -> (Command<'a>, Option<BorrowedFd<'a>>) {
        let (backing, descriptor) = match self.sharing {
            Sharing::Descriptor => (Backing::Mapping { offset: self.memory.offset }, Some(self.memory.file)),
            Sharing::Messages => (Backing::Messages, None),
        };
        let (address, size, access) = (self.iova.0, self.size(), self.access);
        (Command::DmaMap(DmaMap { address, size, access, backing }), descriptor)
    }
}

fn unmap(target: UnmapTarget) -> Command<'static> {
    Command::DmaUnmap(DmaUnmap::new(target))
}

fn range(iova: Iova, size: u64) -> UnmapTarget {
    UnmapTarget::Range { address: iova.0, size }
}

impl Client {
    /// Lets the device access `memory` at `iova`.
    ///
    /// # Errors
    /// [`ClientError::Invalid`] where we have mapped some of it already. After [`ClientError::TimedOut`] the server
    /// may have mapped it nevertheless.
    pub fn dma_map(
        &self,
        iova: Iova,
        memory: Memory<'_>,
        access: Access,
        sharing: Sharing,
    ) -> Result<(), ClientError> {
        let map = Map { iova, memory, access, sharing };
        self.register(&map)?;
        let (command, descriptor) = map.command();
        self.registered(&map, self.call(&command, descriptor.as_slice()))
    }

    /// Many maps as [`Client::dma_map`]: each is sent before the one before it is answered. Gives what became of
    /// each.
    pub fn dma_map_batch(&self, maps: &[Map<'_>]) -> Vec<Result<(), ClientError>> {
        let mut ours = Vec::with_capacity(maps.len());
        let answers = self.call_batch(maps.iter().map(|map| {
            let registered = self.register(map);
            ours.push(registered.is_ok());
            registered.map(|()| map.command())
        }));
        let results = maps.iter().zip(ours).zip(answers);
        results
            .map(|((map, ours), answer)| if ours { self.registered(map, answer) } else { answer.map(drop) })
            .collect()
    }

    /// Before the server can ask for it. Also shared memory may be asked for by messages.
    fn register(&self, map: &Map<'_>) -> Result<(), ClientError> {
        let Memory { file, offset, length } = map.memory;
        let region = Region::mapped(Mapping::new(file, offset, length, map.access)?, map.access);
        let (start, count) = (map.iova.0, map.size());
        self.connection().memory.insert(start, count, region).map(drop).map_err(|_| ClientError::Invalid {
            code: CommandCode::DMA_MAP,
            source: DecodeError::Range { start, count },
        })
    }

    /// The server does not get at what it did not map.
    fn registered(&self, map: &Map<'_>, answer: Result<Answer, ClientError>) -> Result<(), ClientError> {
        let result = answer.and_then(|answer| answer.reply().map(drop));
        if result.is_err() {
            self.connection().memory.remove(map.iova.0, map.size());
        }
        result
    }

    /// Takes memory away from the device: exactly what was mapped at `iova`. When this returns well, the device
    /// accesses it no more.
    ///
    /// # Errors
    /// [`ClientError`]; the device may then still access it, unless the server says that it is not mapped (ENOENT).
    pub fn dma_unmap(&self, iova: Iova, size: u64) -> Result<(), ClientError> {
        self.unmapped(iova, size, self.call(&unmap(range(iova, size)), &[]))
    }

    /// Many unmaps as [`Client::dma_unmap`]: each is sent before the one before it is answered. Gives what became of
    /// each.
    pub fn dma_unmap_batch(&self, ranges: &[(Iova, u64)]) -> Vec<Result<(), ClientError>> {
        let answers =
            self.call_batch(ranges.iter().map(|&(iova, size)| Ok((unmap(range(iova, size)), None))));
        ranges.iter().zip(answers).map(|(&(iova, size), answer)| self.unmapped(iova, size, answer)).collect()
    }

    fn unmapped(
        &self,
        iova: Iova,
        size: u64,
        answer: Result<Answer, ClientError>,
    ) -> Result<(), ClientError> {
        let result = answer.and_then(|answer| is_unmapped(&answer, range(iova, size)));
        // The second may be about one that was done after its time.
        if matches!(result, Ok(()) | Err(ClientError::Refused { errno: Errno::ENOENT, .. })) {
            self.connection().memory.remove(iova.0, size);
        }
        result
    }

    /// Takes all memory away from the device.
    ///
    /// # Errors
    /// [`ClientError`]; the device may then still access it.
    pub fn dma_unmap_all(&self) -> Result<(), ClientError> {
        is_unmapped(&self.call(&unmap(UnmapTarget::All), &[])?, UnmapTarget::All)?;
        self.connection().memory.clear();
        Ok(())
    }
}

/// The reply says again what it is about.
fn is_unmapped(answer: &Answer, target: UnmapTarget) -> Result<(), ClientError> {
    match answer.reply()? {
        Reply::DmaUnmap(unmap) if unmap.target == target => Ok(()),
        _ => Err(answer.mismatch()),
    }
}
