//! The drive as a vfio-user device: configuration space, BAR0, interrupts, resets.
//!
//! BAR0 holds the controller's registers in its first page, the doorbells in the pages after it, then the MSI-X
//! table and, a page further, its pending bits.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, iter};

use nix::errno::Errno;
use outboard_nvme::controller::{
    self, Controller, Counters, Effect, InvalidOptions, Registers, doorbell_write,
};
use outboard_pci::{
    Bar, BarIndex, BarKind, BuildError, Builder, ConfigSpace, Effect as ConfigEffect, Express, Identity,
    Msix, MsixTable, PowerManagement,
};
use outboard_vfio_user::counters::Messages;
use outboard_vfio_user::device::{CONFIG, Description, Device, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma;
use outboard_vfio_user::server::{Connection, serve};
use outboard_vfio_user::wire::{IrqIndex, SparseArea};

use super::doorbells::Doorbells;
use super::machine::Machine;
use super::options::{DoorbellMode, Options};
use super::worker::Worker;
use crate::control::Service;
use crate::disk::{Backend, OpenError};

/// The unit of the BAR's layout and of what clients map. A client whose pages are larger needs the whole BAR.
const PAGE: u64 = 4096;
const BAR0: u32 = 0;

/// Red Hat's vendor ID and QEMU's NVMe device: what firmware and drivers know as a virtual drive.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0010,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    // Mass storage, non-volatile memory, NVMe I/O controller.
    class: [0x01, 0x08, 0x02],
    revision: 2,
};

