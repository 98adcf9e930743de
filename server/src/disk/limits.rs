//! The numbers that bound what a disk uses.

use std::time::Duration;

/// Operations that an image has in flight at most; more wait in a queue, without holding memory of the host or
/// bounce buffers.
pub(super) const DEPTH: u16 = 256;

/// Threads of the pool that stands in for io_uring.
pub(super) const THREADS: usize = 8;

/// How often one operation is repeated when the kernel says "again" before it counts as failed.
pub(super) const RETRIES: u32 = 64;

/// Bytes that one operation of a Write Zeroes writes, where the file system cannot zero by itself.
pub(super) const ZERO_CHUNK: u64 = 1 << 20;

/// Bytes that one operation of a Write Zeroes or a Format has the file system zero.
pub(super) const FALLOCATE_CHUNK: u64 = 1 << 30;

/// Bytes that one operation of a Verify reads.
pub(super) const VERIFY_CHUNK: u64 = 1 << 20;

/// Vectors of one operation (IOV_MAX).
pub(super) const VECTORS: usize = 1024;

/// How long dropping a disk waits for operations in flight. What then is still under way keeps its memory.
pub(super) const DRAIN: Duration = Duration::from_secs(3);

/// How long opening an image waits for its locks: a killed predecessor's are released when the kernel has
/// finished its I/O, shortly after the process is gone.
pub(super) const LOCK_WAIT: Duration = Duration::from_millis(500);
