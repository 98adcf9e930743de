//! Configuration space of a type 0 function.

use std::ops::Range;

use crate::bar::{Bar, BarIndex, BarKind};
use crate::capability::{
    Capability, EXPRESS_DEVICE_CONTROL, Express, INITIATE_FLR, MSIX_CONTROL, MSIX_ENABLE, MSIX_FUNCTION_MASK,
    Msix, PM_CONTROL, PowerManagement, PowerState, Vendor,
};
use crate::registers::Registers;

#[cfg(test)]
mod tests;

// Registers of the type 0 header (PCI Local Bus 3.0, section 6.1).
const VENDOR_ID: usize = 0x00;
const DEVICE_ID: usize = 0x02;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CLASS: usize = 0x09;
const CACHE_LINE_SIZE: usize = 0x0c;
const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
const SUBSYSTEM_ID: usize = 0x2e;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const HEADER_END: usize = 0x40;
/// Capabilities lie in the first 256 bytes, all that a function without PCI Express has.
const CAPABILITIES_END: usize = 0x100;
/// With PCI Express (Base 3.0, section 7.2.2).
const EXTENDED_END: usize = 0x1000;

const COMMAND_IO: u16 = 1 << 0;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// What software may change: the above, parity and SERR reporting.
const COMMAND_WRITABLE: u16 =
    COMMAND_IO | COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE | 0x0140;
/// Interrupt Status, in the register's first byte.
const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const STATUS_CLEARED_BY_ONE: u16 = 0xf900;

/// Who a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem Vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Base class, subclass, programming interface.
    pub class: [u8; 3],
    /// Revision ID.
    pub revision: u8,
}

/// What a write means to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The command register has another value now.
    Command {
        /// Memory Space Enable.
        memory: bool,
        /// Bus Master Enable.
        bus_master: bool,
        /// Interrupt Disable: the pin is not to be asserted.
        intx_disabled: bool,
    },
    /// A BAR has another address now.
    BarMoved(BarIndex, u64),
    /// The power state changed.
    Power(PowerState),
    /// MSI-X Message Control changed.
    Msix {
        /// MSI-X Enable.
        enabled: bool,
        /// Function Mask.
        masked: bool,
    },
    /// Initiate Function Level Reset; this space is in its initial state already.
    FunctionLevelReset,
}

/// Why a function cannot be built as described.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Not a power of two, or out of the specification's range.
    #[error("BAR {} cannot have {} bytes as {:?}", index.get(), bar.size, bar.kind)]
    BarSize {
        /// Which.
        index: BarIndex,
        /// As described.
        bar: Bar,
    },
    /// Taken, or no room for an upper half.
    #[error("BAR {} is taken, or has no room for its upper half", index.get())]
    BarTaken {
        /// Which.
        index: BarIndex,
    },
    /// The MSI-X table or its pending bits lie outside of their BAR, not on a multiple of 8, or not in memory.
    #[error("{length} bytes for MSI-X cannot be at {offset:#x} in BAR {}", index.get())]
    MsixPlace {
        /// Which.
        index: BarIndex,
        /// Where.
        offset: u32,
        /// In bytes.
        length: u64,
    },
    /// The MSI-X table and its pending bits overlap.
    #[error("The MSI-X table and its pending bits overlap in BAR {}", index.get())]
    MsixOverlap {
        /// Which.
        index: BarIndex,
    },
    /// 1 to 2048 vectors.
    #[error("{0} vectors are not between 1 and 2048")]
    MsixVectors(u16),
    /// The list of capabilities ends at 256 bytes.
    #[error("A capability of {length} bytes does not fit behind {used:#x}")]
    CapabilitiesFull {
        /// In bytes.
        length: usize,
        /// Where the last one ends.
        used: usize,
    },
    /// A pin is none (0) or INTA# to INTD# (1 to 4).
    #[error("Interrupt pin {0} does not exist")]
    Pin(u8),
}

/// Describes a function.
pub struct Builder {
    space: ConfigSpace,
    /// Where the link to the next capability is.
    link: usize,
    /// Where the next capability may begin.
    free: usize,
}

