use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::*;
use crate::QueueId;

/// Every field of a bit-field type: set to any value it reads back cut to its width, and no other changes.
macro_rules! fields_are_independent {
    ($name:ident: $ty:ident($repr:ty) { $($get:ident / $with:ident: $value:ty [$width:literal]),* $(,)? }) => {
        proptest! {
            #[test]
            fn $name(start: $repr, $($get: $value),*) {
                let start = $ty::from_bits(start);
                prop_assert_eq!(start.bits(), <$repr>::from_le_bytes(start.as_bytes().try_into().unwrap()));
                $(
                    let changed = start.$with($get);
                    let mask = u64::MAX >> (64 - $width);
                    prop_assert_eq!(u64::from(changed.$get()), u64::from($get) & mask);
                    prop_assert_eq!((changed.bits() ^ start.bits()).count_ones(),
                        (u64::from(start.$get()) ^ u64::from(changed.$get())).count_ones());
                    prop_assert_eq!(changed.$with(start.$get()), start);
                )*
            }
        }
    };
}

fields_are_independent!(capabilities: Capabilities(u64) {
    max_queue_entries / with_max_queue_entries: u16 [16],
    contiguous_queues / with_contiguous_queues: bool [1],
    arbitration / with_arbitration: u8 [2],
    timeout / with_timeout: u8 [8],
    doorbell_stride / with_doorbell_stride: u8 [4],
    nvm_command_set / with_nvm_command_set: bool [1],
    min_page / with_min_page: u8 [4],
    max_page / with_max_page: u8 [4],
    memory_buffer / with_memory_buffer: bool [1],
});
fields_are_independent!(configuration: Configuration(u32) {
    enable / with_enable: bool [1],
    command_set / with_command_set: u8 [3],
    page / with_page: u8 [4],
    arbitration / with_arbitration: u8 [3],
    shutdown_bits / with_shutdown_bits: u8 [2],
    submission_entry / with_submission_entry: u8 [4],
    completion_entry / with_completion_entry: u8 [4],
});
fields_are_independent!(status_field: StatusField(u16) {
    phase / with_phase: bool [1],
    code / with_code: u16 [11],
    retry_delay / with_retry_delay: u8 [2],
    more / with_more: bool [1],
    do_not_retry / with_do_not_retry: bool [1],
});
fields_are_independent!(entry_flags: EntryFlags(u8) {
    fused / with_fused: u8 [2],
    data_pointer_bits / with_data_pointer_bits: u8 [2],
});
fields_are_independent!(read_write: ReadWrite12(u32) {
    blocks / with_blocks: u16 [16],
    directive / with_directive: u8 [4],
    deallocate / with_deallocate: bool [1],
    protection / with_protection: u8 [4],
    force_unit_access / with_force_unit_access: bool [1],
    limited_retry / with_limited_retry: bool [1],
});

proptest! {
    #[test]
    fn a_completion_is_its_dwords(dwords: [u32; 4]) {
        let entry = CompletionEntry::from_dwords(dwords);
        prop_assert_eq!(entry.dwords(), dwords);
        let bytes: Vec<u8> = dwords.iter().flat_map(|dword| dword.to_le_bytes()).collect();
        prop_assert_eq!(entry.as_bytes(), &bytes[..]);
    }

    #[test]
    fn any_bytes_are_a_submission(bytes: [[u8; 32]; 2], lba: u64) {
        let mut entry = SubmissionEntry::read_from_bytes(bytes.as_bytes()).unwrap();
        prop_assert_eq!(entry.as_bytes(), bytes.as_bytes());
        entry.set_starting_lba(lba);
        prop_assert_eq!(entry.starting_lba(), lba);
        prop_assert_eq!(&entry.as_bytes()[40..48], &lba.to_le_bytes()[..]);
    }

    #[test]
    fn a_status_is_its_type_and_code(kind in 0u8..8, code: u8) {
        let status = Status::from_parts(StatusType(kind), code);
        prop_assert_eq!((status.kind().0, status.code()), (kind, code));
        prop_assert_eq!(StatusField::new(status).status(), status);
    }
}

#[test]
fn known_words() {
    let last = SglDescriptor::new(SglType::LAST_SEGMENT, 0x1122_3344_5566_7788, 0x30);
    let mut bytes = [0; 16];
    bytes[..9].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x30]);
    bytes[15] = 0x30;
    assert_eq!(last.as_bytes(), bytes);
    assert_eq!(SglDescriptor::from_halves(last.halves()), last);
    assert_eq!(SglSupport::default().with_support(1).with_bit_bucket(true).bits(), 0x1_0001);

    assert_eq!((Version::V1_4.major(), Version::V1_4.minor(), Version::V1_4.tertiary()), (1, 4, 0));
    // What Linux writes to CC: 64 and 16 byte entries, 4 KiB pages, enabled.
    let cc = Configuration::from_bits(0x0046_0001);
    assert_eq!((cc.enable(), cc.submission_entry(), cc.completion_entry(), cc.page()), (true, 6, 4, 0));
    assert_eq!(StatusField::new(Status::LBA_OUT_OF_RANGE).with_do_not_retry(true).bits(), 0x8100);
    assert_eq!(format!("{:?} {:?}", Status::WRITE_FAULT, Status(0x7c1)), "WRITE_FAULT Status(0x7c1)");
}

#[test]
fn doorbells() {
    assert_eq!(doorbell_index(QueueId(0), false), 0);
    assert_eq!(doorbell_index(QueueId(3), true), 7);
    assert_eq!(doorbell_offset(7, 0), 0x101c);
    assert_eq!(doorbell_offset(1, 4), 0x1040);
}
