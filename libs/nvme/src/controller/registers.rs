//! The controller's registers: BAR0 below the doorbells (Base Specification 1.4, section 3.1).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::Iova;
use crate::spec::{
    AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, DOORBELLS, Register, Version,
    doorbell_offset,
};

#[cfg(test)]
mod tests;

/// What the caller of [`Registers::write`] has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    None,
    /// Wake the thread that polls the controller: it has to act.
    Wake,
}

/// The registers. Any thread reads and writes them at any time and never waits for the controller.
///
/// Every access has a defined result, whatever its width and alignment: bytes of no register read as zero, a
/// write changes the bytes that it covers and ignores those that are read-only. The doorbells are not here
/// but with [`super::Host::doorbell`]; [`doorbell_write`] tells which one a write hits.
#[derive(Debug)]
pub struct Registers {
    capabilities: Capabilities,
    control: AtomicU64,
    status: AtomicU64,
    interrupt_mask: AtomicU32,
    admin_attributes: AtomicU32,
    admin_submission: AtomicU64,
    admin_completion: AtomicU64,
    /// CSTS.NSSRO: it outlives every reset but that of the power.
    subsystem_reset: AtomicBool,
    power_cycles: AtomicU32,
}

/// What the registers hold at one moment, to find out whether they changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot([u64; 5], u32, bool);

/// CC together with how often it was disabled, so that no falling edge of EN is missed, however quickly it
/// rises again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Control {
    pub(super) generation: u32,
    pub(super) configuration: Configuration,
}

impl Control {
    const fn unpack(word: u64) -> Self {
        Self { generation: (word >> 32) as u32, configuration: Configuration::from_bits(low(word)) }
    }

    const fn pack(self) -> u64 {
        (self.generation as u64) << 32 | self.configuration.bits() as u64
    }

    const fn next_generation(self, configuration: Configuration) -> Self {
        Self { generation: self.generation.wrapping_add(1), configuration }
    }
}

/// What AQA, ASQ and ACQ say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdminQueues {
    pub(super) submission: Iova,
    pub(super) submission_entries: u32,
    pub(super) completion: Iova,
    pub(super) completion_entries: u32,
}

/// The bits of CC that are not reserved in 1.4.
const CONFIGURATION_BITS: u32 = 0x00ff_fff1;
/// CSS, MPS and AMS: they change only while the controller is disabled (3.1.5).
const CONFIGURATION_FIXED_BITS: u32 = 0x0000_3ff0;
/// "NVMe": what starts an NVM subsystem reset (3.1.7).
const SUBSYSTEM_RESET: u32 = 0x4e56_4d65;
const ADMIN_ATTRIBUTES_BITS: u32 = 0x0fff_0fff;
/// ASQ and ACQ are page aligned.
const ADMIN_BASE_BITS: u64 = !0xfff;

impl Registers {
    pub(super) fn new(capabilities: Capabilities) -> Self {
        Self {
            capabilities,
            control: AtomicU64::new(0),
            status: AtomicU64::new(0),
            interrupt_mask: AtomicU32::new(0),
            admin_attributes: AtomicU32::new(0),
            admin_submission: AtomicU64::new(0),
            admin_completion: AtomicU64::new(0),
            subsystem_reset: AtomicBool::new(false),
            power_cycles: AtomicU32::new(1),
        }
    }

