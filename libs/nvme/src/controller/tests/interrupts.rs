//! Who is interrupted, and when not.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::machine::*;
use crate::controller::Options;
use crate::spec::{AdminOpcode, FeatureId, NvmOpcode, Register, SubmissionEntry};

fn ready() -> (Machine, Pair) {
    let disk = RamDisk::new(1024, 9, Pace::AtOnce);
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 16);
    machine.host.interrupts.clear();
    (machine, pairs.remove(0))
}

fn read() -> SubmissionEntry {
    transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0)
}

#[test]
fn a_batch_is_one_interrupt() {
    let (mut machine, mut pair) = ready();
    for _ in 0..10 {
        machine.push(&mut pair, &read());
    }
    machine.poll();
    assert_eq!(machine.host.interrupts, [1]);
}

#[test]
fn no_second_interrupt_until_the_host_consumes_and_none_is_lost() {
    let (mut machine, mut pair) = ready();
    machine.push(&mut pair, &read());
    machine.poll();
    machine.push(&mut pair, &read());
    machine.poll();
    machine.poll();
    assert_eq!(machine.host.interrupts, [1], "the first one was not consumed");
    assert_eq!(machine.controller.counters().interrupts_withheld.get(), 1);
    machine.pop(&mut pair).unwrap();
    machine.poll();
    assert_eq!(machine.host.interrupts, [1, 1], "it moved, and one remains");
    machine.pop(&mut pair).unwrap();
    machine.poll();
    assert_eq!(machine.host.interrupts, [1, 1]);
    machine.push(&mut pair, &read());
    machine.poll();
    assert_eq!(machine.host.interrupts, [1, 1, 1]);
}

#[test]
fn before_sleep_nothing_is_withheld() {
    let (mut machine, mut pair) = ready();
    machine.push(&mut pair, &read());
    machine.poll();
    machine.push(&mut pair, &read());
    machine.poll();
    assert!(machine.controller.prepare_sleep(&mut machine.host));
    assert_eq!(machine.host.interrupts, [1, 1]);
    assert!(machine.controller.prepare_sleep(&mut machine.host));
    assert_eq!(machine.host.interrupts, [1, 1]);
}

#[test]
fn a_host_that_consumes_without_telling_hears_of_the_next_in_time() {
    let (mut machine, mut pair) = ready();
    machine.push(&mut pair, &read());
    machine.poll();
    machine.push(&mut pair, &read());
    for _ in 0..1000 {
        machine.poll();
    }
    assert_eq!(machine.host.interrupts, [1, 1]);
}

#[test]
fn sleep_is_refused_while_there_is_work() {
    let (mut machine, mut pair) = ready();
    machine.push(&mut pair, &read());
    assert!(!machine.controller.prepare_sleep(&mut machine.host));
    machine.poll();
    assert!(machine.controller.prepare_sleep(&mut machine.host));
    let _ = machine.write32(Register::CC, 0);
    assert!(!machine.controller.prepare_sleep(&mut machine.host));
}

#[test]
fn a_full_completion_queue_stops_the_taking_until_the_host_consumes() {
    let (mut machine, mut pairs) = {
        let disk = RamDisk::new(1024, 9, Pace::AtOnce);
        Machine::enabled(Options::default(), vec![disk], 1, 4)
    };
    let mut pair = pairs.remove(0);
    for _ in 0..3 {
        machine.push(&mut pair, &read());
    }
    machine.settle();
    for _ in 0..3 {
        machine.push(&mut pair, &read());
    }
    machine.settle();
    assert_eq!(machine.controller.counters().reads.get(), 3);
    assert!(machine.controller.prepare_sleep(&mut machine.host), "only the host can go on");
    for consumed in 1..=3 {
        machine.pop(&mut pair).unwrap();
        assert!(!machine.controller.prepare_sleep(&mut machine.host));
        machine.settle();
        assert_eq!(machine.controller.counters().reads.get(), 3 + consumed);
    }
}

/// Fault 40.
#[test]
fn several_submission_queues_share_a_completion_queue() {
    let (mut machine, mut pair) = ready();
    machine.create_submission(7, 15, BUFFER_AT + 0x10_0000, 1).unwrap();
    let mut other = Pair::new(7, BUFFER_AT + 0x10_0000, 16);
    let mut commands = Vec::new();
    for index in 0..7 {
        let to = if index % 2 == 0 { &mut pair } else { &mut other };
        let command = machine.command_id();
        machine.push(to, &SubmissionEntry { command_id: command.into(), ..read() });
        commands.push((to.id, command));
    }
    machine.settle();
    let mut seen = Vec::new();
    while let Some(completion) = machine.pop(&mut pair) {
        seen.push((completion.submission_queue.get(), completion.command_id.get()));
    }
    seen.sort_by_key(|(_, command)| *command);
    assert_eq!(seen, commands);
}

