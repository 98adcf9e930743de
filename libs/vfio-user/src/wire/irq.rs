//! Interrupts: DEVICE_GET_IRQ_INFO and DEVICE_SET_IRQS.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::device::flags;
use super::dma::check_argsz;
use super::{DecodeError, Query, ReplyError, field, split};

/// A type of interrupt. PCI devices have the five that are named here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IrqIndex(pub u32);

impl IrqIndex {
    /// The pin.
    pub const INTX: Self = Self(0);
    /// MSI.
    pub const MSI: Self = Self(1);
    /// MSI-X.
    pub const MSIX: Self = Self(2);
    /// The device has failed.
    pub const ERR: Self = Self(3);
    /// The device wants to be unplugged.
    pub const REQ: Self = Self(4);
}

flags! {
    /// What can be done with a type of interrupt.
    IrqFlags {
        /// It is delivered through eventfds.
        EVENTFD = 1 << 0,
        /// It can be masked.
        MASKABLE = 1 << 1,
        /// It masks itself when it fires.
        AUTOMASKED = 1 << 2,
        /// The vectors that are bound can only be changed together.
        NORESIZE = 1 << 3,
    }
}

/// The reply to DEVICE_GET_IRQ_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Which type.
    pub index: IrqIndex,
    /// What can be done with it.
    pub flags: IrqFlags,
    /// How many vectors it has.
    pub count: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawIrqInfo {
    argsz: U32,
    flags: U32,
    index: U32,
    count: U32,
}

const _: () = assert!(size_of::<RawIrqInfo>() == 16);

pub(super) fn decode_irq_query(body: &[u8]) -> Result<Query, DecodeError> {
    let (raw, _) = split::<RawIrqInfo>(body)?;
    let argsz = raw.argsz.get();
    check_argsz(argsz, 16)?;
    Ok(Query { argsz, index: raw.index.get() })
}

pub(super) fn encode_irq_query(query: Query, body: &mut Vec<u8>) {
    let raw =
        RawIrqInfo { argsz: query.argsz.into(), flags: 0.into(), index: query.index.into(), count: 0.into() };
    body.extend_from_slice(raw.as_bytes());
}

impl IrqInfo {
    pub(super) fn decode(body: &[u8]) -> Result<Self, ReplyError> {
        let (raw, _) = split::<RawIrqInfo>(body)?;
        Ok(Self {
            index: IrqIndex(raw.index.get()),
            flags: IrqFlags(raw.flags.get()),
            count: raw.count.get(),
        })
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let raw = RawIrqInfo {
            argsz: 16.into(),
            flags: self.flags.0.into(),
            index: self.index.0.into(),
            count: self.count.into(),
        };
        body.extend_from_slice(raw.as_bytes());
    }
}

/// DEVICE_SET_IRQS ("VFIO_USER_DEVICE_SET_IRQS").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// Which type.
    pub index: IrqIndex,
    /// The first vector; its sum with `count` does not wrap.
    pub start: u32,
    /// How many vectors. 0 only in "trigger nothing", with which the whole type is disabled.
    pub count: u32,
    /// What the action is done with.
    pub data: IrqData<'a>,
    /// What is to be done.
    pub action: IrqAction,
}

/// What a DEVICE_SET_IRQS brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// Nothing: the action is done to each vector.
    None,
    /// A byte for each vector: the action is done where it is not 0.
    Bool(&'a [u8]),
    /// An eventfd for each vector, with the message: the action is bound to it.
    Eventfds,
    /// "Eventfds", but none came: what was bound is let go.
    Unbind,
}

/// What a DEVICE_SET_IRQS does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Hold interrupts back.
    Mask,
    /// Let them through.
    Unmask,
    /// Fire them, or bind what they fire.
    Trigger,
}

