//! REGION_READ, REGION_WRITE, REGION_WRITE_MULTI.

use outboard_vfio_user::limits;
use outboard_vfio_user::wire::{Command, CommandCode, RegionFlags, RegionInfo, RegionWrite, RegionWrites};

use super::client::{Client, raw_message};
use super::config::{self, CONFIG, INTERRUPT_LINE};
use super::{Check, Checked, EINVAL, Stop, Subject, alive, dwords, holds, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check {
        point: 60,
        title: "accesses stay in their region, and in the size of a message",
        text: "libvfio-user; rust-vmm allocates what it is told to",
        run: bounds,
    },
    Check {
        point: 61,
        title: "the configuration space is read in any width, and writes to what is read-only succeed",
        text: "QEMU reads 4096 bytes at once; Cloud Hypervisor bytes",
        run: configuration,
    },
    Check {
        point: 62,
        title: "BARs and the ROM tell their size",
        text: "PCI Local Bus 3.0, 6.2.5.1; QEMU and Cloud Hypervisor ask for it",
        run: sizing,
    },
    Check {
        point: 63,
        title: "registers are read in any width and place, and as much comes as was asked for",
        text: "SPDK 9df0f59444",
        run: registers,
    },
    Check {
        point: 64,
        title: "the MSI-X table and its pending bits are there by message",
        text: "QEMU reads the pending bits; SPDK says EINVAL",
        run: msix_tables,
    },
    Check {
        point: 65,
        title: "an access inside of a region is never an error",
        text: "rust-vmm's client waits for more after one",
        run: inside,
    },
    Check {
        point: 66,
        title: "a posted write is done before the read that follows it",
        text: "specification: commands are processed in order",
        run: posted_writes,
    },
    Check {
        point: 67,
        title: "many writes in one message",
        text: "specification, \"VFIO_USER_REGION_WRITE_MULTI\"; QEMU's limit of 200",
        run: many_writes,
    },
];

/// The regions that can be read, and how long they are.
fn readable(client: &mut Client) -> Checked<Vec<(u32, RegionInfo)>> {
    let mut regions = Vec::new();
    for index in 0..client.info()?.regions.min(100) {
        let (info, ..) = client.region_info(index, 32)?;
        if info.size > 0 && info.flags.contains(RegionFlags::READ) {
            regions.push((index, info));
        }
    }
    Ok(regions)
}

fn bounds(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let (info, ..) = client.region_info(CONFIG, 32)?;
    let count = client.info()?.regions;
    let size = info.size;
    let access = |region: u32, offset: u64, count: u32| {
        [offset.to_le_bytes().to_vec(), dwords([region, count])].concat()
    };
    for (region, offset, length) in [
        (CONFIG, size, 1),
        (CONFIG, size - 3, 4),
        (CONFIG, u64::MAX, 1),
        (CONFIG, u64::MAX - 3, 8),
        (CONFIG, 0, (1 << 20) + 1),
        (CONFIG, 0, u32::MAX),
        (count, 0, 1),
        (u32::MAX, 0, 4),
    ] {
        let body = access(region, offset, length);
        let sent = format!("an access to {offset:#x}+{length} of region {region}");
        refused(client.call_raw(CommandCode::REGION_READ, &body, &[]), &sent, &[EINVAL])?;
        let data = [body, vec![0; length.min(64) as usize]].concat();
        refused(client.call_raw(CommandCode::REGION_WRITE, &data, &[]), &sent, &[EINVAL])?;
    }
    for (length, given) in [(4, 3), (4, 5), (0, 1), (4, 0)] {
        let body = [access(CONFIG, INTERRUPT_LINE, length), vec![0; given]].concat();
        let sent = format!("a write of {length} bytes that come as {given}");
        refused(client.call_raw(CommandCode::REGION_WRITE, &body, &[]), &sent, &[EINVAL])?;
    }
    for index in 0..count {
        if client.region_info(index, 32)?.0.size == 0 {
            refused(client.read(index, 0, 1), &format!("a read of region {index}, of size 0"), &[EINVAL])?;
        }
    }
    // Nothing is allowed. As success with a header alone, or with what it is nothing of.
    for offset in [0, 5, size] {
        client.call_raw(CommandCode::REGION_READ, &access(CONFIG, offset, 0), &[])?;
        client.call_raw(CommandCode::REGION_WRITE, &access(CONFIG, offset, 0), &[])?;
    }
    client.read(CONFIG, size - 1, 1)?;
    alive(&mut client)
}

