//! The Timestamp feature (Base Specification 1.4, section 5.21.1.14).

use std::time::Instant;

use zerocopy::little_endian::U64;

/// Milliseconds since 1970, as the host set them, or since the last reset.
#[derive(Clone, Debug)]
pub(super) struct Timestamp {
    origin: Origin,
    milliseconds: u64,
    since: Instant,
}

/// Where the value comes from: bits 3:1 of byte 6.
#[derive(Clone, Copy, Debug)]
enum Origin {
    Reset = 0,
    Host = 1,
}

const MASK: u64 = (1 << 48) - 1;

impl Timestamp {
    /// After a reset.
    pub(super) fn new() -> Self {
        Self { origin: Origin::Reset, milliseconds: 0, since: Instant::now() }
    }

    /// The host's Set Features.
    pub(super) fn set(&mut self, data: U64) {
        *self = Self { origin: Origin::Host, milliseconds: data.get() & MASK, since: Instant::now() };
    }

    /// The data of Get Features.
    pub(super) fn get(&self) -> U64 {
        let elapsed = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(MASK);
        U64::new((self.milliseconds.wrapping_add(elapsed) & MASK) | (self.origin as u64) << 49)
    }
}