/// Why a drive cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// A namespace.
    #[error(transparent)]
    Disk(#[from] OpenError),
    /// An option of the controller.
    #[error(transparent)]
    Options(#[from] InvalidOptions),
    /// The configuration space.
    #[error(transparent)]
    Config(#[from] BuildError),
    /// Memory, threads, descriptors.
    #[error("The drive cannot be set up: {0}")]
    System(#[from] io::Error),
}

/// Where things are in BAR0, in bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    doorbells: u64,
    table: u64,
    pending: u64,
    size: u64,
}

impl Layout {
    fn new(queue_pairs: u16, vectors: u16) -> Self {
        let pages = |bytes: u64| bytes.next_multiple_of(PAGE);
        // Two dwords a queue pair, the admin queues' included.
        let doorbells = pages(u64::from(queue_pairs).saturating_add(1).saturating_mul(8));
        let table = PAGE.saturating_add(doorbells);
        let pending = table.saturating_add(pages(u64::from(vectors).saturating_mul(16)));
        let size = pending.saturating_add(PAGE).next_power_of_two();
        Self { doorbells, table, pending, size }
    }

    fn part(&self, offset: u64) -> (Part, u64) {
        let from = |start: u64| offset.saturating_sub(start);
        if offset >= self.pending {
            (Part::Pending, from(self.pending))
        } else if offset >= self.table {
            (Part::Table, from(self.table))
        } else if offset >= PAGE {
            (Part::Doorbells, from(PAGE))
        } else {
            (Part::Registers, offset)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Registers,
    Doorbells,
    Table,
    Pending,
}

/// An NVMe drive, ready to be served.
pub struct Drive {
    description: Description,
    layout: Layout,
    config: Mutex<ConfigSpace>,
    /// MSI-X Enable of `config`, for the drive's thread.
    msix_enabled: Arc<AtomicBool>,
    /// The level of the interrupt pin.
    pin_raised: Arc<AtomicBool>,
    msix: Mutex<MsixTable>,
    registers: Arc<Registers>,
    doorbells: Arc<Doorbells>,
    worker: Worker,
    counters: Arc<Counters>,
    messages: Arc<Messages>,
    posted: outboard_vfio_user::counters::Count,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drive {
    /// Opens the disks and starts the drive's thread.
    ///
    /// # Errors
    /// [`DriveError`]
    pub fn new(options: Options) -> Result<Self, DriveError> {
        let disks: Vec<Backend<Machine>> =
            options.namespaces.iter().map(|namespace| namespace.open()).collect::<Result<_, _>>()?;
        let events: Vec<OwnedFd> = disks
            .iter()
            .filter_map(|disk| disk.event())
            .map(|event| event.try_clone_to_owned())
            .collect::<Result<_, _>>()?;
        let vectors = options.queue_pairs.saturating_add(1);
        let layout = Layout::new(options.queue_pairs, vectors);
        let doorbells = Arc::new(Doorbells::new(usize::try_from(layout.doorbells).unwrap_or(usize::MAX))?);
        let controller = Controller::new(
            controller::Options {
                serial: options.serial,
                model: options.model,
                vendor: IDENTITY.vendor,
                queue_pairs: options.queue_pairs,
                queue_entries: options.queue_entries,
                vectors,
                shadow_doorbells: options.doorbells == DoorbellMode::Posted,
                ..controller::Options::default()
            },
            disks,
        )?;
        let (registers, counters) = (controller.registers(), controller.counters());
        let msix_enabled = Arc::new(AtomicBool::new(false));
        let pin_raised = Arc::new(AtomicBool::new(false));
        let machine = Machine::new(doorbells.clone(), msix_enabled.clone(), pin_raised.clone());
        Ok(Self {
            description: description(layout, vectors, &doorbells, options.doorbells)?,
            layout,
            config: Mutex::new(config_space(layout, vectors)?),
            msix_enabled,
            pin_raised,
            msix: Mutex::new(MsixTable::new(vectors)),
            registers,
            worker: Worker::start(controller, machine, events, options.doorbells)?,
            doorbells,
            counters,
            messages: Arc::default(),
            posted: Default::default(),
        })
    }

    fn write_bar0(&self, offset: u64, data: &[u8]) {
        let (part, at) = self.layout.part(offset);
        match part {
            Part::Registers => {
                if self.registers.write(at, data) == Effect::Wake {
                    self.worker.wake();
                }
            }
            Part::Doorbells => {
                if let Some((index, value)) = doorbell_write(offset, data)
                    && self.doorbells.store(index, value)
                {
                    self.posted.add(1);
                    self.worker.wake();
                }
            }
            Part::Table => lock(&self.msix).write(usize::try_from(at).unwrap_or(usize::MAX), data),
            // Read-only.
            Part::Pending => {}
        }
    }

    fn read_bar0(&self, offset: u64, into: &mut [u8]) {
        let (part, at) = self.layout.part(offset);
        let at_index = usize::try_from(at).unwrap_or(usize::MAX);
        match part {
            Part::Registers => self.registers.read(at, into),
            // What a read gives is the vendor's choice (3.1.24): nothing.
            Part::Doorbells => into.fill(0),
            Part::Table => lock(&self.msix).read(at_index, into),
            Part::Pending => lock(&self.msix).read_pending(at_index, into),
        }
    }

    fn change_config<T>(&self, change: impl FnOnce(&mut ConfigSpace) -> T) -> T {
        let mut config = lock(&self.config);
        let outcome = change(&mut config);
        let enabled = config.msix_enabled();
        if self.msix_enabled.swap(enabled, Ordering::Relaxed) != enabled {
            // Where interrupts go now, some may be due.
            self.worker.wake();
        }
        outcome
    }

    /// The registers fall back at once; the drive's thread follows.
    fn reset_function(&self) {
        lock(&self.msix).reset();
        let _ = self.registers.reset();
        self.worker.wake();
    }
}

/// The parts of an access to BAR0: no part crosses a page, and so none belongs to two kinds of register.
fn pages(offset: u64, length: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0_usize;
    iter::from_fn(move || {
        let at = offset.saturating_add(done as u64);
        let room = usize::try_from(PAGE.saturating_sub(at % PAGE)).unwrap_or(usize::MAX);
        let end = done.saturating_add(room).min(length);
        let range = done..end;
        done = end;
        (!range.is_empty()).then_some((at, range))
    })
}

fn config_space(layout: Layout, vectors: u16) -> Result<ConfigSpace, BuildError> {
    let (Some(bar0), Ok(table), Ok(pending)) =
        (BarIndex::new(0), u32::try_from(layout.table), u32::try_from(layout.pending))
    else {
        return Err(BuildError::MsixVectors(vectors));
    };
    Ok(Builder::new(IDENTITY)
        .bar(bar0, Bar { kind: BarKind::Memory64 { prefetchable: false }, size: layout.size })?
        .pin(1)?
        .power_management(PowerManagement)?
        .express(Express)?
        .msix(Msix { vectors, table: (bar0, table), pending: (bar0, pending) })?
        .build())
}

fn description(
    layout: Layout,
    vectors: u16,
    doorbells: &Doorbells,
    mode: DoorbellMode,
) -> io::Result<Description> {
    let mappable = match mode {
        DoorbellMode::Posted => None,
        DoorbellMode::Mapped => Some(Mappable {
            file: Arc::new(doorbells.as_fd().try_clone_to_owned()?),
            offset: 0,
            areas: vec![SparseArea { offset: PAGE, size: layout.doorbells }],
            msix: false,
        }),
    };
    Ok(Description::pci()
        .region(BAR0, Region { mappable, ..Region::trapped(layout.size) })
        .region(CONFIG, Region::trapped(PAGE))
        .irq(IrqIndex::INTX, Irq::PIN)
        .irq(IrqIndex::MSIX, Irq::messages(vectors.into())))
}

impl Device for Drive {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        self.worker.attach(connection.clone());
    }

    fn detach(&self) {
        // The queues lay in the client's memory, so nothing of the controller's state outlives it.
        self.change_config(ConfigSpace::reset);
        lock(&self.msix).reset();
        let _ = self.registers.power_cycle();
        self.worker.wake();
        self.worker.detach();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        let mut data = vec![0; length];
        match region {
            BAR0 => {
                for (at, range) in pages(offset, length) {
                    self.read_bar0(at, data.get_mut(range).unwrap_or_default());
                }
            }
            CONFIG => lock(&self.config).read(usize::try_from(offset).unwrap_or(usize::MAX), &mut data),
            _ => return reply.fail(Errno::EINVAL),
        }
        reply.ok(data);
    }

    fn write(&self, region: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        match region {
            BAR0 => {
                for (at, range) in pages(offset, data.len()) {
                    self.write_bar0(at, data.get(range).unwrap_or_default());
                }
                if self.pin_raised.load(Ordering::Acquire) {
                    // This may lower it. The client's next command may unmask it, which interrupts at once if it is
                    // still up.
                    return self.worker.look(reply);
                }
            }
            CONFIG => {
                let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                let effects = self.change_config(|config| config.write(offset, data));
                if effects.contains(&ConfigEffect::FunctionLevelReset) {
                    self.reset_function();
                }
            }
            _ => return reply.fail(Errno::EINVAL),
        }
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        self.change_config(ConfigSpace::reset);
        self.reset_function();
        self.worker.reset(reply);
    }

    fn dma_unmap(&self, _region: &Arc<dma::Entry<dma::Region>>) {
        // The drive's thread lets go of it when it looks.
        self.worker.wake();
    }
}

impl Service for Drive {
    fn serve(&self, stream: UnixStream) {
        match serve(stream, self, &self.messages) {
            Ok(()) => tracing::info!("the client left"),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                let causes = iter::successors(error.source(), |cause| cause.source());
                let cause: String = causes.map(|cause| format!(": {cause}")).collect();
                tracing::warn!("the session ended: {error}{cause}");
            }
        }
    }

    fn stop(&self) {
        self.worker.stop();
    }

    fn counters(&self) -> Vec<(String, u64)> {
        let counters = &self.counters;
        let (reads, writes) = (counters.reads.get(), counters.writes.get());
        let others = [
            ("ios.compare", counters.compares.get()),
            ("ios.verify", counters.verifies.get()),
            ("ios.write_uncorrectable", counters.write_uncorrectables.get()),
            ("ios.flush", counters.flushes.get()),
            ("ios.write_zeroes", counters.write_zeroes.get()),
            ("ios.dataset_management", counters.dataset_management.get()),
        ];
        let total =
            others.iter().fold(reads.wrapping_add(writes), |sum, (_, count)| sum.wrapping_add(*count));
        let mut lines: Vec<(String, u64)> = vec![
            ("bytes.read".into(), counters.bytes_read.get()),
            ("bytes.written".into(), counters.bytes_written.get()),
            ("commands.admin".into(), counters.admin.get()),
            ("doorbells.posted".into(), self.posted.get()),
            ("doorbells.seen".into(), counters.doorbells.get()),
            ("errors".into(), counters.errors.get()),
            ("errors.media".into(), counters.media_errors.get()),
            ("interrupts".into(), counters.interrupts.get()),
            ("interrupts.withheld".into(), counters.interrupts_withheld.get()),
            ("ios.read".into(), reads),
            ("ios.total".into(), total),
            ("ios.write".into(), writes),
            ("messages.total".into(), self.messages.total()),
            ("resets".into(), counters.resets.get()),
        ];
        lines.extend(others.map(|(name, count)| (name.into(), count)));
        lines.extend(
            self.messages
                .by_name()
                .into_iter()
                .map(|(name, count)| (format!("messages.{}", name.to_lowercase()), count)),
        );
        lines.sort();
        lines
    }
}

#[cfg(test)]
mod tests;
