//! Bytes with a rule for each bit: read-only, read-write, or cleared by writing 1.

/// A register file. Every bit of it is read-only unless a mask says otherwise.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    value: Vec<u8>,
    initial: Vec<u8>,
    writable: Vec<u8>,
    cleared_by_one: Vec<u8>,
}

impl Registers {
    pub(crate) fn new(size: usize) -> Self {
        let zeroes = vec![0; size];
        Self {
            value: zeroes.clone(),
            initial: zeroes.clone(),
            writable: zeroes.clone(),
            cleared_by_one: zeroes,
        }
    }

    /// Keeps the first `size` bytes.
    pub(crate) fn truncate(&mut self, size: usize) {
        for file in [&mut self.value, &mut self.initial, &mut self.writable, &mut self.cleared_by_one] {
            file.truncate(size);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.value.len()
    }

    /// Sets bytes and their initial value, as the device does: no mask holds it back.
    pub(crate) fn set(&mut self, offset: usize, bytes: &[u8]) {
        for file in [&mut self.value, &mut self.initial] {
            overwrite(file, offset, bytes);
        }
    }

    /// Sets or clears bits of a byte, as the device does while it runs.
    pub(crate) fn set_bits(&mut self, offset: usize, bits: u8, on: bool) {
        if let Some(byte) = self.value.get_mut(offset) {
            *byte = if on { *byte | bits } else { *byte & !bits };
        }
    }

    pub(crate) fn make_writable(&mut self, offset: usize, mask: &[u8]) {
        overwrite(&mut self.writable, offset, mask);
    }

    pub(crate) fn make_cleared_by_one(&mut self, offset: usize, mask: &[u8]) {
        overwrite(&mut self.cleared_by_one, offset, mask);
    }

    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        for (byte, value) in into.iter_mut().zip(self.value.iter().skip(offset)) {
            *byte = *value;
        }
    }

    pub(crate) fn byte(&self, offset: usize) -> u8 {
        self.value.get(offset).copied().unwrap_or(0)
    }

    pub(crate) fn word(&self, offset: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    pub(crate) fn dword(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes as the host does.
    pub(crate) fn write(&mut self, offset: usize, from: &[u8]) {
        let masks = self.writable.iter().zip(&self.cleared_by_one);
        for ((value, (writable, cleared)), byte) in self.value.iter_mut().zip(masks).skip(offset).zip(from) {
            *value = ((*value & !writable) | (byte & writable)) & !(byte & cleared);
        }
    }

    pub(crate) fn reset(&mut self) {
        self.value.copy_from_slice(&self.initial);
    }
}

fn overwrite(file: &mut [u8], offset: usize, bytes: &[u8]) {
    for (to, from) in file.iter_mut().skip(offset).zip(bytes) {
        *to = *from;
    }
}
