use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[test]
fn the_parts_of_bar0_are_apart_for_any_number_of_queues() {
    for queue_pairs in 1..=1024_u16 {
        let vectors = queue_pairs + 1;
        let stride = (queue_pairs % 16) as u8;
        let layout = Layout::new(queue_pairs, vectors, stride, 0);
        assert!(layout.size.is_power_of_two());
        // What is mapped: whole pages, with every doorbell and nothing else.
        assert!(layout.doorbells.is_multiple_of(PAGE));
        assert!(layout.doorbells >= ((u64::from(queue_pairs) + 1) * 8) << stride);
        assert!(PAGE + layout.doorbells <= layout.table);
        assert!(layout.table + u64::from(vectors) * 16 <= layout.pending);
        assert!(layout.pending + u64::from(vectors).div_ceil(64) * 8 <= layout.size);
        assert!(layout.table.is_multiple_of(PAGE) && layout.pending.is_multiple_of(PAGE));
        for (offset, part, at) in [
            (0, Part::Registers, 0),
            (PAGE - 1, Part::Registers, PAGE - 1),
            (PAGE, Part::Doorbells, 0),
            (layout.table - 1, Part::Doorbells, layout.doorbells - 1),
            (layout.table, Part::Table, 0),
            (layout.pending, Part::Pending, 0),
            (layout.size - 1, Part::Pending, layout.size - 1 - layout.pending),
        ] {
            assert_eq!(layout.part(offset), (part, at), "{queue_pairs} queue pairs");
        }
        assert_eq!(Layout::new(queue_pairs, vectors, stride, 1 << 30).size, 1 << 30);
    }
}

fn bar(vectors: u16) -> Bar0 {
    Bar0::new(Layout::new(vectors - 1, vectors, 0, 0)).unwrap()
}

#[test]
fn each_doorbell_has_its_place_and_none_lies_beyond() {
    for stride in [0, 1, 10, 15] {
        let bar = Bar0::new(Layout::new(3, 4, stride, 0)).unwrap();
        for index in 0..8 {
            assert!(bar.set_doorbell(index, index as u32 + 1));
        }
        for index in 0..8 {
            assert_eq!(bar.load(0x1000 + ((index as u64 * 4) << stride)), index as u32 + 1);
            assert_eq!(bar.doorbell(index), index as u32 + 1);
        }
        for index in [bar.layout.doorbells as usize / 4, 1 << 40, usize::MAX] {
            assert!(!bar.set_doorbell(index, 1), "{index}");
            assert_eq!(bar.doorbell(index), 0);
        }
        assert!(bar.is_masked(0) || bar.load(bar.layout.table) == 0, "the table is where it was");
    }
}

/// A table that nobody programs belongs to a VMM that emulates it.
#[test]
fn a_mask_counts_where_somebody_programmed_the_vector() {
    let bar = bar(65);
    let entry = |vector: u64| vector * 16;
    assert!((0..65).all(|vector| !bar.is_masked(vector)));
    assert_eq!(bar.load(bar.layout.table + entry(64) + 12), 1, "as after a reset");
    bar.write_table(entry(64), &[0, 0, 0xe0, 0xfe]);
    assert!(bar.is_masked(64));
    bar.write_table(entry(64) + 12, &[0xfe, 0xff, 0xff, 0xff]);
    assert!(!bar.is_masked(64));
    assert_eq!(bar.load(bar.layout.table + entry(64) + 12), 0, "reserved bits stay 0");
    bar.write_table(entry(63) + 4, &[1]);
    assert!(bar.is_masked(63), "an address above 4 GiB");
    bar.write_table(entry(65), &[0xff; 16]);
    let mut beyond = [1; 16];
    bar.read(bar.layout.table + entry(65), &mut beyond);
    assert_eq!(beyond, [0; 16], "no vector there");
    bar.reset_vectors();
    assert!((0..66).all(|vector| !bar.is_masked(vector)));
}

proptest! {
    #[test]
    fn pending_bits_are_a_set_of_vectors(changes in vec((0..70_u16, any::<bool>()), 0..100)) {
        let bar = bar(65);
        let mut model = std::collections::BTreeSet::new();
        for (vector, pending) in changes {
            let exists = vector < 96;
            let changed = exists && if pending { model.insert(vector) } else { model.remove(&vector) };
            prop_assert_eq!(bar.set_pending(vector, pending), changed);
            prop_assert_eq!(bar.pending().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            let mut byte = [0];
            bar.read(bar.layout.pending + u64::from(vector / 8), &mut byte);
            prop_assert_eq!(byte[0] >> (vector % 8) & 1 == 1, pending);
        }
        bar.reset_vectors();
        prop_assert_eq!(bar.pending().count(), 0);
    }

    /// What is written is read, whatever the width and the place.
    #[test]
    fn bytes_are_bytes(offset in 0..64_u64, data in vec(any::<u8>(), 1..24)) {
        let bar = bar(4);
        bar.write(offset, &data);
        let mut back = vec![0; data.len() + 8];
        bar.read(offset, &mut back);
        prop_assert_eq!(&back[..data.len()], &data[..]);
        prop_assert_eq!(&back[data.len()..], [0; 8]);
    }
}
