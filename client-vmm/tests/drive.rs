//! The benchmark's and the demonstration's ways into a drive, against `nvme::controller` on a disk in RAM.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

use outboard_nvme::Iova;
use outboard_nvme::controller::{
    self, Controller, Disk, DiskError, Geometry, Host, LbaRange, Operation, Segment, Submission, Tag,
    doorbell_write,
};
use outboard_vfio_user::client::{Client, Options, Sharing};
use outboard_vfio_user::device::{Description, Device, Direct, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma::{self, View};
use outboard_vfio_user::memory::SharedMemory;
use outboard_vfio_user::server::{self, Connection};
use outboard_vfio_user::wire::SparseArea;
use outboard_vmm::bench::{DeviceSpec, Figures, Pattern, Workload, measure};
use outboard_vmm::drive::{Attachment, DoorbellAccess, DriveError, attach, detach};
use vm_memory::Bytes;

const PAGE: usize = 4096;
const BLOCKS: u64 = 1024;

/// What the drive's thread is plugged into.
struct Machine {
    view: View,
    /// BAR 0, of which only the doorbells are memory.
    bar: Arc<SharedMemory>,
}

fn failed(error: dma::DmaError) -> controller::DmaError {
    let (dma::DmaError::NotMapped { iova, length } | dma::DmaError::Refused { iova, length }) = error;
    controller::DmaError { iova: Iova(iova.0), length }
}

impl Host for Machine {
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), controller::DmaError> {
        self.view.read(dma::Iova(at.0), into).map_err(failed)
    }

    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), controller::DmaError> {
        self.view.write(dma::Iova(at.0), from).map_err(failed)
    }

    fn load(&mut self, at: Iova) -> Result<u32, controller::DmaError> {
        self.view.load(dma::Iova(at.0)).map_err(failed)
    }

    fn store(&mut self, at: Iova, value: u32) -> Result<(), controller::DmaError> {
        self.view.store(dma::Iova(at.0), value).map_err(failed)
    }

    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), controller::DmaError> {
        let bytes: Vec<u8> = entry.iter().flat_map(|dword| dword.to_le_bytes()).collect();
        self.write(at, &bytes[..12])?;
        self.store(Iova(at.0 + 12), entry[3])
    }

    fn doorbell(&mut self, index: usize) -> u32 {
        u32::from_le(self.bar.bytes().load(PAGE + 4 * index, Ordering::Acquire).unwrap())
    }

    fn set_doorbell(&mut self, index: usize, value: u32) {
        self.bar.bytes().store(value.to_le(), PAGE + 4 * index, Ordering::Release).unwrap();
    }

    fn interrupt(&mut self, _: u16) {}

    fn interrupt_line(&mut self, _: bool) {}
}

struct RamDisk(Vec<u8>);

impl RamDisk {
    fn transfer(
        &mut self,
        range: LbaRange,
        segments: &[Segment],
        mut each: impl FnMut(Iova, &mut [u8]) -> Result<(), controller::DmaError>,
    ) -> Result<(), DiskError> {
        let mut at = range.start.0 as usize * PAGE;
        for segment in segments {
            let iova = segment.iova.ok_or(DiskError::Internal)?;
            each(iova, &mut self.0[at..at + segment.length]).map_err(|_| DiskError::DataTransfer)?;
            at += segment.length;
        }
        Ok(())
    }
}

impl Disk<Machine> for RamDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_shift: 12,
            formats: &[12],
            blocks: BLOCKS,
            read_only: false,
            volatile_cache: false,
            deallocates: false,
        }
    }

    fn submit(&mut self, host: &mut Machine, _: Tag, operation: Operation<'_>) -> Submission {
        Submission::Done(match operation {
            Operation::Read { range, data } => {
                self.transfer(range, data, |iova, bytes| host.write(iova, bytes))
            }
            Operation::Write { range, data, .. } => {
                self.transfer(range, data, |iova, bytes| host.read(iova, bytes))
            }
            Operation::Flush => Ok(()),
            _ => Err(DiskError::Internal),
        })
    }

    fn commit(&mut self, _: &mut Machine) {}

    fn reap(&mut self, _: &mut Machine, _: &mut Vec<(Tag, Result<(), DiskError>)>) {}
}

/// A client's machine comes, or goes.
type Plug = Option<Machine>;

/// The device: registers, doorbells and a configuration space that has only what is looked at.
struct Drive {
    description: Description,
    registers: Arc<controller::Registers>,
    bar: Arc<SharedMemory>,
    plugs: SyncSender<Plug>,
}

