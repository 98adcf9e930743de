//! What a device server implements, and the token by which it answers.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::errno::Errno;

use crate::dma;
use crate::limits;
use crate::server::Connection;
use crate::wire::{IrqFlags, IrqIndex, Offer, SetIrqs, SparseArea};

/// How a region is mapped by clients.
#[derive(Clone, Debug)]
pub struct Mappable {
    /// What to map; a copy of the descriptor goes to the client. `None`: each client has its own, as
    /// [`Device::file`] says.
    pub file: Option<Arc<OwnedFd>>,
    /// Where in the file the region begins.
    pub offset: u64,
    /// The parts that may be mapped, in bytes from the region's start, all multiples of the page size; none
    /// means the whole region.
    pub areas: Vec<SparseArea>,
    /// The pages of the MSI-X table are among them (VFIO_REGION_INFO_CAP_MSIX_MAPPABLE).
    pub msix: bool,
    /// What is different for a client whose guest would write the table itself.
    pub direct: Direct,
}

/// What a client may map whose guest writes the MSI-X table itself, and who said so in VERSION
/// ([`crate::wire::Capabilities::msix_direct`]).
#[derive(Clone, Debug, Default)]
pub enum Direct {
    /// What all others may: interrupts work that way.
    #[default]
    Granted,
    /// They do not: the pages of the table are kept from it.
    Withheld {
        /// Instead of [`Mappable::areas`]; none means that nothing of the region is mapped.
        areas: Vec<SparseArea>,
    },
}

/// An ioeventfd of a region (GET_REGION_IO_FDS): a write of `size` bytes at `offset` signals it instead of
/// becoming a message.
#[derive(Clone, Debug)]
pub struct Ioeventfd {
    /// Where in the region.
    pub offset: u64,
    /// The width of the write in bytes; 0 matches any.
    pub size: u64,
    /// Only this value matches, if there is one.
    pub datamatch: Option<u64>,
    /// What to signal.
    pub eventfd: Arc<OwnedFd>,
}

/// A region as clients see it. The default is one that does not exist: size 0.
#[derive(Clone, Debug, Default)]
pub struct Region {
    /// Its length in bytes.
    pub size: u64,
    /// Clients may read it.
    pub readable: bool,
    /// Clients may write it.
    pub writable: bool,
    /// What of it clients may map.
    pub mappable: Option<Mappable>,
    /// Its ioeventfds.
    pub ioeventfds: Vec<Ioeventfd>,
}

impl Region {
    /// One that clients read and write by messages.
    pub fn trapped(size: u64) -> Self {
        Self { size, readable: true, writable: true, ..Self::default() }
    }
}

/// A type of interrupt as clients see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Irq {
    /// How many vectors.
    pub count: u32,
    /// What can be done with them.
    pub flags: IrqFlags,
}

impl Irq {
    /// The interrupt pin, whose level [`crate::irq::Interrupts::set_line`] sets.
    pub const PIN: Self =
        Self { count: 1, flags: IrqFlags::EVENTFD.union(IrqFlags::MASKABLE).union(IrqFlags::AUTOMASKED) };

    /// Vectors of MSI or MSI-X, which [`crate::irq::Interrupts::trigger`] raises.
    pub fn messages(count: u32) -> Self {
        Self { count, flags: IrqFlags::EVENTFD.union(IrqFlags::MASKABLE) }
    }

    /// A notice to the client: ERR or REQ.
    pub const NOTICE: Self = Self { count: 1, flags: IrqFlags::EVENTFD };
}

/// What a device is, fixed for its lifetime.
#[derive(Clone, Debug)]
pub struct Description {
    /// By region index: BAR0 to BAR5, ROM, configuration space, VGA.
    pub regions: Vec<Region>,
    /// By interrupt index: INTx, MSI, MSI-X, ERR, REQ.
    pub irqs: Vec<Irq>,
    /// DEVICE_RESET works.
    pub resets: bool,
    /// The sizes of pages that clients' memory may have, a bit each, none below 4 KiB.
    pub pgsizes: u64,
    /// How many maps a client may have; QEMU takes 65535 at most.
    pub max_dma_maps: u32,
    /// Where clients' DMA may lie, for those who ask: first and last address of each range, ascending. None says that
    /// it does not matter.
    pub iova_ranges: Vec<(u64, u64)>,
}

/// The region of the configuration space, behind those of BAR 0 to 5 and of the ROM (linux/vfio.h).
pub const CONFIG: u32 = 7;

impl Description {
    /// A PCI device that can be reset, with all types of regions and interrupts that PCI devices have, and none of
    /// them yet but ERR and REQ.
    pub fn pci() -> Self {
        Self {
            regions: vec![Region::default(); 9],
            irqs: vec![Irq::default(), Irq::default(), Irq::default(), Irq::NOTICE, Irq::NOTICE],
            resets: true,
            pgsizes: limits::PAGE_SIZES,
            max_dma_maps: limits::DMA_MAPS,
            iova_ranges: Vec::new(),
        }
    }

