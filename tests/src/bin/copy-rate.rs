//! `copy-rate [SECONDS]`: how often this core can copy a random 4 KiB block out of 256 MiB, per second. What any
//! drive in memory can reach at most on this machine at this moment: the yardstick of `tests/run bench`.

#![expect(unsafe_code, reason = "advises huge pages, as the drive's memory has them")]

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous};

const MEMORY: usize = 256 << 20;
const BLOCK: usize = 4096;
/// As many blocks as a queue of depth 128 has buffers.
const BUFFERS: usize = 128;

/// Page-aligned, as a guest's buffers are: some processors copy to other places several times slower.
fn map(length: usize) -> &'static mut [u8] {
    let length = NonZeroUsize::new(length).unwrap();
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: without MAP_FIXED the kernel chooses a free range; it stays mapped until the program ends.
    unsafe {
        let start = mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE).unwrap();
        let _ = madvise(start, length.get(), MmapAdvise::MADV_HUGEPAGE);
        std::slice::from_raw_parts_mut(start.cast::<u8>().as_ptr(), length.get())
    }
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let memory = map(MEMORY);
    memory.fill(1);
    let buffers = map(BUFFERS * BLOCK);
    let mut random = 88_172_645_463_325_252_u64;
    let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut copies = 0_usize;
    while start.elapsed() < limit {
        for _ in 0..1000 {
            // xorshift: cheap beside the copy.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let from = (random as usize % (MEMORY / BLOCK)) * BLOCK;
            let to = (copies % BUFFERS) * BLOCK;
            buffers[to..to + BLOCK].copy_from_slice(&memory[from..from + BLOCK]);
            copies += 1;
        }
        std::hint::black_box(&buffers);
    }
    println!("{:.0}", copies as f64 / start.elapsed().as_secs_f64());
}
