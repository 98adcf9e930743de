//! Does what a command says.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::sys::stat::{SFlag, fstat};
use nix::sys::statfs::{FUSE_SUPER_MAGIC, fstatfs};

use super::Connection;
use crate::device::{Device, Direct, Mappable, Region, Reply};
use crate::dma;
use crate::limits;
use crate::memory::Mapping;
use crate::session::server::{Request, Ticket};
use crate::wire::{
    Backing, Capabilities, Command, CommandCode, DeviceFlags, DeviceInfo, DmaMap, DmaUnmap, IoFd, IoFdKind,
    IoFds, IrqInfo, Query, RegionAccess, RegionCapability, RegionFlags, RegionInfo, RegionWrites,
    Reply as WireReply, SparseArea, UnmapTarget,
};

/// Executes a command, or begins to: its answer finds its own way.
pub(super) fn execute(connection: &Arc<Connection>, device: &dyn Device, mut request: Request) {
    let descriptors = request.take_descriptors();
    let ticket = request.ticket;
    let Some(command) = request.command(descriptors.len()) else {
        return connection.finish(ticket, Err(Errno::EINVAL));
    };
    let description = device.description();
    match command {
        Command::GetInfo { .. } => {
            let mut flags = DeviceFlags::PCI;
            if description.resets {
                flags = flags.union(DeviceFlags::RESET);
            }
            let info = DeviceInfo {
                flags,
                regions: count(description.regions.len()),
                interrupts: count(description.irqs.len()),
            };
            connection.finish(ticket, Ok((WireReply::Info(info), vec![])));
        }
        Command::GetRegionInfo(query) => {
            let direct = connection.session().client().is_some_and(Capabilities::writes_msix);
            let answer =
                region(device, query.index).and_then(|region| region_info(device, region, query, direct));
            connection.finish(ticket, answer);
        }
        Command::GetRegionIoFds(query) => {
            let limit = connection.session().client().map_or(1, Capabilities::descriptors);
            let answer = region(device, query.index)
                .and_then(|region| io_fds(region, query, limit.min(limits::DESCRIPTORS)));
            connection.finish(ticket, answer);
        }
        Command::GetIrqInfo(query) => {
            let irq = description.irqs.get(query.index as usize).ok_or(Errno::EINVAL);
            let info = irq.map(|irq| IrqInfo {
                index: crate::wire::IrqIndex(query.index),
                flags: irq.flags,
                count: irq.count,
            });
            connection.finish(ticket, info.map(|info| (WireReply::IrqInfo(info), vec![])));
        }
        Command::SetIrqs(set) => {
            let reply = connection.done(ticket, CommandCode::DEVICE_SET_IRQS);
            device.set_irqs(connection, &set, descriptors, reply);
        }
        Command::DmaMap(map) => dma_map(connection, device, ticket, &map, descriptors),
        Command::DmaUnmap(unmap) => dma_unmap(connection, device, ticket, unmap),
        Command::RegionRead(access) => read(connection, device, ticket, access),
        Command::RegionWrite(write) => {
            let access = write.access();
            match writable(device, &access) {
                Err(errno) => connection.finish(ticket, Err(errno)),
                Ok(()) => {
                    let answer = WireReply::RegionWrite(access);
                    let reply = connection.reply(ticket, |()| answer);
                    if write.data.is_empty() {
                        return reply.ok(());
                    }
                    device.write(access.region, access.offset, write.data, reply);
                }
            }
        }
        Command::RegionWriteMulti(writes) => write_multi(connection, device, ticket, &writes),
        Command::Reset if description.resets => {
            device.reset(connection.done(ticket, CommandCode::DEVICE_RESET));
        }
        // DMA messages go the other way; migration is not served, and EINVAL is what QEMU takes for that.
        Command::Version(_)
        | Command::Reset
        | Command::DmaRead(_)
        | Command::DmaWrite(_)
        | Command::Migration { .. } => connection.finish(ticket, Err(Errno::EINVAL)),
    }
}

type Answer<'a> = Result<(WireReply<'a>, Vec<OwnedFd>), Errno>;

impl Connection {
    /// The token for an answer that carries what `encode` makes of the device's result.
    fn reply<T: 'static>(
        self: &Arc<Self>,
        ticket: Ticket,
        encode: impl FnOnce(T) -> WireReply<'static> + Send + 'static,
    ) -> Reply<T> {
        let connection = self.clone();
        Reply::new(move |result: Result<T, Errno>| {
            connection.finish(ticket, result.map(|value| (encode(value), vec![])));
        })
    }

    /// The token for "done".
    fn done(self: &Arc<Self>, ticket: Ticket, code: CommandCode) -> Reply<()> {
        self.reply(ticket, move |()| WireReply::Done(code))
    }
}

fn region(device: &dyn Device, index: u32) -> Result<&Region, Errno> {
    device.description().regions.get(index as usize).ok_or(Errno::EINVAL)
}

