//! What regions there are, and what accesses do.

use super::*;

/// Points 22, 23, 31 and 33, and the sizes of point 13.
#[test]
fn information_comes_in_its_exact_size() {
    let (mut client, _served) = open(&Plain::new());
    for argsz in [0, 15, u32::MAX] {
        let body = dwords([argsz, 0, 0, 0]);
        assert_eq!(client.call_raw(CommandCode::DEVICE_GET_INFO, &body, &[]).unwrap_err(), EINVAL);
        assert_eq!(client.call_raw(CommandCode::DEVICE_GET_IRQ_INFO, &body, &[]).unwrap_err(), EINVAL);
    }
    for argsz in [16, 32] {
        let reply = client.call_raw(CommandCode::DEVICE_GET_INFO, &dwords([argsz, 0, 0, 0]), &[]).unwrap();
        assert_eq!(reply.body, dwords([16, 3, REGIONS, 5]));
    }
    for (index, count) in [1, 0, VECTORS, 1, 1].into_iter().enumerate() {
        let query = Query { argsz: 16, index: index as u32 };
        let reply = client.call(&Command::GetIrqInfo(query), &[]).unwrap();
        assert_eq!(reply.body, dwords([16, 1, index as u32, count]));
    }
    for index in [5, u32::MAX] {
        assert_eq!(client.call(&Command::GetIrqInfo(Query { argsz: 16, index }), &[]).unwrap_err(), EINVAL);
    }
    for index in [REGIONS, u32::MAX] {
        let query = Query { argsz: 32, index };
        assert_eq!(client.call(&Command::GetRegionInfo(query), &[]).unwrap_err(), EINVAL);
    }
    let absent = client.call(&Command::GetRegionInfo(Query { argsz: 32, index: ABSENT }), &[]).unwrap();
    assert_eq!(absent.body, dwords([32, 0, ABSENT, 0, 0, 0, 0, 0]));
}

/// Points 24 to 29, faults 13, 14 and 70.
#[test]
fn capabilities_and_the_descriptor_come_when_there_is_room() {
    let (mut client, _served) = open(&Plain::new());
    let needed = 32 + 8 + 8 + 16 + 8;
    let mut ask = |argsz: u32, padding: usize| {
        let mut body = dwords([argsz, 0, REGISTERS, 0, 0, 0, 0, 0]);
        body.resize(32 + padding, 0);
        client.call_raw(CommandCode::DEVICE_GET_REGION_INFO, &body, &[])
    };
    for argsz in [0, 31] {
        assert_eq!(ask(argsz, 0).unwrap_err(), EINVAL);
    }
    for argsz in [32, 33, needed - 1] {
        let reply = ask(argsz, 0).unwrap();
        assert_eq!(reply.body[..16], dwords([needed, 7, REGISTERS, 0]), "MMAP, but no CAPS");
        assert!(reply.body.len() == 32 && reply.descriptors.is_empty());
    }
    // SPDK's request is padded to 4064 bytes.
    for (argsz, padding) in [(needed, 0), (needed + 1, 0), (64 << 10, 0), (4064, 4032)] {
        let reply = ask(argsz, padding).unwrap();
        assert_eq!((reply.body.len(), reply.descriptors.len()), (needed as usize, 1));
        assert_eq!(reply.body[..16], dwords([needed, 7 | 8, REGISTERS, 32]));
        let decoded = WireReply::decode(CommandCode::DEVICE_GET_REGION_INFO, &reply.body).unwrap();
        let WireReply::RegionInfo { info, argsz } = decoded else { panic!("{decoded:?}") };
        assert_eq!((argsz, info.size, info.file_offset), (needed, REGISTERS_SIZE, 0));
        assert!(info.flags.contains(RegionFlags::MMAP));
        assert_eq!(
            info.capabilities,
            [
                RegionCapability::SparseMmap(vec![SparseArea { offset: 0x1000, size: 0x1000 }]),
                RegionCapability::MsixMappable
            ]
        );
    }
    let plain = client.call(&Command::GetRegionInfo(Query { argsz: 32, index: HELD }), &[]).unwrap();
    assert_eq!((plain.body[4], plain.descriptors.len()), (3, 0));
}