#[test]
fn the_pin_follows_what_is_not_consumed_and_not_masked() {
    let disk = RamDisk::new(1024, 9, Pace::AtOnce);
    let mut machine = Machine::new(Options::default(), vec![disk]);
    machine.host.pin = true;
    machine.enable();
    machine.create_completion(1, 15, QUEUES_AT + 0x1000, 0b11).unwrap();
    machine.create_submission(1, 15, QUEUES_AT, 1).unwrap();
    let mut pair = Pair::new(1, QUEUES_AT, 16);
    machine.poll();
    assert!(!machine.host.line);
    machine.push(&mut pair, &read());
    machine.poll();
    assert!(machine.host.line);
    let _ = machine.write32(Register::INTMS, 1);
    machine.poll();
    assert!(!machine.host.line, "masked");
    let _ = machine.write32(Register::INTMC, 1);
    machine.poll();
    assert!(machine.host.line);
    machine.pop(&mut pair).unwrap();
    machine.poll();
    assert!(!machine.host.line, "consumed");
    machine.push(&mut pair, &read());
    machine.poll();
    assert!(machine.host.line);
    machine.controller.reset(&mut machine.host);
    assert!(!machine.host.line, "reset");
}

/// TIME is long enough for the slowest machine not to reach it within a test's step.
const LONG: u32 = 250;

fn coalesce(machine: &mut Machine, completions: u32, hundred_microseconds: u32) {
    let value = hundred_microseconds << 8 | (completions - 1);
    let feature = FeatureId::INTERRUPT_COALESCING.0.into();
    machine.admin(AdminOpcode::SET_FEATURES, 0, feature, value).unwrap();
    machine.host.interrupts.clear();
}

#[test]
fn coalesced_completions_are_one_interrupt_at_their_number() {
    let (mut machine, mut pair) = ready();
    coalesce(&mut machine, 4, LONG);
    for round in 1..4 {
        for _ in 0..3 {
            machine.push(&mut pair, &read());
            machine.poll();
        }
        assert_eq!(machine.host.interrupts.len(), round - 1, "three of four");
        machine.push(&mut pair, &read());
        machine.poll();
        assert_eq!(machine.host.interrupts, vec![1; round]);
        assert_eq!(machine.controller.deadline(), None);
        for _ in 0..4 {
            machine.pop(&mut pair).unwrap();
        }
        machine.poll();
    }
}

#[test]
fn coalesced_completions_are_told_of_in_time_also_by_a_controller_that_sleeps() {
    let (mut machine, mut pair) = ready();
    coalesce(&mut machine, 200, 10);
    let start = Instant::now();
    machine.push(&mut pair, &read());
    machine.poll();
    // A slow machine may be there already.
    if let Some(deadline) = machine.controller.deadline() {
        assert!(deadline >= start + Duration::from_millis(1));
        machine.controller.prepare_sleep(&mut machine.host);
        sleep(deadline.saturating_duration_since(Instant::now()));
        machine.poll();
    }
    assert_eq!(machine.host.interrupts, [1]);
    assert!(start.elapsed() >= Duration::from_millis(1));
    assert_eq!(machine.controller.deadline(), None);
}

#[test]
fn a_sleep_does_not_cut_coalescing_short() {
    let (mut machine, mut pair) = ready();
    coalesce(&mut machine, 200, LONG);
    machine.push(&mut pair, &read());
    machine.poll();
    assert!(machine.controller.prepare_sleep(&mut machine.host));
    assert_eq!(machine.host.interrupts, []);
    assert!(machine.controller.deadline().is_some());
    machine.controller.reset(&mut machine.host);
    assert_eq!(machine.controller.deadline(), None);
}

#[test]
fn the_admin_queue_and_vectors_that_ask_for_it_are_not_coalesced() {
    let (mut machine, mut pair) = ready();
    coalesce(&mut machine, 200, LONG);
    // The admin queue's vector is 0.
    machine.admin(AdminOpcode::IDENTIFY, 0, 1, 0).unwrap();
    assert_eq!(machine.host.interrupts, [0]);
    let configure = |machine: &mut Machine, value| {
        let feature = FeatureId::INTERRUPT_VECTOR_CONFIGURATION.0.into();
        machine.admin(AdminOpcode::SET_FEATURES, 0, feature, value).unwrap();
        machine.host.interrupts.clear();
    };
    for (disabled, interrupts) in [(0x1_0002, 0), (0x1_0001, 1), (0x0_0001, 0)] {
        configure(&mut machine, disabled);
        machine.push(&mut pair, &read());
        machine.poll();
        assert_eq!(machine.host.interrupts.len(), interrupts, "{disabled:#x}");
        machine.pop(&mut pair).unwrap();
        machine.host.pin = true;
        machine.poll();
        machine.host.pin = false;
    }
}

#[test]
fn coalescing_that_is_switched_off_lets_go() {
    let (mut machine, mut pair) = ready();
    coalesce(&mut machine, 200, LONG);
    machine.push(&mut pair, &read());
    machine.poll();
    assert_eq!(machine.host.interrupts, []);
    let feature = FeatureId::INTERRUPT_COALESCING.0.into();
    machine.admin(AdminOpcode::SET_FEATURES, 0, feature, 0).unwrap();
    machine.poll();
    assert!(machine.host.interrupts.contains(&1));
}
