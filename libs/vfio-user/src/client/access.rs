//! Reads and writes of a region.

use super::{Client, ClientError};
use crate::limits;
use crate::wire::{Command, CommandCode, RegionAccess, RegionWrite, RegionWrites, Reply};

/// Whether a write waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It has been done when the call returns.
    Replied,
    /// It will be done before whatever is sent next; that it fails, nobody hears.
    Posted,
}

impl Client {
    /// Reads from a region, in as many messages as the server needs.
    ///
    /// # Errors
    /// [`ClientError`]; some of `into` may have been filled.
    pub fn region_read(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), ClientError> {
        let mut offset = offset;
        for piece in into.chunks_mut(self.piece()) {
            let count = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let answer = self.call(&Command::RegionRead(RegionAccess { offset, region, count }), &[])?;
            match answer.reply()? {
                Reply::RegionRead { offset: at, region: of, data }
                    if (at, of, data.len()) == (offset, region, piece.len()) =>
                {
                    piece.copy_from_slice(data);
                }
                _ => return Err(answer.mismatch()),
            }
            offset = offset.saturating_add(count.into());
        }
        Ok(())
    }

    /// Writes to a region, in as many messages as the server needs.
    ///
    /// # Errors
    /// [`ClientError`]; some of it may have been written.
    pub fn region_write(
        &self,
        region: u32,
        offset: u64,
        data: &[u8],
        delivery: Delivery,
    ) -> Result<(), ClientError> {
        let mut offset = offset;
        for data in data.chunks(self.piece()) {
            let write = RegionWrite { offset, region, data };
            let command = Command::RegionWrite(write);
            match delivery {
                Delivery::Posted => self.post(&command)?,
                Delivery::Replied => {
                    let answer = self.call(&command, &[])?;
                    if answer.reply()? != Reply::RegionWrite(write.access()) {
                        return Err(answer.mismatch());
                    }
                }
            }
            offset = offset.saturating_add(data.len() as u64);
        }
        Ok(())
    }

    /// Does many writes of at most 8 bytes each, in order: [`limits::MULTIPLE_WRITES`] with one message if the server
    /// has `write_multiple`, else one by one.
    ///
    /// # Errors
    /// [`ClientError`]; some of them may have been done. [`ClientError::Incomplete`] says how many.
    pub fn region_write_multi(
        &self,
        writes: &[RegionWrite<'_>],
        delivery: Delivery,
    ) -> Result<(), ClientError> {
        let mut before = 0_u64;
        for chunk in writes.chunks(limits::MULTIPLE_WRITES) {
            let count = chunk.len() as u64;
            let done = self.write_chunk(chunk, delivery)?;
            if done != count {
                let (done, count) = (before.saturating_add(done), writes.len() as u64);
                return Err(ClientError::Incomplete { done, count });
            }
            before = before.saturating_add(count);
        }
        Ok(())
    }

    /// Gives how many were done, as far as that is told.
    fn write_chunk(&self, writes: &[RegionWrite<'_>], delivery: Delivery) -> Result<u64, ClientError> {
        let invalid = |source| ClientError::Invalid { code: CommandCode::REGION_WRITE_MULTI, source };
        let count = writes.len() as u64;
        let body = RegionWrites::body(writes).map_err(invalid)?;
        if self.capabilities().write_multiple != Some(true) {
            for write in writes {
                self.region_write(write.region, write.offset, write.data, delivery)?;
            }
            return Ok(count);
        }
        let command = Command::RegionWriteMulti(RegionWrites::decode(&body).map_err(invalid)?);
        if delivery == Delivery::Posted {
            return self.post(&command).map(|()| count);
        }
        let answer = self.call(&command, &[])?;
        match answer.reply()? {
            Reply::RegionWriteMulti { count: done } if done <= count => Ok(done),
            _ => Err(answer.mismatch()),
        }
    }

    /// How much data goes into one message.
    fn piece(&self) -> usize {
        usize::try_from(self.capabilities().data_transfer()).unwrap_or(usize::MAX).max(1)
    }
}
