//! Faults of other NVMe devices over vfio-user, by their number in docs/faults.md, that need the whole drive: a real
//! socket, our own client and driver.

use std::io::Write as _;
use std::sync::Arc;
use std::thread::{self};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use outboard_nvme::driver::{
    Block as _, Command, DataPointer, Doorbell as _, Fragment, Memory as _, QueuePair, Registers as _,
};
use outboard_nvme::spec::{ControllerStatus, LogPageId, Register, SmartLog};
use outboard_nvme::{Lba, Nsid};
use outboard_server::control::Service;
use outboard_server::nvme::{DoorbellMode, Drive, Options};
use outboard_tests::drive::{capability, connect, stream};
use outboard_tests::in_process::eventually;
use outboard_vfio_user::client::{Client, ClientError, Delivery, Sharing};
use outboard_vfio_user::limits;
use outboard_vmm::drive::{Attachment, Block, Doorbell, DoorbellAccess, NvmeDrive, attach, detach};

const PATIENCE: Duration = Duration::from_secs(10);
const QUEUE_PAIRS: u16 = 4;
const ENTRIES: u16 = 64;
const SIZE: usize = 4096;
const BAR: u32 = 0;
const CONFIGURATION: u32 = 7;

fn serve(doorbells: DoorbellMode, namespace: &str) -> Arc<Drive> {
    let options = Options {
        namespaces: vec![namespace.parse().unwrap()],
        doorbells,
        doorbell_stride: 0,
        queue_pairs: QUEUE_PAIRS,
        queue_entries: ENTRIES.into(),
        serial: "FAULTS".into(),
        model: "Test drive".into(),
    };
    Arc::new(Drive::new(options).unwrap())
}

