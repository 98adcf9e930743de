use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;

use nix::sys::eventfd::{EfdFlags, EventFd};
use outboard_pci::{Bar, BarKind, Builder, Identity};

use super::*;
use crate::client::{Client, ClientError, Delivery, Options};
use crate::server::serve;
use crate::wire::{IrqAction, IrqData, SetIrqs};

const IDENTITY: Identity = Identity {
    vendor: 0x1234,
    device: 0x5678,
    subsystem_vendor: 0,
    subsystem: 0,
    class: [0xff, 0, 0],
    revision: 0,
};

/// Bytes in two BARs; the first one of the first BAR is the interrupt.
#[derive(Default)]
struct Bytes {
    ports: [u8; 8],
    memory: [u8; 32],
}

impl Bytes {
    fn of(&mut self, bar: BarIndex) -> &mut [u8] {
        match bar.get() {
            1 => &mut self.ports,
            4 => &mut self.memory,
            other => panic!("there is no BAR {other}"),
        }
    }
}

impl Registers for Bytes {
    fn read(&mut self, bar: BarIndex, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.of(bar)[offset as usize..][..into.len()]);
    }

    fn write(&mut self, bar: BarIndex, offset: u64, from: &[u8]) {
        self.of(bar)[offset as usize..][..from.len()].copy_from_slice(from);
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn interrupt(&self) -> bool {
        self.ports[0] != 0
    }
}

fn function() -> Function<Bytes> {
    let bar = |index| BarIndex::new(index).unwrap();
    let config = Builder::new(IDENTITY)
        .bar(bar(1), Bar { kind: BarKind::Io, size: 8 })
        .unwrap()
        .bar(bar(4), Bar { kind: BarKind::Memory64 { prefetchable: false }, size: 32 })
        .unwrap()
        .pin(1)
        .unwrap()
        .express(outboard_pci::Express)
        .unwrap()
        .build();
    Function::new(config, Bytes::default())
}

fn with_client(function: &Function<Bytes>, test: impl FnOnce(&Client)) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let session = scope.spawn(|| serve(theirs, function, &Arc::default()));
        test(&Client::new(ours, Options::default()).unwrap());
        session.join().unwrap().unwrap();
    });
}

fn pin(client: &Client) -> EventFd {
    let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap();
    client.bind_vectors(IrqIndex::INTX, 0, &[eventfd.as_fd()]).unwrap();
    eventfd
}

fn unmask(client: &Client) {
    let set =
        SetIrqs { index: IrqIndex::INTX, start: 0, count: 1, data: IrqData::None, action: IrqAction::Unmask };
    client.set_irqs(set, &[]).unwrap();
}

fn read<const LENGTH: usize>(client: &Client, region: u32, offset: u64) -> [u8; LENGTH] {
    let mut bytes = [0xee; LENGTH];
    client.region_read(region, offset, &mut bytes).unwrap();
    bytes
}

fn write(client: &Client, region: u32, offset: u64, data: &[u8]) {
    client.region_write(region, offset, data, Delivery::Replied).unwrap();
}

#[test]
fn regions_are_those_of_the_configuration_space() {
    let function = function();
    let size = |region: usize| function.description().regions[region].size;
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(size), [0, 8, 0, 0, 32, 0, 0, 4096, 0]);
    assert_eq!(function.description().irqs[0], Irq::PIN);
    let without = Function::new(Builder::new(IDENTITY).build(), Bytes::default());
    assert_eq!(without.description().irqs[0].count, 0);
}

#[test]
fn registers_are_reached_in_any_width() {
    let function = function();
    with_client(&function, |client| {
        write(client, 4, 3, &[1, 2, 3, 4, 5]);
        assert_eq!(read(client, 4, 2), [0, 1, 2, 3]);
        write(client, 1, 7, &[9]);
        assert_eq!(read(client, 1, 7), [9]);
        assert_eq!(read(client, CONFIG, 0), [0x34, 0x12, 0x78, 0x56]);
        assert!(matches!(client.region_read(0, 0, &mut [0]), Err(ClientError::Refused { .. })));
        assert_eq!(function.with(|bytes| bytes.ports[7]), 9);
    });
    assert_eq!(function.with(|bytes| bytes.memory), [0; 32], "what a client left is gone with it");
}

#[test]
fn the_pin_follows_the_registers() {
    let function = function();
    with_client(&function, |client| {
        let pin = pin(client);
        assert!(pin.read().is_err(), "nothing yet");
        // By the client's write, and again as long as it lasts.
        write(client, 1, 0, &[1]);
        assert_eq!(pin.read(), Ok(1));
        unmask(client);
        assert_eq!(pin.read(), Ok(1));
        assert_eq!(read::<1>(client, CONFIG, 6)[0] & 8, 8, "Interrupt Status");
        write(client, 1, 0, &[0]);
        unmask(client);
        assert!(pin.read().is_err());
        // From outside, and held back by Interrupt Disable.
        write(client, CONFIG, 4, &[0, 4]);
        function.with(|bytes| bytes.ports[0] = 1);
        assert!(pin.read().is_err());
        write(client, CONFIG, 4, &[0, 0]);
        assert_eq!(pin.read(), Ok(1));
    });
}

#[test]
fn each_reset_reaches_the_registers() {
    let function = function();
    with_client(&function, |client| {
        let capability = u64::from(read::<1>(client, CONFIG, 0x34)[0]);
        let resets: [&dyn Fn(); 2] = [
            &|| client.reset().unwrap(),
            // Initiate Function Level Reset.
            &|| write(client, CONFIG, capability + 9, &[0x80]),
        ];
        for reset in resets {
            write(client, 4, 0, &[7; 32]);
            write(client, CONFIG, 4, &[1, 0]);
            reset();
            assert_eq!(read(client, 4, 0), [0; 32]);
            assert_eq!(read(client, CONFIG, 4), [0]);
        }
    });
}
