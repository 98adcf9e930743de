//! The VMM: a vfio-user client.
//!
//! So far it drives NVMe drives from user space, without a guest: [`mod@bench`] measures one, [`demo`] shows that
//! the whole works. What it does not do yet: run a guest.

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

pub mod bench;
pub mod demo;
pub mod drive;
pub mod limits;
