//! The device server.
//!
//! * [`nvme`]: an NVMe drive in software, behind vfio-user; [`disk`]: where its blocks are.
//! * [`vfio`]: a physical function, owned through the kernel.
//! * [`control`]: clients that come and go, signals.
//! * [`cli`]: the command line; [`config`]: a file of several drives; [`snippet`]: what VMMs are told.
//! * [`log`]: what it says while it runs.
//!
//! What it does not do: it talks to no VMM but by vfio-user; it does not daemonize; it serves a drive to one client
//! at a time.
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

pub mod cli;
pub mod config;
pub mod control;
pub mod disk;
pub mod log;
pub mod nvme;
pub mod snippet;
pub mod vfio;
