//! The server's drive under our own client and driver, over a real socket: every kind of namespace, both shapes of
//! doorbells, shared memory and memory that is reached by messages.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use outboard_nvme::driver::{Block as _, Command, DataPointer, Fragment, Memory as _, Namespace, QueuePair};
use outboard_nvme::spec::{AdminOpcode, CompletionEntry, SubmissionEntry};
use outboard_nvme::{Lba, Nsid};
use outboard_server::control::Service;
use outboard_server::nvme::{DoorbellMode, Drive, Options};
use outboard_tests::drive::{capability, connect};
use outboard_vfio_user::client::{Client, Delivery, Sharing};
use outboard_vfio_user::wire::{CommandCode, IrqAction, IrqData, IrqIndex, SetIrqs};
use outboard_vmm::drive::{Attachment, Block, Doorbell, DoorbellAccess, NvmeDrive, attach, detach};
use zerocopy::IntoBytes as _;

const PATIENCE: Duration = Duration::from_secs(10);

/// A drive that serves, and a client that uses it.
struct Stand {
    server: Arc<Drive>,
    session: JoinHandle<()>,
    client: Arc<Client>,
    drive: NvmeDrive,
    queue: QueuePair<Doorbell, Block>,
    block: Block,
    data: DataPointer,
}

const SIZE: usize = 16 << 10;

impl Stand {
    fn new(namespaces: &[String], doorbells: DoorbellMode, sharing: Sharing) -> Self {
        let server = Arc::new(
            Drive::new(Options {
                namespaces: namespaces.iter().map(|spec| spec.parse().unwrap()).collect(),
                doorbells,
                // Each in its own page, where that is what is tried.
                doorbell_stride: if doorbells == DoorbellMode::WholeBar { 10 } else { 0 },
                queue_pairs: 4,
                queue_entries: 64,
                serial: "TEST".into(),
                model: "Test drive".into(),
            })
            .unwrap(),
        );
        let (client, session) = connect(&server);
        let access = match doorbells {
            DoorbellMode::Mapped | DoorbellMode::WholeBar => DoorbellAccess::Mapped,
            DoorbellMode::Posted => DoorbellAccess::Posted,
        };
        let attachment = Attachment { doorbells: access, sharing, memory: 1 << 20 };
        let mut drive = attach(&client, attachment).unwrap();
        drive.request_queues(2.try_into().unwrap()).unwrap();
        let queue = drive.create_queue_pair(17).unwrap();
        let block = drive.memory().allocate(SIZE).unwrap();
        let list = drive.memory().allocate(4096).unwrap();
        let fragment = Fragment { iova: block.iova(), length: SIZE };
        let data = DataPointer::new(&[fragment], Some(&list)).unwrap();
        Self { server, session, client, drive, queue, block, data }
    }

    fn namespace(&mut self, nsid: u32) -> Namespace {
        self.drive.namespace(Nsid(nsid)).unwrap()
    }

    /// Executes a command; the status of a failure.
    fn execute(&mut self, command: Command) -> Result<(), String> {
        let entry = command.entry().unwrap();
        let result = self.queue.execute(entry, PATIENCE, std::thread::yield_now);
        result.map(|_| ()).map_err(|error| error.to_string())
    }

    fn write(&mut self, namespace: Namespace, start: u64, byte: u8, durable: bool) -> Result<(), String> {
        self.block.write(0, &[byte; SIZE]);
        let blocks = (SIZE >> namespace.block_shift) as u32;
        let data = self.data;
        self.execute(Command::Write { nsid: namespace.nsid, start: Lba(start), blocks, data, durable })
    }

