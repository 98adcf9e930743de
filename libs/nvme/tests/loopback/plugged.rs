//! This crate's controller, plugged into the machine.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{JoinHandle, Thread};

use outboard_nvme::Iova;
use outboard_nvme::controller::{self, Controller, Disk, DmaError, Effect, Host};
use outboard_nvme::driver::{self, Doorbell, Drive};
use outboard_nvme::spec::{DOORBELLS, Register};

use crate::machine::{Pages, Ram};

/// The machine as the controller sees it.
#[derive(Clone)]
pub(crate) struct Slot {
    ram: Ram,
    doorbells: Arc<[AtomicU32]>,
}

impl Slot {
    fn check<T>(iova: Iova, length: usize, outcome: Option<T>) -> Result<T, DmaError> {
        outcome.ok_or(DmaError { iova, length })
    }
}

impl Host for Slot {
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        Self::check(at, into.len(), self.ram.read(at, into))
    }
    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        Self::check(at, from.len(), self.ram.write(at, from))
    }
    fn load(&mut self, at: Iova) -> Result<u32, DmaError> {
        Self::check(at, 4, self.ram.load(at))
    }
    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError> {
        Self::check(at, 4, self.ram.store(at, value))
    }
    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError> {
        Self::check(at, 16, self.ram.publish(at, entry))
    }
    fn doorbell(&mut self, index: usize) -> u32 {
        self.doorbells[index].load(Ordering::Acquire)
    }
    fn set_doorbell(&mut self, index: usize, value: u32) {
        self.doorbells[index].store(value, Ordering::Release);
    }
    fn interrupt(&mut self, vector: u16) {
        // The admin queue has interrupts always; nobody listens.
        assert_eq!(vector, 0, "the driver's I/O queues are polled");
    }
    fn interrupt_line(&mut self, _: bool) {}
}

/// What happens when the driver waits, and when it rings.
pub(crate) trait Device: Clone {
    fn pause(&self);
    fn rung(&self);
}

/// The drive's registers as the driver sees them.
pub(crate) struct Bar<P> {
    registers: Arc<controller::Registers>,
    doorbells: Arc<[AtomicU32]>,
    device: P,
}

pub(crate) struct Bell<P> {
    doorbells: Arc<[AtomicU32]>,
    index: usize,
    device: P,
}

impl<P: Device> Doorbell for Bell<P> {
    #[inline]
    fn ring(&mut self, value: u32) -> io::Result<()> {
        self.doorbells[self.index].store(value, Ordering::Release);
        self.device.rung();
        Ok(())
    }
}

impl<P: Device> Bar<P> {
    fn write(&self, register: Register, bytes: &[u8]) {
        if self.registers.write(register.0.into(), bytes) == Effect::Wake {
            self.device.rung();
        }
    }
}

impl<P: Device> driver::Registers for Bar<P> {
    type Doorbell = Bell<P>;

    fn read32(&mut self, register: Register) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.registers.read(register.0.into(), &mut bytes);
        Ok(u32::from_le_bytes(bytes))
    }
    fn read64(&mut self, register: Register) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.registers.read(register.0.into(), &mut bytes);
        Ok(u64::from_le_bytes(bytes))
    }
    fn write32(&mut self, register: Register, value: u32) -> io::Result<()> {
        self.write(register, &value.to_le_bytes());
        Ok(())
    }
    fn write64(&mut self, register: Register, value: u64) -> io::Result<()> {
        self.write(register, &value.to_le_bytes());
        Ok(())
    }
    fn doorbell(&mut self, offset: u64) -> io::Result<Bell<P>> {
        let index = usize::try_from(offset - u64::from(DOORBELLS)).unwrap() / 4;
        Ok(Bell { doorbells: self.doorbells.clone(), index, device: self.device.clone() })
    }
    fn pause(&mut self) {
        self.device.pause();
    }
}

fn parts<D: Disk<Slot>>(
    ram: &Ram,
    options: controller::Options,
    disks: Vec<D>,
) -> (Controller<Slot, D>, Slot) {
    let doorbells = (0..2 * (usize::from(options.queue_pairs) + 1)).map(|_| AtomicU32::new(0)).collect();
    (Controller::new(options, disks).unwrap(), Slot { ram: ram.clone(), doorbells })
}

/// A controller that takes its steps in the driver's thread, when the driver waits.
pub(crate) struct Stepped<D: Disk<Slot>>(Rc<RefCell<(Controller<Slot, D>, Slot)>>);

impl<D: Disk<Slot>> Clone for Stepped<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<D: Disk<Slot>> Stepped<D> {
    pub(crate) fn new(ram: &Ram, options: controller::Options, disks: Vec<D>) -> Self {
        Self(Rc::new(RefCell::new(parts(ram, options, disks))))
    }

    pub(crate) fn step(&self) -> bool {
        let (controller, slot) = &mut *self.0.borrow_mut();
        controller.poll(slot)
    }

    pub(crate) fn bar(&self) -> Bar<Self> {
        let (controller, slot) = &*self.0.borrow();
        Bar { registers: controller.registers(), doorbells: slot.doorbells.clone(), device: self.clone() }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.0.borrow().0.in_flight()
    }
}

impl<D: Disk<Slot>> Device for Stepped<D> {
    fn pause(&self) {
        self.step();
    }
    fn rung(&self) {}
}

/// A drive whose controller is stepped.
pub(crate) type SteppedDrive<D> = Drive<Bar<Stepped<D>>, Pages>;

/// How a controller's thread learns of doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doorbells {
    /// It looks at them all the time.
    Polled,
    /// It sleeps, and each write wakes it.
    Posted,
}

/// A controller in a thread of its own.
#[derive(Clone)]
pub(crate) struct Threaded {
    doorbells: Doorbells,
    worker: Thread,
    rung: Arc<AtomicU64>,
}

/// The thread, which ends when this is dropped.
pub(crate) struct Worker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let thread = self.thread.take().unwrap();
        thread.thread().unpark();
        // A panic of the controller is the test's.
        if let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Threaded {
    pub(crate) fn start<D: Disk<Slot> + Send + 'static>(
        ram: &Ram,
        mut options: controller::Options,
        doorbells: Doorbells,
        disks: Vec<D>,
    ) -> (Worker, Bar<Self>) {
        options.shadow_doorbells = doorbells == Doorbells::Posted;
        let (mut controller, mut slot) = parts(ram, options, disks);
        let (registers, array) = (controller.registers(), slot.doorbells.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                if !controller.poll(&mut slot) {
                    match doorbells {
                        Doorbells::Polled => std::thread::yield_now(),
                        Doorbells::Posted if controller.prepare_sleep(&mut slot) => std::thread::park(),
                        Doorbells::Posted => {}
                    }
                }
            }
        });
        let device = Self { doorbells, worker: thread.thread().clone(), rung: Arc::default() };
        (Worker { stop, thread: Some(thread) }, Bar { registers, doorbells: array, device })
    }
}

impl Bar<Threaded> {
    /// Counts the writes of registers and doorbells.
    pub(crate) fn rung(&self) -> Arc<AtomicU64> {
        self.device.rung.clone()
    }
}

impl Device for Threaded {
    fn pause(&self) {
        std::thread::yield_now();
    }

    #[inline]
    fn rung(&self) {
        if self.doorbells == Doorbells::Posted {
            self.rung.fetch_add(1, Ordering::Relaxed);
            self.worker.unpark();
        }
    }
}
