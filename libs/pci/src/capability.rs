//! Capabilities in configuration space: what each looks like and which of its bits can be written.

use crate::registers::Registers;

/// Identifiers (PCI Code and ID Assignment, section 2).
pub(crate) mod id {
    pub(crate) const POWER_MANAGEMENT: u8 = 0x01;
    pub(crate) const VENDOR: u8 = 0x09;
    pub(crate) const EXPRESS: u8 = 0x10;
    pub(crate) const MSIX: u8 = 0x11;
}

/// A capability that can be laid out at an offset.
pub(crate) trait Capability {
    /// Its identifier.
    fn id(&self) -> u8;
    /// Its length in bytes, header included.
    fn length(&self) -> usize;
    /// Lays out what follows the two bytes of its header.
    fn place(&self, registers: &mut Registers, offset: usize);
}

/// PCI Power Management Interface 1.2, section 3.2: D0 and D3hot, no PME, no soft reset on leaving D3hot.
#[derive(Clone, Copy, Debug, Default)]
pub struct PowerManagement;

/// The power states that [`PowerManagement`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    /// On.
    D0,
    /// Asleep: only configuration space answers.
    D3Hot,
}

pub(crate) const PM_CONTROL: usize = 4;
/// PowerState in PMCSR.
const PM_STATE: u8 = 3;

impl PowerState {
    /// What the field PowerState of PMCSR says; `None` for D1 and D2, which are optional and not there.
    pub(crate) fn decode(control: u8) -> Option<Self> {
        match control & PM_STATE {
            0 => Some(Self::D0),
            3 => Some(Self::D3Hot),
            _ => None,
        }
    }

    pub(crate) fn encode(self) -> u8 {
        match self {
            Self::D0 => 0,
            Self::D3Hot => 3,
        }
    }
}

impl Capability for PowerManagement {
    fn id(&self) -> u8 {
        id::POWER_MANAGEMENT
    }

    fn length(&self) -> usize {
        8
    }

    fn place(&self, registers: &mut Registers, offset: usize) {
        // PMC: version 3 (1.2). PMCSR: PowerState writable; No_Soft_Reset set.
        registers.set(offset.saturating_add(2), &3_u16.to_le_bytes());
        registers.set(offset.saturating_add(PM_CONTROL), &8_u16.to_le_bytes());
        registers.make_writable(offset.saturating_add(PM_CONTROL), &[PM_STATE]);
    }
}

/// PCI Express capability, version 2 (PCI Express Base 3.0, section 7.8), of an endpoint with Function Level
/// Reset.
#[derive(Clone, Copy, Debug, Default)]
pub struct Express;

pub(crate) const EXPRESS_DEVICE_CONTROL: usize = 8;
/// Device Control, Initiate Function Level Reset: reads as 0.
pub(crate) const INITIATE_FLR: u16 = 1 << 15;

impl Capability for Express {
    fn id(&self) -> u8 {
        id::EXPRESS
    }

    fn length(&self) -> usize {
        0x3c
    }

    fn place(&self, registers: &mut Registers, offset: usize) {
        let at = |register: usize| offset.saturating_add(register);
        // Capabilities: version 2, endpoint.
        registers.set(at(2), &0x0002_u16.to_le_bytes());
        // Device Capabilities: payload of 256 bytes, role-based error reporting, FLR.
        registers.set(at(4), &(1_u32 | 1 << 15 | 1 << 28).to_le_bytes());
        // Device Control: relaxed ordering, no snoop, 512 byte reads by default; all but FLR stays as written.
        registers.set(at(EXPRESS_DEVICE_CONTROL), &0x2810_u16.to_le_bytes());
        registers.make_writable(at(EXPRESS_DEVICE_CONTROL), &0x7fff_u16.to_le_bytes());
        // Device Status: errors, cleared by 1.
        registers.make_cleared_by_one(at(0xa), &0x000f_u16.to_le_bytes());
        // Link Capabilities and Status: 8 GT/s, four lanes.
        registers.set(at(0xc), &(3_u32 | 4 << 4).to_le_bytes());
        registers.make_writable(at(0x10), &0x0fdb_u16.to_le_bytes());
        registers.set(at(0x12), &(3_u16 | 4 << 4).to_le_bytes());
        // Device Capabilities 2: completion timeout can be disabled, its value is fixed.
        registers.set(at(0x24), &(1_u32 << 4).to_le_bytes());
        registers.make_writable(at(0x28), &0x0010_u16.to_le_bytes());
        // Link Capabilities 2: 2.5, 5 and 8 GT/s. Link Control 2: target speed 8 GT/s.
        registers.set(at(0x2c), &(7_u32 << 1).to_le_bytes());
        registers.set(at(0x30), &3_u16.to_le_bytes());
        registers.make_writable(at(0x30), &0x000f_u16.to_le_bytes());
    }
}

