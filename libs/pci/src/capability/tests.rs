use proptest::prelude::*;

use super::*;
use crate::{Bar, BarIndex, BarKind, Builder, Identity};

const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0010,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: [0x01, 0x08, 0x02],
    revision: 2,
};

/// A function with other capabilities before MSI-X, as its 256 bytes.
fn space(msix: Option<Msix>) -> [u8; 256] {
    let mut builder = Builder::new(IDENTITY);
    for index in [0, 2, 4] {
        let bar = Bar { kind: BarKind::Memory64 { prefetchable: false }, size: 1 << 33 };
        builder = builder.bar(BarIndex::new(index).unwrap(), bar).unwrap();
    }
    builder = builder.power_management(PowerManagement).unwrap().express(Express).unwrap();
    if let Some(msix) = msix {
        builder = builder.msix(msix).unwrap();
    }
    let mut bytes = [0; 256];
    builder.build().read(0, &mut bytes);
    bytes
}

fn msix() -> Msix {
    let bar = |index| BarIndex::new(index).unwrap();
    Msix { vectors: 65, table: (bar(0), 0x2000), pending: (bar(4), 0x3000) }
}

#[test]
fn without_the_capability_there_is_none() {
    assert_eq!(Msix::find(&space(None)), None);
    assert_eq!(Msix::find(&[]), None);
    let mut no_list = space(Some(msix()));
    no_list[6] &= !(1 << 4);
    assert_eq!(Msix::find(&no_list), None);
}

#[test]
fn a_list_that_is_a_loop_ends() {
    let mut bytes = space(None);
    let first = bytes[0x34];
    bytes[usize::from(first) + 1] = first;
    assert_eq!(Msix::find(&bytes), None);
}

#[test]
fn a_list_that_leads_into_the_header_ends() {
    let mut bytes = space(Some(msix()));
    // A "capability" in the header that looks like MSI-X.
    bytes[0x34] = 0x10;
    bytes[0x10] = id::MSIX;
    assert_eq!(Msix::find(&bytes), None);
}

#[test]
fn a_bar_that_does_not_exist_is_no_table() {
    let bytes = space(Some(msix()));
    let at = find(&bytes, id::MSIX).unwrap();
    for (register, bar) in [(4, 6), (4, 7), (8, 6), (8, 7)] {
        let mut bytes = bytes;
        bytes[at + register] = bytes[at + register] & !7 | bar;
        assert_eq!(Msix::find(&bytes), None, "BAR {bar} in the register at {register}");
    }
}

#[test]
fn the_enable_and_mask_bits_are_no_vectors() {
    let mut bytes = space(Some(msix()));
    let at = find(&bytes, id::MSIX).unwrap();
    bytes[at + 3] |= 0xc0;
    assert_eq!(Msix::find(&bytes), Some(msix()));
}

proptest! {
    #[test]
    fn what_was_built_is_found(
        vectors in 1..=2048_u16,
        bars in prop::array::uniform2(prop::sample::select(vec![0_u8, 2, 4])),
        // Apart, for two that lie in one BAR.
        table in 0..0x1000_u32,
        pending in 0x3000..0x4000_u32,
    ) {
        let [first, second] = bars.map(|index| BarIndex::new(index).unwrap());
        let msix = Msix { vectors, table: (first, table * 8), pending: (second, pending * 8) };
        prop_assert_eq!(Msix::find(&space(Some(msix))), Some(msix));
    }

    #[test]
    fn any_bytes_have_an_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Some(found) = Msix::find(&bytes) {
            prop_assert!((1..=2048).contains(&found.vectors));
            prop_assert!(found.table.1.is_multiple_of(8) && found.pending.1.is_multiple_of(8));
        }
    }
}
