//! A model of the DMA table under loom: every interleaving of a device thread that looks memory up and uses it,
//! and a session that unmaps it or loses its client. `RUSTFLAGS="--cfg loom" cargo test --release --test loom`.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom hands out raw pointers and checks that no two accesses race")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use outboard_vfio_user::dma::{Entry, Reader, Table};

/// Stands for mapped memory: reading it is an access, dropping it is munmap. Loom fails when the two can race,
/// and the flag stands for the reply to the unmap.
struct Memory {
    bytes: UnsafeCell<u32>,
    released: Arc<AtomicBool>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.bytes.with_mut(|bytes| {
            // SAFETY: loom fails the model if anybody else can access the cell now.
            unsafe { *bytes = 0xdead }
        });
        self.released.store(true, Ordering::Release);
    }
}

fn memory(released: &Arc<AtomicBool>) -> Memory {
    Memory { bytes: UnsafeCell::new(7), released: released.clone() }
}

fn access(entry: &Entry<Memory>) {
    // SAFETY: loom fails the model if anybody can write the cell now.
    assert_eq!(entry.value.bytes.with(|bytes| unsafe { *bytes }), 7);
}

/// Lookups against an unmap: an access ends before the release, and after the release nothing is found.
#[test]
fn an_unmap_is_released_after_the_last_lookup() {
    loom::model(|| {
        let released = Arc::new(AtomicBool::new(false));
        let table = Arc::new(Table::new(4));
        drop(table.insert(0x1000, 0x1000, memory(&released)).unwrap());
        let device = thread::spawn({
            let (mut reader, released) = (Reader::new(table.clone()), released.clone());
            move || {
                for _ in 0..2 {
                    reader.refresh();
                    let over = released.load(Ordering::Acquire);
                    if let Some((entry, _)) = reader.find(0x1800, 8) {
                        assert!(!over, "found after the unmap was answered");
                        access(entry);
                    }
                }
                reader.release();
            }
        });
        drop(table.remove(0x1000, 0x1000));
        device.join().unwrap();
        assert!(released.load(Ordering::Acquire), "an unmap was never answered");
    });
}

/// An I/O in flight (a pin, held by a third thread: the kernel) outlives both the lookup and the unmap.
#[test]
fn an_unmap_waits_for_io_in_flight() {
    loom::model(|| {
        let released = Arc::new(AtomicBool::new(false));
        let table = Arc::new(Table::new(4));
        drop(table.insert(0, 0x1000, memory(&released)).unwrap());
        let mut reader = Reader::new(table.clone());
        let pin = reader.find(0, 512).map(|(entry, _)| entry.clone()).unwrap();
        let io = thread::spawn({
            let released = released.clone();
            move || {
                access(&pin);
                assert!(!released.load(Ordering::Acquire));
                drop(pin);
            }
        });
        drop(table.remove(0, 0x1000));
        reader.refresh();
        assert!(reader.find(0, 1).is_none());
        io.join().unwrap();
        assert!(released.load(Ordering::Acquire));
    });
}

/// The client goes while the device works and another range is being mapped: everything is released.
#[test]
fn a_disconnect_releases_everything() {
    loom::model(|| {
        let (first, second) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let table = Arc::new(Table::new(4));
        drop(table.insert(0, 0x1000, memory(&first)).unwrap());
        let device = thread::spawn({
            let mut reader = Reader::new(table.clone());
            move || {
                if let Some((entry, _)) = reader.find(0, 8) {
                    access(entry);
                }
                reader.refresh();
                if let Some((entry, _)) = reader.find(0x1000, 8) {
                    access(entry);
                }
            }
        });
        drop(table.insert(0x1000, 0x1000, memory(&second)).unwrap());
        drop(table.clear());
        device.join().unwrap();
        assert!(first.load(Ordering::Acquire) && second.load(Ordering::Acquire));
    });
}
