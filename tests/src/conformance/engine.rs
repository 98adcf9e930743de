//! How to make a device reach into its client's memory: all that the checks know of a device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use outboard_vfio_user::memory::Access;
use outboard_vfio_user::wire::IrqIndex;

use super::client::{PATIENCE, memory};
use super::{Checked, Client, Sharing, Stop, Subject};

/// Which way data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client's memory to the device.
    Load,
    /// From the device to the client's memory.
    Store,
}

/// How to start a kind of device.
pub trait Engine {
    /// How much of the client's memory it needs for itself, in bytes, a multiple of a page.
    fn room(&self) -> u64;

    /// Makes the device ready to transfer, and to signal that by interrupts of this type. `room` is the address of
    /// its own memory, zeroed.
    ///
    /// # Errors
    /// When the device does not follow.
    fn start(&self, client: &mut Client, room: u64, interrupts: IrqIndex) -> Checked<Box<dyn Transfers>>;

    /// Whether the device is as it was at power-on.
    ///
    /// # Errors
    /// When it cannot be asked.
    fn is_reset(&self, client: &mut Client) -> Checked<bool>;
}

/// A device that is ready. What it loads it keeps, and stores again.
pub trait Transfers {
    /// Lengths are multiples of this, in bytes.
    fn unit(&self) -> usize;

    /// The longest transfer, in bytes. Those longer than two pages go one at a time, others eight at a time.
    fn most(&self) -> usize;

    /// The vector that a transfer's end signals.
    fn vector(&self) -> u32;

    /// Begins a transfer.
    ///
    /// # Errors
    /// When the server does not take it.
    fn begin(&mut self, client: &mut Client, direction: Direction, at: u64, length: usize) -> Checked;

    /// Whether a transfer is over, and whether it was one without an error.
    ///
    /// # Errors
    /// When the device answers nonsense.
    fn poll(&mut self, client: &mut Client) -> Checked<Option<bool>>;
}

/// Where the engine's own memory is.
pub(super) const ROOM: u64 = 0x1000_0000;

/// A client whose device is ready, its own memory shared by `how`.
pub(super) fn start(
    subject: &Subject<'_>,
    client: &mut Client,
    how: Sharing,
    interrupts: IrqIndex,
) -> Checked<Box<dyn Transfers>> {
    let Some(engine) = subject.engine() else {
        return Err(Stop::NotOffered("nobody knows how to make this device use memory"));
    };
    let room = Arc::new(memory(engine.room()));
    client.share(ROOM, engine.room(), Access::ReadWrite, how, &room)?;
    engine.start(client, ROOM, interrupts)
}

/// One transfer: whether the device says that it was one without an error.
pub(super) fn transfer(
    transfers: &mut dyn Transfers,
    client: &mut Client,
    direction: Direction,
    at: u64,
    length: usize,
) -> Checked<bool> {
    client.says(format!("a transfer ({direction:?}) of {length} bytes at {at:#x}"));
    transfers.begin(client, direction, at, length)?;
    finish(transfers, client)
}

/// Waits for the end of one transfer.
pub(super) fn finish(transfers: &mut dyn Transfers, client: &mut Client) -> Checked<bool> {
    let begin = Instant::now();
    loop {
        if let Some(success) = transfers.poll(client)? {
            return Ok(success);
        }
        if begin.elapsed() > PATIENCE {
            return client.wrong("the end of the transfer", format!("nothing within {PATIENCE:?}"));
        }
        client.serve_for(Duration::from_millis(1))?;
    }
}
