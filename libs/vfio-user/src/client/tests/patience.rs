//! Callers with patience of their own.

use std::time::Instant;

use super::*;

const SHORT: Duration = Duration::from_millis(80);

/// A message that only partly fits the socket goes on when there is room: the stream stays whole, the late replies
/// are dropped, and the others go on.
#[test]
fn a_caller_that_gives_up_does_not_hurt_the_others() {
    const CALLS: usize = 4;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        wait.recv().unwrap();
        let mut big = 0;
        while let Some((header, body)) = read_message(&mut theirs) {
            let reply = match Command::decode(&header, &body, 0).unwrap() {
                Command::RegionWrite(write) => {
                    assert!(write.data.iter().all(|&byte| byte == 7));
                    big += 1;
                    Reply::RegionWrite(write.access()).encode(header.id())
                }
                Command::RegionRead(access) => {
                    let data = vec![access.offset as u8; access.count as usize];
                    Reply::RegionRead { offset: access.offset, region: access.region, data: &data }
                        .encode(header.id())
                }
                other => panic!("{other:?}"),
            };
            theirs.write_all(&reply).unwrap();
        }
        big
    });
    let client = Client::new(ours, Options { twin_socket: false, ..Options::default() }).unwrap();
    let hasty = client.with_timeout(SHORT);
    let data = vec![7; 1 << 20];
    for call in 0..CALLS {
        let begin = Instant::now();
        let result = hasty.region_write(0, 0, &data, Delivery::Replied);
        assert!(matches!(result, Err(ClientError::TimedOut { after: SHORT, .. })), "{call}: {result:?}");
        // Not the connection's patience.
        assert!((SHORT..Options::default().timeout).contains(&begin.elapsed()));
    }
    assert_eq!(client.disconnected(), None);
    thread::scope(|scope| {
        let patient = scope.spawn(|| {
            let mut data = [0; 16];
            client.region_read(0, 42, &mut data).unwrap();
            data
        });
        thread::sleep(SHORT);
        go.send(()).unwrap();
        assert_eq!(patient.join().unwrap(), [42; 16]);
    });
    for offset in 0..50 {
        let mut data = [0; 3];
        client.region_read(0, offset, &mut data).unwrap();
        assert_eq!(data, [offset as u8; 3]);
    }
    drop((client, hasty));
    assert_eq!(server.join().unwrap(), CALLS);
}

/// What they leave unsent is bounded.
#[test]
fn callers_that_give_up_do_not_fill_memory() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        theirs
    });
    let client = Client::new(ours, Options { twin_socket: false, ..Options::default() }).unwrap();
    let _theirs = server.join().unwrap();
    let hasty = client.with_timeout(Duration::from_millis(5));
    let data = vec![0; 1 << 20];
    for _ in 0..30 {
        let result = hasty.region_write(0, 0, &data, Delivery::Posted);
        assert!(matches!(result, Err(ClientError::TimedOut { .. })), "{result:?}");
    }
    let waiting = client.connection().lock().outbox.len();
    assert!(waiting <= limits::WAITING_BYTES + (2 << 20), "{waiting}");
    assert_eq!(client.disconnected(), None);
}

/// An unmap that the server did after its time: the second attempt hears that there is nothing, and the place is
/// free again.
#[test]
fn an_unmap_that_was_late_can_be_made_up_for() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        answer_version(&mut theirs);
        let (map, _) = read_message(&mut theirs).unwrap();
        theirs.write_all(&Reply::Done(map.code()).encode(map.id())).unwrap();
        let (late, body) = read_message(&mut theirs).unwrap();
        let Ok(Command::DmaUnmap(unmap)) = Command::decode(&late, &body, 0) else { panic!() };
        let (again, _) = read_message(&mut theirs).unwrap();
        theirs.write_all(&Reply::DmaUnmap(unmap).encode(late.id())).unwrap();
        theirs.write_all(&encode_error(again.id(), again.code(), Errno::ENOENT as u32)).unwrap();
        let (map, _) = read_message(&mut theirs).unwrap();
        theirs.write_all(&Reply::Done(map.code()).encode(map.id())).unwrap();
        theirs
    });
    let client = Client::new(ours, Options::default()).unwrap();
    let memory = SharedMemory::new("guest", PAGE).unwrap();
    let part = Memory { file: memory.as_fd(), offset: 0, length: PAGE };
    let map = || client.dma_map(Iova(0), part, Access::Read, Sharing::Messages);
    let unmap = |client: &Client| client.dma_unmap(Iova(0), PAGE as u64);
    map().unwrap();
    let hasty = client.with_timeout(IMPATIENT.timeout);
    assert!(matches!(unmap(&hasty), Err(ClientError::TimedOut { .. })));
    assert!(matches!(map(), Err(ClientError::Invalid { .. })), "the device may still have it");
    assert_eq!(refused(unmap(&client)), Errno::ENOENT);
    map().unwrap();
    drop(server.join().unwrap());
}

#[test]
fn no_timeout_is_too_long() {
    with_server(|client| {
        let patient = client.with_timeout(Duration::MAX);
        patient.reset().unwrap();
        assert!(matches!(client.with_timeout(Duration::ZERO).reset(), Err(ClientError::TimedOut { .. })));
        patient.reset().unwrap();
    });
}
