//! What a drive is made of.

use crate::disk::NamespaceSpec;

/// How doorbells reach the drive: chosen for the whole device, since QEMU sends no posted write to a device of
/// which anything can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DoorbellMode {
    /// Clients map the doorbell pages, and a thread looks at them: no message per I/O, and a timer when idle.
    Mapped,
    /// Clients map the whole BAR: registers, doorbells and MSI-X table. For those whose pages are larger than what
    /// lies between, and those that do not emulate the table.
    WholeBar,
    /// Nothing is mapped; doorbells are posted messages, few once the driver has set up shadow doorbells, and
    /// the drive sleeps when idle.
    Posted,
}

/// What a drive is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// The namespaces, in the order of their identifiers, which begin at 1.
    pub namespaces: Vec<NamespaceSpec>,
    /// See there.
    pub doorbells: DoorbellMode,
    /// CAP.DSTRD: doorbells are `4 << doorbell_stride` bytes apart; 0 to 15, and 0 if they are posted.
    pub doorbell_stride: u8,
    /// I/O queue pairs, at least 1.
    pub queue_pairs: u16,
    /// The most entries of a queue, at least 2 (CAP.MQES + 1).
    pub queue_entries: u32,
    /// At most 20 ASCII characters.
    pub serial: String,
    /// At most 40 ASCII characters.
    pub model: String,
}
