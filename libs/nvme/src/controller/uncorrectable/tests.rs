use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::Lba;

fn range() -> impl Strategy<Value = LbaRange> {
    let start = prop_oneof![0_u64..300, 4000_u64..4400, Just(u64::MAX - 300)];
    (start, prop_oneof![1_u64..200, Just(64), Just(5000)])
        .prop_map(|(start, blocks)| LbaRange { start: Lba(start), blocks: blocks.min(u64::MAX - start) })
}

proptest! {
    /// Against a set of blocks.
    #[test]
    fn marks_are_a_set(steps in prop::collection::vec((range(), any::<bool>(), range()), 1..40)) {
        let mut marks = Uncorrectable::default();
        let mut model = BTreeSet::new();
        for (range, mark, probe) in steps {
            let blocks = |range: LbaRange| range.start.0..range.start.0 + range.blocks;
            if mark {
                prop_assert_eq!(marks.mark(range), Ok(()));
                model.extend(blocks(range));
            } else {
                marks.clear(range);
                blocks(range).for_each(|block| {
                    model.remove(&block);
                });
            }
            prop_assert_eq!(marks.is_empty(), model.is_empty());
            for probe in [probe, range] {
                let marked = model.range(blocks(probe)).next().is_some();
                let expected = if marked { Err(Status::UNRECOVERED_READ_ERROR) } else { Ok(()) };
                prop_assert_eq!(marks.check(probe), expected);
            }
        }
    }
}

#[test]
fn the_parts_are_limited_and_a_refusal_marks_nothing() {
    let part = |part: u64, blocks| LbaRange { start: Lba(part * 4096), blocks };
    let mut marks = Uncorrectable::default();
    for index in 1..MAX_UNCORRECTABLE_PARTS as u64 {
        marks.mark(part(2 * index, 1)).unwrap();
    }
    // One more would do, this takes two.
    assert_eq!(marks.mark(part(1_000_000, 4097)), Err(Status::CAPACITY_EXCEEDED));
    assert_eq!(marks.check(part(1_000_000, 4097)), Ok(()));
    assert_eq!(marks.mark(part(1_000_000, 4096)), Ok(()));
    assert_eq!(marks.mark(part(3_000_000, 1)), Err(Status::CAPACITY_EXCEEDED));
    // What lies in parts that exist is no matter, and a part that is written is free again.
    assert_eq!(marks.mark(part(2, 4096)), Ok(()));
    marks.clear(part(2, 4096));
    assert_eq!(marks.mark(part(3_000_000, 1)), Ok(()));
}
