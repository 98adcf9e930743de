//! A device of everything that the protocol has and our drive has not: I/O descriptors, all vectors, and regions
//! whose accesses the test decides over.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use nix::errno::Errno;
use outboard_pci::{Bar, BarIndex, BarKind, Builder, ConfigSpace, Effect, Express, Identity, Msix};
use outboard_vfio_user::device::{Description, Device, Direct, Ioeventfd, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma::{self, DmaError, Entry, Iova, View};
use outboard_vfio_user::memory::SharedMemory;
use outboard_vfio_user::server::Connection;
use outboard_vfio_user::wire::{Command, IrqFlags, IrqIndex, RegionWrite, SparseArea};

use crate::conformance::{Checked, Client, Direction, Engine, Transfers, eventfd};

/// The regions, by index.
pub mod region {
    /// Registers that keep what is written; a page of them can be mapped, and two have ioeventfds.
    pub const REGISTERS: u32 = 0;
    /// Its reads are answered when the test says so, if it is to hold them.
    pub const HELD: u32 = 1;
    /// Does not exist.
    pub const ABSENT: u32 = 2;
    /// Where a copy is ordered, which the session's own thread does.
    pub const COPY_HERE: u32 = 3;
    /// Has more ioeventfds than a client takes in a message.
    pub const MANY_EVENTFDS: u32 = 4;
    /// Where a copy is ordered, which a thread of its own does.
    pub const COPY_THERE: u32 = 5;
    /// The configuration space.
    pub const CONFIG: u32 = 7;
    /// Cannot be written.
    pub const READ_ONLY: u32 = 8;
    /// How many there are.
    pub const COUNT: u32 = 9;
}

/// How long the registers' region is, in bytes.
pub const REGISTERS_SIZE: u64 = 0x4000;
/// How many vectors MSI-X has.
pub const VECTORS: u32 = 2048;

/// Where the MSI-X table lies in BAR 4, and after it the pending bits.
const TABLE_SIZE: u64 = 16 * VECTORS as u64;
const MANY_SIZE: u64 = 0x1_0000;

/// What a write to a region of copies says.
const COPY: u64 = 0;
/// Whether a copy that is done asserts the pin.
const PIN: u64 = 64;
/// The pin is let go.
const ACKNOWLEDGE: u64 = 68;

/// A copy from one place of the client's memory to another.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// Where it comes from.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// In bytes.
    pub length: u64,
    /// Where a dword becomes 1 when it is done, and 2 when it failed; 0 is nowhere.
    pub status: u64,
}

impl Copy {
    /// As it is written to the device.
    pub fn bytes(from: u64, to: u64, length: usize) -> Vec<u8> {
        Self { from, to, length: length as u64, status: 0 }.encode()
    }

