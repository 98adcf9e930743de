//! What the device is, its interrupts, and its reset.

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Client, ClientError, Region};
use crate::limits;
use crate::wire::{
    Command, CommandCode, DeviceInfo, IoFd, IrqAction, IrqData, IrqIndex, IrqInfo, Query, Reply, SetIrqs,
};

impl Client {
    /// What kind of device it is.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn device_info(&self) -> Result<DeviceInfo, ClientError> {
        let answer = self.call(&Command::GetInfo { argsz: 16 }, &[])?;
        let Reply::Info(info) = answer.reply()? else { return Err(answer.mismatch()) };
        for (what, count, limit) in [
            ("regions", info.regions, limits::REGIONS),
            ("interrupt types", info.interrupts, limits::INTERRUPT_TYPES),
        ] {
            if count > limit {
                return Err(ClientError::TooMany { what, count, limit });
            }
        }
        Ok(info)
    }

    /// A region, with all that is said of it.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn region(&self, index: u32) -> Result<Region, ClientError> {
        // The fixed part first: how much more there is, the answer says.
        let mut argsz = 32;
        for _ in 0..2 {
            let mut answer = self.ask(&Command::GetRegionInfo(Query { argsz, index }))?;
            let descriptors = answer.take_descriptors();
            let Reply::RegionInfo { info, argsz: needed } = answer.reply()? else {
                return Err(answer.mismatch());
            };
            if info.index != index || needed > limits::ARGUMENT {
                return Err(answer.mismatch());
            }
            // Some send the same file once for each area.
            let (count, most) = (descriptors.len(), info.areas().map_or(1, <[_]>::len).max(1));
            if count > most {
                return Err(answer.unwanted(count, most));
            }
            if needed <= argsz || !info.capabilities.is_empty() {
                return Ok(Region::new(info, descriptors.into_iter().next()));
            }
            argsz = needed;
        }
        Err(ClientError::Mismatch { code: CommandCode::DEVICE_GET_REGION_INFO })
    }

    /// The parts of a region that descriptors serve, and those descriptors.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Mismatch`] also where a part names a descriptor that did not come,
    /// [`ClientError::Descriptors`] where one came that no part names.
    pub fn region_io_fds(&self, index: u32) -> Result<(Vec<IoFd>, Vec<OwnedFd>), ClientError> {
        let mut argsz = 16;
        for _ in 0..2 {
            let mut answer = self.ask(&Command::GetRegionIoFds(Query { argsz, index }))?;
            let descriptors = answer.take_descriptors();
            let Reply::RegionIoFds { fds, argsz: needed } = answer.reply()? else {
                return Err(answer.mismatch());
            };
            if fds.index != index || needed > limits::ARGUMENT {
                return Err(answer.mismatch());
            }
            let named = |entry: &IoFd| [Some(entry.descriptor), entry.shadow.map(|shadow| shadow.descriptor)];
            let named: BTreeSet<u32> = fds.entries.iter().flat_map(named).flatten().collect();
            if named.last().is_some_and(|&last| last as usize >= descriptors.len()) {
                return Err(answer.mismatch());
            }
            if descriptors.len() > named.len() {
                return Err(answer.unwanted(descriptors.len(), named.len()));
            }
            if fds.entries.len() == fds.count as usize {
                return Ok((fds.entries, descriptors));
            }
            if needed <= argsz {
                return Err(answer.mismatch());
            }
            argsz = needed;
        }
        Err(ClientError::Mismatch { code: CommandCode::DEVICE_GET_REGION_IO_FDS })
    }

    /// How many interrupts of a type there are, and what can be done with them.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn irq_info(&self, index: IrqIndex) -> Result<IrqInfo, ClientError> {
        let answer = self.call(&Command::GetIrqInfo(Query { argsz: 16, index: index.0 }), &[])?;
        match answer.reply()? {
            Reply::IrqInfo(info) if info.index == index && info.count <= limits::VECTORS => Ok(info),
            Reply::IrqInfo(IrqInfo { count, .. }) if count > limits::VECTORS => {
                Err(ClientError::TooMany { what: "interrupt vectors", count, limit: limits::VECTORS })
            }
            _ => Err(answer.mismatch()),
        }
    }

    /// Does something with interrupts; with [`IrqData::Eventfds`] go as many `eventfds` as vectors are named.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn set_irqs(&self, set: SetIrqs<'_>, eventfds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done(&Command::SetIrqs(set), eventfds)
    }

    /// Has the vectors from `start` on signal these eventfds, in as many messages as the server needs.
    ///
    /// # Errors
    /// [`ClientError`]; some of them may then be bound.
    pub fn bind_vectors(
        &self,
        index: IrqIndex,
        start: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let room = self.capabilities().descriptors().clamp(1, limits::DESCRIPTORS);
        let mut start = start;
        for eventfds in eventfds.chunks(room) {
            let count = u32::try_from(eventfds.len()).unwrap_or(u32::MAX);
            let set = SetIrqs { index, start, count, data: IrqData::Eventfds, action: IrqAction::Trigger };
            self.set_irqs(set, eventfds)?;
            start = start.saturating_add(count);
        }
        Ok(())
    }

    /// Unbinds all vectors of a type.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn disable_irqs(&self, index: IrqIndex) -> Result<(), ClientError> {
        let set = SetIrqs { index, start: 0, count: 0, data: IrqData::None, action: IrqAction::Trigger };
        self.set_irqs(set, &[])
    }

    /// Resets the device.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn reset(&self) -> Result<(), ClientError> {
        self.done(&Command::Reset, &[])
    }
}
