//! A machine in this process: memory that driver and drive share, without unsafe code.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use outboard_nvme::Iova;
use outboard_nvme::driver::limits::PAGE_SIZE;
use outboard_nvme::driver::{Block, Memory};

/// Where the machine's memory begins, as a drive sees it.
pub(crate) const BASE: u64 = 0x1_0000_0000;

/// The machine's memory.
#[derive(Clone, Debug)]
pub(crate) struct Ram(Arc<[AtomicU64]>);

impl Ram {
    pub(crate) fn new(pages: usize) -> Self {
        Self((0..pages * PAGE_SIZE / 8).map(|_| AtomicU64::new(0)).collect())
    }

    fn size(&self) -> usize {
        self.0.len() * 8
    }

    /// The offset of a run of memory, if it lies inside.
    fn offset(&self, at: Iova, length: usize) -> Option<usize> {
        let offset = usize::try_from(at.0.checked_sub(BASE)?).ok()?;
        (offset.checked_add(length)? <= self.size()).then_some(offset)
    }

    pub(crate) fn read(&self, at: Iova, into: &mut [u8]) -> Option<()> {
        let offset = self.offset(at, into.len())?;
        if offset % 8 == 0 && into.len().is_multiple_of(8) {
            let words = &self.0[offset / 8..][..into.len() / 8];
            for (bytes, word) in into.chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
        } else {
            for (byte, at) in into.iter_mut().zip(offset..) {
                *byte = self.0[at / 8].load(Ordering::Relaxed).to_le_bytes()[at % 8];
            }
        }
        Some(())
    }

    pub(crate) fn write(&self, at: Iova, from: &[u8]) -> Option<()> {
        let offset = self.offset(at, from.len())?;
        if offset % 8 == 0 && from.len().is_multiple_of(8) {
            let words = &self.0[offset / 8..][..from.len() / 8];
            for (bytes, word) in from.chunks_exact(8).zip(words) {
                word.store(u64::from_le_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
            }
        } else {
            for (&byte, at) in from.iter().zip(offset..) {
                self.splice(at, 0xff, byte.into());
            }
        }
        Some(())
    }

    pub(crate) fn load(&self, at: Iova) -> Option<u32> {
        let offset = self.offset(at, 4).filter(|offset| offset % 4 == 0)?;
        let word = self.0[offset / 8].load(Ordering::Acquire);
        Some((word >> (offset % 8 * 8)) as u32)
    }

    pub(crate) fn store(&self, at: Iova, value: u32) -> Option<()> {
        let offset = self.offset(at, 4).filter(|offset| offset % 4 == 0)?;
        self.splice(offset, u32::MAX.into(), value.into());
        Some(())
    }

    /// Writes a completion entry, the half with the phase tag last.
    pub(crate) fn publish(&self, at: Iova, entry: [u32; 4]) -> Option<()> {
        let offset = self.offset(at, 16).filter(|offset| offset % 16 == 0)?;
        let half = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        self.0[offset / 8].store(half(entry[0], entry[1]), Ordering::Relaxed);
        self.0[offset / 8 + 1].store(half(entry[2], entry[3]), Ordering::Release);
        Some(())
    }

    /// Replaces the bytes under `mask` at `offset`.
    fn splice(&self, offset: usize, mask: u64, value: u64) {
        let shift = offset % 8 * 8;
        let replace = |word: u64| Some(word & !(mask << shift) | value << shift);
        let _ = self.0[offset / 8].fetch_update(Ordering::AcqRel, Ordering::Relaxed, replace);
    }
}

/// Hands out the machine's memory by the page; a block gives its pages back when it is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    ram: Ram,
    used: Arc<Mutex<Vec<bool>>>,
}

impl Pages {
    pub(crate) fn new(ram: Ram) -> Self {
        let used = Arc::new(Mutex::new(vec![false; ram.size() / PAGE_SIZE]));
        Self { ram, used }
    }

    /// Pages in use.
    pub(crate) fn used(&self) -> usize {
        self.used.lock().unwrap().iter().filter(|&&used| used).count()
    }
}

impl Memory for Pages {
    type Block = Run;

    fn allocate(&mut self, length: usize) -> io::Result<Run> {
        let pages = length.div_ceil(PAGE_SIZE).max(1);
        let mut used = self.used.lock().unwrap();
        let free = (0..used.len().saturating_sub(pages - 1))
            .find(|&first| !used[first..][..pages].contains(&true))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        used[free..][..pages].fill(true);
        drop(used);
        let run = Run { pages: self.clone(), first: free, size: pages * PAGE_SIZE };
        run.write(0, &vec![0; run.size]);
        Ok(run)
    }
}

/// A run of pages.
#[derive(Debug)]
pub(crate) struct Run {
    pages: Pages,
    first: usize,
    size: usize,
}

impl Run {
    fn at(&self, offset: usize, length: usize) -> Iova {
        assert!(offset + length <= self.size, "{length} bytes at {offset} of {}", self.size);
        Iova(self.iova().0 + offset as u64)
    }
}

impl Block for Run {
    fn iova(&self) -> Iova {
        Iova(BASE + (self.first * PAGE_SIZE) as u64)
    }

    fn size(&self) -> usize {
        self.size
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.pages.ram.read(self.at(offset, into.len()), into).unwrap();
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.pages.ram.write(self.at(offset, from.len()), from).unwrap();
    }

    fn load(&self, offset: usize) -> u32 {
        self.pages.ram.load(self.at(offset, 4)).unwrap()
    }

    fn store(&self, offset: usize, value: u32) {
        self.pages.ram.store(self.at(offset, 4), value).unwrap();
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.pages.used.lock().unwrap()[self.first..][..self.size / PAGE_SIZE].fill(false);
    }
}