fn configuration(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let size = client.region_info(CONFIG, 32)?.0.size;
    holds(
        [256, 4096].contains(&size),
        "GET_REGION_INFO of the configuration space",
        "256 or 4096 bytes",
        size,
    )?;
    let whole = client.read(CONFIG, 0, size as u32)?;
    for width in [1, 2, 4, 8, 3, 7, 64] {
        for offset in 0..256 - width {
            let part = client.read(CONFIG, offset as u64, width as u32)?;
            let expected = whole.get(offset..offset + width).unwrap_or_default();
            same(format!("a read of {width} bytes at {offset:#x}"), part.as_slice(), expected)?;
        }
    }
    // Vendor ID to class code, capability pointer, and the interrupt pin.
    for (offset, width) in [(0, 4), (0, 2), (8, 4), (9, 1), (0x2c, 4), (0x34, 1), (0x3d, 1), (0x3e, 2)] {
        client.write(CONFIG, offset, &vec![0xff; width])?;
        let part = client.read(CONFIG, offset, width as u32)?;
        let expected = &whole[offset as usize..offset as usize + width];
        same(
            format!("a write of {width} bytes at {offset:#x}, which are read-only"),
            part.as_slice(),
            expected,
        )?;
    }
    Ok(())
}

fn sizing(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let mut bar = 0;
    while bar < 6 {
        let at = 0x10 + 4 * u64::from(bar);
        let before = config::dword(&mut client, at)?;
        client.write(CONFIG, at, &u32::MAX.to_le_bytes())?;
        let low = config::dword(&mut client, at)?;
        client.write(CONFIG, at, &before.to_le_bytes())?;
        let wide = before & 0b111 == 0b100;
        let mut mask = u64::from(low & if before & 1 == 1 { !3 } else { !0xf }) | u64::from(u32::MAX) << 32;
        if wide {
            let high = config::dword(&mut client, at + 4)?;
            client.write(CONFIG, at + 4, &u32::MAX.to_le_bytes())?;
            mask = mask & u64::from(u32::MAX) | u64::from(config::dword(&mut client, at + 4)?) << 32;
            client.write(CONFIG, at + 4, &high.to_le_bytes())?;
            same(
                format!("the upper half of BAR {bar} written back"),
                config::dword(&mut client, at + 4)?,
                high,
            )?;
        }
        let size = client.region_info(bar, 32)?.0.size;
        let told = if low == 0 { 0 } else { mask.wrapping_neg() };
        let sent = format!("all ones to BAR {bar}, whose region has {size:#x} bytes");
        // Without a bit to set it is no BAR; else it is at least as long as its region.
        holds((told == 0) == (size == 0) && told >= size, &sent, "the size of the region", told)?;
        same(format!("BAR {bar} written back"), config::dword(&mut client, at)?, before)?;
        bar += if wide { 2 } else { 1 };
    }
    let rom = config::dword(&mut client, 0x30)?;
    client.write(CONFIG, 0x30, &0xffff_f800_u32.to_le_bytes())?;
    let told = config::dword(&mut client, 0x30)? & 0xffff_f800;
    client.write(CONFIG, 0x30, &rom.to_le_bytes())?;
    let size = client.region_info(6, 32)?.0.size;
    holds((told == 0) == (size == 0), "0xfffff800 to the ROM's BAR", "the size of its region", told)
}

fn registers(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let Some((index, info)) = readable(&mut client)?.into_iter().find(|(index, _)| *index < 6) else {
        return Err(Stop::NotOffered("no BAR that can be read"));
    };
    let first = client.read(index, 0, 8)?;
    let halves = [client.read(index, 0, 4)?, client.read(index, 4, 4)?].concat();
    same("a register of 8 bytes, in halves", halves, first)?;
    for offset in (0..64).chain(0xff8..0x1008).filter(|offset| offset + 16 <= info.size) {
        for width in [1, 2, 3, 4, 5, 8, 12, 16] {
            // The length of what comes is looked at by the read itself.
            match client.read(index, offset, width) {
                Ok(_) | Err(Stop::Refused { .. }) => {}
                Err(other) => return Err(other),
            }
        }
    }
    alive(&mut client)
}

