use proptest::prelude::*;

use super::*;

const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0010,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: [0x01, 0x08, 0x02],
    revision: 2,
};

fn bar(index: u8) -> BarIndex {
    BarIndex::new(index).unwrap()
}

/// A function with every kind of thing that can be built.
fn function() -> ConfigSpace {
    Builder::new(IDENTITY)
        .bar(bar(0), Bar { kind: BarKind::Memory64 { prefetchable: false }, size: 0x4000 })
        .unwrap()
        .bar(bar(2), Bar { kind: BarKind::Memory32 { prefetchable: true }, size: 0x1000 })
        .unwrap()
        .bar(bar(3), Bar { kind: BarKind::Io, size: 32 })
        .unwrap()
        .bar(bar(4), Bar { kind: BarKind::Memory64 { prefetchable: true }, size: 1 << 33 })
        .unwrap()
        .pin(1)
        .unwrap()
        .power_management(PowerManagement)
        .unwrap()
        .express(Express)
        .unwrap()
        .msix(Msix { vectors: 65, table: (bar(0), 0x2000), pending: (bar(0), 0x3000) })
        .unwrap()
        .vendor(&Vendor { data: vec![1, 2, 3] })
        .unwrap()
        .build()
}

fn dword(space: &ConfigSpace, offset: usize) -> u32 {
    let mut bytes = [0; 4];
    space.read(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

fn byte(space: &ConfigSpace, offset: usize) -> u8 {
    let mut bytes = [0];
    space.read(offset, &mut bytes);
    bytes[0]
}

/// The capabilities as Linux and QEMU find them: (identifier, offset).
fn walk(space: &ConfigSpace) -> Vec<(u8, usize)> {
    let mut found = Vec::new();
    let mut at = usize::from(byte(space, CAPABILITIES));
    while at != 0 {
        assert!(
            (HEADER_END..CAPABILITIES_END).contains(&at) && at.is_multiple_of(4),
            "a capability at {at:#x}"
        );
        assert!(found.len() < 48, "the list is a loop");
        found.push((byte(space, at), at));
        at = usize::from(byte(space, at + 1));
    }
    found
}

fn capability(space: &ConfigSpace, id: u8) -> usize {
    walk(space).into_iter().find(|&(other, _)| other == id).unwrap().1
}

#[test]
fn the_header_says_who_it_is() {
    let space = function();
    assert_eq!(dword(&space, 0x00), 0x0010_1b36);
    assert_eq!(dword(&space, 0x08), 0x0108_0202);
    assert_eq!(dword(&space, 0x2c), 0x1100_1af4);
    assert_eq!(dword(&space, 0x3c), 0x0000_0100);
    assert_eq!(byte(&space, 0x0e), 0, "a type 0 header of a single function");
}

#[test]
fn the_capabilities_form_a_list_that_does_not_overlap() {
    let space = function();
    let list = walk(&space);
    assert_eq!(list.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [0x01, 0x10, 0x11, 0x09]);
    let lengths = [8, 0x3c, 12, 6];
    for (window, length) in list.windows(2).zip(lengths) {
        assert!(window[0].1 + length <= window[1].1);
    }
    assert_eq!(dword(&space, 0x04) >> 16 & 0x10, 0x10, "Status says that there is a list");
    // Bytes that no capability has are zero.
    assert_eq!(dword(&space, 0x100), 0, "no extended capabilities");
}

#[test]
fn capabilities_say_what_they_are_to() {
    let space = function();
    let express = capability(&space, 0x10);
    assert_eq!(dword(&space, express) >> 16, 0x0002, "an endpoint, version 2");
    assert_ne!(dword(&space, express + 4) & 1 << 28, 0, "with FLR");
    let msix = capability(&space, 0x11);
    assert_eq!(dword(&space, msix) >> 16, 64, "65 vectors");
    assert_eq!(dword(&space, msix + 4), 0x2000);
    assert_eq!(dword(&space, msix + 8), 0x3000);
    let vendor = capability(&space, 0x09);
    assert_eq!(dword(&space, vendor) >> 16, 0x0106);
    assert_eq!(dword(&space, vendor + 4) & 0xffff, 0x0302);
}

/// Conformance point 62.
#[test]
fn sizing_a_bar_shows_its_size_and_kind() {
    let mut space = function();
    for (offset, expected) in [
        (0x10, 0xffff_c004),
        (0x14, 0xffff_ffff),
        (0x18, 0xffff_f008),
        (0x1c, 0x0000_ffe1),
        (0x20, 0x0000_000c),
        (0x24, 0xffff_fffe),
        (0x30, 0),
    ] {
        let before = dword(&space, offset);
        let probe: u32 = if offset == 0x30 { 0xffff_f800 } else { 0xffff_ffff };
        space.write(offset, &probe.to_le_bytes());
        assert_eq!(dword(&space, offset), expected, "{offset:#x}");
        space.write(offset, &before.to_le_bytes());
        assert_eq!(dword(&space, offset), before);
    }
}

#[test]
fn a_moved_bar_is_told_with_its_whole_address() {
    let mut space = function();
    assert_eq!(space.write(0x10, &0xfebf_8000_u32.to_le_bytes()), [Effect::BarMoved(bar(0), 0xfebf_8000)]);
    assert_eq!(space.write(0x14, &0x1_u32.to_le_bytes()), [Effect::BarMoved(bar(0), 0x1_febf_8000)]);
    assert_eq!(space.bar_address(bar(0)), Some(0x1_febf_8000));
    assert_eq!(space.bar_address(bar(1)), None, "an upper half is no BAR");
    assert_eq!(space.write(0x14, &0x1_u32.to_le_bytes()), [], "written, but not changed");
}

#[test]
fn what_a_write_means() {
    let mut space = function();
    let command = Effect::Command { memory: true, bus_master: true, intx_disabled: false };
    assert_eq!(space.write(0x04, &0x0006_u16.to_le_bytes()), [command]);
    assert!(space.memory_enabled() && space.bus_master() && !space.intx_disabled());
    let power = capability(&space, 0x01);
    assert_eq!(space.write(power + 4, &[3]), [Effect::Power(PowerState::D3Hot)]);
    assert_eq!(space.write(power + 4, &[0]), [Effect::Power(PowerState::D0)]);
    let msix = capability(&space, 0x11);
    let enabled = Effect::Msix { enabled: true, masked: false };
    assert_eq!(space.write(msix + 2, &0x8000_u16.to_le_bytes()), [enabled]);
    // As a dword that covers the header too, which stays as it is.
    let masked = Effect::Msix { enabled: true, masked: true };
    assert_eq!(space.write(msix, &0xc000_0000_u32.to_le_bytes()), [masked]);
    assert_eq!(byte(&space, msix), 0x11);
}

/// PCI Local Bus 3.0, section 6.2.3: Interrupt Status tells what is pending whether or not the pin may.
#[test]
fn a_pending_interrupt_asserts_the_pin_unless_that_is_disabled() {
    let mut space = function();
    let status = |space: &ConfigSpace| byte(space, 0x06);
    assert!(space.set_interrupt(true));
    assert_eq!(status(&space), 0x18);
    space.write(0x04, &0x0400_u16.to_le_bytes());
    assert!(!space.set_interrupt(true));
    assert_eq!(status(&space), 0x18, "pending all the same");
    space.write(0x06, &[0xff, 0xff]);
    assert_eq!(status(&space), 0x18, "read-only");
    space.write(0x04, &[0, 0]);
    assert!(!space.set_interrupt(false));
    assert_eq!(status(&space), 0x10);
    assert!(space.set_interrupt(true));
    space.reset();
    assert_eq!(status(&space), 0x10);
}

/// Conformance point 68, and fault 27: by every width that covers the bit.
#[test]
fn function_level_reset_brings_the_initial_state_back() {
    let initial = function();
    let express = capability(&initial, 0x10);
    let writes: [(usize, &[u8]); 4] = [
        (express + 8, &0x8000_u16.to_le_bytes()),
        (express + 9, &[0x80]),
        (express + 8, &0x0000_a810_u32.to_le_bytes()),
        (express + 6, &0x8000_0000_u32.to_le_bytes()),
    ];
    for (offset, bytes) in writes {
        let mut space = function();
        space.write(0x04, &0x0407_u16.to_le_bytes());
        space.write(0x10, &0xfebf_8000_u32.to_le_bytes());
        assert_eq!(space.write(offset, bytes), [Effect::FunctionLevelReset], "{offset:#x} {bytes:x?}");
        for at in (0..4096).step_by(4) {
            assert_eq!(dword(&space, at), dword(&initial, at), "{at:#x}");
        }
    }
    let mut space = function();
    assert_eq!(space.write(express + 8, &0x7fff_u16.to_le_bytes()), []);
}

#[test]
fn what_cannot_be_is_not_built() {
    let new = || Builder::new(IDENTITY);
    let memory = |size| Bar { kind: BarKind::Memory32 { prefetchable: false }, size };
    let wide = |size| Bar { kind: BarKind::Memory64 { prefetchable: false }, size };
    for bad in [memory(0), memory(8), memory(0x3000), memory(1 << 32), Bar { kind: BarKind::Io, size: 512 }] {
        assert!(matches!(new().bar(bar(0), bad), Err(BuildError::BarSize { .. })), "{bad:?}");
    }
    assert!(matches!(new().bar(bar(5), wide(4096)), Err(BuildError::BarTaken { .. })));
    let one = || new().bar(bar(0), wide(4096)).unwrap();
    assert!(matches!(one().bar(bar(1), memory(4096)), Err(BuildError::BarTaken { .. })));
    assert!(matches!(one().bar(bar(0), memory(4096)), Err(BuildError::BarTaken { .. })));
    let two = new().bar(bar(1), memory(4096)).unwrap();
    assert!(matches!(two.bar(bar(0), wide(4096)), Err(BuildError::BarTaken { .. })));
    let msix = |vectors, offset| Msix { vectors, table: (bar(0), offset), pending: (bar(0), 0x800) };
    assert!(matches!(one().msix(msix(0, 0)), Err(BuildError::MsixVectors(0))));
    assert!(matches!(one().msix(msix(2049, 0)), Err(BuildError::MsixVectors(2049))));
    assert!(matches!(one().msix(msix(16, 0xf08)), Err(BuildError::MsixPlace { .. })));
    assert!(matches!(one().msix(msix(1, 4)), Err(BuildError::MsixPlace { .. })));
    assert!(matches!(new().msix(msix(1, 0)), Err(BuildError::MsixPlace { .. })));
    for (table, pending) in [(0, 0), (0, 0xf8), (0x808, 0x800), (0x780, 0x800)] {
        let overlap = Msix { vectors: 65, table: (bar(0), table), pending: (bar(0), pending) };
        assert!(
            matches!(one().msix(overlap), Err(BuildError::MsixOverlap { .. })),
            "{table:#x} {pending:#x}"
        );
    }
    for (table, pending) in [(0x10, 0), (0, 0x410), (0xbf0, 0xbe0)] {
        let apart = Msix { vectors: 65, table: (bar(0), table), pending: (bar(0), pending) };
        assert!(one().msix(apart).is_ok(), "{table:#x} {pending:#x}");
    }
    let ports = new().bar(bar(0), Bar { kind: BarKind::Io, size: 256 }).unwrap();
    let in_ports = Msix { vectors: 1, table: (bar(0), 0), pending: (bar(0), 0x80) };
    assert!(matches!(ports.msix(in_ports), Err(BuildError::MsixPlace { .. })));
    assert!(matches!(new().pin(5), Err(BuildError::Pin(5))));
    let long = Vendor { data: vec![0; 100] };
    assert!(matches!(new().vendor(&long).unwrap().vendor(&long), Err(BuildError::CapabilitiesFull { .. })));
}

/// PCI Power Management 1.2, section 3.2.4.
#[test]
fn a_power_state_that_is_not_there_is_not_entered() {
    let mut space = function();
    let control = capability(&space, 0x01) + 4;
    for (state, code) in [(PowerState::D0, 0), (PowerState::D3Hot, 3)] {
        space.write(control, &[code]);
        for absent in [1, 2] {
            assert_eq!(space.write(control, &[absent]), [], "{state:?} stays");
            assert_eq!(space.power_state(), state);
            assert_eq!(byte(&space, control), 8 | code, "and can be read");
        }
    }
}

#[test]
fn only_pci_express_has_more_than_256_bytes() {
    assert_eq!(function().size(), 4096);
    let mut space = Builder::new(IDENTITY).power_management(PowerManagement).unwrap().build();
    assert_eq!(space.size(), 256);
    // What lies behind the end is nothing, and crossing it is no fault.
    let mut bytes = [0xff; 8];
    assert_eq!(space.write(0xfc, &bytes), []);
    space.read(0xfc, &mut bytes);
    assert_eq!(bytes, [0; 8]);
    space.reset();
    assert_eq!(space.size(), 256);
}

/// Which bits the specification lets software write, and which it clears by 1: written down apart from the
/// builder.
fn masks(space: &ConfigSpace) -> (Vec<u8>, Vec<u8>) {
    let (mut writable, mut cleared) = (vec![0_u8; 4096], vec![0_u8; 4096]);
    let mut allow = |offset: usize, mask: u64, length: usize| {
        writable[offset..offset + length].copy_from_slice(&mask.to_le_bytes()[..length]);
    };
    allow(0x04, 0x0547, 2);
    allow(0x0c, 0xff, 1);
    allow(0x3c, 0xff, 1);
    allow(0x10, 0xffff_ffff_ffff_c000, 8);
    allow(0x18, 0xffff_f000, 4);
    allow(0x1c, 0x0000_ffe0, 4);
    allow(0x20, 0xffff_fffe_0000_0000, 8);
    allow(capability(space, 0x01) + 4, 0x3, 2);
    let express = capability(space, 0x10);
    allow(express + 0x08, 0x7fff, 2);
    allow(express + 0x10, 0x0fdb, 2);
    allow(express + 0x28, 0x0010, 2);
    allow(express + 0x30, 0x000f, 2);
    allow(capability(space, 0x11) + 2, 0xc000, 2);
    cleared[0x06..0x08].copy_from_slice(&0xf900_u16.to_le_bytes());
    cleared[express + 0x0a] = 0x0f;
    (writable, cleared)
}

proptest! {
    /// Against an array of bytes with a mask each, for writes of any width and alignment.
    #[test]
    fn every_bit_follows_its_rule(
        writes in prop::collection::vec((0_usize..4100, prop::collection::vec(any::<u8>(), 1..9)), 0..60)
    ) {
        let mut space = function();
        let (writable, cleared) = masks(&space);
        let mut initial = vec![0; 4096];
        space.read(0, &mut initial);
        let mut model = initial.clone();
        let flr = capability(&space, 0x10) + 9;
        let power = capability(&space, 0x01) + 4;
        for (offset, bytes) in writes {
            // Most writes go where there is something.
            let offset = if offset >= 0x100 && offset % 3 != 0 { offset % 0x100 } else { offset };
            let effects = space.write(offset, &bytes);
            let resets = (offset..offset + bytes.len()).contains(&flr) && bytes[flr - offset] & 0x80 != 0;
            prop_assert_eq!(effects.contains(&Effect::FunctionLevelReset), resets);
            if resets {
                model.copy_from_slice(&initial);
            } else {
                let state = model[power];
                for (at, byte) in (offset..4096).zip(&bytes) {
                    model[at] = (model[at] & !writable[at] | byte & writable[at]) & !(byte & cleared[at]);
                }
                if matches!(model[power] & 3, 1 | 2) {
                    model[power] = state;
                }
            }
            let mut now = vec![0; 4096];
            space.read(0, &mut now);
            prop_assert_eq!(&now, &model);
            // Any part reads as the whole does, and zeroes follow the end.
            let mut part = vec![0xff; bytes.len()];
            space.read(offset, &mut part);
            let expected: Vec<u8> =
                (offset..offset + bytes.len()).map(|at| model.get(at).copied().unwrap_or(0)).collect();
            prop_assert_eq!(part, expected);
        }
    }

    #[test]
    fn a_bar_of_any_size_is_sized_and_placed(
        kind in prop_oneof![
            any::<bool>().prop_map(|prefetchable| BarKind::Memory32 { prefetchable }),
            any::<bool>().prop_map(|prefetchable| BarKind::Memory64 { prefetchable }),
            Just(BarKind::Io),
        ],
        shift in any::<u32>(),
        address in any::<u64>(),
        widths in prop::collection::vec(1_usize..9, 1..9),
    ) {
        // The type bits, the bits below an address, the bytes of the register, the sizes as powers of two.
        let (low_bits, below, width, shifts) = match kind {
            BarKind::Memory32 { prefetchable } => (if prefetchable { 0x8 } else { 0x0 }, 0xf, 4, 4..32),
            BarKind::Memory64 { prefetchable } => (if prefetchable { 0xc } else { 0x4 }, 0xf, 8, 4..64),
            BarKind::Io => (0x1, 0x3, 4, 2..9),
        };
        let size = 1_u64 << (shifts.start + shift % (shifts.end - shifts.start));
        let mut space = Builder::new(IDENTITY).bar(bar(2), Bar { kind, size }).unwrap().build();
        let write = |space: &mut ConfigSpace, value: u64| {
            let bytes = value.to_le_bytes();
            let (mut at, mut widths) = (0, widths.iter().cycle());
            while at < width {
                let end = (at + widths.next().unwrap()).min(width);
                space.write(0x18 + at, &bytes[at..end]);
                at = end;
            }
        };
        let read = |space: &ConfigSpace| u64::from(dword(space, 0x1c)) << 32 | u64::from(dword(space, 0x18));
        write(&mut space, u64::MAX);
        let sized = read(&space);
        prop_assert_eq!(sized & below, low_bits);
        // The lowest address bit that sticks is the size (PCI Local Bus 3.0, section 6.2.5.1).
        prop_assert_eq!(1_u64 << (sized & !below).trailing_zeros(), size);
        write(&mut space, address);
        // Ports have 16 bits.
        let reach = match kind {
            BarKind::Memory32 { .. } => u64::from(u32::MAX),
            BarKind::Memory64 { .. } => u64::MAX,
            BarKind::Io => u64::from(u16::MAX),
        };
        let placed = address & reach & !(size - 1);
        prop_assert_eq!(read(&space), placed | low_bits);
        prop_assert_eq!(space.bar_address(bar(2)), Some(placed));
        prop_assert_eq!(space.bar_address(bar(3)), None);
    }

    /// Whatever is added, in whatever order: what fits is a list of what was added, without overlaps.
    #[test]
    fn any_capabilities_form_a_list(kinds in prop::collection::vec(0_usize..40, 0..12)) {
        let mut added = Vec::new();
        let memory = Bar { kind: BarKind::Memory64 { prefetchable: false }, size: 0x4000 };
        let mut builder = Builder::new(IDENTITY).bar(bar(0), memory).unwrap();
        let mut room = CAPABILITIES_END - HEADER_END;
        for kind in kinds {
            let (id, length) = match kind {
                0 => (0x01, 8),
                1 => (0x10, 0x3c),
                2 => (0x11, 12),
                data => (0x09, data + 3),
            };
            let result = match kind {
                0 => builder.power_management(PowerManagement),
                1 => builder.express(Express),
                2 => builder.msix(Msix { vectors: 9, table: (bar(0), 0x2000), pending: (bar(0), 0x3000) }),
                data => builder.vendor(&Vendor { data: vec![0xff; data] }),
            };
            prop_assert_eq!(result.is_ok(), length <= room);
            let Ok(next) = result else { return Ok(()) };
            builder = next;
            added.push((id, length));
            room = room.saturating_sub(length.next_multiple_of(4));
            let space = ConfigSpace::clone(&builder.space);
            let list = walk(&space);
            prop_assert_eq!(list.len(), added.len());
            let mut end = HEADER_END;
            for (&(id, at), &(expected, length)) in list.iter().zip(&added) {
                prop_assert_eq!(id, expected);
                prop_assert!(at >= end);
                end = at + length;
            }
            prop_assert!(end <= CAPABILITIES_END);
        }
    }
}
