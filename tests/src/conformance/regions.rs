//! What a server says of its device and its regions.

use std::os::fd::OwnedFd;

use outboard_vfio_user::memory::{Access, Mapping};
use outboard_vfio_user::wire::{
    Command, CommandCode, DeviceFlags, IoFdKind, IrqAction, IrqData, IrqIndex, Query, RegionCapability,
    RegionFlags, RegionInfo, RegionWrite, Reply, SetIrqs, SparseArea,
};

use super::client::{Client, by_messages, unmap};
use super::config::{self, CONFIG};
use super::{Check, Checked, EINVAL, ENOSYS, Stop, Subject, dwords, failed, holds, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 13,
        title: "replies fit the buffers that QEMU has for them",
        text: "QEMU: a reply is no longer than its request, if nothing else was said",
        run: reply_sizes,
    },
    Check {
        point: 22,
        title: "GET_INFO takes an argsz of 16 or more",
        text: "libvfio-user sends 16, rust-vmm 32",
        run: device_information,
    },
    Check {
        point: 23,
        title: "a region index that does not exist is EINVAL, one that is not used has size 0",
        text: "libvfio-user",
        run: region_indexes,
    },
    Check {
        point: 24,
        title: "without room for the capabilities: how much they need, and no descriptor",
        text: "libvfio-user test_device_get_region_info_small_argsz",
        run: no_room,
    },
    Check {
        point: 25,
        title: "with room: capabilities and one descriptor, in the size that was told",
        text: "libvfio-user; rust-vmm asserts it",
        run: with_room,
    },
    Check {
        point: 26,
        title: "a request may be longer than its fields",
        text: "SPDK sends 4064 bytes",
        run: padded_request,
    },
    Check {
        point: 27,
        title: "areas that can be mapped, without the MSI-X table unless that is announced",
        text: "QEMU maps them as they are; SPDK wants an NVMe drive's doorbells in one",
        run: areas,
    },
    Check {
        point: 28,
        title: "the chain of capabilities leads forward and stays inside",
        text: "QEMU and Cloud Hypervisor follow it",
        run: chains,
    },
    Check {
        point: 29,
        title: "a region is MMAP only with a descriptor that can be mapped",
        text: "Cloud Hypervisor unwraps it",
        run: mappable,
    },
    Check {
        point: 31,
        title: "a PCI device with 8 to 10 regions",
        text: "QEMU wants 8 and the PCI flag; SPDK has room for 10",
        run: counts,
    },
    Check {
        point: 32,
        title: "I/O descriptors: refused, too many for the room, listed, each sent once",
        text: "libvfio-user test_device_get_region_io_fds",
        run: io_descriptors,
    },
];

const E2BIG: u32 = nix::errno::Errno::E2BIG as u32;

/// The room for any answer.
const ROOM: u32 = 4096;

/// Every region that exists: its index, all that is said of it, and the descriptors.
fn regions(client: &mut Client) -> Checked<Vec<(u32, RegionInfo, Vec<OwnedFd>)>> {
    let mut regions = Vec::new();
    for index in 0..client.info()?.regions.min(100) {
        let (info, _, descriptors) = client.region_info(index, ROOM)?;
        regions.push((index, info, descriptors));
    }
    regions.retain(|(_, info, _)| info.size > 0);
    Ok(regions)
}

/// The first region that has capabilities.
fn with_capabilities(client: &mut Client) -> Checked<(u32, u32)> {
    for index in 0..client.info()?.regions.min(100) {
        let (_, argsz, _) = client.region_info(index, 32)?;
        if argsz > 32 {
            return Ok((index, argsz));
        }
    }
    Err(Stop::NotOffered("no region has capabilities"))
}