/// MSI-X (PCI Local Bus 3.0, section 6.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msix {
    /// Entries of the table, 1 to 2048.
    pub vectors: u16,
    /// The BAR of the table and the table's offset in it, a multiple of 8.
    pub table: (crate::BarIndex, u32),
    /// The same for the pending bits.
    pub pending: (crate::BarIndex, u32),
}

impl Msix {
    /// The capability in the configuration space of a device, which is given from its start. `None` without one, or
    /// with one that names a BAR beyond 5.
    pub fn find(space: &[u8]) -> Option<Self> {
        let at = find(space, id::MSIX)?;
        let [control, table, pending] =
            [MSIX_CONTROL, MSIX_TABLE, MSIX_PENDING].map(|register| at.saturating_add(register));
        let size = u16::from_le_bytes(*space.get(control..)?.first_chunk()?) & MSIX_SIZE;
        let place = |register: usize| {
            let value = u32::from_le_bytes(*space.get(register..)?.first_chunk()?);
            Some((crate::BarIndex::new((value & MSIX_BIR).to_le_bytes()[0])?, value & !MSIX_BIR))
        };
        Some(Self { vectors: size.saturating_add(1), table: place(table)?, pending: place(pending)? })
    }

    /// The table's length in bytes.
    pub fn table_length(&self) -> u64 {
        u64::from(self.vectors).saturating_mul(16)
    }

    /// The length of the pending bits in bytes: whole quadwords.
    pub fn pending_length(&self) -> u64 {
        u64::from(self.vectors).div_ceil(64).saturating_mul(8)
    }
}

/// Where a capability is in configuration space; the device may have linked its list to anything.
fn find(space: &[u8], id: u8) -> Option<usize> {
    const STATUS: usize = 6;
    const HAS_LIST: u8 = 1 << 4;
    const FIRST: usize = 0x34;
    const HEADER_END: u8 = 0x40;
    // All that fit into configuration space, as Linux has it.
    const MOST: usize = 48;
    if space.get(STATUS)? & HAS_LIST == 0 {
        return None;
    }
    let mut pointer = FIRST;
    for _ in 0..MOST {
        let at = space.get(pointer)? & !3;
        if at < HEADER_END {
            return None;
        }
        if *space.get(usize::from(at))? == id {
            return Some(at.into());
        }
        pointer = usize::from(at).saturating_add(1);
    }
    None
}

pub(crate) const MSIX_CONTROL: usize = 2;
const MSIX_TABLE: usize = 4;
const MSIX_PENDING: usize = 8;
/// Message Control, Table Size: one less than there are.
const MSIX_SIZE: u16 = 0x7ff;
/// BAR Indicator Register; the rest is the offset.
const MSIX_BIR: u32 = 7;
pub(crate) const MSIX_ENABLE: u16 = 1 << 15;
pub(crate) const MSIX_FUNCTION_MASK: u16 = 1 << 14;

impl Capability for Msix {
    fn id(&self) -> u8 {
        id::MSIX
    }

    fn length(&self) -> usize {
        12
    }

    fn place(&self, registers: &mut Registers, offset: usize) {
        let at = |register: usize| offset.saturating_add(register);
        registers.set(at(MSIX_CONTROL), &self.vectors.saturating_sub(1).to_le_bytes());
        registers.make_writable(at(MSIX_CONTROL), &(MSIX_ENABLE | MSIX_FUNCTION_MASK).to_le_bytes());
        for (register, (bar, offset)) in [(MSIX_TABLE, self.table), (MSIX_PENDING, self.pending)] {
            registers.set(at(register), &(offset | u32::from(bar.get())).to_le_bytes());
        }
    }
}

/// A vendor-specific capability (PCI Local Bus 3.0, appendix H): read-only bytes.
#[derive(Clone, Debug)]
pub struct Vendor {
    /// What follows the length byte, at most 252 bytes.
    pub data: Vec<u8>,
}

impl Capability for Vendor {
    fn id(&self) -> u8 {
        id::VENDOR
    }

    fn length(&self) -> usize {
        self.data.len().saturating_add(3)
    }

    fn place(&self, registers: &mut Registers, offset: usize) {
        let length = u8::try_from(self.length()).unwrap_or(u8::MAX);
        registers.set(offset.saturating_add(2), &[length]);
        registers.set(offset.saturating_add(3), &self.data);
    }
}

#[cfg(test)]
mod tests;
