//! What the controller needs of the machine that it is plugged into.

use crate::Iova;

/// Why an access to the host's memory failed: a status of Data Transfer Error to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("No access to {length} bytes at {iova:#x}", iova = iova.0)]
pub struct DmaError {
    /// Where it began.
    pub iova: Iova,
    /// Its length in bytes.
    pub length: usize,
}

/// Which way data goes, as seen from the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The controller reads host memory (a Write command's data).
    FromHost,
    /// The controller writes host memory (a Read command's data).
    ToHost,
}

/// A part of a command's data: a run of host memory without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first byte; none, in reads only, where the host wants the data to be dropped (an SGL's bit bucket).
    pub iova: Option<Iova>,
    /// Its length in bytes, never 0.
    pub length: usize,
}

/// The machine around the controller: memory that it reaches by DMA, doorbells that it reads, interrupts that
/// it raises.
///
/// An access may block (memory that is reached by messages) but never for longer than the transport's limit.
/// No access may reach the controller's own registers: a host that maps them as memory answers [`DmaError`]
/// (CVE-2021-3929).
pub trait Host {
    /// Copies from host memory.
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError>;

    /// Whether the host itself sees `bytes` at `at`, where they were read. Asked of the first command after the
    /// controller was enabled, before it is executed: memory that only seems to be the host's must not be written.
    fn confirm(&mut self, at: Iova, bytes: &[u8]) -> bool {
        let _ = (at, bytes);
        true
    }

    /// Copies to host memory.
    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError>;

    /// Loads an aligned little-endian dword; what the host wrote before it is seen after it (acquire).
    fn load(&mut self, at: Iova) -> Result<u32, DmaError>;

    /// Stores an aligned little-endian dword; what was written before it is seen by who reads it (release).
    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError>;

    /// Writes a completion queue entry, its last dword, which holds the phase tag, after the rest (release).
    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError>;

    /// The doorbell register at `index` in the doorbell array (index 2y: SQ y tail, 2y+1: CQ y head), acquire.
    fn doorbell(&mut self, index: usize) -> u32;

    /// Sets a doorbell register, when its queue is created or the controller is reset.
    fn set_doorbell(&mut self, index: usize, value: u32);

    /// Raises interrupt vector `vector` (MSI-X, or the pin when MSI-X is off, then vector 0).
    fn interrupt(&mut self, vector: u16);

    /// The level of the interrupt pin: some completion of a queue with interrupts enabled was not consumed and
    /// is not masked by INTMS. Called when it changes; a host that has MSI-X enabled ignores it.
    fn interrupt_line(&mut self, asserted: bool);

    /// Whether interrupts go through the pin: MSI-X is disabled. Only then is [`Host::interrupt_line`] called,
    /// and only then must the controller hear of every consumed completion.
    fn pin_in_use(&self) -> bool {
        true
    }
}
