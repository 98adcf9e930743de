//! Random interleavings of submission, consumption, deletion and reset: each command that is taken gets exactly
//! one completion, and no completion queue overruns.

use std::collections::HashSet;

use proptest::prelude::*;

use super::machine::*;
use crate::controller::Options;
use crate::spec::{AdminOpcode, NvmOpcode, Status, SubmissionEntry};

const ENTRIES: u32 = 6;
const QUEUES: u16 = 4;

#[derive(Clone, Copy, Debug)]
enum Step {
    Submit { queue: u16, good: bool },
    Consume { queue: u16, most: u32 },
    Poll,
    Pace(usize),
    Sleep,
    Delete { queue: u16 },
    Create { queue: u16, completion: u16 },
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let queue = 1..=QUEUES;
    prop_oneof![
        12 => (queue.clone(), any::<bool>()).prop_map(|(queue, good)| Step::Submit { queue, good }),
        6 => (queue.clone(), 0_u32..4).prop_map(|(queue, most)| Step::Consume { queue, most }),
        10 => Just(Step::Poll),
        3 => (0_usize..4).prop_map(Step::Pace),
        2 => Just(Step::Sleep),
        1 => queue.clone().prop_map(|queue| Step::Delete { queue }),
        2 => (queue.clone(), queue).prop_map(|(queue, completion)| Step::Create { queue, completion }),
        1 => Just(Step::Reset),
    ]
}

/// The driver's view of the submission queues, and of two completion queues that they share.
struct Driver {
    machine: Machine,
    submission: Vec<Option<Pair>>,
    completion: Vec<Pair>,
    /// Commands submitted and not completed, by queue.
    outstanding: HashSet<(u16, u16)>,
    deleting: Option<(u16, u16)>,
}

impl Driver {
    fn new() -> Self {
        let machine = Machine::new(Options::default(), vec![RamDisk::new(64, 9, Pace::Later(1))]);
        let mut driver = Self {
            machine,
            submission: Vec::new(),
            completion: Vec::new(),
            outstanding: HashSet::new(),
            deleting: None,
        };
        driver.enable();
        driver
    }

    fn enable(&mut self) {
        self.machine.enable();
        self.outstanding.clear();
        self.deleting = None;
        self.submission = (0..=QUEUES).map(|_| None).collect();
        self.completion = (1..=QUEUES)
            .map(|id| {
                let at = QUEUES_AT + u64::from(id) * 0x8000;
                let pair = Pair { completion_id: id, ..Pair::new(id, at, ENTRIES) };
                self.machine.host.bytes[at as usize..][..0x8000].fill(0);
                self.machine.create_completion(id, ENTRIES - 1, pair.completion, 0b11).unwrap();
                pair
            })
            .collect();
    }

    fn create(&mut self, queue: u16, completion: u16) {
        if self.submission[usize::from(queue)].is_none() {
            let at = QUEUES_AT + u64::from(queue) * 0x8000;
            self.machine.create_submission(queue, ENTRIES - 1, at, completion).unwrap();
            let pair = Pair { completion_id: completion, ..Pair::new(queue, at, ENTRIES) };
            self.submission[usize::from(queue)] = Some(pair);
        }
    }

    /// Submits while the queue has room by the driver's own count.
    fn submit(&mut self, queue: u16, good: bool) {
        let Some(mut pair) = self.submission[usize::from(queue)].take() else { return };
        let held = self.outstanding.iter().filter(|(id, _)| *id == queue).count();
        if held < ENTRIES as usize - 1 {
            let command = self.machine.command_id();
            let mut entry = transfer(NvmOpcode::READ, if good { 0 } else { 64 }, 1, BUFFER_AT, 0);
            entry.command_id = command.into();
            self.machine.push(&mut pair, &entry);
            self.outstanding.insert((queue, command));
        }
        self.submission[usize::from(queue)] = Some(pair);
    }

