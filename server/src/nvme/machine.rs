//! The machine around the controller: the client's memory and interrupts, and its BAR0.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};

use outboard_nvme::Iova;
use outboard_nvme::controller::{Direction, DmaError, Host};
use outboard_pci::ConfigSpace;
use outboard_vfio_user::dma::{self, Access, View};
use outboard_vfio_user::server::Connection;
use outboard_vfio_user::wire::IrqIndex;
use vm_memory::VolatileSlice;

use super::bar0::Bar0;
use crate::disk::{PinHost, PinnedBytes};

/// A client, as the controller's thread uses it.
struct Guest {
    connection: Arc<Connection>,
    view: View,
}

/// Message Control of the MSI-X capability (PCI Local Bus 3.0, section 6.8.2.3), for the drive's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Msix {
    Disabled,
    Enabled,
    /// With Function Mask.
    Masked,
}

impl Msix {
    pub(super) fn of(config: &ConfigSpace) -> Self {
        match (config.msix_enabled(), config.msix_masked()) {
            (false, _) => Self::Disabled,
            (true, false) => Self::Enabled,
            (true, true) => Self::Masked,
        }
    }
}

/// An [`Msix`] that two threads share.
#[derive(Debug, Default)]
pub(super) struct SharedMsix(AtomicU8);

impl SharedMsix {
    #[inline]
    fn get(&self) -> Msix {
        match self.0.load(Ordering::Acquire) {
            0 => Msix::Disabled,
            1 => Msix::Enabled,
            _ => Msix::Masked,
        }
    }

    /// Sets it; whether that changed it.
    pub(super) fn set(&self, msix: Msix) -> bool {
        let value = msix as u8;
        self.0.swap(value, Ordering::AcqRel) != value
    }
}

/// What the controller is plugged into. Without a client there is no memory, and interrupts are nobody's.
pub(super) struct Machine {
    guest: Option<Guest>,
    /// The present client's, or the last one's.
    bar: Arc<Bar0>,
    msix: Arc<SharedMsix>,
    pin_raised: Arc<AtomicBool>,
}

impl Machine {
    /// A machine without a client. `msix` is that of the configuration space; `pin_raised` tells others of the pin.
    pub(super) fn new(bar: Arc<Bar0>, msix: Arc<SharedMsix>, pin_raised: Arc<AtomicBool>) -> Self {
        Self { guest: None, bar, msix, pin_raised }
    }

    /// A client came, and uses `bar`.
    pub(super) fn attach(&mut self, connection: Arc<Connection>, bar: Arc<Bar0>) {
        self.guest = Some(Guest { view: connection.view(), connection });
        self.bar = bar;
    }

    /// The client went: its memory is let go of.
    pub(super) fn detach(&mut self) {
        self.guest = None;
    }

    /// Whether there is a client.
    pub(super) fn is_attached(&self) -> bool {
        self.guest.is_some()
    }

    /// Lets go of memory that the client has unmapped.
    #[inline]
    pub(super) fn refresh(&mut self) {
        if let Some(guest) = &mut self.guest {
            guest.view.refresh();
        }
    }

    /// Lets go of all memory, before a sleep.
    pub(super) fn release(&mut self) {
        if let Some(guest) = &mut self.guest {
            guest.view.release();
        }
    }

    #[inline]
    fn is_masked(&self, vector: u16) -> bool {
        self.msix.get() == Msix::Masked || self.bar.is_masked(vector)
    }

    fn trigger(&self, vector: u16) {
        if let Some(guest) = &self.guest {
            guest.connection.interrupts().trigger(IrqIndex::MSIX, vector.into());
        }
    }

    /// Raises the interrupts that were held back and are masked no more; true if there was one.
    #[inline]
    pub(super) fn raise_pending(&self) -> bool {
        let mut raised = false;
        for vector in self.bar.pending() {
            if !self.is_masked(vector) && self.bar.set_pending(vector, false) {
                self.trigger(vector);
                raised = true;
            }
        }
        raised
    }

    #[inline]
    fn access<T>(
        &mut self,
        iova: Iova,
        length: usize,
        access: impl FnOnce(&mut View, dma::Iova) -> Result<T, dma::DmaError>,
    ) -> Result<T, DmaError> {
        let error = DmaError { iova, length };
        let guest = self.guest.as_mut().ok_or(error)?;
        access(&mut guest.view, dma::Iova(iova.0)).map_err(|_| error)
    }
}

impl Host for Machine {
    #[inline]
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        self.access(at, into.len(), |view, at| view.read(at, into))
    }

    fn confirm(&mut self, at: Iova, bytes: &[u8]) -> bool {
        let Some(guest) = &mut self.guest else { return false };
        let confirmed = guest.view.confirm(dma::Iova(at.0), bytes);
        if !confirmed {
            tracing::error!(
                "the guest's memory is private to its VMM: what the drive finds in the descriptor that it was given is \
                 not what the guest wrote. Nothing was executed; start the guest with shared memory (QEMU: \
                 -object memory-backend-memfd,share=on,…)"
            );
        }
        confirmed
    }

    #[inline]
    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        self.access(at, from.len(), |view, at| view.write(at, from))
    }

    #[inline]
    fn load(&mut self, at: Iova) -> Result<u32, DmaError> {
        self.access(at, 4, View::load)
    }

    #[inline]
    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError> {
        self.access(at, 4, |view, at| view.store(at, value))
    }

    #[inline]
    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError> {
        self.access(at, 16, |view, at| view.publish(at, entry))
    }

    #[inline]
    fn doorbell(&mut self, index: usize) -> u32 {
        self.bar.doorbell(index)
    }

    fn set_doorbell(&mut self, index: usize, value: u32) {
        self.bar.set_doorbell(index, value);
    }

    fn interrupt(&mut self, vector: u16) {
        if self.is_masked(vector) {
            self.bar.set_pending(vector, true);
            // Either we see that the guest unmasked it meanwhile, or the next look at the pending bits does.
            fence(Ordering::SeqCst);
            if self.is_masked(vector) || !self.bar.set_pending(vector, false) {
                return;
            }
        }
        self.trigger(vector);
    }

    fn interrupt_line(&mut self, asserted: bool) {
        // Up is told before it is, down after: who finds it down need not ask.
        self.pin_raised.fetch_or(asserted, Ordering::Release);
        if let Some(guest) = &self.guest {
            guest.connection.interrupts().set_line(asserted);
        }
        self.pin_raised.store(asserted, Ordering::Release);
    }

    #[inline]
    fn pin_in_use(&self) -> bool {
        self.msix.get() == Msix::Disabled
    }
}

/// Client memory that the kernel reads or writes on its own.
pub(super) struct Pin(dma::Pin);

impl PinnedBytes for Pin {
    fn bytes(&self) -> Option<VolatileSlice<'_>> {
        self.0.bytes()
    }
}

impl PinHost for Machine {
    type Pin = Pin;

    fn pin(&mut self, at: Iova, length: usize, direction: Direction) -> Option<Pin> {
        let access = match direction {
            Direction::FromHost => Access::Read,
            Direction::ToHost => Access::Write,
        };
        self.guest.as_mut()?.view.pin(dma::Iova(at.0), length, access).map(Pin)
    }
}
