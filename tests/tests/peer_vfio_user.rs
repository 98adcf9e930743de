//! Both ends against the published crate `vfio_user`: its client uses our drive, our client uses its server.

use std::fs::File;
use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nix::sys::eventfd::EventFd;
use nix::sys::uio::{pread, pwrite};
use outboard_nvme::driver::{
    Block, Command, DataPointer, Doorbell, Drive, Fragment, Memory, Options, Registers,
};
use outboard_nvme::spec::Register;
use outboard_nvme::{Lba, Nsid};
use outboard_tests::conformance::{Outcome, Process, Subject, checks, eventfd, memory};
use outboard_tests::process::Server;
use outboard_vfio_user::client::{self, Delivery, Sharing};
use outboard_vfio_user::dma::{Access, Iova};
use outboard_vfio_user::memory::Mapping;
use outboard_vfio_user::wire::{IrqAction, IrqData, IrqIndex, SetIrqs, SparseArea};
use vfio_bindings::bindings::vfio::{vfio_region_info, vfio_region_sparse_mmap_area};
use vm_memory::Bytes;

const PATIENCE: Duration = Duration::from_secs(10);

/// Its client, shared by what the driver is plugged into.
type Theirs = Arc<Mutex<vfio_user::Client>>;

fn failed(error: vfio_user::Error) -> io::Error {
    io::Error::other(error.to_string())
}

/// Where doorbells are rung.
#[derive(Clone)]
enum Doorbells {
    Posted,
    /// The page that the drive maps, and where it begins in BAR 0.
    Mapped(Arc<Mapping>, u64),
}

struct Bar0(Theirs, Doorbells);

impl Bar0 {
    fn read<const N: usize>(&mut self, register: Register) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.lock().unwrap().region_read(0, register.0.into(), &mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    fn write(&mut self, register: Register, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap().region_write(0, register.0.into(), bytes).map_err(failed)
    }
}

impl Registers for Bar0 {
    type Doorbell = Bell;

    fn read32(&mut self, register: Register) -> io::Result<u32> {
        self.read(register).map(u32::from_le_bytes)
    }

    fn read64(&mut self, register: Register) -> io::Result<u64> {
        self.read(register).map(u64::from_le_bytes)
    }

    fn write32(&mut self, register: Register, value: u32) -> io::Result<()> {
        self.write(register, &value.to_le_bytes())
    }

    fn write64(&mut self, register: Register, value: u64) -> io::Result<()> {
        self.write(register, &value.to_le_bytes())
    }

    fn doorbell(&mut self, offset: u64) -> io::Result<Bell> {
        Ok(Bell(self.0.clone(), self.1.clone(), offset))
    }
}

struct Bell(Theirs, Doorbells, u64);

impl Doorbell for Bell {
    fn ring(&mut self, value: u32) -> io::Result<()> {
        match &self.1 {
            Doorbells::Posted => {
                self.0.lock().unwrap().region_write(0, self.2, &value.to_le_bytes()).map_err(failed)
            }
            Doorbells::Mapped(page, start) => {
                let order = std::sync::atomic::Ordering::Release;
                let at = (self.2 - start) as usize;
                page.bytes().store(value.to_le(), at, order).map_err(io::Error::other)
            }
        }
    }
}

/// Memory that was mapped through its client, a page after the other.
struct Ram {
    file: Arc<OwnedFd>,
    next: u64,
}

const IOVA: u64 = 0x4000_0000;
const RAM: u64 = 4 << 20;

struct Part {
    file: Arc<OwnedFd>,
    offset: u64,
    size: usize,
}

impl Memory for Ram {
    type Block = Part;

    fn allocate(&mut self, length: usize) -> io::Result<Part> {
        let size = length.next_multiple_of(4096);
        let part = Part { file: self.file.clone(), offset: self.next, size };
        self.next += size as u64;
        assert!(self.next <= RAM);
        Ok(part)
    }
}

impl Block for Part {
    fn iova(&self) -> outboard_nvme::Iova {
        outboard_nvme::Iova(IOVA + self.offset)
    }