    fn encode(self) -> Vec<u8> {
        [self.from, self.to, self.length, self.status].iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// From bytes that the device was sent.
    pub fn parse(bytes: &[u8]) -> Self {
        let value = |at: usize| {
            bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        Self { from: value(0), to: value(8), length: value(16), status: value(24) }
    }

    /// Does it.
    ///
    /// # Errors
    /// What the client's memory says.
    pub fn run(self, view: &mut View) -> Result<(), DmaError> {
        let mut data = vec![0; self.length as usize];
        let result = view.read(Iova(self.from), &mut data).and_then(|()| view.write(Iova(self.to), &data));
        if self.status != 0 {
            view.store(Iova(self.status), if result.is_ok() { 1 } else { 2 })?;
        }
        result
    }
}

/// The device.
pub struct Plain {
    description: Description,
    config: Mutex<ConfigSpace>,
    registers: Mutex<Vec<u8>>,
    table: Mutex<Vec<u8>>,
    pin: Mutex<bool>,
    connection: Mutex<Option<Arc<Connection>>>,
    /// Whether reads of [`region::HELD`] wait.
    pub holds: AtomicBool,
    /// The reads that wait.
    pub held: Mutex<Vec<Reply<Vec<u8>>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config_space() -> ConfigSpace {
    let identity = Identity {
        vendor: 0x1b36,
        device: 0x0005,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        class: [0xff, 0, 0],
        revision: 0,
    };
    let sizes = [(0, REGISTERS_SIZE), (1, 0x1000), (3, 0x1000), (4, MANY_SIZE), (5, 0x1000)];
    let bar = |index| BarIndex::new(index).expect("one of six");
    let memory = |size| Bar { kind: BarKind::Memory32 { prefetchable: false }, size };
    let builder = sizes.into_iter().fold(Builder::new(identity), |builder, (index, size)| {
        builder.bar(bar(index), memory(size)).expect("a BAR of its own")
    });
    let (table, pending) = ((bar(4), 0), (bar(4), TABLE_SIZE as u32));
    let builder = builder.pin(1).and_then(|builder| builder.express(Express));
    let msix = Msix { vectors: VECTORS as u16, table, pending };
    builder.and_then(|builder| builder.msix(msix)).expect("a sound configuration space").build()
}

impl Plain {
    /// A device that nobody has used.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new() -> Arc<Self> {
        let shared = SharedMemory::new("plain", REGISTERS_SIZE as usize).expect("memory");
        let file = Arc::new(shared.as_fd().try_clone_to_owned().expect("a descriptor"));
        let areas = vec![SparseArea { offset: 0x1000, size: 0x1000 }];
        let doorbell: Arc<OwnedFd> = Arc::new(eventfd().into());
        let ioeventfd = |offset| Ioeventfd { offset, size: 4, datamatch: None, eventfd: doorbell.clone() };
        let own = |offset| Ioeventfd { eventfd: Arc::new(eventfd().into()), ..ioeventfd(offset) };
        let plain = |size| Region { size, readable: true, writable: true, ..Region::default() };
        let regions = (0..region::COUNT).map(|index| match index {
            region::REGISTERS => Region {
                mappable: Some(Mappable {
                    file: Some(file.clone()),
                    offset: 0,
                    areas: areas.clone(),
                    msix: true,
                    direct: Direct::Granted,
                }),
                ioeventfds: vec![ioeventfd(0x1000), ioeventfd(0x1008)],
                ..plain(REGISTERS_SIZE)
            },
            region::HELD | region::COPY_HERE | region::COPY_THERE | region::CONFIG => plain(0x1000),
            region::MANY_EVENTFDS => {
                Region { ioeventfds: (0..17).map(|at| own(at * 4)).collect(), ..plain(MANY_SIZE) }
            }
            region::READ_ONLY => Region { writable: false, ..plain(0x100) },
            _ => Region::default(),
        });
        let irq = |count| Irq { count, flags: IrqFlags::EVENTFD };
        Arc::new(Self {
            description: Description {
                regions: regions.collect(),
                irqs: [1, 0, VECTORS, 1, 1].map(irq).to_vec(),
                ..Description::pci()
            },
            config: Mutex::new(config_space()),
            registers: Mutex::new(vec![0; REGISTERS_SIZE as usize]),
            table: Mutex::new(vec![0; MANY_SIZE as usize]),
            pin: Mutex::new(false),
            connection: Mutex::default(),
            holds: AtomicBool::new(false),
            held: Mutex::default(),
        })
    }

    /// The client.
    ///
    /// # Panics
    /// When there is none.
    pub fn connection(&self) -> Arc<Connection> {
        lock(&self.connection).clone().expect("a client")
    }

    /// Answers the reads that wait.
    pub fn release(&self) {
        for reply in lock(&self.held).drain(..) {
            reply.ok(vec![0x11; 4]);
        }
    }

    fn copy(&self, region: u32, data: &[u8], reply: Reply<()>) {
        let (copy, connection, pin) = (Copy::parse(data), self.connection(), *lock(&self.pin));
        let work = move || {
            let result = copy.run(&mut connection.view());
            if pin {
                connection.interrupts().set_line(true);
            } else {
                connection.interrupts().trigger(IrqIndex::MSIX, 0);
            }
            reply.send(result.map_err(|_| Errno::EFAULT));
        };
        if region == region::COPY_HERE {
            work();
        } else {
            thread::spawn(work);
        }
    }
}

impl Device for Plain {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        *lock(&self.connection) = Some(connection.clone());
    }

    fn detach(&self) {
        *lock(&self.connection) = None;
        lock(&self.held).clear();
        lock(&self.config).reset();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        let at = offset as usize;
        match region {
            region::HELD if self.holds.load(Ordering::Relaxed) => lock(&self.held).push(reply),
            region::REGISTERS => reply.ok(lock(&self.registers)[at..][..length].to_vec()),
            region::MANY_EVENTFDS => reply.ok(lock(&self.table)[at..][..length].to_vec()),
            region::CONFIG => {
                let mut data = vec![0; length];
                lock(&self.config).read(at, &mut data);
                reply.ok(data);
            }
            _ => reply.ok(vec![offset as u8; length]),
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        let at = offset as usize;
        match region {
            region::COPY_HERE | region::COPY_THERE if offset == COPY => {
                return self.copy(region, data, reply);
            }
            region::COPY_HERE | region::COPY_THERE if offset == PIN => *lock(&self.pin) = data != [0; 4],
            region::COPY_HERE | region::COPY_THERE if offset == ACKNOWLEDGE => {
                self.connection().interrupts().set_line(false);
            }
            region::REGISTERS => lock(&self.registers)[at..][..data.len()].copy_from_slice(data),
            region::MANY_EVENTFDS => lock(&self.table)[at..][..data.len()].copy_from_slice(data),
            region::CONFIG => {
                let effects = lock(&self.config).write(at, data);
                if effects.contains(&Effect::FunctionLevelReset) {
                    lock(&self.registers).fill(0);
                }
            }
            _ => {}
        }
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        lock(&self.registers).fill(0);
        lock(&self.config).reset();
        reply.ok(());
    }

    fn dma_unmap(&self, _: &Arc<Entry<dma::Region>>) {}
}

/// The device as an engine, whose copies are ordered in this region.
#[derive(Clone, Copy, Debug)]
pub struct Copier(pub u32);

/// The longest copy.
const MOST: usize = 256 << 10;
/// How many status dwords there are, after what was loaded.
const SLOTS: u64 = 64;

impl Engine for Copier {
    fn room(&self) -> u64 {
        MOST as u64 + 4096
    }

    fn start(&self, client: &mut Client, room: u64, interrupts: IrqIndex) -> Checked<Box<dyn Transfers>> {
        let pin = interrupts == IrqIndex::INTX;
        client.write(self.0, PIN, &u32::from(pin).to_le_bytes())?;
        client.ram.poke(room + MOST as u64, &[0; 4 * SLOTS as usize]);
        // So that a reset can be told.
        client.write(region::REGISTERS, 0, &[1])?;
        Ok(Box::new(Copies { region: self.0, room, begun: 0, done: 0, pin }))
    }

    fn is_reset(&self, client: &mut Client) -> Checked<bool> {
        Ok(client.read(region::REGISTERS, 0, 1)? == [0])
    }
}

struct Copies {
    region: u32,
    room: u64,
    begun: u64,
    done: u64,
    pin: bool,
}

impl Copies {
    fn status(&self, number: u64) -> u64 {
        self.room + MOST as u64 + number % SLOTS * 4
    }
}

impl Transfers for Copies {
    fn unit(&self) -> usize {
        64
    }

    fn most(&self) -> usize {
        MOST
    }

    fn vector(&self) -> u32 {
        0
    }

    fn begin(&mut self, client: &mut Client, direction: Direction, at: u64, length: usize) -> Checked {
        let (from, to) = match direction {
            Direction::Load => (at, self.room),
            Direction::Store => (self.room, at),
        };
        let status = self.status(self.begun);
        client.ram.poke(status, &[0; 4]);
        self.begun += 1;
        let data = Copy { from, to, length: length as u64, status }.encode();
        client.post(&Command::RegionWrite(RegionWrite { offset: COPY, region: self.region, data: &data }))
    }

    fn poll(&mut self, client: &mut Client) -> Checked<Option<bool>> {
        let status = client.ram.peek(self.status(self.done), 4);
        if status == [0; 4] {
            return Ok(None);
        }
        self.done += 1;
        if self.pin {
            client.write(self.region, ACKNOWLEDGE, &[0; 4])?;
        }
        Ok(Some(status == [1, 0, 0, 0]))
    }
}
