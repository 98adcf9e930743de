use outboard_nvme::controller::{Controller, Options};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::disk::Backend;

use crate::nvme::bar0::Layout;
use crate::nvme::machine::Machine;

const CAP: u64 = 0x00;
const INTMS: u64 = 0x0c;
const CLEAR: u64 = 0x10;
const CONTROL: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;

/// Stores to the page as a guest does that has mapped it.
struct Guest {
    bar: Arc<Bar0>,
    registers: Arc<Registers>,
    mirror: Mirror,
}

impl Guest {
    fn new() -> Self {
        let controller: Controller<Machine, Backend<Machine>> =
            Controller::new(Options::default(), vec![]).unwrap();
        let registers = controller.registers();
        let bar = Arc::new(Bar0::new(Layout::new(4, 5, 0, 0)).unwrap());
        Self { mirror: Mirror::new(bar.clone(), registers.clone()), bar, registers }
    }

    fn store(&self, offset: u64, value: u32) {
        self.bar.write(offset, &value.to_le_bytes());
    }

    fn register(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.registers.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

#[test]
fn a_client_finds_the_registers_before_anybody_looks() {
    let guest = Guest::new();
    assert_eq!(guest.bar.load(CAP), guest.register(CAP));
    assert_eq!(guest.bar.load(0x08), 0x1_0400);
}

#[test]
fn what_is_read_only_comes_back() {
    let mut guest = Guest::new();
    let before = guest.bar.load(CAP);
    guest.store(CAP, 0);
    guest.store(0x38, 5);
    guest.store(0xffc, 5);
    assert!(guest.mirror.look());
    assert!(!guest.mirror.look());
    guest.mirror.restore();
    assert_eq!((guest.bar.load(CAP), guest.bar.load(0x38), guest.bar.load(0xffc)), (before, 0, 0));
}

#[test]
fn the_admin_queues_are_known_when_the_controller_is_enabled() {
    let mut guest = Guest::new();
    for (offset, value) in [(AQA, 0x1f_001f), (0x28, 0x1000), (0x30, 0x2000), (CONTROL, 0x46_0001)] {
        guest.store(offset, value);
    }
    assert!(guest.mirror.look());
    for (offset, value) in [(AQA, 0x1f_001f), (0x28, 0x1000), (0x30, 0x2000), (CONTROL, 0x46_0001)] {
        assert_eq!(guest.register(offset), value);
        assert_eq!(guest.bar.load(offset), value);
    }
    // A reset from outside shows.
    let _ = guest.registers.reset();
    assert!(!guest.mirror.look());
    assert_eq!((guest.bar.load(CONTROL), guest.bar.load(AQA)), (0, 0));
}

/// The same vector is masked and unmasked again and again.
#[test]
fn every_write_of_intmc_is_seen() {
    let mut guest = Guest::new();
    for _ in 0..3 {
        guest.store(INTMS, 1);
        guest.mirror.look();
        assert_eq!((guest.register(INTMS), guest.bar.load(INTMS)), (1, 1));
        guest.store(CLEAR, 1);
        guest.mirror.look();
        assert_eq!((guest.register(INTMS), guest.bar.load(INTMS), guest.bar.load(CLEAR)), (0, 0, 0));
    }
}

#[test]
fn a_subsystem_reset_is_seen_once_and_its_flag_can_be_cleared() {
    let mut guest = Guest::new();
    guest.store(0x20, 0x4e56_4d65);
    assert!(guest.mirror.look());
    assert_eq!(guest.bar.load(0x20), 0);
    assert_eq!(guest.bar.load(CSTS) & 0x10, 0x10);
    assert!(!guest.mirror.look());
}

proptest! {
    /// Stores that are looked at one by one do what messages do.
    #[test]
    fn stores_are_writes(stores in vec((0..16_u64, any::<u32>()), 0..40)) {
        let mut mapped = Guest::new();
        let messages = Guest::new();
        for (index, value) in stores {
            mapped.store(index * 4, value);
            mapped.mirror.look();
            let _ = messages.registers.write(index * 4, &value.to_le_bytes());
            for index in 0..16 {
                prop_assert_eq!(mapped.register(index * 4), messages.register(index * 4));
                let shown = if index * 4 == CLEAR { 0 } else { mapped.register(index * 4) };
                prop_assert_eq!(mapped.bar.load(index * 4), shown);
            }
        }
    }
}