impl Builder {
    /// A function that has an identity and nothing else.
    pub fn new(identity: Identity) -> Self {
        let mut registers = Registers::new(EXTENDED_END);
        registers.set(VENDOR_ID, &identity.vendor.to_le_bytes());
        registers.set(DEVICE_ID, &identity.device.to_le_bytes());
        registers.set(REVISION, &[identity.revision]);
        let [base, sub, interface] = identity.class;
        registers.set(CLASS, &[interface, sub, base]);
        registers.set(SUBSYSTEM_VENDOR_ID, &identity.subsystem_vendor.to_le_bytes());
        registers.set(SUBSYSTEM_ID, &identity.subsystem.to_le_bytes());
        registers.make_writable(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        registers.make_cleared_by_one(STATUS, &STATUS_CLEARED_BY_ONE.to_le_bytes());
        registers.make_writable(CACHE_LINE_SIZE, &[0xff]);
        registers.make_writable(INTERRUPT_LINE, &[0xff]);
        let space = ConfigSpace { registers, bars: [None; 6], power: None, express: None, msix: None };
        Self { space, link: CAPABILITIES, free: HEADER_END }
    }

    /// Adds a BAR.
    ///
    /// # Errors
    /// [`BuildError::BarSize`], [`BuildError::BarTaken`]
    pub fn bar(mut self, index: BarIndex, bar: Bar) -> Result<Self, BuildError> {
        if !bar.is_valid() {
            return Err(BuildError::BarSize { index, bar });
        }
        let taken = BuildError::BarTaken { index };
        let upper = if bar.is_wide() { Some(index.next().ok_or(taken.clone())?) } else { None };
        if self.space.is_taken(index) || upper.is_some_and(|upper| self.space.is_taken(upper)) {
            return Err(taken);
        }
        *self.space.bars.get_mut(usize::from(index.get())).ok_or(taken)? = Some(bar);
        let registers = &mut self.space.registers;
        let mask = bar.address_mask().to_le_bytes();
        let (low, high) = mask.split_at(4);
        registers.make_writable(index.offset(), low);
        registers.set(index.offset(), &bar.type_bits().to_le_bytes());
        if bar.kind == BarKind::Io {
            registers.make_writable(index.offset().saturating_add(2), &[0, 0]);
        }
        if let Some(upper) = upper {
            registers.make_writable(upper.offset(), high);
        }
        Ok(self)
    }

    /// Says which pin the function uses, 1 for INTA#.
    ///
    /// # Errors
    /// [`BuildError::Pin`]
    pub fn pin(mut self, pin: u8) -> Result<Self, BuildError> {
        if pin > 4 {
            return Err(BuildError::Pin(pin));
        }
        self.space.registers.set(INTERRUPT_PIN, &[pin]);
        Ok(self)
    }

    /// Adds power management.
    ///
    /// # Errors
    /// [`BuildError::CapabilitiesFull`]
    pub fn power_management(mut self, capability: PowerManagement) -> Result<Self, BuildError> {
        self.space.power = Some(self.add(&capability)?);
        Ok(self)
    }

    /// Adds PCI Express.
    ///
    /// # Errors
    /// [`BuildError::CapabilitiesFull`]
    pub fn express(mut self, capability: Express) -> Result<Self, BuildError> {
        self.space.express = Some(self.add(&capability)?);
        Ok(self)
    }

    /// Adds MSI-X; its BARs have to be there already.
    ///
    /// # Errors
    /// [`BuildError::MsixVectors`], [`BuildError::MsixPlace`], [`BuildError::MsixOverlap`],
    /// [`BuildError::CapabilitiesFull`]
    pub fn msix(mut self, capability: Msix) -> Result<Self, BuildError> {
        if !(1..=2048).contains(&capability.vectors) {
            return Err(BuildError::MsixVectors(capability.vectors));
        }
        let table = self.msix_place(capability.table, capability.table_length())?;
        let pending = self.msix_place(capability.pending, capability.pending_length())?;
        let index = capability.table.0;
        if index == capability.pending.0 && table.start < pending.end && pending.start < table.end {
            return Err(BuildError::MsixOverlap { index });
        }
        self.space.msix = Some(self.add(&capability)?);
        Ok(self)
    }

    fn msix_place(&self, (index, offset): (BarIndex, u32), length: u64) -> Result<Range<u64>, BuildError> {
        let memory = self.space.bar(index).filter(|bar| bar.kind != BarKind::Io);
        let range = u64::from(offset)..u64::from(offset).saturating_add(length);
        if range.end > memory.map_or(0, |bar| bar.size) || offset & 7 != 0 {
            return Err(BuildError::MsixPlace { index, offset, length });
        }
        Ok(range)
    }

    /// Adds a vendor-specific capability.
    ///
    /// # Errors
    /// [`BuildError::CapabilitiesFull`]
    pub fn vendor(mut self, capability: &Vendor) -> Result<Self, BuildError> {
        self.add(capability)?;
        Ok(self)
    }

    fn add(&mut self, capability: &impl Capability) -> Result<usize, BuildError> {
        let (offset, length) = (self.free, capability.length());
        let full = BuildError::CapabilitiesFull { length, used: offset };
        let end = offset.checked_add(length).filter(|&end| end <= CAPABILITIES_END).ok_or(full.clone())?;
        let registers = &mut self.space.registers;
        registers.set(offset, &[capability.id(), 0]);
        capability.place(registers, offset);
        registers.set(self.link, &[u8::try_from(offset).map_err(|_| full)?]);
        registers.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.link = offset.saturating_add(1);
        self.free = end.next_multiple_of(4);
        Ok(offset)
    }

    /// The function, in its initial state: with 4096 bytes of configuration space if it has PCI Express, else
    /// with 256.
    pub fn build(mut self) -> ConfigSpace {
        if self.space.express.is_none() {
            self.space.registers.truncate(CAPABILITIES_END);
        }
        self.space
    }
}

/// A function's configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    registers: Registers,
    bars: [Option<Bar>; 6],
    /// Where the capabilities are that mean something to us.
    power: Option<usize>,
    express: Option<usize>,
    msix: Option<usize>,
}

