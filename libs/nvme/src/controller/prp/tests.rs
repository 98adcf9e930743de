use proptest::prelude::*;

use super::*;
use crate::controller::data::DataPointer;
use crate::controller::tests::machine::Memory;
use crate::controller::{Direction, Segment};

const MOST: usize = 1 << 20;

/// What section 4.3 says, entry by entry: the pieces, not merged.
fn model(host: &mut Memory, (prp1, prp2): (u64, u64), length: usize) -> Result<Vec<(u64, usize)>, Status> {
    let first = length.min(4096 - (prp1 & 0xfff) as usize);
    let mut pieces = vec![(prp1, first)];
    if prp1 & 3 != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let mut rest = length - first;
    if rest == 0 {
        return Ok(pieces);
    }
    if rest <= 4096 {
        return if prp2 & 0xfff != 0 {
            Err(Status::INVALID_PRP_OFFSET)
        } else {
            pieces.push((prp2, rest));
            Ok(pieces)
        };
    }
    if prp2 & 7 != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let mut at = prp2;
    while rest != 0 {
        let mut entry = [0; 8];
        host.read(Iova(at), &mut entry).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        let entry = u64::from_le_bytes(entry);
        if entry & 0xfff != 0 {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        if at & 0xfff == 0xff8 && rest > 4096 {
            at = entry;
        } else {
            pieces.push((entry, rest.min(4096)));
            rest -= rest.min(4096);
            at += 8;
        }
    }
    Ok(pieces)
}

/// The segments cut at page ends, as the entries said.
fn pieces(segments: &[Segment]) -> Vec<(u64, usize)> {
    let mut pieces = Vec::new();
    for segment in segments {
        let (mut at, mut rest) = (segment.iova.unwrap().0, segment.length);
        while rest != 0 {
            let length = rest.min(4096 - (at & 0xfff) as usize);
            pieces.push((at, length));
            at = at.wrapping_add(length as u64);
            rest -= length;
        }
    }
    pieces
}

/// Lists in pages 1 and 2, their data in pages beyond this memory.
fn host(entries: &[(usize, u64)]) -> Memory {
    let mut host = Memory::new(0x1_0000);
    // Every entry is a page of its own; the last of a list page links to page 2.
    for (index, place) in host.bytes[0x1000..0x3000].as_chunks_mut().0.iter_mut().enumerate() {
        let entry: u64 = if index % 512 == 511 { 0x2000 } else { 0x10_0000 + index as u64 * 0x2000 };
        *place = entry.to_le_bytes();
    }
    for (index, entry) in entries {
        let place = 0x1000 + (index % 1024) * 8;
        host.bytes[place..place + 8].copy_from_slice(&entry.to_le_bytes());
    }
    host
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_walk_is_what_the_specification_says(
        prp1 in prop_oneof![4 => (0_u64..0x800).prop_map(|o| 0x80_0000 + o * 4), 1 => any::<u64>().prop_map(|a| a >> 8)],
        prp2 in prop_oneof![
            4 => (0_u64..512).prop_map(|entry| 0x1000 + entry * 8),
            1 => Just(0x1ff8_u64),
            1 => 0_u64..0x3000,
            1 => Just(0x90_0000_u64),
        ],
        // Entries that break the alignment, or follow the one before.
        odd in prop::collection::vec(
            (0_usize..1024, prop_oneof![Just(0x200_0004_u64), Just(0x300_0000_u64), Just(0x1_0000_0000)]), 0..2),
        length in prop_oneof![1_usize..=0x2000, 1_usize..=64 * 4096, Just(200 * 4096)],
    ) {
        let mut host = host(&odd);
        let expected = model(&mut host, (prp1, prp2), length);
        let walked = walk(&mut host, prp1, prp2, length).map(|segments| pieces(&segments));
        prop_assert_eq!(walked, expected);
    }

    /// Anything at all: no panic, and a success covers the length.
    #[test]
    fn any_list_ends(prp1: u64, prp2 in 0_u64..0x4000, seed: u64, length in 1..=MOST) {
        let mut host = Memory::new(0x4000);
        let mut state = seed | 1;
        for place in host.bytes.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *place = (state >> 32 & 0x7000).to_le_bytes();
        }
        if let Ok(segments) = walk(&mut host, prp1 & !3, prp2, length) {
            prop_assert_eq!(segments.iter().map(|s| s.length).sum::<usize>(), length);
            prop_assert!(segments.iter().all(|s| s.length != 0));
        }
    }
}

fn walk(host: &mut Memory, prp1: u64, prp2: u64, length: usize) -> Result<Vec<Segment>, Status> {
    let pointer = DataPointer::Prp { first: prp1, second: prp2 };
    Walker::new(MOST).walk(host, pointer, length, Direction::ToHost).map(<[Segment]>::to_vec)
}

fn segment(at: u64, length: usize) -> Segment {
    Segment { iova: Some(Iova(at)), length }
}

#[test]
fn contiguous_pages_are_one_segment_also_from_address_zero() {
    let mut host = Memory::new(0x1000);
    assert_eq!(walk(&mut host, 0, 0, 4096), Ok(vec![segment(0, 4096)]));
    assert_eq!(walk(&mut host, 0, 0x1000, 8192), Ok(vec![segment(0, 8192)]));
    assert_eq!(walk(&mut host, 0x800, 0x1000, 4096), Ok(vec![segment(0x800, 4096)]));
    assert_eq!(walk(&mut host, 0x1000, 0, 8192), Ok(vec![segment(0x1000, 4096), segment(0, 4096)]));
}

#[test]
fn a_page_at_the_end_of_the_address_space_does_not_merge_with_page_zero() {
    let mut host = Memory::new(0x1000);
    let last = u64::MAX - 4095;
    assert_eq!(walk(&mut host, last, 0, 8192), Ok(vec![segment(last, 4096), segment(0, 4096)]));
}

#[test]
fn the_last_entry_of_a_list_page_links_only_if_more_follows() {
    let mut host = host(&[]);
    // Two pages of data beyond the first: the list starts at the last entry of its page, which must link.
    let data = walk(&mut host, 0x80_0000, 0x1ff8, 3 * 4096).unwrap();
    assert_eq!(data[1].iova, Some(Iova(0x10_0000 + 512 * 0x2000)));
    // Two entries fit before the page's end: the last is data.
    host.bytes[0x1ff8..0x2000].copy_from_slice(&0x70_0000_u64.to_le_bytes());
    let data = walk(&mut host, 0x80_0000, 0x1ff0, 3 * 4096).unwrap();
    assert_eq!(data[2], segment(0x70_0000, 4096));
}

#[test]
fn a_list_out_of_reach_is_a_data_transfer_error() {
    let mut host = Memory::new(0x1000);
    assert_eq!(walk(&mut host, 0, 0x1000, 3 * 4096), Err(Status::DATA_TRANSFER_ERROR));
}
