//! A PCI function that is registers and an interrupt pin: what a small device needs of [`Device`].
//!
//! What it does not do: no access to the client's memory, no MSI or MSI-X, nothing that clients map, and no answer
//! that comes later. A device that needs one of these implements [`Device`] itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use outboard_pci::{BarIndex, ConfigSpace, Effect};

use crate::device::{CONFIG, Description, Device, Irq, Region, Reply};
use crate::dma;
use crate::server::Connection;
use crate::wire::IrqIndex;

/// The registers behind a function's BARs.
pub trait Registers: Send {
    /// Reads from `offset` in a BAR on, in whatever width the client chose. All of it lies in the BAR.
    fn read(&mut self, bar: BarIndex, offset: u64, into: &mut [u8]);

    /// Writes from `offset` in a BAR on, in whatever width the client chose. All of it lies in the BAR.
    fn write(&mut self, bar: BarIndex, offset: u64, from: &[u8]);

    /// Back to the initial state: the client has asked for it, or has left.
    fn reset(&mut self);

    /// Whether an interrupt is pending. The pin follows: this is asked after each of the above, and after
    /// [`Function::with`].
    fn interrupt(&self) -> bool;
}

/// A function with its configuration space.
#[derive(Debug)]
pub struct Function<R> {
    description: Description,
    state: Mutex<State<R>>,
}

#[derive(Debug)]
struct State<R> {
    config: ConfigSpace,
    registers: R,
    connection: Option<Arc<Connection>>,
}

impl<R: Registers> Function<R> {
    /// A function whose BARs are `registers`.
    pub fn new(config: ConfigSpace, registers: R) -> Self {
        let mut description = Description::pci().region(CONFIG, Region::trapped(config.size() as u64));
        for index in (0..6).filter_map(BarIndex::new) {
            if let Some(bar) = config.bar(index) {
                description = description.region(index.get().into(), Region::trapped(bar.size));
            }
        }
        if config.pin() != 0 {
            description = description.irq(IrqIndex::INTX, Irq::PIN);
        }
        Self { description, state: Mutex::new(State { config, registers, connection: None }) }
    }

    /// Uses the registers as the outside world does, from any thread; the pin follows.
    pub fn with<T>(&self, change: impl FnOnce(&mut R) -> T) -> T {
        let mut state = self.state();
        let result = change(&mut state.registers);
        state.set_pin();
        result
    }

    fn state(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Registers> State<R> {
    fn set_pin(&mut self) {
        let asserted = self.config.set_interrupt(self.registers.interrupt());
        if let Some(connection) = &self.connection {
            connection.interrupts().set_line(asserted);
        }
    }

    fn reset(&mut self) {
        self.config.reset();
        self.registers.reset();
        self.set_pin();
    }
}

/// The BAR that a region is; `None` for the others.
fn bar(region: u32) -> Option<BarIndex> {
    u8::try_from(region).ok().and_then(BarIndex::new)
}

/// Where in the configuration space.
fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl<R: Registers> Device for Function<R> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self, connection: &Arc<Connection>) {
        let mut state = self.state();
        state.connection = Some(connection.clone());
        state.set_pin();
    }

    fn detach(&self) {
        let mut state = self.state();
        state.connection = None;
        state.reset();
    }

    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>) {
        let mut state = self.state();
        let mut data = vec![0; length];
        match bar(region) {
            Some(bar) => state.registers.read(bar, offset, &mut data),
            None if region == CONFIG => state.config.read(at(offset), &mut data),
            None => return reply.fail(Errno::EINVAL),
        }
        state.set_pin();
        drop(state);
        reply.ok(data);
    }

    fn write(&self, region: u32, offset: u64, data: &[u8], reply: Reply<()>) {
        let mut state = self.state();
        match bar(region) {
            Some(bar) => state.registers.write(bar, offset, data),
            None if region == CONFIG => {
                if state.config.write(at(offset), data).contains(&Effect::FunctionLevelReset) {
                    state.registers.reset();
                }
            }
            None => return reply.fail(Errno::EINVAL),
        }
        state.set_pin();
        drop(state);
        reply.ok(());
    }

    fn reset(&self, reply: Reply<()>) {
        self.state().reset();
        reply.ok(());
    }

    fn dma_unmap(&self, _: &Arc<dma::Entry<dma::Region>>) {}
}

#[cfg(test)]
mod tests;