/// What of a region a client may map, and whether the MSI-X table is among it; `direct`: its guest would write that.
fn offered(mappable: &Mappable, direct: bool) -> Option<(&[SparseArea], bool)> {
    match &mappable.direct {
        Direct::Withheld { areas } if direct => (!areas.is_empty()).then_some((areas, false)),
        _ => Some((&mappable.areas, mappable.msix)),
    }
}

fn region_info(device: &dyn Device, region: &Region, query: Query, direct: bool) -> Answer<'static> {
    let mappable = region.mappable.as_ref();
    let mappable = mappable.and_then(|mappable| Some((mappable, offered(mappable, direct)?)));
    let mut flags = RegionFlags::default();
    for (set, flag) in [
        (region.readable, RegionFlags::READ),
        (region.writable, RegionFlags::WRITE),
        (mappable.is_some(), RegionFlags::MMAP),
    ] {
        if set {
            flags = flags.union(flag);
        }
    }
    let mut info = RegionInfo { index: query.index, flags, size: region.size, ..RegionInfo::default() };
    let mut descriptors = Vec::new();
    if let Some((Mappable { file, offset, .. }, (areas, msix))) = mappable {
        info.file_offset = *offset;
        if !areas.is_empty() {
            info.capabilities.push(RegionCapability::SparseMmap(areas.to_vec()));
        }
        if msix {
            info.capabilities.push(RegionCapability::MsixMappable);
        }
        // With the reply that the client can use, not with the one that only says how much room it needs.
        if info.encoded_size() <= query.argsz {
            let own = if file.is_none() { device.file(query.index) } else { None };
            descriptors.push(copy(file.as_ref().or(own.as_ref()).ok_or(Errno::EIO)?)?);
        }
    }
    Ok((WireReply::region_info(info, query.argsz), descriptors))
}

/// At most `limit` descriptors, which is what the client takes with one message.
fn io_fds(region: &Region, query: Query, limit: usize) -> Answer<'static> {
    if region.size == 0 {
        return Err(Errno::EINVAL);
    }
    let mut descriptors: Vec<&Arc<OwnedFd>> = Vec::new();
    let entries = region.ioeventfds.iter().map(|ioeventfd| {
        let known = descriptors.iter().position(|descriptor| Arc::ptr_eq(descriptor, &ioeventfd.eventfd));
        let descriptor = known.unwrap_or_else(|| {
            descriptors.push(&ioeventfd.eventfd);
            descriptors.len().saturating_sub(1)
        });
        IoFd {
            offset: ioeventfd.offset,
            size: ioeventfd.size,
            descriptor: count(descriptor),
            kind: IoFdKind::IOEVENTFD,
            // KVM_IOEVENTFD_FLAG_DATAMATCH
            flags: u32::from(ioeventfd.datamatch.is_some()),
            datum: ioeventfd.datamatch.unwrap_or(0),
            shadow: None,
        }
    });
    let fds = IoFds::new(query.index, entries.collect());
    if fds.encoded_size() > query.argsz {
        descriptors.clear();
    }
    if descriptors.len() > limit {
        return Err(Errno::E2BIG);
    }
    let descriptors = descriptors.into_iter().map(|eventfd| copy(eventfd)).collect::<Result<_, _>>()?;
    Ok((WireReply::region_io_fds(fds, query.argsz), descriptors))
}