impl Drive {
    /// A drive, and what its thread is to run.
    fn new(mapped: bool) -> (Self, impl FnOnce() + Send) {
        let options = controller::Options { shadow_doorbells: !mapped, ..controller::Options::default() };
        let bar = Arc::new(SharedMemory::new("bar", 2 * PAGE).unwrap());
        let mappable = mapped.then(|| Mappable {
            file: Some(Arc::new(bar.as_fd().try_clone_to_owned().unwrap())),
            offset: 0,
            areas: vec![SparseArea { offset: PAGE as u64, size: PAGE as u64 }],
            msix: false,
            direct: Direct::Granted,
        });
        let region =
            |size: usize| Region { size: size as u64, readable: true, writable: true, ..Region::default() };
        let mut regions = vec![Region::default(); 9];
        regions[0] = Region { mappable, ..region(2 * PAGE) };
        regions[7] = region(256);
        let disk = RamDisk(vec![0; BLOCKS as usize * PAGE]);
        let mut controller = Controller::new(options, vec![disk]).unwrap();
        let (plugs, plugged) = sync_channel::<Plug>(0);
        let drive = Self {
            description: Description { regions, irqs: vec![Irq::default(); 5], ..Description::pci() },
            registers: controller.registers(),
            bar,
            plugs,
        };
        let work = move || {
            let mut machine = None;
            while let Ok(plug) = match machine {
                None => plugged.recv().map(Some),
                Some(_) => match plugged.try_recv() {
                    Err(TryRecvError::Empty) => Ok(None),
                    Err(TryRecvError::Disconnected) => Err(RecvError),
                    Ok(plug) => Ok(Some(plug)),
                },
            } {
                if let Some(plug) = plug {
                    machine = plug;
                }
                if let Some(machine) = &mut machine {
                    machine.view.refresh();
                    if !controller.poll(machine) {
                        thread::yield_now();
                    }
                }
            }
        };
        (drive, work)
    }
}

impl Device for Drive {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        self.plugs.send(Some(Machine { view: connection.view(), bar: self.bar.clone() })).unwrap();
    }

    fn detach(&self) {
        self.plugs.send(None).unwrap();
        let _ = self.registers.reset();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        let mut data = vec![0; length];
        if region == 0 {
            self.registers.read(offset, &mut data);
        } else if (offset, length) == (9, 3) {
            data.copy_from_slice(&[2, 8, 1]);
        }
        reply.ok(data);
    }

    fn write(&self, region: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        if region == 0 {
            let _ = self.registers.write(offset, data);
            if let Some((index, value)) = doorbell_write(offset, data, 0) {
                self.bar.bytes().store(value.to_le(), PAGE + 4 * index, Ordering::Release).unwrap();
            }
        }
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        let _ = self.registers.reset();
        reply.ok(());
    }

    fn dma_unmap(&self, _: &Arc<dma::Entry<dma::Region>>) {}
}

fn with_drive<R>(mapped: bool, test: impl FnOnce(&Arc<Client>) -> R) -> R {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (drive, work) = Drive::new(mapped);
    thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(move || server::serve(theirs, &drive, &Arc::default()).unwrap());
        let client = Arc::new(Client::new(ours, Options::default()).unwrap());
        test(&client)
    })
}

fn figures(mapped: bool, doorbells: DoorbellAccess, shadow: bool, sharing: Sharing) -> Figures {
    let device = DeviceSpec { socket: "unused".into(), doorbells, shadow, sharing };
    let time = Duration::from_millis(300);
    let workload = Workload { pattern: Pattern::Randrw, block: 16 << 10, depth: 8, time, cpu: None };
    with_drive(mapped, |client| {
        // Twice: a drive that was detached can be attached again.
        measure(client, &device, 1, workload).unwrap();
        measure(client, &device, 2, workload).unwrap()
    })
}

#[test]
fn mapped_doorbells_cost_no_message() {
    let figures = figures(true, DoorbellAccess::Mapped, false, Sharing::Descriptor);
    assert!(figures.ios > 100, "{figures:?}");
    assert_eq!(figures.messages, 0);
    assert!(figures.latency.p50 > 0.0 && figures.latency.p50 <= figures.latency.p99);
}

#[test]
fn posted_doorbells_cost_messages_unless_there_are_shadows() {
    let plain = figures(false, DoorbellAccess::Any, false, Sharing::Descriptor);
    assert!(plain.ios > 100 && plain.messages_per_io > 0.1, "{plain:?}");
    let shadow = figures(false, DoorbellAccess::Posted, true, Sharing::Descriptor);
    // A thread that does not get to run sleeps more often, and is rung for.
    let fewer = shadow.messages_per_io < plain.messages_per_io / 5.0;
    assert!(shadow.ios > 100 && fewer, "{plain:?}, {shadow:?}");
}

#[test]
fn memory_by_messages_costs_messages() {
    let figures = figures(true, DoorbellAccess::Mapped, false, Sharing::Messages);
    assert!(figures.ios > 10 && figures.messages_per_io >= 1.0, "{figures:?}");
}

#[test]
fn what_cannot_be_mapped_is_said() {
    let attachment =
        Attachment { doorbells: DoorbellAccess::Mapped, sharing: Sharing::Descriptor, memory: 1 << 20 };
    with_drive(false, |client| {
        assert!(matches!(attach(client, attachment), Err(DriveError::NotMappable)));
        let posted = Attachment { doorbells: DoorbellAccess::Posted, ..attachment };
        detach(attach(client, posted).unwrap()).unwrap();
    });
}
