//! Base Address Registers (PCI Local Bus 3.0, section 6.2.5).

/// Which BAR: 0 to 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BarIndex(u8);

impl BarIndex {
    /// `None` beyond 5.
    pub const fn new(index: u8) -> Option<Self> {
        if index < 6 { Some(Self(index)) } else { None }
    }

    /// The number, which is also that of the region in vfio.
    pub const fn get(self) -> u8 {
        self.0
    }

    pub(crate) fn offset(self) -> usize {
        usize::from(self.0).saturating_mul(4).saturating_add(FIRST)
    }

    pub(crate) fn next(self) -> Option<Self> {
        Self::new(self.0.saturating_add(1))
    }
}

/// The offset of BAR 0.
const FIRST: usize = 0x10;

/// What a BAR decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Memory below 4 GiB.
    Memory32 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// Memory anywhere; takes the next BAR as its upper half.
    Memory64 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// Ports.
    Io,
}

/// A BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// What it decodes.
    pub kind: BarKind,
    /// In bytes, a power of two.
    pub size: u64,
}

impl Bar {
    /// The read-only low bits.
    pub(crate) fn type_bits(&self) -> u32 {
        match self.kind {
            BarKind::Memory32 { prefetchable: false } => 0x0,
            BarKind::Memory32 { prefetchable: true } => 0x8,
            BarKind::Memory64 { prefetchable: false } => 0x4,
            BarKind::Memory64 { prefetchable: true } => 0xc,
            BarKind::Io => 0x1,
        }
    }

    /// The bits that the host may set: those above the size.
    pub(crate) fn address_mask(&self) -> u64 {
        !self.size.wrapping_sub(1)
    }

    pub(crate) fn is_wide(&self) -> bool {
        matches!(self.kind, BarKind::Memory64 { .. })
    }

    /// The specification's least sizes, and powers of two only.
    pub(crate) fn is_valid(&self) -> bool {
        let (least, most) = match self.kind {
            BarKind::Memory32 { .. } => (16, 1 << 31),
            BarKind::Memory64 { .. } => (16, 1 << 63),
            BarKind::Io => (4, 256),
        };
        self.size.is_power_of_two() && (least..=most).contains(&self.size)
    }
}
