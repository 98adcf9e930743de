//! Configuration space against models that know its rules bit by bit, and walked as hosts walk it.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::capability::id;

const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0010,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: [0x01, 0x08, 0x02],
    revision: 2,
};

const BAR0_SIZE: u64 = 0x8000;
const BAR2_SIZE: u64 = 0x100;
const BAR3_SIZE: u64 = 0x20;
const BAR4_SIZE: u64 = 1 << 33;

fn index(index: u8) -> BarIndex {
    BarIndex::new(index).unwrap()
}

fn vendor() -> Vendor {
    Vendor { data: vec![0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6] }
}

/// Everything that a function can have.
fn whole() -> ConfigSpace {
    Builder::new(IDENTITY)
        .bar(index(0), Bar { kind: BarKind::Memory64 { prefetchable: false }, size: BAR0_SIZE })
        .unwrap()
        .bar(index(2), Bar { kind: BarKind::Io, size: BAR2_SIZE })
        .unwrap()
        .bar(index(3), Bar { kind: BarKind::Memory32, size: BAR3_SIZE })
        .unwrap()
        .bar(index(4), Bar { kind: BarKind::Memory64 { prefetchable: true }, size: BAR4_SIZE })
        .unwrap()
        .pin(1)
        .unwrap()
        .power_management(PowerManagement)
        .unwrap()
        .vendor(&vendor())
        .unwrap()
        .express(Express)
        .unwrap()
        .msix(Msix { vectors: 65, table: (index(0), 0x2000), pending: (index(0), 0x4000) })
        .unwrap()
        .build()
}

// Where the capabilities of `whole` are: each begins at the first multiple of 4 behind the one before.
const PM_AT: usize = 0x40;
const VENDOR_AT: usize = 0x48;
const EXPRESS_AT: usize = 0x54;
const MSIX_AT: usize = 0x90;

fn byte(space: &ConfigSpace, offset: usize) -> u8 {
    let mut bytes = [0];
    space.read(offset, &mut bytes);
    bytes[0]
}

fn word(space: &ConfigSpace, offset: usize) -> u16 {
    let mut bytes = [0; 2];
    space.read(offset, &mut bytes);
    u16::from_le_bytes(bytes)
}

fn dword(space: &ConfigSpace, offset: usize) -> u32 {
    let mut bytes = [0; 4];
    space.read(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn content(space: &ConfigSpace) -> Vec<u8> {
    let mut bytes = vec![0; space.size()];
    space.read(0, &mut bytes);
    bytes
}

/// What a write does to a bit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    Fixed,
    Kept,
    ClearedByOne,
}

/// `whole`, one bit at a time.
struct Model {
    bits: Vec<bool>,
    initial: Vec<bool>,
    rules: Vec<Rule>,
}

const FLR_BIT: usize = (EXPRESS_AT + 8) * 8 + 15;
const POWER_BIT: usize = (PM_AT + 4) * 8;

impl Model {
    fn new(space: &ConfigSpace) -> Self {
        let initial: Vec<bool> =
            content(space).iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).collect();
        let mut rules = vec![Rule::Fixed; initial.len()];
        let mut rule = |offset: usize, mask: u64, rule: Rule| {
            for bit in (0..64).filter(|bit| mask >> bit & 1 == 1) {
                rules[offset * 8 + bit] = rule;
            }
        };
        // PCI 3.0, 6.2.2: I/O, memory, bus master, parity, SERR#, interrupt disable.
        rule(0x04, 0x0547, Rule::Kept);
        // 6.2.3: the errors, bits 8 and 11 to 15.
        rule(0x06, 0xf900, Rule::ClearedByOne);
        rule(0x0c, 0xff, Rule::Kept);
        rule(0x10, !(BAR0_SIZE - 1), Rule::Kept);
        // 6.2.5.1: ports end at 64 KiB, and the upper half is 0.
        rule(0x18, 0xffff & !(BAR2_SIZE - 1), Rule::Kept);
        rule(0x1c, 0xffff_ffff & !(BAR3_SIZE - 1), Rule::Kept);
        rule(0x20, !(BAR4_SIZE - 1), Rule::Kept);
        rule(0x3c, 0xff, Rule::Kept);
        rule(PM_AT + 4, 3, Rule::Kept);
        // PCI Express 3.0, 7.8.4, 7.8.5, 7.8.7, 7.8.16, 7.8.19.
        rule(EXPRESS_AT + 0x08, 0x7fff, Rule::Kept);
        rule(EXPRESS_AT + 0x0a, 0x000f, Rule::ClearedByOne);
        rule(EXPRESS_AT + 0x10, LINK_CONTROL, Rule::Kept);
        rule(EXPRESS_AT + 0x28, DEVICE_CONTROL_2, Rule::Kept);
        rule(EXPRESS_AT + 0x30, 0x000f, Rule::Kept);
        rule(MSIX_AT + 2, 0xc000, Rule::Kept);
        Self { bits: initial.clone(), initial, rules }
    }

    fn write(&mut self, offset: usize, data: &[u8]) {
        let first = offset * 8;
        let written: Vec<bool> =
            data.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).collect();
        let bit = |at: usize| at.checked_sub(first).and_then(|at| written.get(at)).copied();
        if bit(FLR_BIT) == Some(true) {
            self.bits.clone_from(&self.initial);
            return;
        }
        let power = [self.bits[POWER_BIT], self.bits[POWER_BIT + 1]];
        for (at, value) in (first..self.bits.len()).zip(&written) {
            match self.rules[at] {
                Rule::Fixed => {}
                Rule::Kept => self.bits[at] = *value,
                Rule::ClearedByOne => self.bits[at] &= !value,
            }
        }
        // PM 1.2, 3.2.4: a write of a state that is not supported changes nothing.
        if self.bits[POWER_BIT] != self.bits[POWER_BIT + 1] {
            (self.bits[POWER_BIT], self.bits[POWER_BIT + 1]) = (power[0], power[1]);
        }
    }

    fn content(&self) -> Vec<u8> {
        self.bits
            .chunks(8)
            .map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit)))
            .collect()
    }
}

