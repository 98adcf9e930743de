//! The MSI-X table and its pending bits as memory (PCI Local Bus 3.0, section 6.8.2).

/// Bytes of a table entry.
const ENTRY: usize = 16;
/// Vector Control, Mask Bit.
const MASKED: u32 = 1;

/// What a table keeps of a byte that is written `offset` bytes from its start: of Vector Control only the mask. For
/// tables that are elsewhere than in an [`MsixTable`].
pub fn kept(offset: u64, byte: u8) -> u8 {
    const LENGTH: u64 = ENTRY as u64;
    match offset % LENGTH {
        12 => byte & 1,
        13.. => 0,
        _ => byte,
    }
}

/// An entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector {
    /// Message Address.
    pub address: u64,
    /// Message Data.
    pub data: u32,
    /// Vector Control, Mask Bit.
    pub masked: bool,
}

/// A table and its pending bits. The host reads and writes them in any width.
#[derive(Clone, Debug)]
pub struct MsixTable {
    table: Vec<u8>,
    pending: Vec<u8>,
}

impl MsixTable {
    /// `vectors` entries, all masked, none pending.
    pub fn new(vectors: u16) -> Self {
        let vectors = usize::from(vectors);
        let mut table = Self {
            table: vec![0; vectors.saturating_mul(ENTRY)],
            pending: vec![0; vectors.div_ceil(64).saturating_mul(8)],
        };
        table.reset();
        table
    }

    /// The state after power-on.
    pub fn reset(&mut self) {
        self.pending.fill(0);
        self.table.fill(0);
        for entry in self.table.chunks_exact_mut(ENTRY) {
            if let Some(control) = entry.get_mut(12) {
                *control = 1;
            }
        }
    }

    /// Reads the table; bytes past its end are zero.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        read(&self.table, offset, into);
    }

    /// Reads the pending bits; bytes past their end are zero.
    pub fn read_pending(&self, offset: usize, into: &mut [u8]) {
        read(&self.pending, offset, into);
    }

    /// Writes the table. Of Vector Control only the mask is kept; the pending bits cannot be written.
    pub fn write(&mut self, offset: usize, from: &[u8]) {
        for (at, (to, byte)) in (offset as u64..).zip(self.table.iter_mut().skip(offset).zip(from)) {
            *to = kept(at, *byte);
        }
    }

    /// An entry, if there is one.
    pub fn vector(&self, vector: u16) -> Option<Vector> {
        let entry = self.table.chunks_exact(ENTRY).nth(vector.into())?;
        let (address, rest) = entry.split_first_chunk::<8>()?;
        let (data, rest) = rest.split_first_chunk::<4>()?;
        let control = u32::from_le_bytes(*rest.first_chunk::<4>()?);
        Some(Vector {
            address: u64::from_le_bytes(*address),
            data: u32::from_le_bytes(*data),
            masked: control & MASKED != 0,
        })
    }

    /// Sets or clears a pending bit; those beyond the last vector are reserved and stay 0.
    pub fn set_pending(&mut self, vector: u16, pending: bool) {
        if self.vector(vector).is_none() {
            return;
        }
        let bit = 1 << (vector % 8);
        if let Some(byte) = self.pending.get_mut(usize::from(vector / 8)) {
            *byte = if pending { *byte | bit } else { *byte & !bit };
        }
    }
}

fn read(bytes: &[u8], offset: usize, into: &mut [u8]) {
    into.fill(0);
    for (to, from) in into.iter_mut().zip(bytes.iter().skip(offset)) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests;
