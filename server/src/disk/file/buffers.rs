//! The memory of a transfer between host and image.
#![expect(unsafe_code, reason = "vectors of raw pointers may be sent to another thread")]

use nix::libc::iovec;
use outboard_nvme::controller::{Direction, Segment};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::disk::limits::{VECTORS, ZERO_CHUNK};
use crate::disk::{PinHost, PinnedBytes};

/// What direct I/O asks of a transfer's memory and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alignment {
    /// Nothing: the image is read and written through the page cache.
    Any,
    /// Each vector begins at a multiple of `memory` and is a multiple of `length` long (powers of two).
    Direct {
        /// Of the address.
        memory: usize,
        /// Of the length, and of the offset in the image.
        length: usize,
    },
}

impl Alignment {
    fn admits(self, vector: &iovec) -> bool {
        match self {
            Alignment::Any => true,
            Alignment::Direct { memory, length } => {
                vector.iov_base.addr() & memory.wrapping_sub(1) == 0
                    && vector.iov_len & length.wrapping_sub(1) == 0
            }
        }
    }
}

/// The vectors of a transfer together with what keeps the memory behind them.
///
/// Until it is dropped, every vector points to memory that is mapped, that no reference points to, and that may
/// be written if the transfer is a read. Whoever lends the vectors to the kernel keeps the value until the kernel
/// is done.
pub(in crate::disk) struct Buffers<P> {
    vectors: Vec<iovec>,
    /// Vectors that are used up.
    used: usize,
    memory: Memory<P>,
}

/// What keeps the memory of a transfer.
enum Memory<P> {
    /// The host's own.
    Pinned { _pins: Vec<P> },
    /// Ours, aligned for any direct I/O; the host's data is copied.
    Bounced(Vec<Page>),
    /// Zeroes, only to be written to the medium.
    Zeroes,
}

/// A unit of bounce buffers, aligned for direct I/O on any medium.
#[derive(Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

const PAGE: usize = 4096;

/// What [`Buffers::zeroes`] points to, again and again.
static ZEROES: [Page; 16] = [const { Page([0; PAGE]) }; 16];

// SAFETY: the pointers are to memory that the value owns (`P` is Send, pages are), or to a static.
unsafe impl<P: Send> Send for Buffers<P> {}

impl<P: PinnedBytes> Buffers<P> {
    /// Lends the host's own memory; none if not all of it can be pinned and admitted.
    pub(super) fn pinned<H: PinHost<Pin = P>>(
        host: &mut H,
        data: &[Segment],
        direction: Direction,
        alignment: Alignment,
    ) -> Option<Buffers<P>> {
        let mut pins = Vec::with_capacity(data.len());
        let mut vectors: Vec<iovec> = Vec::with_capacity(data.len());
        for segment in data {
            let pin = host.pin(segment.iova?, segment.length, direction)?;
            let bytes = pin.bytes().filter(|bytes| bytes.len() == segment.length)?;
            // The mapping outlives the slice: it is the pin's.
            let start = bytes.ptr_guard_mut().as_ptr();
            let next = iovec { iov_base: start.cast(), iov_len: bytes.len() };
            pins.push(pin);
            match vectors.last_mut() {
                // Neighbours in the host's memory mostly are neighbours in ours.
                Some(last)
                    if last.iov_base.addr().checked_add(last.iov_len) == Some(next.iov_base.addr()) =>
                {
                    last.iov_len = last.iov_len.checked_add(next.iov_len)?;
                }
                _ => vectors.push(next),
            }
        }
        let fits = vectors.len() <= VECTORS && vectors.iter().all(|vector| alignment.admits(vector));
        fits.then_some(Buffers { vectors, used: 0, memory: Memory::Pinned { _pins: pins } })
    }
}

impl<P> Buffers<P> {
    /// A bounce buffer of `length` bytes.
    pub(super) fn bounced(length: usize) -> Buffers<P> {
        let mut pages = vec![Page([0; PAGE]); length.div_ceil(PAGE)];
        let vectors = vec![iovec { iov_base: pages.as_mut_ptr().cast(), iov_len: length }];
        Buffers { vectors, used: 0, memory: Memory::Bounced(pages) }
    }

    /// Zeroes to write, as many as `length`, at most [`ZERO_CHUNK`].
    pub(super) fn zeroes(length: u64) -> Buffers<P> {
        let mut left = usize::try_from(length.min(ZERO_CHUNK)).unwrap_or(0);
        let mut vectors = Vec::with_capacity(left.div_ceil(size_of_val(&ZEROES)));
        while left > 0 {
            let some = left.min(size_of_val(&ZEROES));
            vectors.push(iovec { iov_base: ZEROES.as_ptr().cast_mut().cast(), iov_len: some });
            left = left.saturating_sub(some);
        }
        Buffers { vectors, used: 0, memory: Memory::Zeroes }
    }

    /// The bounce buffer, whole; none if the host's own memory is used.
    pub(super) fn bounce(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Bounced(pages) => Some(pages.as_mut_slice().as_mut_bytes()),
            Memory::Pinned { .. } | Memory::Zeroes => None,
        }
    }

    /// The vectors that are still to be transferred.
    pub(super) fn vectors(&self) -> &[iovec] {
        self.vectors.get(self.used..).unwrap_or_default()
    }

    /// Bytes that are still to be transferred.
    pub(super) fn left(&self) -> usize {
        self.vectors().iter().fold(0, |sum, vector| sum.saturating_add(vector.iov_len))
    }

    /// Takes the first `count` bytes as transferred.
    pub(super) fn advance(&mut self, mut count: usize) {
        while let Some(vector) = self.vectors.get_mut(self.used) {
            if count < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(count);
                vector.iov_len = vector.iov_len.saturating_sub(count);
                return;
            }
            count = count.saturating_sub(vector.iov_len);
            self.used = self.used.saturating_add(1);
        }
    }
}