/// Link Control of an endpoint: ASPM, read completion boundary, common clock, extended synch.
const LINK_CONTROL: u64 = 0x00cb;
/// Device Control 2: completion timeout disable.
const DEVICE_CONTROL_2: u64 = 0x0010;

/// Where registers are, and now and then anywhere.
fn place() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0..0xa0_usize, 1 => 0xa0..0x1000_usize, 1 => 0xff0..0x1010_usize]
}

/// Every width that is sent, and those that should not be; ones and zeroes more often than chance has them.
fn data() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![Just(0xff), Just(0), any::<u8>()];
    prop_oneof![
        vec(byte.clone(), 1..=1),
        vec(byte.clone(), 2..=2),
        vec(byte.clone(), 4..=4),
        vec(byte.clone(), 8..=8),
        vec(byte, 0..40),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn writes_do_to_each_bit_what_its_rule_says(writes in vec((place(), data()), 0..40)) {
        let mut space = whole();
        let mut model = Model::new(&space);
        for (offset, data) in writes {
            space.write(offset, &data);
            model.write(offset, &data);
            let (ours, theirs) = (content(&space), model.content());
            let wrong = ours.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs);
            prop_assert!(wrong.is_none(), "byte {:#x?} after {:02x?} at {:#x}", wrong, data, offset);
        }
    }

    #[test]
    fn reads_are_parts_of_the_content(
        writes in vec((place(), data()), 0..8),
        offset in place(),
        length in 0..300_usize,
    ) {
        let mut space = whole();
        for (offset, data) in writes {
            space.write(offset, &data);
        }
        let mut read = vec![0xaa; length];
        space.read(offset, &mut read);
        let expected: Vec<u8> =
            content(&space).into_iter().chain(std::iter::repeat(0)).skip(offset).take(length).collect();
        prop_assert_eq!(read, expected);
    }

    /// Effects are exactly the differences between what can be asked before and after.
    #[test]
    fn effects_are_what_changed(writes in vec((place(), data()), 0..40)) {
        let mut space = whole();
        for (offset, data) in writes {
            let before = space.clone();
            let effects = space.write(offset, &data);
            if effects == [Effect::FunctionLevelReset] {
                prop_assert_eq!(content(&space), content(&whole()));
                continue;
            }
            let mut expected = Vec::new();
            if word(&before, 0x04) != word(&space, 0x04) {
                let command = word(&space, 0x04);
                expected.push(Effect::Command {
                    memory: command & 2 != 0,
                    bus_master: command & 4 != 0,
                    intx_disabled: command & 0x400 != 0,
                });
            }
            for bar in [0, 2, 3, 4].map(index) {
                if before.bar_address(bar) != space.bar_address(bar) {
                    expected.push(Effect::BarMoved(bar, space.bar_address(bar).unwrap()));
                }
            }
            if before.power_state() != space.power_state() {
                expected.push(Effect::Power(space.power_state()));
            }
            if word(&before, MSIX_AT + 2) != word(&space, MSIX_AT + 2) {
                let control = word(&space, MSIX_AT + 2);
                expected.push(Effect::Msix { enabled: control & 0x8000 != 0, masked: control & 0x4000 != 0 });
            }
            prop_assert_eq!(effects, expected);
        }
    }

    /// After any past, a reset gives back what power-on gave.
    #[test]
    fn reset_is_power_on(writes in vec((place(), data()), 0..40)) {
        let mut space = whole();
        for (offset, data) in writes {
            space.write(offset, &data);
        }
        space.reset();
        prop_assert_eq!(content(&space), content(&whole()));
        prop_assert_eq!(space.bar_address(index(4)), Some(0));
        prop_assert_eq!(space.power_state(), PowerState::D0);
    }

    /// 6.2.5.1, with the dwords of the BARs written in any widths: the size is the lowest bit that sticks.
    #[test]
    fn sizing(
        kind in prop_oneof![
            Just(BarKind::Memory32),
            Just(BarKind::Io),
            any::<bool>().prop_map(|prefetchable| BarKind::Memory64 { prefetchable }),
        ],
        shift in 2..64_u32,
        at in 0..6_u8,
        widths in vec(prop_oneof![Just(1_usize), Just(2), Just(4), Just(8)], 24),
        upper_first in any::<bool>(),
        address in any::<u64>(),
    ) {
        let bar = Bar { kind, size: 1 << shift };
        let wide = matches!(kind, BarKind::Memory64 { .. });
        let built = Builder::new(IDENTITY).bar(index(at), bar);
        let fits = !(wide && at == 5);
        let legal = match kind {
            BarKind::Memory32 => (4..=31).contains(&shift),
            BarKind::Memory64 { .. } => shift >= 4,
            BarKind::Io => shift <= 8,
        };
        prop_assert_eq!(built.is_ok(), fits && legal);
        let Ok(builder) = built else { return Ok(()) };
        let mut space = builder.build();
        let low = 0x10 + usize::from(at) * 4;
        let flags = u64::from(dword(&space, low));
        prop_assert_eq!(flags, match kind {
            BarKind::Memory32 => 0,
            BarKind::Io => 1,
            BarKind::Memory64 { prefetchable } => 4 | u64::from(prefetchable) << 3,
        });
        let length = if wide { 8 } else { 4 };
        let mut halves = vec![low];
        if wide {
            halves.push(low + 4);
        }
        if upper_first {
            halves.reverse();
        }
        let mut widths = widths.into_iter();
        let mut write = |space: &mut ConfigSpace, value: u64| {
            for half in &halves {
                let mut done = 0;
                while done < 4 {
                    let width = widths.next().unwrap_or(4).min(4 - done);
                    let from = half - low + done;
                    space.write(half + done, &value.to_le_bytes()[from..from + width]);
                    done += width;
                }
            }
        };
        let read = |space: &ConfigSpace| {
            let mut bytes = [0; 8];
            space.read(low, &mut bytes[..length]);
            u64::from_le_bytes(bytes)
        };
        write(&mut space, u64::MAX);
        let width_mask = match kind {
            BarKind::Memory64 { .. } => u64::MAX,
            BarKind::Memory32 => 0xffff_ffff,
            BarKind::Io => 0xffff,
        };
        let probed = read(&space) & !(if kind == BarKind::Io { 3 } else { 15 });
        prop_assert_eq!(probed.wrapping_neg() & width_mask, bar.size & width_mask, "{:#x}", probed);
        prop_assert_eq!(read(&space) & !probed, flags);
        // And then it goes to an address, of which the low bits do not count.
        write(&mut space, address);
        prop_assert_eq!(space.bar_address(index(at)), Some(address & width_mask & !(bar.size - 1)));
        prop_assert_eq!(read(&space), address & width_mask & !(bar.size - 1) | flags);
        // Nothing else has changed.
        for other in (0x10..0x28).step_by(4).filter(|other| !(low..low + length).contains(other)) {
            prop_assert_eq!(dword(&space, other), 0);
        }
    }

    /// However many capabilities of whatever lengths: the list is sound, or the builder refuses.
    #[test]
    fn capability_lists_are_sound(lengths in vec(0..60_usize, 0..10)) {
        let mut builder = Builder::new(IDENTITY);
        let mut expected = Vec::new();
        let mut used = 0x40_usize;
        for length in lengths {
            let capability = Vendor { data: vec![0x5a; length] };
            let room = used + length + 3 <= 0x100;
            builder = match builder.vendor(&capability) {
                Ok(builder) => builder,
                Err(error) => {
                    prop_assert!(!room);
                    prop_assert_eq!(error, BuildError::CapabilitiesFull { length: length + 3, used });
                    return Ok(());
                }
            };
            prop_assert!(room);
            expected.push((0x09, used));
            used = (used + length + 3).next_multiple_of(4);
        }
        let space = builder.build();
        let found = walk(&space);
        prop_assert_eq!(&found, &expected);
        for (_, at) in found {
            prop_assert!(at + usize::from(byte(&space, at + 2)) <= 0x100);
        }
    }
}

