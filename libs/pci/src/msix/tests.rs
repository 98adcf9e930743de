//! The table against a list of entries.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Write(usize, Vec<u8>),
    SetPending(u16, bool),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..1200_usize, vec(any::<u8>(), 0..24)).prop_map(|(at, data)| Step::Write(at, data)),
        4 => (0..80_u16, any::<bool>()).prop_map(|(vector, pending)| Step::SetPending(vector, pending)),
        1 => Just(Step::Reset),
    ]
}

/// What an entry's four dwords hold, and whether it is pending.
#[derive(Clone, Copy)]
struct Entry {
    dwords: [u32; 4],
    pending: bool,
}

const POWER_ON: Entry = Entry { dwords: [0, 0, 0, 1], pending: false };

proptest! {
    #[test]
    fn the_table_is_a_list_of_entries(
        vectors in 1..=70_u16,
        steps in vec(step(), 0..40),
        (at, length) in (0..1200_usize, 0..64_usize),
    ) {
        let mut table = MsixTable::new(vectors);
        let mut model = vec![POWER_ON; vectors.into()];
        for step in steps {
            match step {
                Step::Write(at, data) => {
                    table.write(at, &data);
                    for (at, byte) in (at..).zip(data) {
                        let Some(entry) = model.get_mut(at / 16) else { continue };
                        let dword = &mut entry.dwords[at % 16 / 4];
                        let shift = at % 4 * 8;
                        *dword = *dword & !(0xff << shift) | u32::from(byte) << shift;
                        entry.dwords[3] &= 1;
                    }
                }
                Step::SetPending(vector, pending) => {
                    table.set_pending(vector, pending);
                    if let Some(entry) = model.get_mut(usize::from(vector)) {
                        entry.pending = pending;
                    }
                }
                Step::Reset => {
                    table.reset();
                    model.fill(POWER_ON);
                }
            }
        }
        for vector in 0..80 {
            let expected = model.get(usize::from(vector)).map(|Entry { dwords: [low, high, data, control], .. }| {
                Vector {
                    address: u64::from(*high) << 32 | u64::from(*low),
                    data: *data,
                    masked: *control == 1,
                }
            });
            prop_assert_eq!(table.vector(vector), expected);
        }
        let bytes: Vec<u8> =
            model.iter().flat_map(|entry| entry.dwords).flat_map(u32::to_le_bytes).collect();
        let mut pending = vec![0_u8; model.len().div_ceil(64) * 8];
        for (vector, _) in model.iter().enumerate().filter(|(_, entry)| entry.pending) {
            pending[vector / 8] |= 1 << (vector % 8);
        }
        let part = |bytes: &[u8], at: usize| -> Vec<u8> {
            bytes.iter().copied().chain(std::iter::repeat(0)).skip(at).take(length).collect()
        };
        let mut read = vec![0xaa; length];
        table.read(at, &mut read);
        prop_assert_eq!(&read, &part(&bytes, at));
        let at = at % 20;
        table.read_pending(at, &mut read);
        prop_assert_eq!(&read, &part(&pending, at));
    }
}