/// An image whose I/O takes a while: it is of the kernel's doing.
fn image(directory: &tempfile::TempDir) -> String {
    let path = directory.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    format!("file:{}", path.display())
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

/// A guest that uses the drive.
struct Guest {
    drive: NvmeDrive,
    queues: Vec<QueuePair<Doorbell, Block>>,
    block: Block,
    read: Command,
}

impl Guest {
    fn new(client: &Arc<Client>, pairs: u16) -> Self {
        let attachment =
            Attachment { doorbells: DoorbellAccess::Any, sharing: Sharing::Descriptor, memory: 1 << 20 };
        let mut drive = attach(client, attachment).unwrap();
        drive.request_queues(QUEUE_PAIRS.try_into().unwrap()).unwrap();
        let queues = (0..pairs).map(|_| drive.create_queue_pair(ENTRIES).unwrap()).collect();
        let block = drive.memory().allocate(SIZE).unwrap();
        let fragment = Fragment { iova: block.iova(), length: SIZE };
        let data = DataPointer::new::<Block>(&[fragment], None).unwrap();
        let read = Command::Read { nsid: Nsid(1), start: Lba(0), blocks: (SIZE >> 9) as u32, data };
        Self { drive, queues, block, read }
    }

    /// Fills the queues with reads.
    fn load(&mut self) {
        for queue in &mut self.queues {
            while queue.submit(&self.read).is_ok() {}
            queue.ring().unwrap();
        }
    }

    /// One read, to its end, on each queue.
    fn check(&mut self) {
        for queue in &mut self.queues {
            queue.execute(self.read.entry().unwrap(), PATIENCE, thread::yield_now).unwrap();
        }
    }
}

/// A new client finds the drive in order.
fn check(server: &Arc<Drive>) {
    let (client, session) = connect(server);
    let mut guest = Guest::new(&client, QUEUE_PAIRS);
    guest.check();
    detach(guest.drive).unwrap();
    client.close();
    session.join().unwrap();
}

fn write(client: &Client, register: Register, value: u32) {
    client.region_write(BAR, register.0.into(), &value.to_le_bytes(), Delivery::Replied).unwrap();
}

/// Initiates a function level reset (PCI Express 4.0, 7.5.3.4).
fn reset_function(client: &Client) {
    let control = capability(client, 0x10) + 8;
    client.region_write(CONFIGURATION, control + 1, &[0x80], Delivery::Replied).unwrap();
}

const VALUES: [u32; 6] = [0, 1, ENTRIES as u32 - 1, ENTRIES as u32, 0xffff, u32::MAX];

/// Doorbells beyond the queues that exist, rung by messages and by stores, before and after the drive is enabled.
#[test]
fn fault_35_doorbells_of_no_queue() {
    for mode in [DoorbellMode::Mapped, DoorbellMode::Posted] {
        let server = serve(mode, "ram:1M");
        let (client, session) = connect(&server);
        let indexes = |from: u64| from..2 * u64::from(QUEUE_PAIRS) + 4;
        for value in VALUES {
            for index in indexes(0) {
                let at = 0x1000 + index * 4;
                client.region_write(BAR, at, &value.to_le_bytes(), Delivery::Posted).unwrap();
            }
        }
        let mut guest = Guest::new(&client, 1);
        for value in VALUES {
            for index in indexes(4) {
                guest.drive.registers().doorbell(0x1000 + index * 4).unwrap().ring(value).unwrap();
            }
            thread::sleep(Duration::from_millis(3));
        }
        guest.check();
        let smart: SmartLog = guest.drive.log_page(LogPageId::SMART).unwrap();
        assert_ne!(smart.error_log_entries.get(), 0, "the host can read of it");
        detach(guest.drive).unwrap();
        client.close();
        session.join().unwrap();
        server.stop();
    }
}

/// Function level resets while the queues are full, and EN that toggles without a wait.
#[test]
fn fault_51_resets_under_load() {
    let directory = directory();
    for namespace in ["ram:1M".to_string(), image(&directory)] {
        let server = serve(DoorbellMode::Mapped, &namespace);
        let (client, session) = connect(&server);
        for round in 0..30 {
            let mut guest = Guest::new(&client, QUEUE_PAIRS);
            guest.check();
            guest.load();
            if round % 3 == 0 {
                reset_function(&client);
            } else if round % 3 == 1 {
                for enable in [0, 1, 0, 1, 0, 1] {
                    write(&client, Register::CC, 0x0046_0000 | enable);
                }
            } else {
                write(&client, Register::NSSR, 0x4e56_4d65);
            }
            client.dma_unmap_all().unwrap();
            client.reset().unwrap();
        }
        client.close();
        session.join().unwrap();
        check(&server);
        server.stop();
    }
}

/// An unmap is answered when the last use has ended: afterwards nothing is written.
#[test]
fn fault_52_unmap_under_load() {
    let directory = directory();
    let server = serve(DoorbellMode::Mapped, &image(&directory));
    let (client, session) = connect(&server);
    for _ in 0..20 {
        let mut guest = Guest::new(&client, QUEUE_PAIRS);
        guest.load();
        client.dma_unmap_all().unwrap();
        guest.block.write(0, &[0xee; SIZE]);
        thread::sleep(Duration::from_millis(5));
        let mut bytes = [0; SIZE];
        guest.block.read(0, &mut bytes);
        assert_eq!(bytes, [0xee; SIZE]);
        client.reset().unwrap();
    }
    client.close();
    session.join().unwrap();
    check(&server);
    server.stop();
}

/// Clients that vanish under load, of several drives at once: the next one maps the same addresses anew.
#[test]
fn fault_53_fault_54_clients_that_vanish() {
    let directory = directory();
    let namespace = image(&directory);
    let servers: Vec<_> = ["ram:1M", "null:1M", &namespace]
        .into_iter()
        .flat_map(|namespace| {
            // A file is one drive's.
            let modes: &[_] = match namespace.starts_with("file") {
                true => &[DoorbellMode::Mapped],
                false => &[DoorbellMode::Mapped, DoorbellMode::Posted],
            };
            modes.iter().map(|mode| serve(*mode, namespace)).collect::<Vec<_>>()
        })
        .collect();
    thread::scope(|scope| {
        for server in &servers {
            scope.spawn(move || {
                for _ in 0..25 {
                    let (client, session) = connect(server);
                    let mut guest = Guest::new(&client, QUEUE_PAIRS);
                    guest.check();
                    guest.load();
                    client.close();
                    session.join().unwrap();
                }
                check(server);
            });
        }
    });
    servers.iter().for_each(|server| server.stop());
}

/// All queues exist and have commands: the session ends at once, and the next client is served.
#[test]
fn fault_56_disconnect_with_everything_pending() {
    let directory = directory();
    let server = serve(DoorbellMode::Mapped, &image(&directory));
    let (client, session) = connect(&server);
    let mut guest = Guest::new(&client, QUEUE_PAIRS);
    guest.load();
    let start = Instant::now();
    client.close();
    session.join().unwrap();
    // Nothing waits until a limit acts.
    assert!(start.elapsed() < limits::REPLY, "{:?}", start.elapsed());
    check(&server);
    server.stop();
}

/// Each step of a client's beginning fails.
#[test]
fn fault_57_beginnings_that_fail() {
    let server = serve(DoorbellMode::Mapped, "ram:1M");
    for bytes in [&[][..], &[1, 0, 1], &[0xff; 16], &[1, 0, 1, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
        let (mut stream, session) = stream(&server);
        stream.write_all(bytes).unwrap();
        drop(stream);
        session.join().unwrap();
    }
    // No admin queues, then admin queues that are nowhere.
    for (attributes, tail) in [(0, 0), (0x001f_001f, 1)] {
        let (client, session) = connect(&server);
        let status = || {
            let mut status = [0; 4];
            client.region_read(BAR, Register::CSTS.0.into(), &mut status).unwrap();
            ControllerStatus::from_bits(u32::from_le_bytes(status))
        };
        write(&client, Register::AQA, attributes);
        write(&client, Register::CC, 0x0046_0001);
        // Doorbells count from Ready on (NVMe 1.4, section 7.6.1).
        eventually("ready, or a fatal status", || status().ready() || status().fatal());
        let doorbell = u32::to_le_bytes(tail);
        client.region_write(BAR, 0x1000, &doorbell, Delivery::Replied).unwrap();
        eventually("a fatal status", || status().fatal());
        client.close();
        session.join().unwrap();
    }
    check(&server);
    server.stop();
}

/// Clients of another version ask for a tenth region, that of migration.
#[test]
fn fault_61_a_region_that_we_do_not_have() {
    let server = serve(DoorbellMode::Mapped, "ram:1M");
    let (client, session) = connect(&server);
    assert_eq!(client.device_info().unwrap().regions, 9);
    let error = client.region(9).unwrap_err();
    assert!(matches!(error, ClientError::Refused { errno: Errno::EINVAL, .. }), "{error:?}");
    Guest::new(&client, 1).check();
    client.close();
    session.join().unwrap();
    server.stop();
}