/// The list as Linux (`__pci_find_next_cap_ttl`) and QEMU (`vfio_add_std_cap`) follow it; stricter, since those
/// forgive a pointer's low bits.
fn walk(space: &ConfigSpace) -> Vec<(u8, usize)> {
    let mut found = Vec::new();
    if word(space, 0x06) & 0x10 == 0 {
        return found;
    }
    let mut at = usize::from(byte(space, 0x34));
    while at != 0 {
        assert!(at >= 0x40 && at % 4 == 0, "a capability at {at:#x}");
        assert!(found.iter().all(|&(_, before)| before != at), "a loop at {at:#x}");
        let id = byte(space, at);
        assert!(id != 0 && id != 0xff);
        found.push((id, at));
        at = usize::from(byte(space, at + 1));
    }
    found
}

#[test]
fn capabilities_are_where_hosts_look_for_them() {
    let space = whole();
    assert_eq!(
        walk(&space),
        [
            (id::POWER_MANAGEMENT, PM_AT),
            (id::VENDOR, VENDOR_AT),
            (id::EXPRESS, EXPRESS_AT),
            (id::MSIX, MSIX_AT)
        ]
    );
    let mut bytes = [0; 9];
    space.read(VENDOR_AT, &mut bytes);
    assert_eq!(bytes, [0x09, EXPRESS_AT as u8, 9, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6]);
    // Table Size is one less; table and PBA name their BAR in the low three bits.
    assert_eq!(word(&space, MSIX_AT + 2), 64);
    assert_eq!((dword(&space, MSIX_AT + 4), dword(&space, MSIX_AT + 8)), (0x2000, 0x4000));
}