    fn size(&self) -> usize {
        self.size
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        assert_eq!(pread(&self.file, into, (self.offset as usize + offset) as i64), Ok(into.len()));
    }

    fn write(&self, offset: usize, from: &[u8]) {
        assert_eq!(pwrite(&self.file, from, (self.offset as usize + offset) as i64), Ok(from.len()));
    }

    fn load(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn store(&self, offset: usize, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }
}

/// Maps memory, binds interrupts, writes, reads back, resets, unmaps: all through its calls.
fn its_client_uses_our_drive(doorbells: &str) {
    const SIZE: usize = 64 << 10;
    let server = Server::nvme(&["--namespace", "ram:64M", "--doorbells", doorbells]);
    let mut client = vfio_user::Client::new(server.path()).unwrap();
    let file = Arc::new(memory(RAM));
    client.dma_map(0, IOVA, RAM, file.as_raw_fd()).unwrap();
    let irq = client.get_irq_info(IrqIndex::MSIX.0).unwrap();
    assert!(irq.count > 1);
    let vectors: Vec<EventFd> = (0..2).map(|_| eventfd()).collect();
    let raw: Vec<_> = vectors.iter().map(|vector| vector.as_fd().as_raw_fd()).collect();
    // EVENTFD | TRIGGER, then NONE | TRIGGER of the second.
    client.set_irqs(IrqIndex::MSIX.0, 4 | 32, 0, 2, &raw).unwrap();
    client.set_irqs(IrqIndex::MSIX.0, 1 | 32, 1, 1, &[]).unwrap();
    assert_eq!((vectors[0].read().is_ok(), vectors[1].read()), (false, Ok(1)));
    let bell = {
        let bar = client.region(0).unwrap();
        match (&bar.file_offset, bar.sparse_areas.first()) {
            (Some(file), Some(area)) => {
                let start = file.start() + area.offset;
                let page = Mapping::new(file.file(), start, area.size as usize, Access::Write).unwrap();
                Doorbells::Mapped(Arc::new(page), area.offset)
            }
            _ => Doorbells::Posted,
        }
    };
    assert_eq!(matches!(bell, Doorbells::Mapped(..)), doorbells == "mapped");
    let client = Arc::new(Mutex::new(client));
    let ram = Ram { file: file.clone(), next: 0 };
    let mut drive = Drive::enable(Bar0(client.clone(), bell), ram, Options::default()).unwrap();
    drive.request_queues(NonZeroU16::MIN).unwrap();
    let namespace = drive.namespace(Nsid(1)).unwrap();
    assert_eq!(namespace.blocks << namespace.block_shift, 64 << 20);
    let mut queue = drive.create_queue_pair(16).unwrap();
    let (block, list) = (drive.memory().allocate(SIZE).unwrap(), drive.memory().allocate(4096).unwrap());
    let data = DataPointer::new(&[Fragment { iova: block.iova(), length: SIZE }], Some(&list)).unwrap();
    let (nsid, blocks) = (namespace.nsid, (SIZE >> namespace.block_shift) as u32);
    let mut run = |command: Command| {
        queue.execute(command.entry().unwrap(), PATIENCE, thread::yield_now).unwrap();
    };
    let pattern = |round: usize| -> Vec<u8> { (0..SIZE).map(|at| (at * 7 + round) as u8).collect() };
    for round in 0..8 {
        block.write(0, &pattern(round));
        let start = Lba(round as u64 * u64::from(blocks));
        run(Command::Write { nsid, start, blocks, data, durable: false });
    }
    run(Command::Flush { nsid });
    for round in 0..8 {
        block.write(0, &[0xee; SIZE]);
        run(Command::Read { nsid, start: Lba(round as u64 * u64::from(blocks)), blocks, data });
        let mut came = vec![0; SIZE];
        block.read(0, &mut came);
        assert!(came == pattern(round), "round {round}");
    }
    let mut client = client.lock().unwrap();
    client.reset().unwrap();
    let mut status = [0xff; 4];
    client.region_read(0, Register::CSTS.0.into(), &mut status).unwrap();
    assert_eq!(status, [0; 4]);
    client.dma_unmap(IOVA, RAM).unwrap();
    client.shutdown().unwrap();
}

#[test]
fn its_client_uses_our_drive_with_mapped_doorbells() {
    its_client_uses_our_drive("mapped");
}

#[test]
fn its_client_uses_our_drive_with_posted_doorbells() {
    its_client_uses_our_drive("posted");
}

/// A device on its server: registers that stay, a copy within the client's memory, and interrupts.
#[derive(Default)]
struct Backend {
    registers: Vec<u8>,
    maps: Vec<(u64, u64, u64, File)>,
    vectors: Vec<File>,
    resets: u32,
}

/// Writing an address here copies the four bytes at it to the four behind them, and interrupts.
const COPY: u64 = 0x100;
/// What it has of registers and configuration space.
const REGION: u64 = 0x2000;

impl vfio_user::ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            0 => data.copy_from_slice(&self.registers[offset as usize..][..data.len()]),
            _ => data.fill(region as u8),
        }
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.registers[offset as usize..][..data.len()].copy_from_slice(data);
        if offset != COPY {
            return Ok(());
        }
        let at = u64::from_le_bytes(data.try_into().map_err(io::Error::other)?);
        let inside = |(address, size, ..): &&(u64, u64, u64, File)| (*address..address + size).contains(&at);
        let Some((address, _, offset, file)) = self.maps.iter().find(inside) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let place = (offset + at - address) as i64;
        let mut bytes = [0; 4];
        pread(file, &mut bytes, place)?;
        pwrite(file, &bytes, place + 4)?;
        for vector in &self.vectors {
            nix::unistd::write(vector, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: vfio_user::DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        file: Option<File>,
    ) -> io::Result<()> {
        let file = file.ok_or(io::ErrorKind::InvalidInput)?;
        self.maps.push((address, size, offset, file));
        Ok(())
    }

    fn dma_unmap(&mut self, _: vfio_user::DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        self.maps.retain(|map| (map.0, map.1) != (address, size));
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.resets += 1;
        self.registers.fill(0);
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, fds: Vec<File>) -> io::Result<()> {
        self.vectors = fds;
        Ok(())
    }
}

/// Its server, for one client each time.
struct ItsServer {
    server: vfio_user::Server,
    backend: Mutex<Backend>,
    page: OwnedFd,
}

impl ItsServer {
    fn new(directory: &std::path::Path) -> Arc<Self> {
        let page = memory(REGION);
        let area = vfio_region_sparse_mmap_area { offset: 0x1000, size: 0x1000 };
        let region = |index: u32| {
            let exists = [0, 7].contains(&index);
            // READ | WRITE, and for BAR 0 MMAP | CAPS.
            let flags = if index == 0 {
                0xf
            } else if exists {
                3
            } else {
                0
            };
            vfio_user::ServerRegion {
                region_info: vfio_region_info {
                    argsz: 32,
                    flags,
                    index,
                    size: if exists { REGION } else { 0 },
                    ..Default::default()
                },
                sparse_areas: if index == 0 { vec![vfio_user::SparseArea { area }] } else { vec![] },
                mmap_fd: (index == 0).then_some(page.as_raw_fd()),
            }
        };
        let irqs =
            (0..5).map(|index| vfio_user::IrqInfo { index, flags: 1, count: if index == 2 { 4 } else { 0 } });
        let regions = (0..9).map(region).collect();
        let server = vfio_user::Server::new(&directory.join("s"), true, irqs.collect(), regions).unwrap();
        let backend = Backend { registers: vec![0; REGION as usize], ..Backend::default() };
        Arc::new(Self { server, backend: Mutex::new(backend), page })
    }

