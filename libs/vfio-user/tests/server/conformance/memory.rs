//! DMA_MAP and DMA_UNMAP.

use super::*;

/// Points 45 to 47, 53 and 55, faults 11 and 20.
#[test]
fn maps_and_unmaps_that_cannot_be_change_nothing() {
    let (mut client, _served) = open(&Plain::new());
    let file = memory("maps", 0x10_0000);
    let at = |address, size| mapping(address, size, Access::ReadWrite, 0);
    client.map(&at(0x10_0000, 0x4000), Some(file.as_fd())).unwrap();
    for (address, size) in [
        (0x10_0000, 0x4000),
        (0x10_0000, 0x1000),
        (0x10_3000, 0x1000),
        (0x0f_f000, 0x2000),
        (0x10_3000, 0x2000),
        (0x0f_0000, 0x2_0000),
    ] {
        assert_eq!(client.map(&at(address, size), Some(file.as_fd())), Err(EEXIST), "{address:#x}+{size:#x}");
        assert_eq!(client.map(&by_messages(address, size), None), Err(EEXIST));
    }
    let map = |argsz: u32, flags: u32, offset: u64, address: u64, size: u64| {
        let wide: Vec<u8> = [offset, address, size].iter().flat_map(|value| value.to_le_bytes()).collect();
        [dwords([argsz, flags]), wide].concat()
    };
    let one = [file.as_fd()];
    let two = [file.as_fd(); 2];
    let socket = std::os::unix::net::UnixStream::pair().unwrap();
    let bad: [(Vec<u8>, &[BorrowedFd<'_>]); 14] = [
        (map(31, 3, 0, 0, 0x1000), &one),
        (map(32, 3 | 16, 0, 0, 0x1000), &one),
        (map(32, 3 | 4, 0, 0, 0x1000), &[]),
        (map(32, 3 | 8, 0, 0, 0x1000), &[]),
        (map(32, 3 | 4 | 8, 0, 0, 0x1000), &one),
        (map(32, 0, 0, 0, 0x1000), &one),
        (map(32, 3, 0, 0, 0x1000), &two),
        (map(32, 3, 0, 0, 0), &one),
        (map(32, 3, 0, 0, 0), &[]),
        (map(32, 3, 0, u64::MAX - 0xffe, 0x1000), &[]),
        (map(32, 3, 0, 0, 0x10_1000), &one),
        (map(32, 3, 0xf_f000, 0, 0x2000), &one),
        (map(32, 3, u64::MAX - 0xfff, 0, 0x2000), &one),
        (map(32, 3, 1, 0, 0x1000), &one),
    ];
    for (body, descriptors) in bad {
        assert_eq!(
            client.call_raw(CommandCode::DMA_MAP, &body, descriptors).unwrap_err(),
            EINVAL,
            "{body:?}"
        );
    }
    let body = map(32, 3, 0, 0, 0x1000);
    assert_eq!(client.call_raw(CommandCode::DMA_MAP, &body, &[socket.0.as_fd()]).unwrap_err(), EINVAL);
    let read_only = std::fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
    let read_only = read_only.unwrap();
    assert_eq!(client.map(&at(0, 0x1000), Some(read_only.as_fd())), Err(Errno::EACCES as u32));
    client.map(&mapping(0, 0x1000, Access::Read, 0), Some(read_only.as_fd())).unwrap();

    let unmap_body = |argsz: u32, flags: u32, address: u64, size: u64| {
        [dwords([argsz, flags]), address.to_le_bytes().to_vec(), size.to_le_bytes().to_vec()].concat()
    };
    for (address, size) in [
        (0x10_0000, 0x1000),
        (0x10_1000, 0x3000),
        (0x10_0000, 0x5000),
        (0x80_0000, 0x1000),
        (0, 0),
        (0, u64::MAX),
    ] {
        let result = client.call_raw(CommandCode::DMA_UNMAP, &unmap_body(24, 0, address, size), &[]);
        assert_eq!(result.unwrap_err(), ENOENT);
    }
    for (argsz, flags, address, size) in [
        (23, 0, 0x10_0000, 0x4000),
        (u32::MAX, 0, 0x10_0000, 0x4000),
        (24, 2, 0x10_0000, 0x4000),
        (24, 3, 0, 0),
        (24, 4, 0x10_0000, 0x4000),
        // Fault 9.
        (u32::MAX, 1, 0x10_0000, 0x4000),
        (40, 1, 0x10_0000, 0x4000),
    ] {
        let result = client.call_raw(CommandCode::DMA_UNMAP, &unmap_body(argsz, flags, address, size), &[]);
        assert_eq!(result.unwrap_err(), EINVAL);
    }
    assert_eq!(mappings_named("maps"), 2, "both that were mapped, and nothing else");
    client.unmap(0x10_0000, 0x4000).unwrap();
    client.unmap(0, 0x1000).unwrap();
    assert_eq!((mappings_named("maps"), descriptors_named("maps")), (0, 2));
}

/// Point 54, fault 24: maps cost no descriptors. Point 51: all at once.
#[test]
fn a_thousand_maps_of_one_file() {
    let (mut client, _served) = open(&Plain::new());
    let file = memory("thousand", 0x1000 * 1000);
    for index in (0..1000).rev() {
        let map = mapping(index * 0x2000, 0x1000, Access::ReadWrite, index * 7 % 1000 * 0x1000);
        client.map(&map, Some(file.as_fd())).unwrap();
    }
    assert_eq!(descriptors_named("thousand"), 1);
    assert!(mappings_named("thousand") >= 900);
    let reply = client.call(&Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), &[]).unwrap();
    assert_eq!(reply.body.len(), 24);
    assert_eq!(mappings_named("thousand"), 0);
    client.call(&Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), &[]).unwrap();
}

/// Fault 19: nothing is cut to 32 bits.
#[test]
fn big_maps_are_reached_to_their_end() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let size = 5 << 30;
    let file = memory("big", size);
    client.map(&mapping(1 << 40, size, Access::ReadWrite, 0), Some(file.as_fd())).unwrap();
    let mut view = device.connection().view();
    for offset in [0, (4 << 30) + 4097, size - 8] {
        view.write(Iova((1 << 40) + offset), b"far away").unwrap();
        let mut bytes = [0; 8];
        nix::sys::uio::pread(&file, &mut bytes, offset as i64).unwrap();
        assert_eq!(&bytes, b"far away");
    }
    assert!(view.write(Iova((1 << 40) + size - 4), b"far away").is_err());
    view.release();
    client.unmap(1 << 40, size).unwrap();
}

/// Point 50: an unmap is answered when the last I/O has let go.
#[test]
fn an_unmap_waits_for_pins() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let file = memory("pinned", 0x2000);
    for address in [0, 0x1000] {
        client.map(&mapping(address, 0x1000, Access::ReadWrite, address), Some(file.as_fd())).unwrap();
    }
    let pin = |address| -> Pin {
        device.connection().view().pin(Iova(address), 512, Access::Write).expect("it is mapped")
    };
    for command in [unmap(0x1000, 0x1000), Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All))] {
        let pin = pin(if command == unmap(0x1000, 0x1000) { 0x1000 } else { 0 });
        let id = client.send(&command, &[]);
        assert!(client.receive_within(Duration::from_millis(50)).is_none());
        let begin = Instant::now();
        drop(pin);
        client.reply(id, CommandCode::DMA_UNMAP).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(1));
    }
    assert_eq!(mappings_named("pinned"), 0);
}