#[test]
fn a_function_without_capabilities_has_no_list() {
    let space = Builder::new(IDENTITY).build();
    assert_eq!(word(&space, 0x06), 0);
    assert_eq!(byte(&space, 0x34), 0);
    assert_eq!(walk(&space), []);
}

#[test]
fn the_header_says_who_it_is() {
    let space = whole();
    assert_eq!(dword(&space, 0x00), 0x0010_1b36);
    assert_eq!(dword(&space, 0x08), 0x0108_0202);
    assert_eq!(byte(&space, 0x0e), 0, "type 0, one function");
    assert_eq!(dword(&space, 0x2c), 0x1100_1af4);
    assert_eq!(byte(&space, 0x3d), 1, "INTA#");
    // PCI Express and extended space: none.
    assert_eq!(dword(&space, 0x100), 0);
}

/// What lspci and Linux conclude from the PCI Express capability (PCI Express 3.0, 7.8).
#[test]
fn the_link_is_one_that_exists() {
    let space = whole();
    let capabilities = word(&space, EXPRESS_AT + 2);
    assert_eq!((capabilities & 15, capabilities >> 4 & 15), (2, 0), "version 2, endpoint");
    let (device, control) = (dword(&space, EXPRESS_AT + 4), word(&space, EXPRESS_AT + 8));
    assert!(device & 1 << 28 != 0, "FLR");
    assert!(u32::from(control >> 5 & 7) <= (device & 7), "the payload in use is one that is supported");
    let (link, status) = (dword(&space, EXPRESS_AT + 0x0c), word(&space, EXPRESS_AT + 0x12));
    let (speed, width) = (link & 15, link >> 4 & 63);
    assert_eq!((u32::from(status & 15), u32::from(status >> 4 & 63)), (speed, width), "at its best");
    assert!([1, 2, 4, 8, 12, 16, 32].contains(&width));
    let speeds = dword(&space, EXPRESS_AT + 0x2c) >> 1 & 0x7f;
    assert_eq!(speeds, (1 << speed) - 1, "every speed up to the highest");
    assert_eq!(u32::from(word(&space, EXPRESS_AT + 0x30) & 15), speed, "target speed");
    // No slot, no root port.
    assert_eq!(dword(&space, EXPRESS_AT + 0x14), 0);
    assert_eq!(dword(&space, EXPRESS_AT + 0x1c), 0);
}

