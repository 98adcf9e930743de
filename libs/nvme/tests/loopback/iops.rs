//! What driver and controller cost by themselves: `cargo test --release -p outboard-nvme --test loopback --
//! --ignored --nocapture iops`. It measures, it asserts nothing about speed.

use std::num::NonZeroU16;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use outboard_nvme::driver::{
    Block, Command, DataPointer, Doorbell, Drive, Fragment, Memory as _, Options, QueuePair,
};
use outboard_nvme::{Lba, Nsid, controller};

use crate::disks::Null;
use crate::machine::{Pages, Ram, Run};
use crate::plugged::{Doorbells, Stepped, Threaded};

const TIME: Duration = Duration::from_secs(2);

/// Keeps `depth` reads of 4 KiB outstanding for a while; gives I/Os per second, and I/Os.
fn measure<D: Doorbell>(
    queue: &mut QueuePair<D, Run>,
    block: &Run,
    depth: usize,
    mut step: impl FnMut(),
) -> (f64, u64) {
    let data = DataPointer::new(&[Fragment { iova: block.iova(), length: 4096 }], None::<&Run>).unwrap();
    let (start, mut done, mut lba) = (Instant::now(), 0u64, 0u64);
    let mut room = depth;
    loop {
        for _ in 0..room {
            // A full period generator over 2^20 blocks.
            lba = (lba * 5 + 8) & 0xf_ffff;
            queue.submit(&Command::Read { nsid: Nsid(1), start: Lba(lba), blocks: 8, data }).unwrap();
        }
        queue.ring().unwrap();
        step();
        room = queue.poll(|completion| assert!(completion.status.status().is_success())).unwrap();
        done += room as u64;
        if done % 4096 < room as u64 && start.elapsed() > TIME {
            break;
        }
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    let patience = Instant::now();
    while queue.outstanding() > 0 && patience.elapsed() < TIME {
        step();
        queue.poll(|_| {}).unwrap();
    }
    (rate, done)
}

const BLOCKS: u64 = 1 << 21;
const DEPTHS: [usize; 4] = [1, 8, 32, 128];

#[test]
#[ignore = "a measurement"]
fn iops_in_one_thread() {
    let ram = Ram::new(256);
    let device = Stepped::new(&ram, controller::Options::default(), vec![Null(BLOCKS)]);
    let mut drive = Drive::enable(device.bar(), Pages::new(ram), Options::default()).unwrap();
    drive.request_queues(NonZeroU16::MIN).unwrap();
    let mut queue = drive.create_queue_pair(256).unwrap();
    let block = drive.memory().allocate(4096).unwrap();
    for depth in DEPTHS {
        let (rate, _) = measure(&mut queue, &block, depth, || {
            device.step();
        });
        println!("one thread, null, depth {depth}: {:.2} M IOPS, {:.0} ns each", rate / 1e6, 1e9 / rate);
    }
}

#[test]
#[ignore = "a measurement"]
fn iops_in_two_threads() {
    for doorbells in [Doorbells::Polled, Doorbells::Posted] {
        let ram = Ram::new(256);
        let (_worker, bar) =
            Threaded::start(&ram, controller::Options::default(), doorbells, vec![Null(BLOCKS)]);
        let rung = bar.rung();
        let mut drive = Drive::enable(bar, Pages::new(ram.clone()), Options::default()).unwrap();
        drive.request_queues(NonZeroU16::MIN).unwrap();
        if doorbells == Doorbells::Posted {
            drive.use_shadow_doorbells().unwrap();
        }
        let mut queue = drive.create_queue_pair(256).unwrap();
        let block = drive.memory().allocate(4096).unwrap();
        for depth in DEPTHS {
            let before = rung.load(Ordering::Relaxed);
            let (rate, ios) = measure(&mut queue, &block, depth, std::hint::spin_loop);
            let messages = (rung.load(Ordering::Relaxed) - before) as f64 / ios as f64;
            println!(
                "{doorbells:?}, null, depth {depth}: {:.2} M IOPS, {:.0} ns and {messages:.4} messages each",
                rate / 1e6,
                1e9 / rate
            );
        }
    }
}
