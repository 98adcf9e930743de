use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve,
    Push,
    Ring(u32),
    Release,
}

fn step(entries: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Reserve),
        3 => Just(Step::Push),
        1 => Just(Step::Release),
        2 => (0..entries + 2).prop_map(Step::Ring),
        1 => any::<u32>().prop_map(Step::Ring),
    ]
}

proptest! {
    /// Against the list of entries that the host has not consumed.
    #[test]
    fn a_completion_queue_never_overruns(
        (entries, steps) in (2_u32..9)
            .prop_flat_map(|entries| (Just(entries), prop::collection::vec(step(entries), 0..200))),
    ) {
        let mut queue = CompletionQueue::new(Iova(0x1000), entries, None);
        let mut posted: VecDeque<u32> = VecDeque::new();
        let (mut reserved, mut total, mut seen) = (0, 0_u32, 0);
        for step in steps {
            let slots = entries - 1 - posted.len() as u32 - reserved;
            prop_assert_eq!(queue.room(), slots);
            prop_assert_eq!(queue.used(), posted.len() as u32);
            match step {
                Step::Reserve if slots > 0 => {
                    queue.reserve();
                    reserved += 1;
                }
                Step::Release if reserved > 0 => {
                    queue.release();
                    reserved -= 1;
                }
                Step::Push if reserved > 0 => {
                    let (at, phase) = queue.push();
                    prop_assert_eq!(at, Iova(0x1000 + u64::from(total % entries) * 16));
                    prop_assert_eq!(phase, (total / entries) % 2 == 0);
                    posted.push_back(total % entries);
                    reserved -= 1;
                    total += 1;
                }
                Step::Ring(value) => {
                    // A head is good when it is the slot of an entry that was posted, or the one after.
                    let head = (total - posted.len() as u32) % entries;
                    let consumed = (0..=posted.len()).find(|count| (head + *count as u32) % entries == value);
                    let expected = match consumed {
                        _ if value == seen => Ok(false),
                        Some(count) => {
                            posted.drain(..count);
                            Ok(true)
                        }
                        None => Err(InvalidDoorbell),
                    };
                    seen = value;
                    prop_assert_eq!(queue.ring(value), expected);
                }
                _ => {}
            }
        }
    }

    #[test]
    fn a_submission_queue_gives_each_entry_once_and_in_order(
        entries in 2_u32..9,
        steps in prop::collection::vec((0_u32..12, 0_u32..9), 0..100),
    ) {
        let mut queue = SubmissionQueue::new(Iova(0), entries, QueueId(1));
        let (mut taken, mut tail, mut doorbell) = (0_u32, 0_u32, 0);
        for (value, most) in steps {
            let rung = queue.ring(value);
            prop_assert_eq!(rung.is_err(), value >= entries && value != doorbell);
            doorbell = value;
            if value < entries {
                tail = value;
            }
            let head = taken % entries;
            let pending = (tail + entries - head) % entries;
            prop_assert_eq!(queue.pending(), pending);
            let (at, count) = queue.run(most);
            prop_assert_eq!(at, Iova(u64::from(head) * 64));
            prop_assert!(count <= most && count <= pending && head + count <= entries);
            prop_assert!(count != 0 || most == 0 || pending == 0);
            for _ in 0..count {
                queue.take();
                taken += 1;
            }
            prop_assert_eq!(u32::from(queue.head()), taken % entries);
        }
    }
}

#[test]
fn queues_of_65536_entries_work() {
    let mut queue = SubmissionQueue::new(Iova(0), 65536, QueueId(1));
    assert_eq!(queue.ring(65535), Ok(true));
    assert_eq!(queue.pending(), 65535);
    let completion = CompletionQueue::new(Iova(0), 65536, None);
    assert_eq!(completion.room(), 65535);
}