#[test]
fn no_rom() {
    let mut space = whole();
    for value in [0xffff_f800_u32, 0xffff_fffe, 0xffff_ffff] {
        assert_eq!(space.write(0x30, &value.to_le_bytes()), []);
        assert_eq!(dword(&space, 0x30), 0);
    }
}

#[test]
fn sizing_a_wide_bar_as_linux_does() {
    let mut space = whole();
    space.write(0x20, &[0xff; 4]);
    assert_eq!(dword(&space, 0x20), 0x0000_000c);
    space.write(0x24, &[0xff; 4]);
    assert_eq!(dword(&space, 0x24), 0xffff_fffe);
    assert_eq!(space.write(0x24, &[3, 0, 0, 0]), [Effect::BarMoved(index(4), 0x2_0000_0000)]);
    assert_eq!(space.write(0x24, &[3, 0, 0, 0]), [], "as it was");
}

#[test]
fn function_level_reset_in_every_width() {
    let control = EXPRESS_AT + 8;
    for (offset, data) in [
        (control + 1, &[0x80_u8][..]),
        (control, &[0x10, 0xa8]),
        (control, &[0x10, 0xa8, 0, 0]),
        (control - 1, &[0, 0, 0x80]),
        (control - 4, &[0, 0, 0, 0, 0, 0x80, 0, 0]),
    ] {
        let mut space = whole();
        space.write(0x04, &[6, 4]);
        space.write(0x10, &[0, 0, 0xe0, 0xfe]);
        space.write(PM_AT + 4, &[3]);
        space.write(MSIX_AT + 3, &[0x80]);
        assert_eq!(space.write(offset, data), [Effect::FunctionLevelReset], "{data:02x?} at {offset:#x}");
        assert_eq!(content(&space), content(&whole()));
        assert_eq!(word(&space, control) & INITIATE_FLR, 0, "reads as 0");
    }
    let mut space = whole();
    for (offset, data) in [(control, &[0x80_u8][..]), (control + 2, &[0, 0x80]), (control, &[0xff, 0x7f])] {
        assert!(
            !space.write(offset, data).contains(&Effect::FunctionLevelReset),
            "{data:02x?} at {offset:#x}"
        );
    }
}

#[test]
fn power_states() {
    let mut space = whole();
    let control = PM_AT + 4;
    assert_eq!(space.write(control, &[1]), [], "no D1");
    assert_eq!(space.write(control, &[2, 0]), [], "no D2");
    assert_eq!(word(&space, control) & 3, 0);
    assert_eq!(space.write(control, &[3, 0]), [Effect::Power(PowerState::D3Hot)]);
    assert_eq!(space.write(control, &[1]), [], "no D1 from D3hot either");
    assert_eq!(space.power_state(), PowerState::D3Hot);
    assert_eq!(word(&space, control), 0x000b, "and No_Soft_Reset");
    assert_eq!(space.write(control, &[0, 0, 0, 0]), [Effect::Power(PowerState::D0)]);
}

