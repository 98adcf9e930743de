//! PCI as a device shows it: configuration space with capabilities and BARs, and the MSI-X table.
//!
//! For device servers, whose clients read and write the space by messages of any width.
//!
//! What it does not do: no bridges (header type 1), no expansion ROM, no extended capabilities; and it accesses
//! no memory and raises no interrupt: [`ConfigSpace::write`] says what a write means, and the device does it.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

mod bar;
mod capability;
mod config;
pub mod msix;
mod registers;

pub use bar::{Bar, BarIndex, BarKind};
pub use capability::{Express, Msix, PowerManagement, PowerState, Vendor};
pub use config::{BuildError, Builder, ConfigSpace, Effect, Identity};
pub use msix::{MsixTable, Vector};
