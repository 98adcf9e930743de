//! Many commands at once.

use super::*;

const COUNT: u64 = 500;

fn maps<'a>(memory: &'a SharedMemory, sharing: Sharing) -> Vec<Map<'a>> {
    let part = |index: u64| Memory { file: memory.as_fd(), offset: index * PAGE as u64, length: PAGE };
    (0..COUNT)
        .map(|index| Map { iova: iova(index), memory: part(index), access: Access::ReadWrite, sharing })
        .collect()
}

fn iova(index: u64) -> Iova {
    Iova(0x100_0000 + index * 0x2000)
}

#[test]
fn maps_and_unmaps_are_pipelined() {
    for sharing in [Sharing::Descriptor, Sharing::Messages] {
        with_server(|client| {
            let memory = SharedMemory::new("guest", PAGE * COUNT as usize).unwrap();
            let maps = maps(&memory, sharing);
            let results = client.dma_map_batch(&maps);
            assert_eq!(results.len(), maps.len());
            results.into_iter().for_each(|result| result.unwrap());
            memory.bytes().write_obj(0x1122_u64, 499 * PAGE).unwrap();
            client.region_write(0, 0, &iova(499).0.to_le_bytes(), Delivery::Replied).unwrap();
            assert_eq!(memory.bytes().read_obj::<u64>(499 * PAGE + 8).unwrap(), 0x1122);
            // Again: each is refused here, and stays.
            assert!(client.dma_map_batch(&maps[..3]).iter().all(|result| result.is_err()));
            assert_eq!(client.connection().memory.entries().len(), COUNT as usize);
            let ranges: Vec<_> = (0..COUNT).map(|index| (iova(index), PAGE as u64)).collect();
            // One that is not there, in the middle.
            client.dma_unmap(ranges[250].0, PAGE as u64).unwrap();
            for (index, result) in client.dma_unmap_batch(&ranges).into_iter().enumerate() {
                if index == 250 {
                    assert_eq!(refused(result), Errno::ENOENT);
                } else {
                    result.unwrap();
                }
            }
            assert!(client.connection().memory.entries().is_empty());
            assert_eq!(client.sent().of(CommandCode::DMA_MAP), COUNT);
        });
    }
}

/// The server sees a window full of them before it answers the first, also while another thread calls.
#[test]
fn a_batch_does_not_wait_for_answers() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        let mut waiting = Vec::new();
        for number in 0..COUNT {
            let (header, _) = read_message(&mut theirs).unwrap();
            waiting.push(header);
            if waiting.len() == limits::PIPELINED || number + 1 == COUNT {
                for (at, header) in waiting.drain(..).enumerate() {
                    let reply = if at % 7 == 3 {
                        encode_error(header.id(), header.code(), 12)
                    } else {
                        Reply::Done(header.code()).encode(header.id())
                    };
                    theirs.write_all(&reply).unwrap();
                }
            }
        }
        theirs
    });
    let client = Client::new(ours, Options { twin_socket: false, ..Options::default() }).unwrap();
    let memory = SharedMemory::new("guest", PAGE * COUNT as usize).unwrap();
    let results = client.dma_map_batch(&maps(&memory, Sharing::Messages));
    for (number, result) in results.into_iter().enumerate() {
        let mapped =
            client.connection().memory.entries().iter().any(|entry| entry.start() == iova(number as u64).0);
        match number % limits::PIPELINED % 7 {
            3 => assert_eq!((refused(result), mapped), (Errno::ENOMEM, false)),
            _ => assert_eq!((result.unwrap(), mapped), ((), true)),
        }
    }
    let _theirs = server.join().unwrap();
}

/// The time is up once for all of them, not once for each.
#[test]
fn a_server_that_stops_answering_costs_one_timeout() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        for _ in 0..5 {
            let (header, _) = read_message(&mut theirs).unwrap();
            theirs.write_all(&Reply::Done(header.code()).encode(header.id())).unwrap();
        }
        theirs
    });
    let client = Client::new(ours, IMPATIENT).unwrap();
    let memory = SharedMemory::new("guest", PAGE * COUNT as usize).unwrap();
    let begin = std::time::Instant::now();
    let results = client.dma_map_batch(&maps(&memory, Sharing::Descriptor));
    // One for each would be some 500; a loaded machine is late.
    assert!(begin.elapsed() < 50 * IMPATIENT.timeout, "{:?}", begin.elapsed());
    assert!(results[..5].iter().all(|result| result.is_ok()));
    assert!(results[5..].iter().all(|result| matches!(result, Err(ClientError::TimedOut { .. }))));
    assert_eq!(results.len(), COUNT as usize);
    assert_eq!(client.connection().memory.entries().len(), 5, "the server gets no more than that");
    drop(server.join().unwrap());
}

fn writes(data: &[u8]) -> Vec<RegionWrite<'_>> {
    data.iter()
        .enumerate()
        .map(|(at, _)| RegionWrite { offset: 64 + at as u64, region: 0, data: &data[at..=at] })
        .collect()
}

#[test]
fn many_writes_go_in_the_messages_that_the_server_knows() {
    let data: Vec<u8> = (0..450).map(|at| at as u8).collect();
    for delivery in [Delivery::Posted, Delivery::Replied] {
        with_server(|client| {
            client.region_write_multi(&writes(&data), delivery).unwrap();
            let mut read = vec![0; data.len()];
            client.region_read(0, 64, &mut read).unwrap();
            assert_eq!(read, data);
            assert_eq!(client.sent().of(CommandCode::REGION_WRITE_MULTI), 3);
            assert_eq!(client.sent().of(CommandCode::REGION_WRITE), 0);
            // More than 8 bytes are no such write.
            let long = [RegionWrite { offset: 0, region: 0, data: &[0; 9] }];
            let result = client.region_write_multi(&long, delivery);
            assert!(matches!(result, Err(ClientError::Invalid { .. })), "{result:?}");
            client.region_write_multi(&[], delivery).unwrap();
        });
    }
    // A server that did not say that it knows it.
    let echo = |header: &Header, body: &[u8]| {
        let Ok(Command::RegionWrite(write)) = Command::decode(header, body, 0) else { panic!("{header:?}") };
        Reply::RegionWrite(write.access()).encode(header.id())
    };
    against(echo, |client| {
        client.region_write_multi(&writes(&data), Delivery::Replied).unwrap();
        assert_eq!(client.sent().of(CommandCode::REGION_WRITE), 450);
    });
}

#[test]
fn writes_that_were_not_done_are_told() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let mut capabilities = crate::wire::Capabilities::ours();
        capabilities.write_multiple = Some(true);
        let (header, _) = read_message(&mut theirs).unwrap();
        theirs.write_all(&Reply::Version(Version { minor: 1, capabilities }).encode(header.id())).unwrap();
        for count in [200_u64, 7, 201, u64::MAX] {
            let (header, _) = read_message(&mut theirs).unwrap();
            theirs.write_all(&Reply::RegionWriteMulti { count }.encode(header.id())).unwrap();
        }
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let data = [0; 250];
    let result = client.region_write_multi(&writes(&data), Delivery::Replied);
    assert!(matches!(result, Err(ClientError::Incomplete { done: 207, count: 250 })), "{result:?}");
    for _ in 0..2 {
        let result = client.region_write_multi(&writes(&data), Delivery::Replied);
        assert!(matches!(result, Err(ClientError::Mismatch { .. })), "{result:?}");
    }
    server.join().unwrap();
}