    /// Reads bytes from `offset` on.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let skip = (at & 3) as usize;
            let count = rest.len().min(4_usize.saturating_sub(skip));
            let (chunk, more) = rest.split_at_mut(count);
            let dword = u32::try_from(at & !3).map_or(0, |dword| self.read_dword(Register(dword)));
            for (byte, value) in chunk.iter_mut().zip(dword.to_le_bytes().into_iter().skip(skip)) {
                *byte = value;
            }
            at = at.saturating_add(count as u64);
            rest = more;
        }
    }

    /// Writes bytes from `offset` on, dword by dword from the lowest.
    pub fn write(&self, offset: u64, from: &[u8]) -> Effect {
        let mut effect = Effect::None;
        let mut at = offset;
        let mut rest = from;
        while !rest.is_empty() && at < u64::from(DOORBELLS) {
            let skip = (at & 3) as usize;
            let count = rest.len().min(4_usize.saturating_sub(skip));
            let (chunk, more) = rest.split_at(count);
            let (mut value, mut mask) = ([0; 4], [0; 4]);
            for ((value, mask), byte) in value.iter_mut().zip(&mut mask).skip(skip).zip(chunk) {
                (*value, *mask) = (*byte, 0xff);
            }
            if self.write_dword(Register(low(at & !3)), u32::from_le_bytes(value), u32::from_le_bytes(mask))
                == Effect::Wake
            {
                effect = Effect::Wake;
            }
            at = at.saturating_add(count as u64);
            rest = more;
        }
        effect
    }

    /// What they hold now.
    #[inline]
    pub fn snapshot(&self) -> Snapshot {
        let wide = [&self.control, &self.status, &self.admin_submission, &self.admin_completion];
        let [control, status, submission, completion] = wide.map(|word| word.load(Ordering::Acquire));
        let attributes = self.admin_attributes.load(Ordering::Acquire);
        Snapshot(
            [control, status, submission, completion, attributes.into()],
            self.interrupt_mask(),
            self.subsystem_reset.load(Ordering::Acquire),
        )
    }

    /// The power goes and comes back, as when the client is gone: [`Registers::reset`] and what only a power
    /// cycle clears.
    pub fn power_cycle(&self) -> Effect {
        self.subsystem_reset.store(false, Ordering::Release);
        self.power_cycles.fetch_add(1, Ordering::AcqRel);
        self.reset()
    }

    /// A reset from outside: function level reset, device reset. The registers fall back to their defaults at
    /// once; the controller is quiet when [`super::Controller::is_quiet`] says so.
    pub fn reset(&self) -> Effect {
        self.update_control(|control| control.next_generation(Configuration::default()));
        self.interrupt_mask.store(0, Ordering::Release);
        self.admin_attributes.store(0, Ordering::Release);
        self.admin_submission.store(0, Ordering::Release);
        self.admin_completion.store(0, Ordering::Release);
        Effect::Wake
    }

    fn read_dword(&self, register: Register) -> u32 {
        match register {
            Register::CAP => low(self.capabilities.bits()),
            HIGH_CAP => low(self.capabilities.bits() >> 32),
            Register::VS => Version::V1_4.bits(),
            Register::INTMS | Register::INTMC => self.interrupt_mask.load(Ordering::Acquire),
            Register::CC => self.control().configuration.bits(),
            Register::CSTS => self.read_status().bits(),
            Register::AQA => self.admin_attributes.load(Ordering::Acquire),
            Register::ASQ => low(self.admin_submission.load(Ordering::Acquire)),
            HIGH_ASQ => low(self.admin_submission.load(Ordering::Acquire) >> 32),
            Register::ACQ => low(self.admin_completion.load(Ordering::Acquire)),
            HIGH_ACQ => low(self.admin_completion.load(Ordering::Acquire) >> 32),
            // No memory buffer, boot partition or persistent memory region: their registers read as zero.
            _ => 0,
        }
    }

    fn write_dword(&self, register: Register, value: u32, mask: u32) -> Effect {
        match register {
            Register::INTMS => {
                self.interrupt_mask.fetch_or(value & mask, Ordering::AcqRel);
                Effect::Wake
            }
            Register::INTMC => {
                self.interrupt_mask.fetch_and(!(value & mask), Ordering::AcqRel);
                Effect::Wake
            }
            Register::CC => {
                self.update_control(|control| control.written(value, mask));
                Effect::Wake
            }
            Register::AQA => {
                update(&self.admin_attributes, value, mask & ADMIN_ATTRIBUTES_BITS);
                Effect::None
            }
            Register::ASQ | Register::ACQ | HIGH_ASQ | HIGH_ACQ => {
                let base = match register {
                    Register::ASQ | HIGH_ASQ => &self.admin_submission,
                    _ => &self.admin_completion,
                };
                let shift = if register.0 & 4 == 0 { 0 } else { 32 };
                let mask = (u64::from(mask) << shift) & ADMIN_BASE_BITS;
                update_wide(base, u64::from(value) << shift, mask);
                Effect::None
            }
            Register::CSTS => {
                if ControllerStatus::from_bits(value & mask).subsystem_reset_occurred() {
                    self.subsystem_reset.store(false, Ordering::Release);
                }
                Effect::None
            }
            // The link and so configuration space stay as they are (7.3.1): no virtual machine would notice.
            Register::NSSR if mask == u32::MAX && value == SUBSYSTEM_RESET => {
                self.subsystem_reset.store(true, Ordering::Release);
                self.reset()
            }
            _ => Effect::None,
        }
    }

    /// CSTS as the host may see it: after a quick 1-0-1 of EN, what belongs to the older life is not shown.
    fn read_status(&self) -> ControllerStatus {
        let control = self.control();
        let word = self.status.load(Ordering::Acquire);
        let status = if control.configuration.enable() && control.generation != (word >> 32) as u32 {
            ControllerStatus::default()
        } else {
            ControllerStatus::from_bits(low(word))
        };
        status.with_subsystem_reset_occurred(self.subsystem_reset.load(Ordering::Acquire))
    }

    /// How often the power came, this time included.
    pub(super) fn power_cycles(&self) -> u32 {
        self.power_cycles.load(Ordering::Acquire)
    }

    pub(super) fn control(&self) -> Control {
        Control::unpack(self.control.load(Ordering::Acquire))
    }

    /// Shows `status`, which belongs to the life that `generation` began.
    pub(super) fn set_status(&self, generation: u32, status: ControllerStatus) {
        self.status.store(u64::from(generation) << 32 | u64::from(status.bits()), Ordering::Release);
    }

    pub(super) fn admin_queues(&self) -> AdminQueues {
        let attributes = AdminQueueAttributes::from_bits(self.admin_attributes.load(Ordering::Acquire));
        AdminQueues {
            submission: Iova(self.admin_submission.load(Ordering::Acquire)),
            submission_entries: u32::from(attributes.submission_size()).saturating_add(1),
            completion: Iova(self.admin_completion.load(Ordering::Acquire)),
            completion_entries: u32::from(attributes.completion_size()).saturating_add(1),
        }
    }

    /// INTMS: the vectors that do not assert the pin, a bit each.
    pub(super) fn interrupt_mask(&self) -> u32 {
        self.interrupt_mask.load(Ordering::Acquire)
    }

    fn update_control(&self, change: impl Fn(Control) -> Control) {
        let mut old = self.control.load(Ordering::Acquire);
        while let Err(now) = self.control.compare_exchange_weak(
            old,
            change(Control::unpack(old)).pack(),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            old = now;
        }
    }
}

