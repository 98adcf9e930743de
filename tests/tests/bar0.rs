//! BAR0 as memory under our own client: masks and pending bits of MSI-X, and clients that keep what they have mapped.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use outboard_nvme::Nsid;
use outboard_server::control::Service;
use outboard_server::nvme::{DoorbellMode, Drive, Options};
use outboard_tests::drive::{capability, connect};
use outboard_vfio_user::client::{Client, Delivery, Sharing};
use outboard_vfio_user::memory::{Access, Mapping};
use outboard_vfio_user::wire::IrqIndex;
use outboard_vmm::drive::{Attachment, DoorbellAccess, NvmeDrive, attach, detach};
use vm_memory::Bytes;

const BAR0: u32 = 0;
const CONFIG: u32 = 7;
/// PCI Local Bus 3.0, section 6.8.2.
const MSIX: u8 = 0x11;

fn drive(doorbells: DoorbellMode) -> Arc<Drive> {
    let options = Options {
        namespaces: vec!["ram:1M".parse().unwrap()],
        doorbells,
        doorbell_stride: 0,
        queue_pairs: 4,
        queue_entries: 64,
        serial: "TEST".into(),
        model: "Test drive".into(),
    };
    Arc::new(Drive::new(options).unwrap())
}

/// A client of a drive, with the drive enabled.
struct Guest {
    session: JoinHandle<()>,
    client: Arc<Client>,
    drive: NvmeDrive,
}

impl Guest {
    fn new(server: &Arc<Drive>) -> Self {
        let (client, session) = connect(server);
        let attachment =
            Attachment { doorbells: DoorbellAccess::Any, sharing: Sharing::Descriptor, memory: 1 << 20 };
        let drive = attach(&client, attachment).unwrap();
        Self { session, client, drive }
    }

    /// Everything of BAR0 that can be mapped.
    fn map(&self) -> Mapping {
        let region = self.client.region(BAR0).unwrap();
        let area = region.areas().unwrap()[0];
        region.map(area, Access::ReadWrite).unwrap()
    }

    /// Where the MSI-X capability is, its table and its pending bits.
    fn msix(&self) -> (u64, u64, u64) {
        let at = capability(&self.client, MSIX);
        let place = |register: u64| {
            let mut bytes = [0; 4];
            self.client.region_read(CONFIG, at + register, &mut bytes).unwrap();
            let place = u32::from_le_bytes(bytes);
            assert_eq!(place & 7, BAR0);
            u64::from(place)
        };
        (at, place(4), place(8))
    }

    /// Message Control: MSI-X Enable and Function Mask.
    fn set_msix(&self, enabled: bool, masked: bool) {
        let control = u8::from(enabled) << 7 | u8::from(masked) << 6;
        let at = self.msix().0 + 3;
        self.client.region_write(CONFIG, at, &[control], Delivery::Replied).unwrap();
    }

    fn write(&self, offset: u64, value: u32) {
        self.client.region_write(BAR0, offset, &value.to_le_bytes(), Delivery::Replied).unwrap();
    }

    fn is_pending(&self, vector: u64) -> bool {
        let mut byte = [0];
        self.client.region_read(BAR0, self.msix().2 + vector / 8, &mut byte).unwrap();
        byte[0] >> (vector % 8) & 1 == 1
    }

    /// An admin command, whose completion raises vector 0.
    fn command(&mut self) {
        self.drive.namespace(Nsid(1)).unwrap();
    }

