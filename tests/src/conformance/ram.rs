//! The memory that a client shares with its device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::uio::{pread, pwrite};
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::transport::Message;
use outboard_vfio_user::wire::{Command, CommandCode, DmaAccess, Reply, encode_error};

/// What is at an address. It is reached by pread(2) and pwrite(2), so a file that shrinks does no harm here.
struct Area {
    address: u64,
    size: u64,
    access: Access,
    file: Arc<OwnedFd>,
}

/// The areas, and what the device has asked of them by message.
#[derive(Default)]
pub struct Ram {
    areas: Vec<Area>,
    /// The DMA messages that were served.
    pub served: Vec<(CommandCode, DmaAccess)>,
    /// How many of its bytes the body of a reply to DMA_WRITE has: 16 by the text, 12 or 0 of some peers.
    pub write_reply: Option<usize>,
}

impl Ram {
    pub(super) fn insert(&mut self, address: u64, size: u64, access: Access, file: Arc<OwnedFd>) {
        self.areas.retain(|area| area.address != address);
        self.areas.push(Area { address, size, access, file });
    }

    fn find(&self, address: u64, length: usize) -> Option<(&Area, i64)> {
        let area = self.areas.iter().find(|area| {
            address
                .checked_sub(area.address)
                .is_some_and(|offset| offset.checked_add(length as u64).is_some_and(|end| end <= area.size))
        })?;
        Some((area, (address - area.address) as i64))
    }

    /// Reads memory.
    ///
    /// # Panics
    /// Where there is none.
    pub fn peek(&self, address: u64, length: usize) -> Vec<u8> {
        let (area, offset) = self.find(address, length).expect("memory of the client's");
        let mut bytes = vec![0; length];
        let _ = pread(&area.file, &mut bytes, offset);
        bytes
    }

    /// Writes memory.
    ///
    /// # Panics
    /// Where there is none.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        let (area, offset) = self.find(address, bytes.len()).expect("memory of the client's");
        let _ = pwrite(&area.file, bytes, offset);
    }

    /// The reply to a DMA message; `None` for anything else.
    pub(super) fn serve(&mut self, message: &Message) -> Option<Vec<u8>> {
        let (id, code) = (message.header.id(), message.header.code());
        let access = match Command::decode(&message.header, &message.body, 0).ok()? {
            Command::DmaRead(access) => access,
            Command::DmaWrite(write) => write.access(),
            _ => return None,
        };
        self.served.push((code, access));
        let refused = |errno: Errno| Some(encode_error(id, code, errno as u32));
        let Some((area, _)) = self.find(access.address, access.count as usize) else {
            return refused(Errno::EINVAL);
        };
        let permitted =
            if code == CommandCode::DMA_READ { area.access.reads() } else { area.access.writes() };
        if !permitted {
            return refused(Errno::EPERM);
        }
        if let Ok(Command::DmaWrite(write)) = Command::decode(&message.header, &message.body, 0) {
            self.poke(write.address, write.data);
            let mut reply = Reply::DmaWrite(Some(access)).encode(id);
            let length = 16 + self.write_reply.unwrap_or(16);
            reply.truncate(length);
            reply[4..8].copy_from_slice(&(length as u32).to_le_bytes());
            return Some(reply);
        }
        let data = self.peek(access.address, access.count as usize);
        Some(Reply::DmaRead { address: access.address, data: &data }.encode(id))
    }
}
