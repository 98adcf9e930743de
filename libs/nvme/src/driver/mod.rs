//! Uses an NVMe drive, polled: no interrupts, no threads, no allocation while I/O runs.
//!
//! [`Drive`] resets and enables the controller, speaks to its admin queue and makes [`QueuePair`]s, each of
//! which belongs to one thread. How registers are reached and where memory comes from is the caller's:
//! [`Registers`], [`Doorbell`], [`Memory`] and [`Block`]. Whatever the device answers, nothing here panics, and
//! every wait ends.
//!
//! What it does not do: interrupts, asynchronous events, retries, metadata, memory pages other than 4 KiB. It does not free what a device may still reach: disable the drive before its memory goes.

mod command;
mod device;
mod drive;
mod error;
pub mod limits;
mod prp;
mod queue;
mod sgl;
mod shadow;
mod slots;

pub use command::Command;
pub use device::{Block, Doorbell, Memory, Registers};
pub use drive::{Drive, Namespace, Options};
pub use error::{CommandError, Error, SubmitError};
pub use prp::{DataPointer, Fragment, PrpError};
pub use queue::{Completion, QueuePair};
pub use sgl::SglError;
pub use slots::CommandId;