    /// The one byte that fills what is read.
    fn read(&mut self, namespace: Namespace, start: u64) -> u8 {
        self.block.write(0, &[0xee; SIZE]);
        let blocks = (SIZE >> namespace.block_shift) as u32;
        let data = self.data;
        self.execute(Command::Read { nsid: namespace.nsid, start: Lba(start), blocks, data }).unwrap();
        let mut bytes = vec![0; SIZE];
        self.block.read(0, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        bytes[0]
    }

    /// Sets MSI-X Enable (PCI Local Bus 3.0, 6.8.2.3).
    fn enable_msix(&self, enabled: bool) {
        let control = [u8::from(enabled) << 7];
        let at = capability(&self.client, 0x11) + 3;
        self.client.region_write(7, at, &control, Delivery::Replied).unwrap();
    }

    fn leave(mut self) {
        self.drive.delete_queue_pair(self.queue).unwrap();
        detach(self.drive).unwrap();
        self.client.close();
        self.session.join().unwrap();
        self.server.stop();
    }
}

fn image(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path.to_str().unwrap().into()
}

fn everything(doorbells: DoorbellMode, sharing: Sharing) {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let (small, large) = (image(directory.path(), "small"), image(directory.path(), "large"));
    let specs = [
        format!("file:{small}"),
        format!("file:{large},block-size=4096"),
        "ram:1M".to_string(),
        "ram:1M,block-size=4096,read-only".to_string(),
    ];
    let mut stand = Stand::new(&specs, doorbells, sharing);
    for nsid in 1..=3 {
        let namespace = stand.namespace(nsid);
        assert_eq!(namespace.block_shift, if nsid == 2 { 12 } else { 9 });
        assert_eq!(namespace.blocks << namespace.block_shift, 1 << 20);
        let chunk = (SIZE >> namespace.block_shift) as u64;
        for (at, durable) in [(0, false), (1, true), (2, false)] {
            stand.write(namespace, at * chunk, 0x10 + at as u8, durable).unwrap();
        }
        stand.execute(Command::Flush { nsid: namespace.nsid }).unwrap();
        for at in 0..3 {
            assert_eq!(stand.read(namespace, at * chunk), 0x10 + at as u8, "namespace {nsid}");
        }
        let (nsid, blocks) = (namespace.nsid, chunk as u32);
        let zero = Command::WriteZeroes { nsid, start: Lba(chunk), blocks, deallocate: false, durable: true };
        stand.execute(zero).unwrap();
        assert_eq!(stand.read(namespace, chunk), 0);
        assert_eq!(stand.read(namespace, 0), 0x10, "beside it nothing changed");
        let error = stand.write(namespace, namespace.blocks, 1, false).unwrap_err();
        assert!(error.contains("LBA_OUT_OF_RANGE"), "{error}");
    }
    let read_only = stand.namespace(4);
    assert_eq!(stand.read(read_only, 0), 0);
    assert!(stand.write(read_only, 0, 1, false).is_err());
    stand.leave();
    // The file has what was written, and what was never written takes no room.
    let bytes = std::fs::read(&small).unwrap();
    assert!(bytes[..SIZE].iter().all(|&byte| byte == 0x10));
    assert!(bytes[SIZE..2 * SIZE].iter().all(|&byte| byte == 0));
    assert!(bytes[2 * SIZE..3 * SIZE].iter().all(|&byte| byte == 0x12));
    assert!(std::fs::metadata(&small).unwrap().blocks() * 512 < 1 << 19);
}

#[test]
fn mapped_doorbells_and_shared_memory() {
    everything(DoorbellMode::Mapped, Sharing::Descriptor);
}

#[test]
fn posted_doorbells_and_shared_memory() {
    everything(DoorbellMode::Posted, Sharing::Descriptor);
}

#[test]
fn a_whole_bar_and_shared_memory() {
    everything(DoorbellMode::WholeBar, Sharing::Descriptor);
}

#[test]
fn a_whole_bar_and_memory_by_messages() {
    everything(DoorbellMode::WholeBar, Sharing::Messages);
}

#[test]
fn mapped_doorbells_and_memory_by_messages() {
    everything(DoorbellMode::Mapped, Sharing::Messages);
}

#[test]
fn posted_doorbells_and_memory_by_messages() {
    everything(DoorbellMode::Posted, Sharing::Messages);
}

/// Mapped I/O crosses the socket zero times, by the counters of both sides.
#[test]
fn mapped_io_sends_no_message() {
    let mut stand = Stand::new(&["ram:1M".into()], DoorbellMode::Mapped, Sharing::Descriptor);
    let namespace = stand.namespace(1);
    let counter = |stand: &Stand, name: &str| {
        stand.server.counters().into_iter().find(|(other, _)| other == name).unwrap().1
    };
    let messages = |stand: &Stand| (counter(stand, "messages.total"), stand.client.sent().total());
    let before = messages(&stand);
    for at in 0..32 {
        stand.write(namespace, at * 32, at as u8, false).unwrap();
        assert_eq!(stand.read(namespace, at * 32), at as u8);
    }
    assert_eq!(messages(&stand), before);
    for (name, value) in [("ios.read", 32), ("ios.write", 32), ("bytes.read", 524_288)] {
        assert_eq!(counter(&stand, name), value, "{name}");
    }
    stand.leave();
}

/// While MSI-X is enabled nobody looks at the pin, and a drive that sleeps need not hear of consumed completions.
#[test]
fn completions_that_are_consumed_while_the_drive_sleeps_cost_a_message_only_for_the_pin() {
    let mut stand = Stand::new(&["ram:1M".into()], DoorbellMode::Posted, Sharing::Descriptor);
    stand.drive.use_shadow_doorbells().unwrap();
    // Shadow doorbells are of queues that are created after them.
    let queue = stand.drive.create_queue_pair(17).unwrap();
    let plain = std::mem::replace(&mut stand.queue, queue);
    stand.drive.delete_queue_pair(plain).unwrap();
    let namespace = stand.namespace(1);
    for (msix_enabled, expected) in [(false, 2), (true, 1), (false, 2)] {
        stand.enable_msix(msix_enabled);
        let before = stand.client.sent().total();
        for _ in 0..3 {
            let command = Command::Read { nsid: namespace.nsid, start: Lba(0), blocks: 1, data: stand.data };
            stand.queue.submit(&command).unwrap();
            stand.queue.ring().unwrap();
            // Long enough for the drive to fall asleep, before and after.
            std::thread::sleep(Duration::from_millis(250));
            let taken = stand.queue.poll(|completion| assert_eq!(completion.outcome(), Ok(0)));
            assert_eq!(taken.unwrap(), 1);
            std::thread::sleep(Duration::from_millis(250));
        }
        assert_eq!(stand.client.sent().total() - before, 3 * expected, "MSI-X enabled: {msix_enabled}");
    }
    stand.leave();
}

/// A queue pair with interrupts, number 2, as Linux' driver works it.
struct Interrupting {
    client: Arc<Client>,
    submission: Block,
    completion: Block,
    /// Where doorbells and event indexes are, with shadow doorbells.
    shadow: Option<(Block, Block)>,
    /// Commands that there were, one after the other.
    count: u32,
}

impl Interrupting {
    const ENTRIES: u32 = 8;
    const TAIL: usize = 4;
    const HEAD: usize = 5;

