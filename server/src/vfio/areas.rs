//! Which parts of a BAR a client may map: all of it but the pages of the MSI-X table and of its pending bits, which
//! the kernel does not map where it does not say VFIO_REGION_INFO_CAP_MSIX_MAPPABLE.

use std::ops::Range;

use outboard_pci::{BarIndex, Msix};
use outboard_vfio_user::wire::SparseArea;

/// How much of a BAR may be mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// These parts, in ascending order, apart from each other, in whole pages; at least one.
    Areas(Vec<SparseArea>),
    /// None of it.
    Nothing,
}

/// What of a BAR of `size` bytes may be mapped by a host with pages of `page` bytes, so that none of `withheld` (bytes
/// from the BAR's start) is.
///
/// A BAR that is smaller than a page is mapped whole or not at all; of another one that does not end with a page, the
/// rest is left out.
pub fn mappable(size: u64, page: u64, withheld: &[Range<u64>]) -> Extent {
    let withheld = || withheld.iter().filter(|range| range.start < range.end && range.start < size);
    if size < page {
        return if withheld().next().is_none() { Extent::Whole } else { Extent::Nothing };
    }
    let floor = |offset: u64| offset.saturating_sub(offset.checked_rem(page).unwrap_or(0));
    let end = floor(size);
    let ceiling = |offset: u64| offset.checked_next_multiple_of(page).map_or(end, |offset| offset.min(end));
    let mut holes: Vec<_> = withheld().map(|range| floor(range.start)..ceiling(range.end)).collect();
    holes.sort_by_key(|hole| hole.start);
    holes.push(end..end);
    let mut areas = Vec::new();
    let mut from = 0;
    for hole in holes {
        if let Some(size) = hole.start.checked_sub(from).filter(|&size| size > 0) {
            areas.push(SparseArea { offset: from, size });
        }
        from = from.max(hole.end);
    }
    match areas.as_slice() {
        [] => Extent::Nothing,
        [SparseArea { offset: 0, size: all }] if *all == size => Extent::Whole,
        _ => Extent::Areas(areas),
    }
}

/// The bytes of `bar` that are the MSI-X table or its pending bits.
pub fn msix(msix: &Msix, bar: BarIndex) -> Vec<Range<u64>> {
    [(msix.table, msix.table_length()), (msix.pending, msix.pending_length())]
        .into_iter()
        .filter(|((of, _), _)| *of == bar)
        .map(|((_, offset), length)| u64::from(offset)..u64::from(offset).saturating_add(length))
        .collect()
}

#[cfg(test)]
mod tests;
