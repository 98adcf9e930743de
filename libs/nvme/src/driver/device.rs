//! What the driver needs of whoever plugs the drive in.

use std::io;

use crate::Iova;
use crate::spec::Register;

/// The drive's registers: the first bytes of BAR 0.
pub trait Registers {
    /// A doorbell register.
    type Doorbell: Doorbell;

    /// Reads a 32-bit register.
    fn read32(&mut self, register: Register) -> io::Result<u32>;

    /// Reads a 64-bit register.
    fn read64(&mut self, register: Register) -> io::Result<u64>;

    /// Writes a 32-bit register.
    fn write32(&mut self, register: Register, value: u32) -> io::Result<()>;

    /// Writes a 64-bit register.
    fn write64(&mut self, register: Register, value: u64) -> io::Result<()>;

    /// The doorbell `offset` bytes from the start of BAR 0.
    fn doorbell(&mut self, offset: u64) -> io::Result<Self::Doorbell>;

    /// Called between two looks while the driver waits. A device that runs in the caller's thread takes its
    /// step here.
    fn pause(&mut self) {
        std::thread::yield_now();
    }
}

/// A doorbell register: a volatile store to mapped memory, or a message.
pub trait Doorbell {
    /// Writes the register. What was written to memory before is seen by who sees the value (release).
    fn ring(&mut self, value: u32) -> io::Result<()>;
}

/// Makes memory that the drive can reach.
pub trait Memory {
    /// A block of it.
    type Block: Block;

    /// Makes a block of at least `length` bytes, zeroed, contiguous to the drive, aligned to 4096 bytes.
    fn allocate(&mut self, length: usize) -> io::Result<Self::Block>;
}

/// A block of memory shared with the drive, which may change it at any time.
///
/// Offsets are in bytes from the block's start. They are the driver's, never the drive's: one outside the block
/// is a bug, and an implementor may panic.
pub trait Block {
    /// Where the drive sees its first byte.
    fn iova(&self) -> Iova;

    /// Its size in bytes.
    fn size(&self) -> usize;

    /// Copies out.
    fn read(&self, offset: usize, into: &mut [u8]);

    /// Copies in.
    fn write(&self, offset: usize, from: &[u8]);

    /// Loads an aligned little-endian dword; what the drive wrote before it is seen after it (acquire).
    fn load(&self, offset: usize) -> u32;

    /// Stores an aligned little-endian dword; what was written before it is seen by who reads it (release).
    fn store(&self, offset: usize, value: u32);
}