#[test]
fn command_and_msix_control() {
    let mut space = whole();
    let command = |memory, bus_master, intx_disabled| Effect::Command { memory, bus_master, intx_disabled };
    assert_eq!(space.write(0x04, &[6]), [command(true, true, false)]);
    assert_eq!(space.write(0x05, &[4]), [command(true, true, true)]);
    assert!(space.memory_enabled() && space.bus_master() && space.intx_disabled());
    assert_eq!(space.write(0x04, &[0x18]), [command(false, false, true)], "the reserved bits stay 0");
    assert_eq!(word(&space, 0x04), 0x0400);
    assert_eq!(space.write(MSIX_AT + 3, &[0xc0]), [Effect::Msix { enabled: true, masked: true }]);
    assert!(space.msix_enabled() && space.msix_masked());
    assert_eq!(space.write(MSIX_AT, &[0, 0, 0, 0x80]), [Effect::Msix { enabled: true, masked: false }]);
    assert_eq!(word(&space, MSIX_AT + 2), 0x8040, "the table's size is not the host's to choose");
}

#[test]
fn what_cannot_be_built() {
    let builder = || Builder::new(IDENTITY);
    let bar = |kind, size| Bar { kind, size };
    let wide = BarKind::Memory64 { prefetchable: false };
    let error = |result: Result<Builder, BuildError>| result.err().expect("an error");
    for (kind, size) in [
        (BarKind::Memory32, 0),
        (BarKind::Memory32, 8),
        (BarKind::Memory32, 48),
        (BarKind::Memory32, 1 << 32),
        (BarKind::Io, 2),
        (BarKind::Io, 512),
        (wide, 8),
        (wide, (1 << 40) + 1),
    ] {
        let bar = bar(kind, size);
        assert_eq!(error(builder().bar(index(0), bar)), BuildError::BarSize { index: index(0), bar });
    }
    let taken = |at| BuildError::BarTaken { index: index(at) };
    assert_eq!(error(builder().bar(index(5), bar(wide, 4096))), taken(5));
    let with = |at, kind| builder().bar(index(at), bar(kind, 4096)).unwrap();
    assert_eq!(error(with(1, BarKind::Memory32).bar(index(0), bar(wide, 16))), taken(0));
    assert_eq!(error(with(1, wide).bar(index(2), bar(BarKind::Memory32, 16))), taken(2));
    assert_eq!(error(with(1, wide).bar(index(1), bar(BarKind::Memory32, 16))), taken(1));

    let msix = |vectors, table, pending| {
        let capability = Msix { vectors, table: (index(1), table), pending: (index(1), pending) };
        with(1, BarKind::Memory32).msix(capability)
    };
    assert!(msix(64, 0, 0xff8).is_ok());
    for vectors in [0, 2049] {
        assert_eq!(error(msix(vectors, 0, 0xff8)), BuildError::MsixVectors(vectors));
    }
    let place = |offset, length| BuildError::MsixPlace { index: index(1), offset, length };
    assert_eq!(error(msix(64, 0xc08, 0)), place(0xc08, 1024), "one entry too far");
    assert_eq!(error(msix(65, 0, 0xff8)), place(0xff8, 16));
    assert_eq!(error(msix(64, 4, 0xff8)), place(4, 1024), "not a multiple of 8");
    assert_eq!(error(msix(64, 0, 0x3f8)), place(0x3f8, 8), "in the table");
    let elsewhere = Msix { vectors: 1, table: (index(3), 0), pending: (index(1), 0) };
    let refused = with(1, BarKind::Memory32).msix(elsewhere);
    assert_eq!(error(refused), BuildError::MsixPlace { index: index(3), offset: 0, length: 16 });
    assert_eq!(error(builder().pin(5)), BuildError::Pin(5));
    for pin in 0..=4 {
        assert_eq!(byte(&builder().pin(pin).unwrap().build(), 0x3d), pin);
    }
    assert_eq!(BarIndex::new(6), None);
}