fn reply_sizes(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let set = SetIrqs {
        index: IrqIndex::ERR,
        start: 0,
        count: 1,
        data: IrqData::Unbind,
        action: IrqAction::Trigger,
    };
    let line = client.read(CONFIG, config::INTERRUPT_LINE, 1)?;
    for (command, most) in [
        (Command::GetInfo { argsz: 16 }, 32),
        (Command::GetIrqInfo(Query { argsz: 16, index: 2 }), 32),
        (Command::DmaMap(by_messages(0, 0x1000)), 48),
        (unmap(0, 0x1000), 40),
        (Command::SetIrqs(set), 36),
        (
            Command::RegionWrite(RegionWrite { offset: config::INTERRUPT_LINE, region: CONFIG, data: &line }),
            33,
        ),
        (Command::Reset, 16),
    ] {
        match client.call(&command, &[]) {
            Ok(reply) if reply.body.len() + 16 > most => {
                return client.wrong(&format!("at most {most} bytes"), format!("{}", reply.body.len() + 16));
            }
            Ok(_) | Err(Stop::Refused { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

fn device_information(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for argsz in [0, 15] {
        let result = client.call_raw(CommandCode::DEVICE_GET_INFO, &dwords([argsz, 0, 0, 0]), &[]);
        refused(result, &format!("GET_INFO with an argsz of {argsz}"), &[EINVAL])?;
    }
    for argsz in [16, 32] {
        let reply = client.call_raw(CommandCode::DEVICE_GET_INFO, &dwords([argsz, 0, 0, 0]), &[])?;
        same(format!("GET_INFO with an argsz of {argsz}"), reply.body.len(), 16)?;
    }
    Ok(())
}

fn region_indexes(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let count = client.info()?.regions;
    for index in [count, count + 1, u32::MAX] {
        refused(client.region_info(index, 32), &format!("GET_REGION_INFO of region {index}"), &[EINVAL])?;
    }
    for index in 0..count {
        let (info, _, descriptors) = client.region_info(index, ROOM)?;
        if info.size == 0 {
            let rest = (info.flags.0, info.capabilities.len(), descriptors.len());
            same(format!("GET_REGION_INFO of region {index}, which has size 0"), rest, (0, 0, 0))?;
        }
    }
    Ok(())
}

fn query(argsz: u32, index: u32) -> Vec<u8> {
    dwords([argsz, 0, index, 0, 0, 0, 0, 0])
}

fn no_room(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let code = CommandCode::DEVICE_GET_REGION_INFO;
    for argsz in [0, 31] {
        let result = client.call_raw(code, &query(argsz, CONFIG), &[]);
        refused(result, &format!("GET_REGION_INFO with an argsz of {argsz}"), &[EINVAL])?;
    }
    let (index, needed) = with_capabilities(&mut client)?;
    for argsz in [32, needed - 1] {
        let reply = client.call_raw(code, &query(argsz, index), &[])?;
        let dword = |at: usize| {
            reply.body.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes)
        };
        let came = (reply.body.len(), dword(0), dword(4) & 8, dword(12), reply.descriptors.len());
        same(format!("GET_REGION_INFO with an argsz of {argsz}"), came, (32, needed, 0, 0, 0))?;
    }
    Ok(())
}

fn with_room(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let (index, needed) = with_capabilities(&mut client)?;
    let mut first = None;
    for argsz in [needed, needed + 1, ROOM] {
        let reply = client.call_raw(CommandCode::DEVICE_GET_REGION_INFO, &query(argsz, index), &[])?;
        let sent = format!("GET_REGION_INFO with an argsz of {argsz}, where {needed} are needed");
        same(&sent, reply.body.len(), needed as usize)?;
        let mapped = reply.body.get(4).is_some_and(|flags| flags & 4 != 0);
        same(&sent, reply.descriptors.len(), usize::from(mapped))?;
        let body = first.get_or_insert_with(|| reply.body.clone());
        same(&sent, &reply.body, body)?;
    }
    Ok(())
}

fn padded_request(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for index in 0..client.info()?.regions.min(10) {
        let mut body = query(4064, index);
        let short = client.call_raw(CommandCode::DEVICE_GET_REGION_INFO, &body, &[])?;
        body.resize(4064, 0);
        let long = client.call_raw(CommandCode::DEVICE_GET_REGION_INFO, &body, &[])?;
        same(format!("GET_REGION_INFO of region {index} in 4064 bytes"), long.body, short.body)?;
    }
    Ok(())
}

fn page_size() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().map_or(4096, |size| size as u64)
}

/// What of a region can be mapped.
fn mapped_areas(info: &RegionInfo) -> Vec<SparseArea> {
    let sparse = info.capabilities.iter().find_map(|capability| match capability {
        RegionCapability::SparseMmap(areas) => Some(areas.clone()),
        _ => None,
    });
    sparse.unwrap_or_else(|| vec![SparseArea { offset: 0, size: info.size }])
}

fn areas(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let msix = config::msix(&mut client)?;
    let class = config::dword(&mut client, 8)? >> 8;
    let regions: Vec<_> = regions(&mut client)?
        .into_iter()
        .filter(|(_, info, _)| info.flags.contains(RegionFlags::MMAP))
        .collect();
    if regions.is_empty() {
        return Err(Stop::NotOffered("no region can be mapped"));
    }
    let page = page_size();
    for (index, info, _) in regions {
        let mut areas = mapped_areas(&info);
        areas.sort_by_key(|area| area.offset);
        let sent = format!("GET_REGION_INFO of region {index}, whose areas are {areas:?}");
        let aligned =
            areas.iter().all(|area| area.offset % page == 0 && area.size % page == 0 && area.size > 0);
        holds(aligned, &sent, "whole pages", page)?;
        let inside =
            areas.iter().all(|area| area.offset.checked_add(area.size).is_some_and(|end| end <= info.size));
        holds(inside, &sent, "parts of the region", info.size)?;
        let apart = areas.windows(2).all(|pair| pair[0].offset + pair[0].size <= pair[1].offset);
        holds(apart, &sent, "areas that do not overlap", &areas)?;
        let covers = |offset: u64, length: u64| {
            areas.iter().any(|area| offset < area.offset + area.size && area.offset < offset + length)
        };
        if !info.capabilities.contains(&RegionCapability::MsixMappable) && !areas.is_empty() {
            for place in msix.iter().flatten().filter(|place| place.bar == index) {
                let sparse = info
                    .capabilities
                    .iter()
                    .any(|capability| matches!(capability, RegionCapability::SparseMmap(_)));
                // Of a region that is mapped whole QEMU leaves the table's pages out itself.
                holds(
                    !sparse || !covers(place.offset, place.length),
                    &sent,
                    "the MSI-X table and pending bits left out",
                    place,
                )?;
            }
        }
        // NVM Express: mass storage, non-volatile memory.
        if class == 0x01_08_02 && index == 0 {
            let doorbells =
                areas.iter().any(|area| area.offset <= 0x1000 && area.offset + area.size >= 0x2000);
            holds(doorbells, &sent, "the first page of doorbells in one area", ())?;
        }
    }
    Ok(())
}

fn chains(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    with_capabilities(&mut client)?;
    // Decoding follows the chain, and takes it only if each step leads forward and stays inside.
    for index in 0..client.info()?.regions.min(100) {
        client.region_info(index, ROOM)?;
    }
    Ok(())
}

fn mappable(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for (index, info, descriptors) in regions(&mut client)? {
        let sent = format!("GET_REGION_INFO of region {index}");
        let mapped = info.flags.contains(RegionFlags::MMAP);
        same(&sent, descriptors.len(), usize::from(mapped))?;
        for area in mapped_areas(&info).into_iter().filter(|_| mapped) {
            let access =
                match (info.flags.contains(RegionFlags::READ), info.flags.contains(RegionFlags::WRITE)) {
                    (true, true) => Access::ReadWrite,
                    (false, true) => Access::Write,
                    _ => Access::Read,
                };
            let Some(descriptor) = descriptors.first() else { continue };
            let mapping =
                Mapping::new(descriptor, info.file_offset + area.offset, area.size as usize, access);
            if let Err(error) = mapping {
                return failed(sent, format!("{area:?} can be mapped"), error.to_string());
            }
        }
    }
    Ok(())
}

fn counts(subject: &Subject<'_>) -> Checked {
    let info = subject.open()?.info()?;
    holds(info.flags.contains(DeviceFlags::PCI), "GET_INFO", "a PCI device", info.flags)?;
    holds((8..=10).contains(&info.regions), "GET_INFO", "8 to 10 regions", info.regions)?;
    holds((3..=50).contains(&info.interrupts), "GET_INFO", "3 to 50 types of interrupts", info.interrupts)
}

fn io_descriptors(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let count = client.info()?.regions;
    let code = CommandCode::DEVICE_GET_REGION_IO_FDS;
    if let Err(Stop::Refused { .. }) = client.call_raw(code, &dwords([16, 0, CONFIG, 0]), &[]) {
        return Err(Stop::NotOffered("GET_REGION_IO_FDS"));
    }
    for body in [
        [ROOM, 1, CONFIG, 0],
        [ROOM, 0, CONFIG, 1],
        [15, 0, CONFIG, 0],
        [(1 << 20) + 1, 0, CONFIG, 0],
        [ROOM, 0, count, 0],
    ] {
        let result = client.call_raw(code, &dwords(body), &[]);
        refused(result, &format!("GET_REGION_IO_FDS {body:?}"), &[EINVAL, ENOSYS])?;
    }
    let mut offered = false;
    for index in 0..count {
        let (info, ..) = client.region_info(index, 32)?;
        let sent = format!("GET_REGION_IO_FDS of region {index}");
        let result = client.call_raw(code, &dwords([16, 0, index, 0]), &[]);
        if info.size == 0 {
            refused(result, &sent, &[EINVAL])?;
            continue;
        }
        let short = result?;
        let needed = short.body.get(..4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes);
        same(&sent, (short.body.len(), short.descriptors.len()), (16, 0))?;
        if needed == 16 {
            continue;
        }
        let reply = match client.call_raw(code, &dwords([needed, 0, index, 0]), &[]) {
            // More descriptors than we said that we take.
            Err(Stop::Refused { errno: E2BIG, .. }) => continue,
            reply => reply?,
        };
        let Ok(Reply::RegionIoFds { fds, .. }) = Reply::decode(code, &reply.body) else {
            return client.wrong("a list of sub-regions", format!("{:02x?}", reply.body));
        };
        same(&sent, reply.body.len(), needed as usize)?;
        let highest = fds.entries.iter().map(|entry| entry.descriptor as usize).max().unwrap_or(0);
        same(&sent, reply.descriptors.len(), highest + 1)?;
        let known = fds.entries.iter().all(|entry| entry.kind.0 <= IoFdKind::IOEVENTFD_SHADOW.0);
        holds(known, &sent, "entries of a known type", &fds.entries)?;
        offered = true;
    }
    if offered { Ok(()) } else { Err(Stop::NotOffered("no region has I/O descriptors")) }
}