    /// Executes commands until they have raised vector 0: one whose completion is consumed before the drive looks
    /// needs no interrupt.
    fn raise(&mut self, raised: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !raised(self) {
            assert!(begin.elapsed() < Duration::from_secs(5), "no interrupt");
            self.command();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn leave(self) {
        detach(self.drive).unwrap();
        self.client.close();
        self.session.join().unwrap();
    }
}

fn eventfd() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap()
}

fn fires(eventfd: &EventFd) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(5) {
        if eventfd.read().is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

fn stays_silent(eventfd: &EventFd) -> bool {
    std::thread::sleep(Duration::from_millis(50));
    eventfd.read().is_err()
}

/// Takes what was under way before a mask was set: the drive has raised it before it completes another command.
fn settle(guest: &mut Guest, eventfd: &EventFd) {
    guest.command();
    let _ = eventfd.read();
}

/// How the guest reaches the table.
type Store<'a> = &'a dyn Fn(&Guest, u64, u32);

fn masks_hold_interrupts_back(doorbells: DoorbellMode, store: Store<'_>) {
    let server = drive(doorbells);
    let mut guest = Guest::new(&server);
    let interrupt = eventfd();
    guest.client.bind_vectors(IrqIndex::MSIX, 0, &[interrupt.as_fd()]).unwrap();
    guest.set_msix(true, false);
    // A client that emulates the table never touches the one in the BAR.
    guest.raise(|_| interrupt.read().is_ok());
    let (_, table, _) = guest.msix();
    store(&guest, table, 0xfee0_0000);
    store(&guest, table + 12, 1);
    settle(&mut guest, &interrupt);
    guest.raise(|guest| guest.is_pending(0));
    assert!(stays_silent(&interrupt), "masked");
    store(&guest, table + 12, 0);
    assert!(fires(&interrupt), "unmasked");
    assert!(!guest.is_pending(0));
    guest.set_msix(true, true);
    settle(&mut guest, &interrupt);
    guest.raise(|guest| guest.is_pending(0));
    assert!(stays_silent(&interrupt), "the function is masked");
    guest.set_msix(true, false);
    assert!(fires(&interrupt));
    guest.raise(|_| interrupt.read().is_ok());
    // A reset forgets what is pending and who programmed what.
    store(&guest, table + 12, 1);
    settle(&mut guest, &interrupt);
    guest.raise(|guest| guest.is_pending(0));
    guest.client.reset().unwrap();
    assert!(!guest.is_pending(0));
    assert!(stays_silent(&interrupt));
    guest.client.close();
    guest.session.join().unwrap();
    server.stop();
}

#[test]
fn masks_in_a_mapped_table_hold_interrupts_back() {
    masks_hold_interrupts_back(DoorbellMode::WholeBar, &|guest, offset, value| {
        guest.map().bytes().store(value, offset as usize, Ordering::Release).unwrap();
    });
}

#[test]
fn masks_in_a_table_of_messages_hold_interrupts_back() {
    for doorbells in [DoorbellMode::WholeBar, DoorbellMode::Mapped, DoorbellMode::Posted] {
        masks_hold_interrupts_back(doorbells, &Guest::write);
    }
}

#[test]
fn the_whole_bar_is_one_sealed_file_and_registers_in_it_follow() {
    let server = drive(DoorbellMode::WholeBar);
    let guest = Guest::new(&server);
    let region = guest.client.region(BAR0).unwrap();
    assert!(region.is_msix_mappable());
    assert_eq!(region.areas().unwrap().len(), 1);
    assert_eq!(region.areas().unwrap()[0].size, region.size());
    assert!(region.size().is_multiple_of(0x1_0000), "whole pages also where a page is 64 KiB");
    assert!(nix::unistd::ftruncate(region.file().unwrap(), 0).is_err(), "sealed");
    let memory = guest.map();
    let load = |offset: usize| memory.bytes().load::<u32>(offset, Ordering::Acquire).unwrap();
    assert_eq!(load(0x08), 0x1_0400, "VS");
    assert_eq!(load(0x1c), 1, "CSTS.RDY");
    // By a message as by a store.
    guest.write(0x14, 0);
    let begin = Instant::now();
    while load(0x1c) != 0 {
        assert!(begin.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    }
    guest.client.close();
    guest.session.join().unwrap();
    server.stop();
}

/// What one client keeps mapped after it left is not what the next one uses.
#[test]
fn a_client_that_left_rings_nobodys_doorbells() {
    for doorbells in [DoorbellMode::Mapped, DoorbellMode::WholeBar] {
        let server = drive(doorbells);
        let first = Guest::new(&server);
        let kept = first.map();
        first.leave();
        let mut second = Guest::new(&server);
        let length = kept.bytes().len();
        for _ in 0..10 {
            kept.bytes().write_slice(&vec![0xff; length], 0).unwrap();
            second.command();
        }
        let messages = second.map();
        let mut ours = vec![0; length];
        messages.bytes().read_slice(&mut ours, 0).unwrap();
        assert!(ours.iter().any(|&byte| byte != 0xff));
        assert!(server.counters().contains(&("errors".into(), 0)));
        second.leave();
        server.stop();
    }
}