impl Control {
    /// After a write of `value` to the bits of `mask`.
    const fn written(self, value: u32, mask: u32) -> Self {
        let old = self.configuration;
        let bits = (old.bits() & !mask) | (value & mask & CONFIGURATION_BITS);
        let new = Configuration::from_bits(bits);
        if !old.enable() {
            Self { configuration: new, ..self }
        } else if new.enable() {
            let bits = (bits & !CONFIGURATION_FIXED_BITS) | (old.bits() & CONFIGURATION_FIXED_BITS);
            Self { configuration: Configuration::from_bits(bits), ..self }
        } else {
            self.next_generation(new)
        }
    }
}

/// Which doorbell a write of BAR0 hits, as an index for [`super::Host::doorbell`], and the value. An access
/// that is not a whole aligned dword (3.1.24) rings nothing. `stride` is CAP.DSTRD.
pub fn doorbell_write(offset: u64, from: &[u8], stride: u8) -> Option<(usize, u32)> {
    let value = u32::from_le_bytes(from.try_into().ok()?);
    let bytes = offset.checked_sub(u64::from(DOORBELLS))?;
    let apart = doorbell_offset(1, stride).saturating_sub(u64::from(DOORBELLS));
    if bytes.checked_rem(apart) != Some(0) {
        return None;
    }
    Some((usize::try_from(bytes.checked_div(apart)?).ok()?, value))
}

const HIGH_CAP: Register = Register(0x04);
const HIGH_ASQ: Register = Register(0x2c);
const HIGH_ACQ: Register = Register(0x34);

const fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

fn update(register: &AtomicU32, value: u32, mask: u32) {
    let mut old = register.load(Ordering::Acquire);
    while let Err(now) = register.compare_exchange_weak(
        old,
        (old & !mask) | (value & mask),
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        old = now;
    }
}

fn update_wide(register: &AtomicU64, value: u64, mask: u64) {
    let mut old = register.load(Ordering::Acquire);
    while let Err(now) = register.compare_exchange_weak(
        old,
        (old & !mask) | (value & mask),
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        old = now;
    }
}