/// Point 32, fault 15.
#[test]
fn io_descriptors_are_listed_when_there_is_room() {
    let (mut client, _served) = open(&Plain::new());
    let needed = 16 + 2 * 40;
    let mut ask = |body: [u32; 4]| client.call_raw(CommandCode::DEVICE_GET_REGION_IO_FDS, &dwords(body), &[]);
    for body in [
        [needed, 1, REGISTERS, 0],
        [needed, 0, REGISTERS, 1],
        [15, 0, REGISTERS, 0],
        [(1 << 20) + 1, 0, REGISTERS, 0],
        [needed, 0, REGIONS, 0],
        [needed, 0, ABSENT, 0],
    ] {
        assert_eq!(ask(body).unwrap_err(), EINVAL, "{body:?}");
    }
    for argsz in [16, needed - 1] {
        let reply = ask([argsz, 0, REGISTERS, 0]).unwrap();
        assert_eq!(reply.body, dwords([needed, 0, REGISTERS, 2]));
        assert!(reply.descriptors.is_empty());
    }
    let reply = ask([needed, 0, REGISTERS, 0]).unwrap();
    assert_eq!(
        (reply.body.len(), reply.descriptors.len()),
        (needed as usize, 1),
        "a shared one is sent once"
    );
    let none = ask([16, 0, HELD, 0]).unwrap();
    assert_eq!(none.body, dwords([16, 0, HELD, 0]));
    // 17 are more than the client said that it takes.
    assert_eq!(ask([4096, 0, MANY_EVENTFDS, 0]).unwrap_err(), Errno::E2BIG as u32);
}

/// Points 60, 61 and 64, faults 8 and 19.
#[test]
fn accesses_stay_in_their_region() {
    let (mut client, _served) = open(&Plain::new());
    let size = REGISTERS_SIZE;
    for (region, offset, count) in [
        (REGISTERS, size, 1),
        (REGISTERS, size - 3, 4),
        (REGISTERS, u64::MAX, 1),
        (REGISTERS, u64::MAX - 3, 8),
        (REGISTERS, 0, (1 << 20) + 1),
        (REGISTERS, 0, u32::MAX),
        (REGISTERS, size + 1, 0),
        (ABSENT, 0, 1),
        (REGIONS, 0, 1),
        (u32::MAX, 0, 4),
    ] {
        let body = [&offset.to_le_bytes()[..], &dwords([region, count])].concat();
        assert_eq!(client.call_raw(CommandCode::REGION_READ, &body, &[]).unwrap_err(), EINVAL);
        let data = [body, vec![0; count.min(64) as usize]].concat();
        assert_eq!(client.call_raw(CommandCode::REGION_WRITE, &data, &[]).unwrap_err(), EINVAL);
    }
    // A length that is not the data's.
    for (count, length) in [(4, 3), (4, 5), (0, 1), (4, 0)] {
        let body = [&0_u64.to_le_bytes()[..], &dwords([REGISTERS, count]), &vec![0; length]].concat();
        assert_eq!(client.call_raw(CommandCode::REGION_WRITE, &body, &[]).unwrap_err(), EINVAL);
    }
    assert_eq!(client.write(READ_ONLY, 0, &[0]), Err(EINVAL));
    assert_eq!(client.read(READ_ONLY, 0, 0x100).unwrap().len(), 0x100);
    for offset in [0, 5, size] {
        assert_eq!(client.read(REGISTERS, offset, 0), Ok(vec![]));
        client.write(REGISTERS, offset, &[]).unwrap();
    }
    assert_eq!(client.read(REGISTERS, size - 1, 1), Ok(vec![0]));
    alive(&mut client);
}

/// Point 67.
#[test]
fn many_writes_in_one_message() {
    let (mut client, _served) = open(&Plain::new());
    let code = CommandCode::REGION_WRITE_MULTI;
    let write = |offset, data| RegionWrite { offset, region: REGISTERS, data };
    for count in [1_u64, 200] {
        let writes: Vec<_> = (0..count).map(|at| write(at * 8, &[1, 2, 3, 4, 5, 6, 7, 8][..])).collect();
        let reply = client.call_raw(code, &RegionWrites::body(&writes).unwrap(), &[]).unwrap();
        assert_eq!(reply.body, count.to_le_bytes());
        assert_eq!(client.read(REGISTERS, (count - 1) * 8, 2), Ok(vec![1, 2]));
    }
    // Those after one that is out of place are not done.
    let writes = [write(0, &[9; 1]), write(REGISTERS_SIZE, &[9; 4]), write(16, &[9; 4])];
    let body = RegionWrites::body(&writes).unwrap();
    assert_eq!(client.call_raw(code, &body, &[]).unwrap().body, 1_u64.to_le_bytes());
    assert_eq!(client.read(REGISTERS, 0, 2), Ok(vec![9, 2]));
    assert_eq!(client.read(REGISTERS, 16, 1), Ok(vec![1]));
    for wrong in [0_u64, 4, 201, u64::MAX] {
        let mut body = body.clone();
        body[..8].copy_from_slice(&wrong.to_le_bytes());
        assert_eq!(client.call_raw(code, &body, &[]).unwrap_err(), EINVAL);
    }
    let mut long = body.clone();
    long[20] = 9;
    assert_eq!(client.call_raw(code, &long, &[]).unwrap_err(), EINVAL);
    let mut posted = raw(1, code.0, &body);
    posted[8] = 0x10;
    client.send_bytes(&posted, &[]);
    alive(&mut client);
}