    fn new(stand: &mut Stand, shadow: bool) -> Self {
        let mut block = || stand.drive.memory().allocate(4096).unwrap();
        let (submission, completion, doorbells, events) = (block(), block(), block(), block());
        let mut execute = |opcode: AdminOpcode, prp1: &Block, prp2: u64, dword10: u32, dword11: u32| {
            let entry = SubmissionEntry {
                opcode: opcode.0,
                prp1: prp1.iova().0.into(),
                prp2: prp2.into(),
                dword10: dword10.into(),
                dword11: dword11.into(),
                ..SubmissionEntry::default()
            };
            stand.drive.execute(entry).unwrap();
        };
        if shadow {
            execute(AdminOpcode::DOORBELL_BUFFER_CONFIG, &doorbells, events.iova().0, 0, 0);
        }
        let queue = (Self::ENTRIES - 1) << 16 | 2;
        // Interrupts enabled, contiguous; the completion queue is number 2.
        execute(AdminOpcode::CREATE_COMPLETION_QUEUE, &completion, 0, queue, 0b11);
        execute(AdminOpcode::CREATE_SUBMISSION_QUEUE, &submission, 0, queue, 2 << 16 | 1);
        let shadow = shadow.then_some((doorbells, events));
        Self { client: stand.client.clone(), submission, completion, shadow, count: 0 }
    }

    fn submit(&mut self, entry: SubmissionEntry) {
        let slot = self.count % Self::ENTRIES;
        self.submission.write(slot as usize * 64, entry.as_bytes());
        self.ring(Self::TAIL);
    }

