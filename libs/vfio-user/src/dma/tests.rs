use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::memory::SharedMemory;

/// A client whose memory is all reached by messages: byte n is n's low byte until written.
#[derive(Default)]
struct ByMessages(Mutex<BTreeMap<u64, u8>>);

impl Messages for ByMessages {
    fn read(&self, from: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        let written = self.0.lock().unwrap();
        for (i, byte) in into.iter_mut().enumerate() {
            let at = from.0 + i as u64;
            *byte = written.get(&at).copied().unwrap_or(at as u8);
        }
        Ok(())
    }

    fn write(&self, to: Iova, from: &[u8]) -> Result<(), DmaError> {
        self.0.lock().unwrap().extend(from.iter().enumerate().map(|(i, &byte)| (to.0 + i as u64, byte)));
        Ok(())
    }

    fn are_served(&self) -> bool {
        true
    }
}

fn mapped(memory: &SharedMemory, length: usize, access: Access) -> Region {
    Region::mapped(Mapping::new(memory, 0, length, access).unwrap(), access)
}

fn view(table: &Arc<Table<Region>>) -> View {
    View::new(table.clone(), Arc::new(ByMessages::default()))
}

#[test]
fn an_access_crosses_from_mapped_memory_to_memory_by_messages_and_back() {
    let memory = SharedMemory::new("guest", 4096).unwrap();
    let table = Arc::new(Table::new(16));
    table.insert(0x1000, 4096, mapped(&memory, 4096, Access::ReadWrite)).unwrap();
    table.insert(0x2000, 0x1000, Region::by_messages(Access::ReadWrite)).unwrap();
    table.insert(0x3000, 4096, mapped(&memory, 4096, Access::ReadWrite)).unwrap();
    let mut view = view(&table);
    let data: Vec<u8> = (0..0x1010).map(|i| (i % 251) as u8).collect();
    view.write(Iova(0x1ff8), &data).unwrap();
    let mut back = vec![0; data.len()];
    view.read(Iova(0x1ff8), &mut back).unwrap();
    assert_eq!(back, data);
    // Both mappings are of the same memory: the tail came out at its beginning.
    let mut head = [0; 8];
    memory.bytes().subslice(0, 8).unwrap().copy_to(&mut head);
    assert_eq!(head, data[0x1008..]);
    assert!(view.slice(Iova(0x1ff8), 16, Access::Read).is_none());
    assert!(view.pin(Iova(0x2000), 16, Access::Read).is_none());
    assert!(view.read(Iova(0x3ff8), &mut back).is_err());
}

/// QEMU with `share=off` hands over a descriptor whose pages are not those that its guest writes.
#[test]
fn the_client_is_asked_whether_it_sees_the_same() {
    let memory = SharedMemory::new("guest", 4096).unwrap();
    let table = Arc::new(Table::new(16));
    table.insert(0x1000, 4096, mapped(&memory, 4096, Access::ReadWrite)).unwrap();
    table.insert(0x2000, 4096, Region::by_messages(Access::ReadWrite)).unwrap();
    let client = Arc::new(ByMessages::default());
    let mut view = View::new(table, client.clone());
    let mut ours = [0xee; 64];
    view.read(Iova(0x1080), &mut ours).unwrap();
    assert_eq!(ours, [0; 64]);
    assert!(!view.confirm(Iova(0x1080), &ours), "the client sees its pattern there");
    client.write(Iova(0x1080), &ours).unwrap();
    assert!(view.confirm(Iova(0x1080), &ours));
    assert!(view.confirm(Iova(0x2000), &ours), "what came by a message is what the client sees");
}

/// Conformance point 48.
#[test]
fn access_is_what_the_client_granted() {
    let memory = SharedMemory::new("guest", 4096).unwrap();
    let table = Arc::new(Table::new(16));
    table.insert(0, 4096, mapped(&memory, 4096, Access::Read)).unwrap();
    table.insert(4096, 4096, mapped(&memory, 4096, Access::Write)).unwrap();
    table.insert(8192, 4096, Region::by_messages(Access::Read)).unwrap();
    let mut view = view(&table);
    assert!(view.read(Iova(0), &mut [0; 8]).is_ok());
    assert!(view.write(Iova(0), &[0; 8]).is_err());
    assert!(view.pin(Iova(0), 8, Access::Write).is_none());
    assert!(view.write(Iova(4096), &[0; 8]).is_ok());
    assert!(view.read(Iova(4096), &mut [0; 8]).is_err());
    assert!(view.load(Iova(4096)).is_err());
    assert!(view.write(Iova(8192), &[0; 8]).is_err());
}

#[test]
fn dwords_are_little_endian_also_by_messages_and_misaligned() {
    let table = Arc::new(Table::new(16));
    let memory = SharedMemory::new("guest", 4096).unwrap();
    table.insert(0, 4096, mapped(&memory, 4096, Access::ReadWrite)).unwrap();
    table.insert(4096, 4096, Region::by_messages(Access::ReadWrite)).unwrap();
    let mut view = view(&table);
    for at in [0, 8, 13, 4096, 4099] {
        view.store(Iova(at), 0x0403_0201).unwrap();
        let mut bytes = [0; 4];
        view.read(Iova(at), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4]);
        assert_eq!(view.load(Iova(at)).unwrap(), 0x0403_0201);
    }
}

