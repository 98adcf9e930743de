//! The disk that moves no data.

use outboard_nvme::controller::{Geometry, Operation, Submission};

use super::lba_formats;

/// Completes everything at once and touches neither a medium nor host memory: all data compare equal.
pub(super) struct NullDisk {
    geometry: Geometry,
}

impl NullDisk {
    pub(super) fn new(block_shift: u32, blocks: u64, read_only: bool) -> NullDisk {
        let size = blocks.checked_shl(block_shift).unwrap_or(0);
        NullDisk {
            geometry: Geometry {
                block_shift,
                formats: lba_formats(9, size),
                blocks,
                read_only,
                volatile_cache: false,
                deallocates: false,
            },
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[inline]
    pub(super) fn submit(&mut self, operation: Operation<'_>) -> Submission {
        if let Operation::Format { block_shift } = operation {
            self.geometry = self.geometry.formatted(block_shift);
        }
        Submission::Done(Ok(()))
    }
}
