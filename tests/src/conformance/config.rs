//! The configuration space: every PCI device has it, and what a client may do there is known.

use outboard_vfio_user::wire::{Command, RegionAccess};

use super::{Checked, Client, Stop};

pub(super) const CONFIG: u32 = 7;
pub(super) const COMMAND: u64 = 0x04;
pub(super) const INTERRUPT_LINE: u64 = 0x3c;

const CAPABILITIES: u64 = 0x34;
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;

/// A read.
pub(super) fn read(offset: u64, count: u32) -> Command<'static> {
    Command::RegionRead(RegionAccess { offset, region: CONFIG, count })
}

fn word(client: &mut Client, offset: u64) -> Checked<u16> {
    Ok(client.read(CONFIG, offset, 2)?.try_into().map_or(0, u16::from_le_bytes))
}

pub(super) fn dword(client: &mut Client, offset: u64) -> Checked<u32> {
    Ok(client.read(CONFIG, offset, 4)?.try_into().map_or(0, u32::from_le_bytes))
}

/// Where a capability is.
fn capability(client: &mut Client, id: u8) -> Checked<Option<u64>> {
    let mut at = u64::from(word(client, CAPABILITIES)? & 0xfc);
    // There is room for 48 of them.
    for _ in 0..48 {
        if at == 0 {
            return Ok(None);
        }
        let [found, next] = word(client, at)?.to_le_bytes();
        if found == id {
            return Ok(Some(at));
        }
        at = u64::from(next & 0xfc);
    }
    client.wrong("a chain of capabilities that ends", "one that does not")
}

/// Lets the device decode its BARs and use memory, and signal by MSI-X or not.
pub(super) fn enable(client: &mut Client, msix: bool) -> Checked {
    let command = word(client, COMMAND)? | 6;
    client.write(CONFIG, COMMAND, &command.to_le_bytes())?;
    if let Some(at) = capability(client, MSIX)? {
        let control = word(client, at + 2)? & !0x8000 | if msix { 0x8000 } else { 0 };
        client.write(CONFIG, at + 2, &control.to_le_bytes())?;
    }
    Ok(())
}

/// Where MSI-X has things: a BAR, an offset in it, and a length in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) bar: u32,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// MSI-X's table and its pending bits.
pub(super) fn msix(client: &mut Client) -> Checked<Option<[Place; 2]>> {
    let Some(at) = capability(client, MSIX)? else { return Ok(None) };
    let vectors = u64::from(word(client, at + 2)? & 0x7ff) + 1;
    let mut place = |register, length| {
        let value = dword(client, at + register)?;
        Ok(Place { bar: value & 7, offset: u64::from(value & !7), length })
    };
    Ok(Some([place(4, vectors * 16)?, place(8, vectors.div_ceil(64) * 8)?]))
}

/// Function-level reset.
pub(super) fn function_level_reset(client: &mut Client) -> Checked {
    let Some(at) = capability(client, EXPRESS)? else {
        return Err(Stop::NotOffered("no PCI Express capability"));
    };
    if dword(client, at + 4)? & 1 << 28 == 0 {
        return Err(Stop::NotOffered("no function-level reset"));
    }
    let control = word(client, at + 8)? | 1 << 15;
    client.write(CONFIG, at + 8, &control.to_le_bytes())
}
