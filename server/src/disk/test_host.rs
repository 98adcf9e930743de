//! A host that is a piece of plain memory.
#![expect(unsafe_code, reason = "lends its memory to the kernel")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outboard_nvme::Iova;
use outboard_nvme::controller::{
    Direction, Disk, DiskError, DmaError, Host, Operation, Segment, Submission, Tag,
};

use super::{Backend, PinHost, PinnedBytes};
use vm_memory::VolatileSlice;

/// Where the memory begins, as the controller sees it.
pub(super) const BASE: u64 = 0x1_0000_0000;

struct Arena {
    start: *mut u8,
    layout: Layout,
    pins: AtomicUsize,
}

// SAFETY: only reached by raw pointers; tests do not touch what is in flight.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}

/// Memory from [`BASE`] on, some of which cannot be pinned.
pub(super) struct TestHost {
    arena: Arc<Arena>,
    unpinnable: Range<u64>,
}

impl TestHost {
    pub(super) fn new(size: usize) -> TestHost {
        let layout = Layout::from_size_align(size, 4096).unwrap();
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        assert!(!start.is_null());
        TestHost { arena: Arc::new(Arena { start, layout, pins: AtomicUsize::new(0) }), unpinnable: 0..0 }
    }

    /// Data in this range has to be copied.
    pub(super) fn unpinnable(mut self, range: Range<u64>) -> TestHost {
        self.unpinnable = range;
        self
    }

    /// Pins that were not dropped.
    pub(super) fn pins(&self) -> usize {
        self.arena.pins.load(Ordering::Relaxed)
    }

    fn at(&self, iova: Iova, length: usize) -> Result<*mut u8, DmaError> {
        let offset = iova.0.checked_sub(BASE).and_then(|offset| usize::try_from(offset).ok());
        match offset {
            Some(offset) if offset + length <= self.arena.layout.size() => {
                Ok(self.arena.start.wrapping_add(offset))
            }
            _ => Err(DmaError { iova, length }),
        }
    }

    /// The bytes of some segments, one after the other; zeroes in place of dropped ones.
    pub(super) fn bytes(&mut self, data: &[Segment]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for segment in data {
            let mut some = vec![0; segment.length];
            if let Some(iova) = segment.iova {
                self.read(iova, &mut some).unwrap();
            }
            bytes.extend(some);
        }
        bytes
    }

    /// Fills some segments.
    pub(super) fn fill(&mut self, data: &[Segment], mut bytes: &[u8]) {
        for segment in data {
            let (some, rest) = bytes.split_at(segment.length);
            if let Some(iova) = segment.iova {
                self.write(iova, some).unwrap();
            }
            bytes = rest;
        }
    }
}

impl Host for TestHost {
    fn read(&mut self, at: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        let from = self.at(at, into.len())?;
        // SAFETY: in the arena, which no reference points into.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write(&mut self, at: Iova, from: &[u8]) -> Result<(), DmaError> {
        let into = self.at(at, from.len())?;
        // SAFETY: as above.
        unsafe { into.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn load(&mut self, at: Iova) -> Result<u32, DmaError> {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn store(&mut self, at: Iova, value: u32) -> Result<(), DmaError> {
        self.write(at, &value.to_le_bytes())
    }

    fn publish(&mut self, at: Iova, entry: [u32; 4]) -> Result<(), DmaError> {
        entry.iter().zip(0u64..).try_for_each(|(&word, index)| self.store(Iova(at.0 + 4 * index), word))
    }

    fn doorbell(&mut self, _index: usize) -> u32 {
        0
    }

    fn set_doorbell(&mut self, _index: usize, _value: u32) {}

    fn interrupt(&mut self, _vector: u16) {}

    fn interrupt_line(&mut self, _asserted: bool) {}
}

pub(super) struct TestPin {
    arena: Arc<Arena>,
    start: *mut u8,
    length: usize,
}

// SAFETY: the pointer is into the arena, which is Send.
unsafe impl Send for TestPin {}

impl PinnedBytes for TestPin {
    fn bytes(&self) -> Option<VolatileSlice<'_>> {
        // SAFETY: the arena stays allocated with the pin; nobody makes references into it.
        Some(unsafe { VolatileSlice::new(self.start, self.length) })
    }
}

impl Drop for TestPin {
    fn drop(&mut self) {
        self.arena.pins.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PinHost for TestHost {
    type Pin = TestPin;

    fn pin(&mut self, at: Iova, length: usize, _direction: Direction) -> Option<TestPin> {
        if at.0 < self.unpinnable.end && at.0 + length as u64 > self.unpinnable.start {
            return None;
        }
        let start = self.at(at, length).ok()?;
        self.arena.pins.fetch_add(1, Ordering::Relaxed);
        Some(TestPin { arena: Arc::clone(&self.arena), start, length })
    }
}

/// Waits until something can be reaped; fails if nothing comes.
pub(super) fn wait(event: BorrowedFd<'_>) {
    let mut fds = [PollFd::new(event, PollFlags::POLLIN)];
    let ready = loop {
        match poll(&mut fds, PollTimeout::from(10_000u16)) {
            Err(nix::errno::Errno::EINTR) => {}
            ready => break ready.unwrap(),
        }
    };
    assert_eq!(ready, 1, "no completion");
}

impl Backend<TestHost> {
    /// Waits for all that is in flight.
    pub(super) fn drain(&mut self, host: &mut TestHost, done: &mut Vec<(Tag, Result<(), DiskError>)>) {
        self.commit(host);
        self.reap(host, done);
        while self.in_flight() > 0 {
            wait(self.event().unwrap());
            self.reap(host, done);
        }
    }

    /// Performs one operation.
    pub(super) fn perform(&mut self, host: &mut TestHost, operation: Operation<'_>) -> Result<(), DiskError> {
        match self.submit(host, Tag(7), operation) {
            Submission::Done(result) => result,
            Submission::Pending => {
                let mut done = Vec::new();
                self.drain(host, &mut done);
                assert_eq!(done.len(), 1);
                assert_eq!(done[0].0, Tag(7));
                done[0].1
            }
        }
    }
}