fn copy(descriptor: &OwnedFd) -> Result<OwnedFd, Errno> {
    descriptor.try_clone().map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

/// Whether all of an access lies in its region.
fn within(region: &Region, access: &RegionAccess) -> bool {
    access.offset.checked_add(access.count.into()).is_some_and(|end| end <= region.size)
}

fn writable(device: &dyn Device, access: &RegionAccess) -> Result<(), Errno> {
    let region = region(device, access.region)?;
    if region.writable && within(region, access) { Ok(()) } else { Err(Errno::EINVAL) }
}

fn read(connection: &Arc<Connection>, device: &dyn Device, ticket: Ticket, access: RegionAccess) {
    let RegionAccess { offset, region: index, count } = access;
    let length = count as usize;
    match region(device, index) {
        Ok(region) if region.readable && within(region, &access) => {}
        _ => return connection.finish(ticket, Err(Errno::EINVAL)),
    }
    let connection = connection.clone();
    let reply = Reply::new(move |result: Result<Vec<u8>, Errno>| {
        let data = result.and_then(|data| if data.len() == length { Ok(data) } else { Err(Errno::EIO) });
        let answer = data
            .as_ref()
            .map(|data| (WireReply::RegionRead { offset, region: index, data }, vec![]))
            .map_err(|&errno| errno);
        connection.finish(ticket, answer);
    });
    if length == 0 {
        return reply.ok(vec![]);
    }
    device.read(index, offset, length, reply);
}

/// The writes of a REGION_WRITE_MULTI, which are handed out in order; the last one that is answered answers.
struct Batch {
    connection: Arc<Connection>,
    ticket: Ticket,
    done: AtomicU64,
}

impl Drop for Batch {
    fn drop(&mut self) {
        let count = self.done.load(Ordering::Relaxed);
        self.connection.finish(self.ticket, Ok((WireReply::RegionWriteMulti { count }, vec![])));
    }
}

/// The answer counts the writes that were done; those after one that is out of place are not tried.
fn write_multi(connection: &Arc<Connection>, device: &dyn Device, ticket: Ticket, writes: &RegionWrites<'_>) {
    let batch = Arc::new(Batch { connection: connection.clone(), ticket, done: AtomicU64::new(0) });
    for write in writes.iter() {
        let access = write.access();
        if let Err(errno) = writable(device, &access) {
            tracing::debug!(?access, %errno, "a write of a REGION_WRITE_MULTI is refused");
            break;
        }
        let batch = batch.clone();
        let reply = Reply::new(move |result: Result<(), Errno>| {
            if result.is_ok() {
                batch.done.fetch_add(1, Ordering::Relaxed);
            }
        });
        device.write(access.region, access.offset, write.data, reply);
    }
}

fn dma_map(
    connection: &Arc<Connection>,
    device: &dyn Device,
    ticket: Ticket,
    map: &DmaMap,
    descriptors: Vec<OwnedFd>,
) {
    let inserted = client_memory(connection, map, descriptors).and_then(|region| {
        connection.memory.insert(map.address, map.size, region).map_err(|error| {
            tracing::debug!(%error, "DMA_MAP refused");
            error.errno()
        })
    });
    let region = match inserted {
        Ok(region) => region,
        Err(errno) => return connection.finish(ticket, Err(errno)),
    };
    let (address, size) = (map.address, map.size);
    let reply = Reply::new({
        let connection = connection.clone();
        move |result: Result<(), Errno>| {
            if result.is_err() {
                connection.memory.remove(address, size);
            }
            connection.finish(ticket, result.map(|()| (WireReply::Done(CommandCode::DMA_MAP), vec![])));
        }
    });
    device.dma_map(&region, reply);
}

/// The memory that a DMA_MAP is about. Its descriptor is closed when this returns: a client with thousands of
/// maps of one file does not cost us thousands of descriptors.
fn client_memory(
    connection: &Connection,
    map: &DmaMap,
    descriptors: Vec<OwnedFd>,
) -> Result<dma::Region, Errno> {
    let offset = match map.backing {
        Backing::Messages => return Ok(dma::Region::by_messages(map.access)),
        // Reading and writing a file does the same as mapping it, and the kernel tells if it cannot be mapped.
        Backing::Mapping { offset } | Backing::File { offset } => offset,
    };
    let file = descriptors.first().ok_or(Errno::EINVAL)?;
    let stat = fstat(file)?;
    let end = offset.checked_add(map.size).ok_or(Errno::EINVAL)?;
    // Only of a regular file (memfd, shm, hugetlbfs) can be told that the memory is there: beyond its end is
    // SIGBUS.
    if stat.st_mode & SFlag::S_IFMT.bits() != SFlag::S_IFREG.bits()
        || u64::try_from(stat.st_size).is_ok_and(|length| end > length)
    {
        tracing::warn!(?map, length = stat.st_size, "DMA_MAP of more than its file holds, or of no file");
        return Err(Errno::EINVAL);
    }
    // Whoever touches it waits for a process of the client's choice, and may hold what all other mappings of this
    // process need meanwhile.
    if fstatfs(file)?.filesystem_type() == FUSE_SUPER_MAGIC {
        tracing::warn!(?map, "DMA_MAP of a file that another process makes up (FUSE)");
        return Err(Errno::EINVAL);
    }
    let length = usize::try_from(map.size).map_err(|_| Errno::ENOMEM)?;
    let mapping =
        Mapping::watched(file, offset, length, map.access, connection.alarm.clone()).map_err(|error| {
            tracing::warn!(%error, ?map, "DMA_MAP refused");
            match error.kind() {
                io::ErrorKind::StorageFull => Errno::ENOSPC,
                _ => error.raw_os_error().map_or(Errno::EINVAL, Errno::from_raw),
            }
        })?;
    Ok(dma::Region::mapped(mapping, map.access))
}

fn dma_unmap(connection: &Arc<Connection>, device: &dyn Device, ticket: Ticket, unmap: DmaUnmap) {
    let removed = match unmap.target {
        UnmapTarget::Range { address, size } => {
            connection.memory.remove(address, size).map(|region| vec![region]).ok_or(Errno::ENOENT)
        }
        UnmapTarget::All => Ok(connection.memory.clear()),
        UnmapTarget::RangeWithDirtyBitmap { .. } => Err(Errno::EINVAL),
    };
    let removed = match removed {
        Ok(removed) => removed,
        Err(errno) => return connection.finish(ticket, Err(errno)),
    };
    // Owned by every region that was removed: the last one to be released takes it along, and that answers.
    let answer = Arc::new(Released { connection: connection.clone(), ticket, unmap });
    for region in removed {
        let answer = answer.clone();
        region.value.on_release(move || drop(answer));
        device.dma_unmap(&region);
    }
}

struct Released {
    connection: Arc<Connection>,
    ticket: Ticket,
    unmap: DmaUnmap,
}

impl Drop for Released {
    fn drop(&mut self) {
        self.connection.finish(self.ticket, Ok((WireReply::DmaUnmap(self.unmap), vec![])));
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
