//! What only the device's side can bring about or see.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use outboard_tests::conformance::{Process, eventfd, mapping, memory, unmap};
use outboard_tests::in_process::{eventually, open};
use outboard_tests::plain::{Plain, region};
use outboard_vfio_user::dma::{Iova, Pin};
use outboard_vfio_user::limits;
use outboard_vfio_user::memory::Access;
use outboard_vfio_user::server::ServeError;
use outboard_vfio_user::session::server::SessionError;
use outboard_vfio_user::wire::{
    Command, CommandCode, DmaUnmap, IrqAction, IrqData, IrqIndex, Query, RegionAccess, SetIrqs, UnmapTarget,
};

const HELD: Command<'static> =
    Command::RegionRead(RegionAccess { offset: 0, region: region::HELD, count: 4 });

fn read(offset: u64, count: u32) -> Command<'static> {
    Command::RegionRead(RegionAccess { offset, region: region::REGISTERS, count })
}

fn holding() -> Arc<Plain> {
    let device = Plain::new();
    device.holds.store(true, Ordering::Relaxed);
    device
}

/// Point 7: an id may be in flight twice, and nothing overtakes a command that takes its time.
#[test]
fn pipelined_commands_with_one_id_are_answered_in_order() {
    let device = holding();
    let (mut client, _served) = open(&device);
    let mut bytes = HELD.encode(0, false);
    (1..=200_u32).for_each(|count| bytes.extend(read(0, count).encode(0, false)));
    client.send_bytes(&bytes, &[]).unwrap();
    eventually("the slow one is begun", || !device.held.lock().unwrap().is_empty());
    client.expect_silence(Duration::from_millis(30)).unwrap();
    device.release();
    assert_eq!(client.reply(0, CommandCode::REGION_READ).unwrap().body[16..], [0x11; 4]);
    for count in 1..=200 {
        assert_eq!(client.reply(0, CommandCode::REGION_READ).unwrap().body.len(), 16 + count);
    }
}

/// A client that sends and does not read gets no memory for it, and can go on when it reads in time.
#[test]
fn a_client_that_does_not_read_is_left_alone() {
    let (mut client, _served) = open(&Plain::new());
    let command = read(0, 0x4000).encode(5, false);
    let mut sent = 0_u32;
    while client.try_send(&command, &[], Duration::from_millis(300)).unwrap() {
        sent += 1;
        assert!(sent < 200_000, "all of it is taken");
    }
    // What waits: replies of 4 MiB, some thousand commands, and two sockets full.
    assert!(sent > 256, "{sent}");
    for _ in 0..sent {
        client.reply(5, CommandCode::REGION_READ).unwrap();
    }
}

/// Point 71: the client dies while a command is being executed, and others wait behind it.
#[test]
fn a_client_may_die_during_a_command() {
    let device = holding();
    let (mut client, served) = open(&device);
    let file = memory(0x1000);
    client.send(&HELD, &[]).unwrap();
    client.send(&Command::DmaMap(mapping(0, 0x1000, Access::ReadWrite, 0)), &[file.as_fd()]).unwrap();
    eventually("it is executed", || !device.held.lock().unwrap().is_empty());
    drop(client);
    served.outcome().unwrap();
    assert_eq!((Process::this().descriptors(&file), Process::this().mappings(&file)), (1, 0));
    open(&device).0.info().unwrap();
}

/// Point 14: what is late is not sent at all, whichever thread is late.
#[test]
fn nothing_is_sent_after_the_limit() {
    let device = holding();
    let (mut client, served) = open(&device);
    client.send(&HELD, &[]).unwrap();
    client.send(&read(0, 4), &[]).unwrap();
    let begin = Instant::now();
    eventually("it is executed", || !device.held.lock().unwrap().is_empty());
    let late = std::mem::take(&mut *device.held.lock().unwrap());
    client.expect_end().unwrap();
    let took = begin.elapsed();
    assert!((limits::REPLY..limits::REPLY * 2).contains(&took), "{took:?}");
    late.into_iter().for_each(|reply| reply.ok(vec![0; 4]));
    let error = served.outcome().unwrap_err();
    assert!(
        matches!(
            error,
            ServeError::Session(SessionError::Overdue {
                code: CommandCode::REGION_READ,
                limit: limits::REPLY
            })
        ),
        "{error}"
    );
}

/// Point 42: the client's resample descriptor unmasks the pin also while the socket is busy all the time.
#[test]
fn the_pin_is_resampled_through_its_descriptor() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let (trigger, unmask) = (eventfd(), eventfd());
    for (action, eventfd) in [(IrqAction::Trigger, &trigger), (IrqAction::Unmask, &unmask)] {
        let set = SetIrqs { index: IrqIndex::INTX, start: 0, count: 1, data: IrqData::Eventfds, action };
        client.set_irqs(set, &[eventfd]).unwrap();
    }
    let signalled = || trigger.read().unwrap_or(0);
    let connection = device.connection();
    connection.interrupts().set_line(true);
    assert_eq!(signalled(), 1);
    connection.interrupts().set_line(true);
    assert_eq!(signalled(), 0, "masked until it is unmasked");
    unmask.write(1).unwrap();
    eventually("it fires again", || {
        client.read(region::REGISTERS, 0, 4).unwrap();
        signalled() == 1
    });
    connection.interrupts().set_line(false);
    unmask.write(1).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(signalled(), 0);
}

/// Fault 19: nothing is cut to 32 bits.
#[test]
fn big_maps_are_reached_to_their_end() {
    let device = Plain::new();
    let (mut client, _served) = open(&device);
    let size = 5 << 30;
    let file = memory(size);
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
    let file = memory(0x2000);
    for address in [0, 0x1000] {
        client.map(&mapping(address, 0x1000, Access::ReadWrite, address), Some(file.as_fd())).unwrap();
    }
    let pin = |address| -> Pin {
        device.connection().view().pin(Iova(address), 512, Access::Write).expect("it is mapped")
    };
    for (command, address) in
        [(unmap(0x1000, 0x1000), 0x1000), (Command::DmaUnmap(DmaUnmap::new(UnmapTarget::All)), 0)]
    {
        let pin = pin(address);
        let id = client.send(&command, &[]).unwrap();
        client.expect_silence(Duration::from_millis(50)).unwrap();
        let begin = Instant::now();
        drop(pin);
        client.reply(id, CommandCode::DMA_UNMAP).unwrap();
        // The last pin's end is what answers it, no limit.
        assert!(begin.elapsed() < limits::REPLY / 2);
    }
    assert_eq!(Process::this().mappings(&file), 0);
}

/// Point 32: no more descriptors than the client takes, which is 16.
#[test]
fn more_io_descriptors_than_the_client_takes_are_refused() {
    let (mut client, _served) = open(&Plain::new());
    let query = Query { argsz: 4096, index: region::MANY_EVENTFDS };
    let result = client.call(&Command::GetRegionIoFds(query), &[]);
    assert_eq!(result.unwrap_err().errno(), Some(Errno::E2BIG as u32));
}

/// Point 60.
#[test]
fn a_region_that_is_only_to_be_read_is_not_written() {
    let (mut client, _served) = open(&Plain::new());
    let result = client.write(region::READ_ONLY, 0, &[0]);
    assert_eq!(result.unwrap_err().errno(), Some(Errno::EINVAL as u32));
    assert_eq!(client.read(region::READ_ONLY, 0, 0x100).unwrap().len(), 0x100);
    let result = client.read(region::ABSENT, 0, 1);
    assert_eq!(result.unwrap_err().errno(), Some(Errno::EINVAL as u32));
}