/// What writes have effects on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    command: u16,
    bars: [Option<u64>; 6],
    power: PowerState,
    msix: u16,
}

impl ConfigSpace {
    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.registers.len()
    }

    /// Reads bytes from `offset` on, in any width and alignment; those past the end read as zero.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        into.fill(0);
        self.registers.read(offset, into);
    }

    /// Writes bytes from `offset` on, in any width and alignment, and says what it means. What is read-only stays
    /// as it is.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Vec<Effect> {
        if self.initiates_flr(offset, from) {
            self.reset();
            return vec![Effect::FunctionLevelReset];
        }
        let before = self.state();
        self.registers.write(offset, from);
        self.discard_unsupported_power_state(before.power);
        let after = self.state();
        let mut effects = Vec::new();
        if before.command != after.command {
            effects.push(Effect::Command {
                memory: after.command & COMMAND_MEMORY != 0,
                bus_master: after.command & COMMAND_BUS_MASTER != 0,
                intx_disabled: after.command & COMMAND_INTX_DISABLE != 0,
            });
        }
        for (index, (before, after)) in (0..).zip(before.bars.into_iter().zip(after.bars)) {
            if let (true, Some(index), Some(address)) = (before != after, BarIndex::new(index), after) {
                effects.push(Effect::BarMoved(index, address));
            }
        }
        if before.power != after.power {
            effects.push(Effect::Power(after.power));
        }
        if before.msix != after.msix {
            effects.push(Effect::Msix { enabled: self.msix_enabled(), masked: self.msix_masked() });
        }
        effects
    }

    /// Whether a write sets the bit that always reads as 0.
    fn initiates_flr(&self, offset: usize, from: &[u8]) -> bool {
        let Some(express) = self.express else { return false };
        let [_, high] = INITIATE_FLR.to_le_bytes();
        let register = express.saturating_add(EXPRESS_DEVICE_CONTROL).saturating_add(1);
        register.checked_sub(offset).and_then(|at| from.get(at)).is_some_and(|byte| byte & high != 0)
    }

    /// An attempt to enter D1 or D2 completes, and changes nothing (PCI Power Management 1.2, section 3.2.4).
    fn discard_unsupported_power_state(&mut self, before: PowerState) {
        if let Some(at) = self.power_control()
            && PowerState::decode(self.registers.byte(at)).is_none()
        {
            self.registers.write(at, &[before.encode()]);
        }
    }

    /// The initial state, as after power-on.
    pub fn reset(&mut self) {
        self.registers.reset();
    }

    fn state(&self) -> State {
        let mut bars = [None; 6];
        for (index, address) in (0..).zip(&mut bars) {
            *address = BarIndex::new(index).and_then(|index| self.bar_address(index));
        }
        State { command: self.command(), bars, power: self.power_state(), msix: self.msix_control() }
    }

    fn command(&self) -> u16 {
        self.registers.word(COMMAND)
    }

    /// The BAR at `index`, if one begins there.
    pub fn bar(&self, index: BarIndex) -> Option<Bar> {
        self.bars.get(usize::from(index.get())).copied().flatten()
    }

    fn is_taken(&self, index: BarIndex) -> bool {
        let below = index.get().checked_sub(1).and_then(BarIndex::new).and_then(|below| self.bar(below));
        self.bar(index).is_some() || below.is_some_and(|bar| bar.is_wide())
    }

    /// Where the host has placed a BAR.
    pub fn bar_address(&self, index: BarIndex) -> Option<u64> {
        let bar = self.bar(index)?;
        let low = u64::from(self.registers.dword(index.offset()));
        let high = match index.next() {
            Some(upper) if bar.is_wide() => u64::from(self.registers.dword(upper.offset())) << 32,
            _ => 0,
        };
        Some((high | low) & bar.address_mask())
    }

    /// Which pin the function uses, 1 for INTA#; 0 for none.
    pub fn pin(&self) -> u8 {
        self.registers.byte(INTERRUPT_PIN)
    }

    /// Memory Space Enable.
    pub fn memory_enabled(&self) -> bool {
        self.command() & COMMAND_MEMORY != 0
    }

    /// Bus Master Enable.
    pub fn bus_master(&self) -> bool {
        self.command() & COMMAND_BUS_MASTER != 0
    }

    /// Interrupt Disable.
    pub fn intx_disabled(&self) -> bool {
        self.command() & COMMAND_INTX_DISABLE != 0
    }

    /// Says in Interrupt Status whether the device has an interrupt pending, and tells whether it asserts its pin:
    /// Interrupt Disable holds it back (PCI Local Bus 3.0, section 6.2.3). Also to be asked when the command
    /// register has changed.
    #[must_use = "the pin follows it"]
    pub fn set_interrupt(&mut self, pending: bool) -> bool {
        self.registers.set_bits(STATUS, STATUS_INTERRUPT, pending);
        pending && !self.intx_disabled()
    }

    /// The power state; D0 without the capability.
    pub fn power_state(&self) -> PowerState {
        let control = self.power_control().map_or(0, |at| self.registers.byte(at));
        PowerState::decode(control).unwrap_or(PowerState::D0)
    }

    fn power_control(&self) -> Option<usize> {
        self.power.map(|at| at.saturating_add(PM_CONTROL))
    }

    fn msix_control(&self) -> u16 {
        self.msix.map_or(0, |at| self.registers.word(at.saturating_add(MSIX_CONTROL)))
    }

    /// MSI-X Enable.
    pub fn msix_enabled(&self) -> bool {
        self.msix_control() & MSIX_ENABLE != 0
    }

    /// MSI-X Function Mask.
    pub fn msix_masked(&self) -> bool {
        self.msix_control() & MSIX_FUNCTION_MASK != 0
    }
}