fn msix_tables(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let Some(places) = config::msix(&mut client)? else { return Err(Stop::NotOffered("MSI-X")) };
    let info = client.region_info(places[0].bar, 32)?.0;
    for place in places {
        holds(
            place.offset + place.length <= info.size || place.bar != places[0].bar,
            "MSI-X",
            "a place in its BAR",
            place,
        )?;
        let whole = client.read(place.bar, place.offset, place.length as u32)?;
        for width in [4, 8] {
            let part = client.read(place.bar, place.offset, width)?;
            same(format!("{width} bytes of {place:?}"), part.as_slice(), &whole[..width as usize])?;
        }
    }
    // The address of the first entry.
    let [table, _] = places;
    let before = client.read(table.bar, table.offset, 4)?;
    client.write(table.bar, table.offset, &0xfee0_1000_u32.to_le_bytes())?;
    let written = client.read(table.bar, table.offset, 4)?;
    client.write(table.bar, table.offset, &before)?;
    same("a write to the MSI-X table", written, 0xfee0_1000_u32.to_le_bytes().to_vec())
}

fn inside(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for (index, info) in readable(&mut client)? {
        for width in [1, 2, 4, 8] {
            let last = info.size - u64::from(width);
            let middle = info.size / 2 / 8 * 8;
            for offset in [0, 4, 8, 0x10, 0x40, middle, last] {
                if offset + u64::from(width) <= info.size && offset % u64::from(width) == 0 {
                    client.read(index, offset, width)?;
                }
            }
        }
    }
    // As Cloud Hypervisor writes: command register, a BAR in bytes.
    let command = client.read(CONFIG, config::COMMAND, 2)?;
    client.write(CONFIG, config::COMMAND, &command)?;
    for at in 0x10..0x14 {
        let byte = client.read(CONFIG, at, 1)?;
        client.write(CONFIG, at, &byte)?;
    }
    Ok(())
}

/// The Interrupt Line register: a byte that every device keeps, and that does nothing.
fn line(data: &[u8]) -> RegionWrite<'_> {
    RegionWrite { offset: INTERRUPT_LINE, region: CONFIG, data }
}

fn posted_writes(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    for value in 0..=255_u8 {
        client.says(format!("a posted write of {value} to the Interrupt Line register"));
        client.post(&Command::RegionWrite(line(&[value ^ 0xff])))?;
        client.post(&Command::RegionWrite(line(&[value])))?;
        let came = client.read(CONFIG, INTERRUPT_LINE, 1)?;
        same("two posted writes of the Interrupt Line register, then a read", came, vec![value])?;
    }
    Ok(())
}

fn many_writes(subject: &Subject<'_>) -> Checked {
    let mut client = subject.open()?;
    let code = CommandCode::REGION_WRITE_MULTI;
    let body = |writes: &[RegionWrite<'_>]| RegionWrites::body(writes).expect("writes of at most 8 bytes");
    let one = body(&[line(&[1])]);
    match client.call_raw(code, &one, &[]) {
        Err(Stop::Refused { .. }) => return Err(Stop::NotOffered("REGION_WRITE_MULTI")),
        reply => same("one write in a message", reply?.body, 1_u64.to_le_bytes().to_vec())?,
    }
    let values: Vec<[u8; 1]> = (0..limits::MULTIPLE_WRITES).map(|at| [at as u8]).collect();
    let writes: Vec<_> = values.iter().map(|value| line(value)).collect();
    let reply = client.call_raw(code, &body(&writes), &[])?;
    same("200 writes in a message", reply.body, 200_u64.to_le_bytes().to_vec())?;
    let read = |client: &mut Client| client.read(CONFIG, INTERRUPT_LINE, 1);
    same("200 writes in a message, of 0 to 199", read(&mut client)?, vec![199])?;
    // Those after one that is out of place are not done.
    let beyond = RegionWrite { offset: 1 << 40, region: CONFIG, data: &[9; 4] };
    let writes = body(&[line(&[5]), beyond, line(&[6])]);
    let reply = client.call_raw(code, &writes, &[])?;
    same("a write, one out of place, and another", reply.body, 1_u64.to_le_bytes().to_vec())?;
    same("a write, one out of place, and another", read(&mut client)?, vec![5])?;
    for wrong in [0_u64, 4, 201, u64::MAX] {
        let mut body = writes.clone();
        body[..8].copy_from_slice(&wrong.to_le_bytes());
        refused(
            client.call_raw(code, &body, &[]),
            &format!("three writes that say they are {wrong}"),
            &[EINVAL],
        )?;
    }
    let mut long = writes.clone();
    // The count of the first: after the number of writes, its offset, and its region.
    long[20] = 9;
    refused(client.call_raw(code, &long, &[]), "a write of 9 bytes among them", &[EINVAL])?;
    client.says("a posted message of writes");
    client.send_bytes(&raw_message(1, code.0, 1 << 4, &body(&[line(&[7])])), &[])?;
    same("a posted message of writes", read(&mut client)?, vec![7])
}