/// Conformance point 50: the release, and with it the reply, waits for readers and pins.
#[test]
fn a_removed_region_is_released_when_the_last_user_lets_go() {
    let memory = SharedMemory::new("guest", 4096).unwrap();
    let table = Arc::new(Table::new(16));
    table.insert(0, 4096, mapped(&memory, 4096, Access::ReadWrite)).unwrap();
    let mut view = view(&table);
    let pin = view.pin(Iova(0), 512, Access::Read).unwrap();
    let released = Arc::new(AtomicUsize::new(0));
    let removed = table.remove(0, 4096).unwrap();
    removed.value.on_release({
        let released = released.clone();
        move || _ = released.fetch_add(1, Ordering::Relaxed)
    });
    drop(removed);
    assert!(view.read(Iova(0), &mut [0; 4]).is_ok(), "until it refreshes, a view may finish what it does");
    drop(pin);
    assert_eq!(released.load(Ordering::Relaxed), 0);
    view.refresh();
    assert_eq!(released.load(Ordering::Relaxed), 1);
    assert!(view.read(Iova(0), &mut [0; 4]).is_err());
}

#[test]
fn a_burst_of_maps_and_a_full_table() {
    let table = Arc::new(Table::new(65_535));
    for i in 0..65_535_u64 {
        table.insert(i * 8192, 4096, Region::by_messages(Access::ReadWrite)).unwrap();
    }
    assert_eq!(
        table.insert(4096, 4096, Region::by_messages(Access::Read)).unwrap_err(),
        InsertError::Full { limit: 65_535 }
    );
    let mut view = view(&table);
    assert!(view.read(Iova(65_534 * 8192), &mut [0; 4096]).is_ok());
    assert!(view.read(Iova(65_534 * 8192), &mut [0; 4097]).is_err());
    assert_eq!(table.clear().len(), 65_535);
    assert!(table.is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u64, u64),
    Remove(u64, u64),
    Find(u64, usize),
    Refresh,
    Clear,
}

/// Addresses near 0, in the middle, and at the end of 64 bits, so that ranges meet and wrap.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..24, (1_u64 << 40)..(1 << 40) + 24, u64::MAX - 24..=u64::MAX]
}

fn step() -> impl Strategy<Value = Step> {
    let size = || prop_oneof![4 => 0_u64..10, 1 => Just(u64::MAX), 1 => (1_u64 << 40)..(1 << 40) + 30];
    prop_oneof![
        4 => (address(), size()).prop_map(|(a, s)| Step::Insert(a, s)),
        3 => (address(), size()).prop_map(|(a, s)| Step::Remove(a, s)),
        4 => (address(), 1_usize..12).prop_map(|(a, l)| Step::Find(a, l)),
        1 => Just(Step::Refresh),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    /// Against a list of (start, last, name): what a refreshed reader finds is what is mapped; what an old one
    /// finds besides was mapped when it looked last.
    #[test]
    fn the_table_is_a_list_of_ranges(steps in prop::collection::vec(step(), 0..80)) {
        let table = Arc::new(Table::new(8));
        let mut reader = Reader::new(table.clone());
        let mut model: Vec<(u64, u64, usize)> = Vec::new();
        for (name, step) in steps.into_iter().enumerate() {
            match step {
                Step::Insert(start, size) => {
                    let expected = match size.checked_sub(1).and_then(|extent| start.checked_add(extent)) {
                        None => Err(InsertError::Range { start, size }),
                        Some(last) if model.iter().any(|&(s, l, _)| s <= last && start <= l) => {
                            Err(InsertError::Overlap { start, size })
                        }
                        Some(_) if model.len() == 8 => Err(InsertError::Full { limit: 8 }),
                        Some(last) => Ok(last),
                    };
                    let result = table.insert(start, size, name).map(|entry| entry.last());
                    prop_assert_eq!(&result, &expected);
                    model.extend(expected.ok().map(|last| (start, last, name)));
                }
                Step::Remove(start, size) => {
                    let found = model.iter().position(|&(s, l, _)| s == start && size != 0 && l - s == size - 1);
                    let removed = table.remove(start, size).map(|entry| entry.value);
                    prop_assert_eq!(removed, found.map(|at| model.remove(at).2));
                }
                Step::Find(at, length) => {
                    reader.refresh();
                    let expected = at.checked_add(length as u64 - 1).and_then(|last| {
                        model.iter().find(|&&(s, l, _)| s <= at && last <= l)
                    });
                    let found = reader.find(at, length).map(|(entry, offset)| (entry.value, offset));
                    prop_assert_eq!(found, expected.map(|&(s, _, name)| (name, at - s)));
                    let single = table.find(at).map(|entry| entry.value);
                    prop_assert_eq!(single, model.iter().find(|&&(s, l, _)| s <= at && at <= l).map(|m| m.2));
                }
                Step::Refresh => reader.refresh(),
                Step::Clear => {
                    prop_assert_eq!(table.clear().len(), model.len());
                    model.clear();
                }
            }
            prop_assert_eq!(table.len(), model.len());
        }
    }
}
