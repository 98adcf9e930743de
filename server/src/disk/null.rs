//! A disk that moves no data.

use outboard_nvme::controller::Geometry;

/// See the module.
pub struct Null {
    geometry: Geometry,
}

impl Null {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self { geometry }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }
}