    /// Takes the completion that the interrupt told of.
    fn consume(&mut self) {
        let slot = self.count % Self::ENTRIES;
        let last = CompletionEntry::from_dwords([0, 0, 0, self.completion.load(slot as usize * 16 + 12)]);
        assert_eq!(last.status.phase(), (self.count / Self::ENTRIES).is_multiple_of(2));
        assert!(last.status.status().is_success());
        self.ring(Self::HEAD);
        self.count += 1;
    }

    fn ring(&self, doorbell: usize) {
        let (old, new) = (self.count % Self::ENTRIES, (self.count + 1) % Self::ENTRIES);
        let wanted = self.shadow.as_ref().is_none_or(|(doorbells, events)| {
            doorbells.store(doorbell * 4, new);
            fence(Ordering::SeqCst);
            let event = events.load(doorbell * 4) as u16;
            (new as u16).wrapping_sub(event).wrapping_sub(1) < (new as u16).wrapping_sub(old as u16)
        });
        if wanted {
            let offset = 0x1000 + doorbell as u64 * 4;
            self.client.region_write(0, offset, &new.to_le_bytes(), Delivery::Posted).unwrap();
        }
    }
}

/// QEMU without KVM takes any access to a BAR for the end of an interrupt of the pin: then it unmasks, and until then
/// it interrupts the guest again and again. So a guest has to touch a doorbell for what it consumes, and must not be
/// interrupted again for what that told of (fault 62).
#[test]
fn the_pin_interrupts_once_and_falls_by_a_doorbell_register() {
    for shadow in [false, true] {
        let mut stand = Stand::new(&["ram:1M".into()], DoorbellMode::Posted, Sharing::Descriptor);
        let mut queue = Interrupting::new(&mut stand, shadow);
        let command = Command::Read { nsid: Nsid(1), start: Lba(0), blocks: 1, data: stand.data };
        let pin = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        stand.client.bind_vectors(IrqIndex::INTX, 0, &[pin.as_fd()]).unwrap();
        let (index, data, action) = (IrqIndex::INTX, IrqData::None, IrqAction::Unmask);
        let unmask = SetIrqs { index, start: 0, count: 1, data, action };
        for round in 0..3000 {
            queue.submit(command.entry().unwrap());
            let mut interrupt = [PollFd::new(pin.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut interrupt, 5000_u16), Ok(1), "round {round}, shadow {shadow}");
            assert_eq!(pin.read(), Ok(1));
            let before = stand.client.sent().of(CommandCode::REGION_WRITE);
            queue.consume();
            let writes = stand.client.sent().of(CommandCode::REGION_WRITE) - before;
            assert_eq!(writes, 1, "round {round}, shadow {shadow}");
            stand.client.set_irqs(unmask, &[]).unwrap();
            assert_eq!(pin.read(), Err(Errno::EAGAIN), "round {round}, shadow {shadow}");
        }
        stand.leave();
    }
}

#[test]
fn deallocation_gives_the_hosts_blocks_back() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = image(directory.path(), "disk");
    let mut stand = Stand::new(&[format!("file:{path}")], DoorbellMode::Posted, Sharing::Descriptor);
    let namespace = stand.namespace(1);
    for at in 0..8 {
        stand.write(namespace, at * 32, 1, true).unwrap();
    }
    let full = std::fs::metadata(&path).unwrap().blocks();
    // Dataset Management ranges: context attributes, length, start (NVMe 1.4, figure 386).
    let mut list = Vec::new();
    for (start, blocks) in [(0_u64, 64_u32), (128, 128)] {
        list.extend([0_u32.to_le_bytes(), blocks.to_le_bytes()].concat());
        list.extend(start.to_le_bytes());
    }
    stand.block.write(0, &list);
    let command = Command::Deallocate { nsid: namespace.nsid, ranges: 2, data: stand.data };
    stand.execute(command).unwrap();
    let left = std::fs::metadata(&path).unwrap().blocks();
    assert!(left + 190 <= full, "{full} blocks before, {left} after");
    assert_eq!((stand.read(namespace, 0), stand.read(namespace, 64)), (0, 1));
    stand.leave();
}
