//! NVMe as a language, spoken from both sides.
//!
//! * [`spec`]: the structures and numbers of the NVM Express Base Specification 1.4, no behaviour.
//! * [`controller`]: plays a drive: registers, queues, commands. It has no threads and no sockets; whoever
//!   owns it calls [`controller::Controller::poll`].
//! * [`driver`]: uses a drive, polled. The two are tested against each other without any VM.
//!
//! What it does not do: it knows no PCI (configuration space and the MSI-X table belong to whoever plugs the
//! controller in), no transport, and no storage: disks come in through [`controller::Disk`].

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

pub mod controller;
pub mod driver;
pub mod spec;

/// An address as the controller sees the host's memory (PRP entries, queue bases), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

/// A logical block address, in blocks of the namespace's LBA size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

/// A queue's identifier; 0 is the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u16);

/// A namespace identifier; 0 is none, 0xffffffff is all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nsid(pub u32);
