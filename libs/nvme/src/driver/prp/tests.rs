use std::cell::RefCell;

use proptest::prelude::*;

use super::*;

/// A block of memory for a list.
pub(in crate::driver) struct List(RefCell<Vec<u8>>);

impl List {
    pub(in crate::driver) fn new(size: usize) -> Self {
        Self(RefCell::new(vec![0; size]))
    }
}

pub(in crate::driver) const LIST: u64 = 0x7000_0000_0000;

impl Block for List {
    fn iova(&self) -> Iova {
        Iova(LIST)
    }
    fn size(&self) -> usize {
        self.0.borrow().len()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0.borrow()[offset..][..into.len()]);
    }
    fn write(&self, offset: usize, from: &[u8]) {
        self.0.borrow_mut()[offset..][..from.len()].copy_from_slice(from);
    }
    fn load(&self, _: usize) -> u32 {
        unreachable!("PRP lists are only written")
    }
    fn store(&self, _: usize, _: u32) {
        unreachable!("PRP lists are copied")
    }
}

/// Reads PRP entries as the specification tells a controller to (4.3).
fn walk(pointer: DataPointer, list: &List, mut length: u64) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    let mut push = |at: u64, length: &mut u64| {
        let here = (PAGE - at % PAGE).min(*length);
        runs.push((at, here));
        *length -= here;
    };
    push(pointer.first, &mut length);
    if length <= PAGE {
        if length > 0 {
            push(pointer.second, &mut length);
        }
        return runs;
    }
    let mut at = pointer.second;
    while length > 0 {
        let mut bytes = [0; 8];
        list.read((at - LIST) as usize, &mut bytes);
        let entry = u64::from_le_bytes(bytes);
        if at % PAGE == PAGE - 8 && length > PAGE {
            at = entry;
            continue;
        }
        assert_eq!(entry % PAGE, 0);
        push(entry, &mut length);
        at += 8;
    }
    runs
}

/// Runs that touch, joined.
fn joined(runs: impl IntoIterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (at, length) in runs {
        match out.last_mut() {
            Some((start, end)) if *start + *end == at => *end += length,
            _ => out.push((at, length)),
        }
    }
    out
}

proptest! {
    /// What a controller finds is what was described, whatever the offsets and however long the list.
    #[test]
    fn a_controller_finds_the_fragments(
        offset in 0..PAGE / 4,
        middle in prop::collection::vec((1u64..1 << 30, 1..600u64), 0..6),
        tail in 0..PAGE,
        first_pages in 1..1200u64,
    ) {
        let offset = offset * 4;
        let mut fragments = vec![(0x10_0000 + offset, first_pages * PAGE - offset)];
        fragments.extend(middle.iter().map(|&(page, pages)| (page * PAGE, pages * PAGE)));
        let last = fragments.last_mut().unwrap();
        last.1 -= tail.min(last.1 - 1);
        let length = fragments.iter().map(|run| run.1).sum();
        let list = List(RefCell::new(vec![0xff; 16 * PAGE_SIZE]));
        let described: Vec<_> = fragments
            .iter()
            .map(|&(iova, length)| Fragment { iova: Iova(iova), length: length as usize })
            .collect();
        let pointer = DataPointer::new(&described, Some(&list)).unwrap();
        prop_assert_eq!(joined(walk(pointer, &list, length)), joined(fragments));
    }
}

#[test]
fn what_cannot_be_described() {
    let fragment = |iova, length| Fragment { iova: Iova(iova), length };
    let none = None::<&List>;
    assert_eq!(DataPointer::new(&[], none), Err(PrpError::Empty));
    for wrong in [fragment(2, 8), fragment(u64::MAX - 3, 8)] {
        assert_eq!(DataPointer::new(&[wrong], none), Err(PrpError::Misaligned { fragment: wrong }));
    }
    let (short, inside) = (fragment(0x1000, 0x800), fragment(0x2004, 0xffc));
    assert_eq!(
        DataPointer::new(&[short, fragment(0x2000, 8)], none),
        Err(PrpError::Misaligned { fragment: short })
    );
    assert_eq!(
        DataPointer::new(&[fragment(0x1000, 0x1000), inside], none),
        Err(PrpError::Misaligned { fragment: inside })
    );
    let list = List(RefCell::new(vec![0; PAGE_SIZE]));
    assert!(DataPointer::new(&[fragment(0x1000, 513 * PAGE_SIZE)], Some(&list)).is_ok());
    assert_eq!(
        DataPointer::new(&[fragment(0x1000, 514 * PAGE_SIZE)], Some(&list)),
        Err(PrpError::ListTooSmall { needed: 2 * PAGE_SIZE, given: PAGE_SIZE })
    );
}
