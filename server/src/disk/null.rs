//! The disk that moves no data.

use outboard_nvme::controller::{Geometry, Submission};

/// Completes everything at once and touches neither a medium nor host memory.
pub(super) struct NullDisk {
    geometry: Geometry,
}

impl NullDisk {
    pub(super) fn new(block_shift: u32, blocks: u64, read_only: bool) -> NullDisk {
        NullDisk {
            geometry: Geometry { block_shift, blocks, read_only, volatile_cache: false, deallocates: false },
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[inline]
    pub(super) fn submit(&self) -> Submission {
        Submission::Done(Ok(()))
    }
}
