#![expect(clippy::single_range_in_vec_init, reason = "one range to withhold is the usual case")]

use proptest::prelude::*;

use super::*;

const PAGES: [u64; 3] = [4 << 10, 16 << 10, 64 << 10];

fn bar(index: u8) -> BarIndex {
    BarIndex::new(index).unwrap()
}

fn areas(areas: &[(u64, u64)]) -> Extent {
    Extent::Areas(areas.iter().map(|&(offset, size)| SparseArea { offset, size }).collect())
}

#[test]
fn a_bar_without_a_table_is_mapped_whole() {
    for page in PAGES {
        assert_eq!(mappable(1 << 20, page, &[]), Extent::Whole);
        assert_eq!(mappable(256, page, &[]), Extent::Whole);
        assert_eq!(mappable(0, page, &[]), Extent::Whole, "and nobody asks");
    }
}

#[test]
fn a_table_on_the_page_of_the_doorbells_takes_them_along() {
    // QEMU's drive: 16 KiB, the doorbells at 4 KiB, the table at 8 KiB, the pending bits at 12 KiB.
    let nvme = [0x2000..0x2410, 0x3000..0x3010];
    assert_eq!(mappable(0x4000, 4 << 10, &nvme), areas(&[(0, 0x2000)]));
    assert_eq!(mappable(0x4000, 16 << 10, &nvme), Extent::Nothing);
    assert_eq!(mappable(0x4000, 64 << 10, &nvme), Extent::Nothing, "smaller than a page");
    // In the middle of the page that the doorbells begin.
    for page in PAGES {
        assert_eq!(
            mappable(4 * page, page, &[page + 0x800..page + 0xc00]),
            areas(&[(0, page), (2 * page, 2 * page)])
        );
    }
}

#[test]
fn a_table_at_the_end_of_a_bar_leaves_what_is_before() {
    for page in PAGES {
        let size = 16 * page;
        assert_eq!(
            mappable(size, page, &[size - 0x500..size - 0x10, size - 0x10..size]),
            areas(&[(0, size - page)])
        );
    }
}

#[test]
fn a_table_in_a_bar_of_its_own_leaves_the_other_bars_whole() {
    let capability = Msix { vectors: 2048, table: (bar(4), 0), pending: (bar(4), 0x8000) };
    for page in PAGES {
        assert_eq!(mappable(1 << 20, page, &msix(&capability, bar(0))), Extent::Whole);
        assert_eq!(mappable(0x9000, page, &msix(&capability, bar(4))), Extent::Nothing);
    }
}

#[test]
fn a_bar_smaller_than_a_page_is_mapped_whole_or_not_at_all() {
    for page in PAGES {
        let size = page / 2;
        assert_eq!(mappable(size, page, &[0..16]), Extent::Nothing);
        assert_eq!(mappable(size, page, &[size - 8..size]), Extent::Nothing);
        assert_eq!(
            mappable(size, page, &[size..size + 16]),
            Extent::Whole,
            "beyond it there is nothing to withhold"
        );
    }
}

#[test]
fn the_table_and_the_pending_bits_are_where_the_capability_says() {
    let capability = Msix { vectors: 65, table: (bar(0), 0x2000), pending: (bar(2), 0x3000) };
    assert_eq!(msix(&capability, bar(0)), [0x2000..0x2000 + 65 * 16]);
    assert_eq!(msix(&capability, bar(2)), [0x3000..0x3010]);
    assert_eq!(msix(&capability, bar(1)), []);
}

/// A table somewhere in a BAR (or past its end, as a device may claim), and its pending bits.
fn case() -> impl Strategy<Value = (u64, u64, Vec<Range<u64>>)> {
    let sizes = (4..22_u32).prop_map(|shift| 1_u64 << shift);
    let sizes = prop_oneof![4 => sizes, 1 => 16..(1_u64 << 21)];
    (prop::sample::select(PAGES.to_vec()), sizes).prop_flat_map(|(page, size)| {
        let range = (0..size + page, 1..=2048_u64).prop_map(|(start, vectors)| {
            let start = start & !7;
            start..start + vectors * 16
        });
        (Just(page), Just(size), prop::collection::vec(range, 0..4))
    })
}

proptest! {
    /// By the definition, page by page.
    #[test]
    fn every_page_is_offered_or_withheld_with_a_reason((page, size, withheld) in case()) {
        let offered = match mappable(size, page, &withheld) {
            Extent::Whole => vec![SparseArea { offset: 0, size }],
            Extent::Nothing => vec![],
            Extent::Areas(areas) => {
                prop_assert!(!areas.is_empty());
                for area in &areas {
                    prop_assert!(area.size > 0 && area.offset.is_multiple_of(page) && area.size.is_multiple_of(page));
                    prop_assert!(area.offset + area.size <= size);
                }
                // Two that touch would be one.
                prop_assert!(areas.is_sorted_by(|first, second| first.offset + first.size < second.offset));
                areas
            }
        };
        let covers = |range: Range<u64>, at: u64| !range.is_empty() && range.start < at + page && at < range.end;
        for at in (0..size).step_by(page as usize) {
            let secret = withheld.iter().any(|range| covers(range.start..range.end.min(size), at));
            let partial = size > page && at + page > size;
            let within = offered.iter().any(|area| {
                area.offset <= at && (at + page).min(size) <= area.offset + area.size
            });
            let touched = offered.iter().any(|area| covers(area.offset..area.offset + area.size, at));
            prop_assert_eq!(within, !secret && !partial, "page {:#x}", at);
            prop_assert_eq!(touched, within, "page {:#x}", at);
        }
    }
}