    fn consume(&mut self, queue: u16, most: u32) {
        for _ in 0..most {
            let pair = &mut self.completion[usize::from(queue) - 1];
            let Some(completion) = self.machine.pop(pair) else { break };
            let command = (completion.submission_queue.get(), completion.command_id.get());
            assert!(self.outstanding.remove(&command), "{command:?} completes twice or was never sent");
            let status = completion.status.status();
            assert!(matches!(status, Status::SUCCESS | Status::LBA_OUT_OF_RANGE));
        }
    }

    fn delete(&mut self, queue: u16) {
        if self.deleting.is_none() && self.submission[usize::from(queue)].is_some() {
            let command = self.machine.command_id();
            let mut entry = SubmissionEntry {
                opcode: AdminOpcode::DELETE_SUBMISSION_QUEUE.0,
                dword10: u32::from(queue).into(),
                ..SubmissionEntry::default()
            };
            entry.command_id = command.into();
            let mut admin = std::mem::replace(&mut self.machine.admin, Pair::new(0, 0, 2));
            self.machine.push(&mut admin, &entry);
            self.machine.admin = admin;
            self.deleting = Some((queue, command));
            self.finish_deletion();
        }
    }

    /// Waits for the deletion: the disk may be slow but ends, and no one needs to consume for it.
    fn finish_deletion(&mut self) {
        let Some((queue, command)) = self.deleting.take() else { return };
        let pace = std::mem::replace(&mut self.disk().pace, Pace::Later(1));
        self.machine.settle();
        self.disk().pace = pace;
        let mut admin = std::mem::replace(&mut self.machine.admin, Pair::new(0, 0, 2));
        let completion = self.machine.pop(&mut admin).expect("the deletion ends");
        self.machine.admin = admin;
        assert_eq!((completion.command_id.get(), result(&completion)), (command, Ok(0)));
        self.submission[usize::from(queue)] = None;
        // What was completed before the deletion did is there to consume; the rest was dropped.
        for id in 1..=QUEUES {
            self.consume(id, u32::MAX);
        }
        self.outstanding.retain(|(id, _)| *id != queue);
    }

    fn disk(&mut self) -> &mut RamDisk {
        &mut self.machine.controller.disks.namespaces[0].disk
    }

    fn reset(&mut self) {
        self.machine.controller.reset(&mut self.machine.host);
        self.disk().pace = Pace::Later(1);
        let before = self.machine.host.bytes[QUEUES_AT as usize..BUFFER_AT as usize].to_vec();
        self.machine.settle();
        assert!(self.machine.controller.is_quiet());
        let after = &self.machine.host.bytes[QUEUES_AT as usize..BUFFER_AT as usize];
        assert!(before == after, "something was posted after the reset");
        self.enable();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_command_completes_once(steps in prop::collection::vec(step(), 1..150)) {
        let mut driver = Driver::new();
        for step in steps {
            match step {
                Step::Submit { queue, good } => driver.submit(queue, good),
                Step::Consume { queue, most } => driver.consume(queue, most),
                Step::Poll => {
                    driver.machine.poll();
                }
                Step::Pace(most) => driver.disk().pace = Pace::Later(most),
                Step::Sleep => {
                    driver.machine.controller.prepare_sleep(&mut driver.machine.host);
                }
                Step::Delete { queue } => driver.delete(queue),
                Step::Create { queue, completion } => {
                    let pace = std::mem::replace(&mut driver.disk().pace, Pace::Later(1));
                    driver.create(queue, completion);
                    driver.disk().pace = pace;
                }
                Step::Reset => driver.reset(),
            }
        }
        // Everything that was submitted completes once the host consumes.
        driver.disk().pace = Pace::Later(4);
        for _ in 0..200 {
            driver.machine.poll();
            for queue in 1..=QUEUES {
                driver.consume(queue, u32::MAX);
            }
        }
        prop_assert!(driver.outstanding.is_empty(), "{:?} never complete", driver.outstanding);
        prop_assert_eq!(driver.machine.controller.in_flight(), 0);
    }
}