    fn serve(self: &Arc<Self>) -> thread::JoinHandle<Result<(), vfio_user::Error>> {
        let server = self.clone();
        thread::spawn(move || server.server.run(&mut *server.backend.lock().unwrap()))
    }
}

#[test]
fn our_client_uses_its_server() {
    let directory = tempfile::tempdir().unwrap();
    let server = ItsServer::new(directory.path());
    let session = server.serve();
    let client = client::Client::connect(&directory.path().join("s"), client::Options::default()).unwrap();
    let info = client.device_info().unwrap();
    assert_eq!((info.regions, info.interrupts), (9, 5));
    // The region that is mapped is the file that it gave.
    let bar = client.region(0).unwrap();
    let areas = bar.areas().unwrap();
    assert_eq!(areas, [SparseArea { offset: 0x1000, size: 0x1000 }]);
    pwrite(&server.page, b"theirs", 0x1000).unwrap();
    let mut bytes = [0; 6];
    bar.map(areas[0], Access::ReadWrite).unwrap().bytes().read_slice(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"theirs");
    // Accesses by message.
    client.region_write(0, 0x40, &[1, 2, 3, 4, 5], Delivery::Replied).unwrap();
    client.region_write(0, 0x42, &[9], Delivery::Posted).unwrap();
    let mut bytes = [0; 6];
    client.region_read(0, 0x40, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 9, 4, 5, 0]);
    // Memory and interrupts.
    let ram = memory(0x4000);
    let part = client::Memory { file: ram.as_fd(), offset: 0x1000, length: 0x2000 };
    client.dma_map(Iova(0x10_0000), part, Access::ReadWrite, Sharing::Descriptor).unwrap();
    let vectors: Vec<EventFd> = (0..4).map(|_| eventfd()).collect();
    assert_eq!(client.irq_info(IrqIndex::MSIX).unwrap().count, 4);
    let borrowed: Vec<_> = vectors.iter().map(AsFd::as_fd).collect();
    let set = |data| SetIrqs { index: IrqIndex::MSIX, start: 0, count: 4, data, action: IrqAction::Trigger };
    client.set_irqs(set(IrqData::Eventfds), &borrowed).unwrap();
    pwrite(&ram, b"copy", 0x1010).unwrap();
    client.region_write(0, COPY, &0x10_0010_u64.to_le_bytes(), Delivery::Replied).unwrap();
    let mut bytes = [0; 4];
    pread(&ram, &mut bytes, 0x1014).unwrap();
    assert_eq!(&bytes, b"copy");
    assert!(vectors.iter().all(|vector| vector.read() == Ok(1)));
    // What it refuses is an error to us, and the connection goes on.
    let refused = client.region_write(0, COPY, &0x99_0000_u64.to_le_bytes(), Delivery::Replied);
    assert!(refused.is_err());
    client.reset().unwrap();
    let mut bytes = [7; 2];
    client.region_read(0, 0x40, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 2]);
    client.dma_unmap(Iova(0x10_0000), 0x2000).unwrap();
    client.close();
    session.join().unwrap().unwrap();
    let backend = server.backend.lock().unwrap();
    assert_eq!((backend.resets, backend.maps.len()), (1, 0));
    drop(borrowed);
    assert_eq!(Process::this().descriptors(&ram), 1);
}

/// The checks can fail: what is known to be wrong with its server, they find.
#[test]
fn the_checks_find_what_its_server_gets_wrong() {
    let found = |point: u8| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let server = ItsServer::new(directory.path());
        let connect = || {
            // It panics at some of what it is sent; that is its end, not ours.
            server.serve();
            std::os::unix::net::UnixStream::connect(&path)
        };
        let subject = Subject::new(connect);
        let mut outcomes = checks().filter(|check| check.point == point).map(|check| check.run(&subject));
        outcomes.any(|outcome| matches!(outcome, Outcome::Failed(_)))
    };
    // An errno of 0 and answers to posted commands; commands before VERSION; any major version; accesses past the
    // end of a region.
    for point in [9, 10, 15, 16] {
        assert!(found(point), "point {point}");
    }
    // And what it does right, they let pass.
    for point in [11, 31] {
        assert!(!found(point), "point {point}");
    }
}