const DATA_NONE: u32 = 1 << 0;
const DATA_BOOL: u32 = 1 << 1;
const DATA_EVENTFD: u32 = 1 << 2;
const DATA: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
const MASK: u32 = 1 << 3;
const UNMASK: u32 = 1 << 4;
const TRIGGER: u32 = 1 << 5;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSetIrqs {
    argsz: U32,
    flags: U32,
    index: U32,
    start: U32,
    count: U32,
}

const _: () = assert!(size_of::<RawSetIrqs>() == 20);

impl<'a> SetIrqs<'a> {
    pub(super) fn decode(body: &'a [u8], descriptors: usize) -> Result<Self, DecodeError> {
        let (raw, content) = split::<RawSetIrqs>(body)?;
        let (argsz, flags) = (raw.argsz.get(), raw.flags.get());
        let (index, start, count) = (IrqIndex(raw.index.get()), raw.start.get(), raw.count.get());
        // argsz counts the bytes of "bool", never the descriptors.
        check_argsz(argsz, 20)?;
        let action = match flags & !DATA {
            MASK => IrqAction::Mask,
            UNMASK => IrqAction::Unmask,
            TRIGGER => IrqAction::Trigger,
            _ => return Err(DecodeError::Flags { flags }),
        };
        let expected = usize::try_from(count).unwrap_or(usize::MAX);
        let data = match (flags & DATA, descriptors) {
            (DATA_NONE, 0) => IrqData::None,
            (DATA_BOOL, 0) if content.len() == expected && argsz.checked_sub(20) == Some(count) => {
                IrqData::Bool(content)
            }
            (DATA_BOOL, 0) => {
                return Err(DecodeError::DataLength { length: content.len(), count: count.into() });
            }
            (DATA_EVENTFD, 0) => IrqData::Unbind,
            (DATA_EVENTFD, _) if descriptors == expected => IrqData::Eventfds,
            (DATA_EVENTFD, _) => return Err(DecodeError::Descriptors { descriptors, expected }),
            (DATA_NONE | DATA_BOOL, _) => return Err(DecodeError::Descriptors { descriptors, expected: 0 }),
            _ => return Err(DecodeError::Flags { flags }),
        };
        let command = Self { index, start, count, data, action };
        if command.is_consistent() {
            Ok(command)
        } else {
            Err(DecodeError::Range { start: start.into(), count: count.into() })
        }
    }

    /// Whether the vectors go with the rest. Only the device knows whether it has them.
    fn is_consistent(&self) -> bool {
        if self.start.checked_add(self.count).is_none() {
            return false;
        }
        if self.count == 0 && (self.start, self.data, self.action) != (0, IrqData::None, IrqAction::Trigger) {
            return false;
        }
        // ERR and REQ are one vector each, and cannot be masked.
        ![IrqIndex::ERR, IrqIndex::REQ].contains(&self.index)
            || (self.action == IrqAction::Trigger && self.count <= 1)
    }

    pub(super) fn encode(&self, body: &mut Vec<u8>) {
        let (data, content) = match self.data {
            IrqData::None => (DATA_NONE, &[][..]),
            IrqData::Bool(content) => (DATA_BOOL, content),
            IrqData::Eventfds | IrqData::Unbind => (DATA_EVENTFD, &[][..]),
        };
        let action = match self.action {
            IrqAction::Mask => MASK,
            IrqAction::Unmask => UNMASK,
            IrqAction::Trigger => TRIGGER,
        };
        let raw = RawSetIrqs {
            argsz: field(content.len()).saturating_add(20).into(),
            flags: (data | action).into(),
            index: self.index.0.into(),
            start: self.start.into(),
            count: self.count.into(),
        };
        body.extend_from_slice(raw.as_bytes());
        body.extend_from_slice(content);
    }

    pub(super) fn descriptors(&self) -> usize {
        match self.data {
            IrqData::Eventfds => usize::try_from(self.count).unwrap_or(usize::MAX),
            IrqData::None | IrqData::Bool(_) | IrqData::Unbind => 0,
        }
    }
}
