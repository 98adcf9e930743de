use proptest::prelude::*;
use zerocopy::FromBytes;

use super::*;
use crate::driver::prp::tests::{LIST, List};
use crate::spec::DataPointerType;

/// Reads descriptors as the specification tells a controller to.
fn walk(pointer: DataPointer, list: &List) -> Vec<Fragment> {
    let mut fragments = Vec::new();
    let mut next = pointer.descriptor();
    loop {
        let (at, length) = (next.address.get(), next.length.get());
        let kind = next.identifier.kind();
        if kind == SglType::DATA_BLOCK {
            fragments.push(Fragment { iova: Iova(at), length: length as usize });
            return fragments;
        }
        let mut bytes = vec![0; length as usize];
        list.read((at - LIST) as usize, &mut bytes);
        let segment = <[SglDescriptor]>::ref_from_bytes(&bytes).unwrap();
        let (last, others) = segment.split_last().unwrap();
        for descriptor in others {
            assert_eq!(descriptor.identifier.kind(), SglType::DATA_BLOCK);
            let iova = Iova(descriptor.address.get());
            fragments.push(Fragment { iova, length: descriptor.length.get() as usize });
        }
        // A segment ends with the pointer to the next, unless it is the last.
        assert_eq!(kind == SglType::LAST_SEGMENT, last.identifier.kind() == SglType::DATA_BLOCK);
        next = *last;
    }
}

fn fragment(at: u64, length: usize) -> Fragment {
    Fragment { iova: Iova(at), length }
}

proptest! {
    #[test]
    fn a_controller_finds_the_fragments(
        lengths in prop_oneof![
            prop::collection::vec(1_usize..9000, 1..6),
            prop::collection::vec(1_usize..600, 250..800),
            (254_usize..260).prop_map(|count| vec![1; count]),
            (509_usize..514).prop_map(|count| vec![1; count]),
        ],
    ) {
        let fragments: Vec<_> = lengths.iter().zip(0..).map(|(length, at)| fragment(at * 10_001, *length)).collect();
        let list = List::new(4 * PAGE_SIZE);
        let pointer = DataPointer::sgl(&fragments, Some(&list)).unwrap();
        prop_assert_eq!(pointer.kind(), DataPointerType::SGL);
        prop_assert_eq!(walk(pointer, &list), fragments);
    }
}

#[test]
fn what_cannot_be_described() {
    let none = None::<&List>;
    assert_eq!(DataPointer::sgl(&[], none), Err(SglError::Empty));
    assert_eq!(DataPointer::sgl(&[fragment(1, 0)], none), Err(SglError::Empty));
    for fragment in [fragment(u64::MAX, 1), fragment(0, 1 << 32)] {
        assert_eq!(DataPointer::sgl(&[fragment], none), Err(SglError::TooLong { fragment }));
    }
    let many = vec![fragment(1, 1); 257];
    let list = List::new(PAGE_SIZE);
    assert!(DataPointer::sgl(&many[..256], Some(&list)).is_ok());
    let error = SglError::ListTooSmall { needed: 2 * PAGE_SIZE, given: PAGE_SIZE };
    assert_eq!(DataPointer::sgl(&many, Some(&list)), Err(error));
    let error = SglError::ListTooSmall { needed: PAGE_SIZE, given: 0 };
    assert_eq!(DataPointer::sgl(&many[..2], none), Err(error));
}
