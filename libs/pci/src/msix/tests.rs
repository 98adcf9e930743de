use proptest::prelude::*;

use super::*;

#[test]
fn a_new_table_is_masked_and_nothing_is_pending() {
    let table = MsixTable::new(65);
    let masked = Vector { address: 0, data: 0, masked: true };
    assert!((0..65).all(|vector| table.vector(vector) == Some(masked)));
    assert_eq!(table.vector(65), None);
    let mut pending = [0xff; 24];
    table.read_pending(0, &mut pending);
    assert_eq!(pending, [0; 24]);
}

#[test]
fn an_entry_is_what_was_written() {
    let mut table = MsixTable::new(4);
    table.write(16, &0xfee0_1000_u64.to_le_bytes());
    table.write(24, &0x4021_u32.to_le_bytes());
    table.write(28, &0xffff_fffe_u32.to_le_bytes());
    assert_eq!(table.vector(1), Some(Vector { address: 0xfee0_1000, data: 0x4021, masked: false }));
    // The reserved bits of Vector Control read as zero.
    let mut control = [0xff; 4];
    table.read(28, &mut control);
    assert_eq!(control, [0; 4]);
}

proptest! {
    #[test]
    fn the_table_is_an_array_of_entries(
        writes in prop::collection::vec((0_usize..200, prop::collection::vec(any::<u8>(), 1..20)), 0..40),
        pending in prop::collection::vec((0_u16..20, any::<bool>()), 0..40),
    ) {
        let mut table = MsixTable::new(10);
        let mut model = vec![0_u8; 160];
        (0..10).for_each(|vector| model[vector * 16 + 12] = 1);
        for (offset, bytes) in writes {
            table.write(offset, &bytes);
            for (at, byte) in (offset..160).zip(bytes) {
                model[at] = match at % 16 { 12 => byte & 1, 13..16 => 0, _ => byte };
            }
        }
        let mut now = vec![0xff; 170];
        table.read(0, &mut now);
        prop_assert_eq!(&now[..160], &model);
        prop_assert_eq!(&now[160..], &[0; 10]);
        let mut bits = 0_u64;
        for (vector, set) in pending {
            table.set_pending(vector, set);
            let bit = if vector < 10 { 1 << vector } else { 0 };
            bits = if set { bits | bit } else { bits & !bit };
        }
        let mut bytes = [0; 8];
        table.read_pending(0, &mut bytes);
        prop_assert_eq!(u64::from_le_bytes(bytes), bits);
    }
}