    /// What a client is told in VERSION.
    pub(crate) fn offer(&self) -> Offer {
        let withheld = |region: &Region| {
            region
                .mappable
                .as_ref()
                .is_some_and(|mappable| matches!(mappable.direct, Direct::Withheld { .. }))
        };
        Offer {
            pgsizes: self.pgsizes,
            max_dma_maps: self.max_dma_maps,
            msix_direct: !self.regions.iter().any(withheld),
            iova_ranges: self.iova_ranges.clone(),
        }
    }

    /// With a region; one beyond those that there are is left out.
    #[must_use]
    pub fn region(mut self, index: u32, region: Region) -> Self {
        if let Some(slot) = self.regions.get_mut(index as usize) {
            *slot = region;
        }
        self
    }

    /// With a type of interrupt; one beyond those that there are is left out.
    #[must_use]
    pub fn irq(mut self, index: IrqIndex, irq: Irq) -> Self {
        if let Some(slot) = self.irqs.get_mut(index.0 as usize) {
            *slot = irq;
        }
        self
    }
}

/// A command's answer, due some time. Dropping it unanswered answers EIO, so that no reply is ever lost.
///
/// The session executes commands in order, each after the one before was answered, and gives up on a device
/// that takes longer than [`crate::limits::REPLY`].
#[must_use = "the client waits for the answer"]
pub struct Reply<T> {
    send: Option<Answer<T>>,
}

type Answer<T> = Box<dyn FnOnce(Result<T, Errno>) + Send>;

impl<T> Reply<T> {
    /// An answer that goes to `send`.
    pub fn new(send: impl FnOnce(Result<T, Errno>) + Send + 'static) -> Self {
        Self { send: Some(Box::new(send)) }
    }

    /// Answers, from any thread.
    pub fn send(mut self, result: Result<T, Errno>) {
        if let Some(send) = self.send.take() {
            send(result);
        }
    }

    /// Success.
    pub fn ok(self, value: T) {
        self.send(Ok(value));
    }

    /// Failure.
    pub fn fail(self, errno: Errno) {
        self.send(Err(errno));
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(send) = self.send.take() {
            send(Err(Errno::EIO));
        }
    }
}

impl<T> std::fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("answered", &self.send.is_none()).finish()
    }
}

/// A device behind a vfio-user socket.
///
/// The session calls these from its own thread, one command after the other, in the client's order. Every
/// command but the notices carries a [`Reply`], which may be kept and answered later from any thread; the next
/// command comes when it was. Offsets and lengths were checked against [`Description`].
pub trait Device: Send + Sync {
    /// What the device is.
    fn description(&self) -> &Description;

    /// What the present client maps of `region`, where [`Mappable::file`] says that each has its own: a client that
    /// has left may still write to what it has mapped.
    fn file(&self, region: u32) -> Option<Arc<OwnedFd>> {
        let _ = region;
        None
    }

    /// A client is there. The connection is how the device reaches its memory and its interrupts; keep it until
    /// [`Device::detach`].
    fn attach(&self, connection: &Arc<Connection>);

    /// The client is gone. Memory and interrupts stay usable until this returns, and nothing of the connection
    /// may be used after; work that is still under way keeps what it has pinned.
    fn detach(&self);

    /// REGION_READ: `length` bytes (not 0).
    fn read(&self, region: u32, offset: u64, length: usize, reply: Reply<Vec<u8>>);

    /// REGION_WRITE (of at least one byte), posted or not, and each entry of a REGION_WRITE_MULTI.
    fn write(&self, region: u32, offset: u64, data: &[u8], reply: Reply<()>);

    /// DEVICE_RESET; answered when the device is in its initial state and accesses no memory.
    fn reset(&self, reply: Reply<()>);

    /// A DMA_MAP: the region is already in the table. A device that must prepare it (pin it, map it in an IOMMU)
    /// answers when that is done; an error takes it out of the table again.
    fn dma_map(&self, region: &Arc<dma::Entry<dma::Region>>, reply: Reply<()>) {
        let _ = region;
        reply.ok(());
    }

    /// A DMA_UNMAP: the region has left the table. The client is answered when the last reference to it is
    /// dropped, so a device only has to let go: its threads refresh their views, and who keeps the region
    /// (an IOMMU mapping, an I/O) answers late by dropping it late.
    fn dma_unmap(&self, region: &Arc<dma::Entry<dma::Region>>);

    /// SET_IRQS. The default keeps the eventfds in the connection, for a device that raises its interrupts by
    /// itself.
    fn set_irqs(
        &self,
        connection: &Connection,
        request: &SetIrqs<'_>,
        eventfds: Vec<OwnedFd>,
        reply: Reply<()>,
    ) {
        reply.send(connection.interrupts().set(request, eventfds).map_err(|error| {
            tracing::debug!(%error, "SET_IRQS refused");
            Errno::EINVAL
        }));
    }
}
