//! The drive as a vfio-user device: configuration space, BAR0, interrupts, resets.

use std::os::fd::OwnedFd;
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
    PowerManagement,
};
use outboard_vfio_user::counters::Messages;
use outboard_vfio_user::device::{CONFIG, Description, Device, Direct, Irq, Mappable, Region, Reply};
use outboard_vfio_user::dma;
use outboard_vfio_user::server::{Connection, serve};
use outboard_vfio_user::wire::{IrqIndex, SparseArea};

use super::bar0::{Bar0, Layout, PAGE, Part};
use super::machine::{Machine, Msix, SharedMsix};
use super::mirror::Mirror;
use super::options::{DoorbellMode, Options};
use super::worker::{Client, Worker};
use crate::control::Service;
use crate::disk::{Backend, OpenError};

/// The least size of a BAR that is mapped whole: the largest page of a host that cannot map less.
const LARGEST_PAGE: u64 = 0x1_0000;
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

/// An NVMe drive, ready to be served.
pub struct Drive {
    description: Description,
    layout: Layout,
    config: Mutex<ConfigSpace>,
    /// MSI-X of `config`, for the drive's thread.
    msix: Arc<SharedMsix>,
    /// The level of the interrupt pin.
    pin_raised: Arc<AtomicBool>,
    registers: Arc<Registers>,
    doorbells: DoorbellMode,
    stride: u8,
    /// The present client's; that of the next one, when there is none.
    bar: Mutex<Arc<Bar0>>,
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
        let least = if options.doorbells == DoorbellMode::WholeBar { LARGEST_PAGE } else { 0 };
        let layout = Layout::new(options.queue_pairs, vectors, options.doorbell_stride, least);
        let bar = Arc::new(Bar0::new(layout)?);
        let controller = Controller::new(
            controller::Options {
                serial: options.serial,
                model: options.model,
                vendor: IDENTITY.vendor,
                queue_pairs: options.queue_pairs,
                queue_entries: options.queue_entries,
                vectors,
                shadow_doorbells: options.doorbells == DoorbellMode::Posted,
                doorbell_stride: options.doorbell_stride,
                ..controller::Options::default()
            },
            disks,
        )?;
        let (registers, counters) = (controller.registers(), controller.counters());
        let msix = Arc::new(SharedMsix::default());
        let pin_raised = Arc::new(AtomicBool::new(false));
        let machine = Machine::new(bar.clone(), msix.clone(), pin_raised.clone());
        Ok(Self {
            description: description(layout, vectors, options.doorbells),
            layout,
            config: Mutex::new(config_space(layout, vectors)?),
            msix,
            pin_raised,
            registers,
            doorbells: options.doorbells,
            stride: options.doorbell_stride,
            worker: Worker::start(controller, machine, events, options.doorbells)?,
            bar: Mutex::new(bar),
            counters,
            messages: Arc::default(),
            posted: Default::default(),
        })
    }

    fn change_config<T>(&self, change: impl FnOnce(&mut ConfigSpace) -> T) -> T {
        let mut config = lock(&self.config);
        let outcome = change(&mut config);
        if self.msix.set(Msix::of(&config)) {
            // Where interrupts go now, some may be due.
            self.worker.wake();
        }
        outcome
    }

    fn bar(&self) -> Arc<Bar0> {
        lock(&self.bar).clone()
    }

    fn write_bar0(&self, bar: &Bar0, offset: u64, data: &[u8]) {
        let (part, at) = self.layout.part(offset);
        match part {
            // Whoever maps the registers meets only one way of writing them.
            Part::Registers if self.doorbells == DoorbellMode::WholeBar => {
                bar.write(offset, data);
                self.worker.wake();
            }
            Part::Registers => {
                if self.registers.write(at, data) == Effect::Wake {
                    self.worker.wake();
                }
            }
            Part::Doorbells => {
                if let Some((index, value)) = doorbell_write(offset, data, self.stride)
                    && bar.set_doorbell(index, value)
                {
                    self.posted.add(1);
                    self.worker.wake();
                }
            }
            Part::Table => {
                bar.write_table(at, data);
                // A vector that is not masked any more may be pending.
                self.worker.wake();
            }
            // Read-only.
            Part::Pending => {}
        }
    }

    fn read_bar0(&self, bar: &Bar0, offset: u64, into: &mut [u8]) {
        match self.layout.part(offset).0 {
            Part::Registers if self.doorbells != DoorbellMode::WholeBar => self.registers.read(offset, into),
            // What a read gives is the vendor's choice (3.1.24): nothing.
            Part::Doorbells => into.fill(0),
            Part::Registers | Part::Table | Part::Pending => bar.read(offset, into),
        }
    }

    /// The registers fall back at once; the drive's thread follows.
    fn reset_function(&self) {
        self.bar().reset_vectors();
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
        .msix(outboard_pci::Msix { vectors, table: (bar0, table), pending: (bar0, pending) })?
        .build())
}

fn description(layout: Layout, vectors: u16, mode: DoorbellMode) -> Description {
    let mappable =
        |areas, msix| Some(Mappable { file: None, offset: 0, areas, msix, direct: Direct::Granted });
    let mappable = match mode {
        DoorbellMode::Posted => None,
        DoorbellMode::Mapped => mappable(vec![SparseArea { offset: PAGE, size: layout.doorbells }], false),
        DoorbellMode::WholeBar => mappable(vec![], true),
    };
    Description::pci()
        .region(BAR0, Region { mappable, ..Region::trapped(layout.size) })
        .region(CONFIG, Region::trapped(PAGE))
        .irq(IrqIndex::INTX, Irq::PIN)
        .irq(IrqIndex::MSIX, Irq::messages(vectors.into()))
}

impl Device for Drive {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        let bar = self.bar();
        let mapped = self.doorbells == DoorbellMode::WholeBar;
        let mirror = mapped.then(|| Mirror::new(bar.clone(), self.registers.clone()));
        self.worker.attach(Client { connection: connection.clone(), bar, mirror });
    }

    fn file(&self, region: u32) -> Option<Arc<OwnedFd>> {
        (region == BAR0).then(|| self.bar().file())
    }

    fn detach(&self) {
        // The queues lay in the client's memory, so nothing of the controller's state outlives it.
        self.change_config(ConfigSpace::reset);
        self.bar().reset_vectors();
        let _ = self.registers.power_cycle();
        self.worker.wake();
        self.worker.detach();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        let mut data = vec![0; length];
        match region {
            BAR0 => {
                let bar = self.bar();
                for (at, range) in pages(offset, length) {
                    self.read_bar0(&bar, at, data.get_mut(range).unwrap_or_default());
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
                let bar = self.bar();
                for (at, range) in pages(offset, data.len()) {
                    self.write_bar0(&bar, at, data.get(range).unwrap_or_default());
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
        match Bar0::new(self.layout) {
            Ok(bar) => *lock(&self.bar) = Arc::new(bar),
            Err(error) => return tracing::error!(%error, "no memory for a client's BAR0: it is sent away"),
        }
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
            ("ios.sgl".into(), counters.sgls.get()),
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
