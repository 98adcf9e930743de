//! The protocol's fine print, and what broken or hostile clients do, against a plain device.

mod endings;
mod framing;
mod interrupts;
mod memory;
mod regions;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::EventFd;
use outboard_vfio_user::device::{Description, Device, Ioeventfd, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma::{self, Entry, Iova, Pin};
use outboard_vfio_user::limits;
use outboard_vfio_user::memory::{Access, SharedMemory};
use outboard_vfio_user::server::{Connection, ServeError};
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::transport::FrameError;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaUnmap, IrqAction, IrqData, IrqFlags, IrqIndex, Query, RegionAccess,
    RegionCapability, RegionFlags, RegionWrite, RegionWrites, Reply as WireReply, SetIrqs, SparseArea,
    UnmapTarget, Version,
};

use crate::client::{
    Client, Served, by_messages, connect, copies, descriptors_named, eventfd, eventually, mapping,
    mappings_named, memory, open, raw, unmap,
};

const EINVAL: u32 = Errno::EINVAL as u32;
const ENOENT: u32 = Errno::ENOENT as u32;
const EEXIST: u32 = Errno::EEXIST as u32;

/// Registers that keep what is written, and a region whose reads are answered when the test says so.
pub(crate) struct Plain {
    description: Description,
    registers: Mutex<Vec<u8>>,
    connection: Mutex<Option<Arc<Connection>>>,
    held: Mutex<Vec<Reply<Vec<u8>>>>,
}

const REGISTERS: u32 = 0;
const REGISTERS_SIZE: u64 = 0x4000;
const HELD: u32 = 1;
const ABSENT: u32 = 2;
const MANY_EVENTFDS: u32 = 4;
const READ_ONLY: u32 = 7;
const REGIONS: u32 = 9;
const VECTORS: u32 = 2048;

impl Plain {
    pub(crate) fn new() -> Arc<Self> {
        let shared = SharedMemory::new("plain", REGISTERS_SIZE as usize).unwrap();
        let file: Arc<OwnedFd> = Arc::new(shared.as_fd().try_clone_to_owned().unwrap());
        let areas = vec![SparseArea { offset: 0x1000, size: 0x1000 }];
        let doorbell: Arc<OwnedFd> = Arc::new(eventfd().into());
        let ioeventfd = |offset| Ioeventfd { offset, size: 4, datamatch: None, eventfd: doorbell.clone() };
        let own = |offset| Ioeventfd { eventfd: Arc::new(eventfd().into()), ..ioeventfd(offset) };
        let region = |size| Region { size, readable: true, writable: true, ..Region::default() };
        let mut regions = vec![Region::default(); REGIONS as usize];
        regions[REGISTERS as usize] = Region {
            mappable: Some(Mappable { file: Some(file), offset: 0, areas, msix: true }),
            ioeventfds: vec![ioeventfd(0x1000), ioeventfd(0x1008)],
            ..region(REGISTERS_SIZE)
        };
        regions[HELD as usize] = region(0x1000);
        regions[MANY_EVENTFDS as usize] =
            Region { ioeventfds: (0..17).map(|at| own(at * 4)).collect(), ..region(0x1000) };
        regions[READ_ONLY as usize] = Region { writable: false, ..region(0x100) };
        let irq = |count| Irq { count, flags: IrqFlags::EVENTFD };
        let description =
            Description { regions, irqs: [1, 0, VECTORS, 1, 1].map(irq).to_vec(), resets: true };
        Arc::new(Self {
            description,
            registers: Mutex::new(vec![0; REGISTERS_SIZE as usize]),
            connection: Mutex::default(),
            held: Mutex::default(),
        })
    }

    fn connection(&self) -> Arc<Connection> {
        self.connection.lock().unwrap().clone().unwrap()
    }

    fn release(&self) {
        for reply in self.held.lock().unwrap().drain(..) {
            reply.ok(vec![0x11; 4]);
        }
    }
}

impl Device for Plain {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        *self.connection.lock().unwrap() = Some(connection.clone());
    }

    fn detach(&self) {
        *self.connection.lock().unwrap() = None;
        self.held.lock().unwrap().clear();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        match region {
            HELD => self.held.lock().unwrap().push(reply),
            REGISTERS => {
                reply.ok(self.registers.lock().unwrap()[offset as usize..][..length].to_vec());
            }
            _ => reply.ok(vec![0; length]),
        }
    }

    fn write(&self, _: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        self.registers.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        self.registers.lock().unwrap().fill(0);
        reply.ok(());
    }

    fn dma_unmap(&self, _: &Arc<Entry<dma::Region>>) {}
}

fn dwords<const N: usize>(values: [u32; N]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn read(offset: u64, count: u32) -> Command<'static> {
    Command::RegionRead(RegionAccess { offset, region: REGISTERS, count })
}

/// Still cuts the stream where we do, and still answers.
fn alive(client: &mut Client) {
    client.write(REGISTERS, 8, &[1, 2, 3, 4]).unwrap();
    assert_eq!(client.read(REGISTERS, 8, 4), Ok(vec![1, 2, 3, 4]));
}

fn bind(start: u32, count: u32) -> SetIrqs<'static> {
    let (data, action) = (IrqData::Eventfds, IrqAction::Trigger);
    SetIrqs { index: IrqIndex::MSIX, start, count, data, action }
}
