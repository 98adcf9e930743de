//! Enable, reset, shutdown.

use proptest::prelude::*;

use super::machine::*;
use crate::controller::{Effect, Options};
use crate::spec::{
    AdminOpcode, Configuration, ControllerStatus, LogPageId, NvmOpcode, Register, ShutdownNotification,
    ShutdownStatus, SmartLog, SubmissionEntry,
};

fn ready(pace: Pace) -> (Machine, Pair) {
    let disk = RamDisk::new(1024, 9, pace);
    let (machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 16);
    (machine, pairs.remove(0))
}

fn disk(machine: &mut Machine) -> &mut RamDisk {
    &mut machine.controller.disks.namespaces[0].disk
}

fn get_log(page: LogPageId, bytes: u32) -> SubmissionEntry {
    SubmissionEntry {
        opcode: AdminOpcode::GET_LOG_PAGE.0,
        prp1: DATA_AT.into(),
        dword10: ((bytes / 4 - 1) << 16 | u32::from(page.0)).into(),
        ..SubmissionEntry::default()
    }
}

fn write(machine: &mut Machine, pair: &mut Pair) {
    machine.push(pair, &transfer(NvmOpcode::WRITE, 0, 1, BUFFER_AT, 0));
    machine.poll();
}

#[test]
fn what_the_controller_cannot_do_is_a_fatal_status_that_a_reset_ends() {
    for wrong in [
        Machine::configuration().with_page(1),
        Machine::configuration().with_command_set(7),
        Machine::configuration().with_arbitration(1),
    ] {
        let mut machine = Machine::new(Options::default(), vec![]);
        let _ = machine.write32(Register::AQA, 31 << 16 | 31);
        let _ = machine.write32(Register::CC, wrong.with_enable(true).bits());
        machine.poll();
        assert_eq!(machine.status(), ControllerStatus::default().with_fatal(true));
        let _ = machine.write32(Register::CC, 0);
        machine.poll();
        assert_eq!(machine.status(), ControllerStatus::default());
        machine.enable();
    }
    // Admin queues of one entry.
    let mut machine = Machine::new(Options::default(), vec![]);
    let _ = machine.write32(Register::CC, 1);
    machine.poll();
    assert!(machine.status().fatal());
}

/// The first command is not executed, nothing is written, and the host's own mistake does not outlive a reset.
#[test]
fn memory_that_only_seems_to_be_the_hosts_is_fatal() {
    let mut machine = Machine::new(Options::default(), vec![RamDisk::new(16, 9, Pace::AtOnce)]);
    machine.enable();
    machine.host.private = true;
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, ADMIN_AT, 32));
    let identify = SubmissionEntry {
        opcode: AdminOpcode::IDENTIFY.0,
        prp1: DATA_AT.into(),
        dword10: 1.into(),
        ..SubmissionEntry::default()
    };
    machine.push(&mut admin, &identify);
    let before = machine.host.bytes.clone();
    machine.settle();
    assert_eq!(machine.status(), ControllerStatus::default().with_ready(true).with_fatal(true));
    assert_eq!(machine.host.bytes, before);
    assert!(machine.host.interrupts.is_empty());
    machine.host.private = false;
    let _ = machine.write32(Register::CC, 0);
    machine.settle();
    machine.enable();
    machine.run_admin(identify).unwrap();
}

#[test]
fn ready_falls_only_when_the_last_disk_operation_has_ended() {
    let (mut machine, mut pair) = ready(Pace::Later(0));
    write(&mut machine, &mut pair);
    assert_eq!(machine.controller.in_flight(), 1);
    let before = machine.host.bytes.clone();
    machine.host.interrupts.clear();
    let _ = machine.write32(Register::CC, Machine::configuration().bits());
    for _ in 0..10 {
        machine.poll();
        assert!(machine.status().ready(), "the disk still reads the host's memory");
        assert!(!machine.controller.is_quiet());
    }
    disk(&mut machine).pace = Pace::Later(1);
    machine.settle();
    assert_eq!(machine.status(), ControllerStatus::default());
    assert!(machine.controller.is_quiet());
    assert_eq!(machine.host.bytes, before, "nothing is posted after the reset");
    assert_eq!(machine.host.interrupts, []);
    machine.enable();
    assert_eq!(machine.controller.counters().resets.get(), 1);
}

/// Fault 51.
#[test]
fn a_quick_disable_and_enable_is_a_reset() {
    let (mut machine, mut pair) = ready(Pace::Later(0));
    write(&mut machine, &mut pair);
    let enabled = Machine::configuration().with_enable(true).bits();
    let _ = machine.write32(Register::CC, 0);
    let _ = machine.write32(Register::CC, enabled);
    assert!(!machine.status().ready());
    machine.poll();
    assert!(!machine.status().ready(), "not before the old life has ended");
    disk(&mut machine).pace = Pace::Later(1);
    machine.settle();
    assert!(machine.status().ready());
    assert_eq!(machine.host.doorbells, vec![0; machine.host.doorbells.len()]);
    // The new life's admin queue works from its beginning.
    machine.admin = Pair::new(0, ADMIN_AT, 32);
    let end = machine.admin.completion as usize + 32 * 16;
    machine.host.bytes[ADMIN_AT as usize..end].fill(0);
    machine.create_completion(1, 15, QUEUES_AT, 1).unwrap();
}

#[test]
fn a_reset_from_outside_converges_from_every_state() {
    for state in 0..6 {
        let (mut machine, mut pair) = ready(Pace::Later(0));
        let shutdown = Machine::configuration().with_enable(true).with_shutdown(ShutdownNotification::NORMAL);
        match state {
            0 => {}
            1 => write(&mut machine, &mut pair),
            2 => {
                write(&mut machine, &mut pair);
                let _ = machine.write32(Register::CC, shutdown.bits());
            }
            3 => {
                let _ = machine.write32(Register::CC, shutdown.bits());
            }
            4 => {
                write(&mut machine, &mut pair);
                let _ = machine.write32(Register::CC, 0);
            }
            _ => {
                // The admin queue is out of reach.
                let _ = machine.write32(Register::CC, 0);
                machine.settle();
                let _ = machine.registers.write(Register::ASQ.0.into(), &(1_u64 << 40).to_le_bytes());
                let _ = machine.write32(Register::CC, Machine::configuration().with_enable(true).bits());
                machine.poll();
                machine.host.doorbells[0] = 1;
                machine.poll();
                assert_eq!(machine.status(), ControllerStatus::default().with_ready(true).with_fatal(true));
            }
        }
        machine.poll();
        assert_eq!(machine.registers.reset(), Effect::Wake);
        machine.poll();
        disk(&mut machine).pace = Pace::Later(1);
        machine.settle();
        assert!(machine.controller.is_quiet(), "state {state}");
        assert_eq!(machine.status(), ControllerStatus::default());
        machine.enable();
    }
}

#[test]
fn each_time_the_power_comes_is_counted() {
    let (mut machine, _) = ready(Pace::AtOnce);
    for cycles in 1..4_u32 {
        machine.run_admin(get_log(LogPageId::SMART, 512)).unwrap();
        assert_eq!(machine.data::<SmartLog>().power_cycles.get(), u128::from(cycles));
        let _ = machine.registers.reset();
        machine.settle();
        let _ = machine.registers.power_cycle();
        machine.settle();
        machine.enable();
    }
}

#[test]
fn a_subsystem_reset_converges_and_leaves_its_trace() {
    let (mut machine, mut pair) = ready(Pace::Later(0));
    write(&mut machine, &mut pair);
    assert_eq!(machine.write32(Register::NSSR, 0x4e56_4d65), Effect::Wake);
    machine.poll();
    let occurred = ControllerStatus::default().with_subsystem_reset_occurred(true);
    assert_eq!(machine.status(), occurred.with_ready(true), "the disk still reads the host's memory");
    disk(&mut machine).pace = Pace::Later(1);
    machine.settle();
    assert_eq!(machine.status(), occurred);
    assert_eq!(machine.read32(Register::AQA), 0);
    let _ = machine.write32(Register::CSTS, occurred.bits());
    machine.enable();
}

#[test]
fn shutdown_ends_what_was_begun_and_flushes() {
    for notification in [ShutdownNotification::NORMAL, ShutdownNotification::ABRUPT] {
        let (mut machine, mut pair) = ready(Pace::Later(0));
        machine.host.bytes[BUFFER_AT as usize..][..512].fill(0xaa);
        write(&mut machine, &mut pair);
        let configuration = Machine::configuration().with_enable(true).with_shutdown(notification);
        let _ = machine.write32(Register::CC, configuration.bits());
        machine.poll();
        assert_eq!(machine.status().shutdown(), ShutdownStatus::OCCURRING);
        disk(&mut machine).pace = Pace::Later(1);
        machine.settle();
        assert_eq!(machine.status().shutdown(), ShutdownStatus::COMPLETE);
        assert!(machine.pop(&mut pair).is_some());
        assert_eq!(disk(&mut machine).durable[..512], [0xaa; 512]);
        // No command is taken any more, until a reset.
        machine.push(&mut pair, &SubmissionEntry::default());
        machine.settle();
        assert!(machine.pop(&mut pair).is_none());
        let _ = machine.write32(Register::CC, Configuration::default().bits());
        machine.settle();
        assert_eq!(machine.status(), ControllerStatus::default());
        machine.enable();
    }
}

#[test]
fn a_disabled_controller_can_be_shut_down_and_enabled_again() {
    let mut machine = Machine::new(Options::default(), vec![RamDisk::new(8, 9, Pace::Later(1))]);
    let off = Machine::configuration().with_shutdown(ShutdownNotification::NORMAL);
    let _ = machine.write32(Register::CC, off.bits());
    machine.settle();
    assert_eq!(machine.status(), ControllerStatus::default().with_shutdown(ShutdownStatus::COMPLETE));
    machine.enable();
}

/// Fault 35: doorbells of queues that exist and of those that do not, before and after the controller is
/// enabled.
#[test]
fn any_doorbell_may_be_rung_with_any_value() {
    for value in [0, 1, 15, 16, 17, 31, 32, 0xffff, 0x1_0000, u32::MAX] {
        let (mut machine, _) = ready(Pace::AtOnce);
        for enabled in [true, false] {
            for index in 0..machine.host.doorbells.len() {
                machine.host.doorbells[index] = value;
                for _ in 0..4 {
                    machine.poll();
                }
                machine.controller.prepare_sleep(&mut machine.host);
            }
            assert_eq!(machine.status(), ControllerStatus::default().with_ready(enabled), "{value:#x}");
            machine.controller.reset(&mut machine.host);
            machine.settle();
        }
        machine.enable();
        machine.create_completion(1, 15, QUEUES_AT, 1).unwrap();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, Vec<u8>),
    Configure(Configuration),
    Reset,
    Poll,
    Reap,
    Ring(usize, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let configuration = (any::<bool>(), 0_u8..4, prop_oneof![9 => Just(0_u8), 1 => 1_u8..8]).prop_map(
        |(enable, shutdown, page)| {
            Machine::configuration().with_enable(enable).with_shutdown_bits(shutdown & 1).with_page(page)
        },
    );
    prop_oneof![
        2 => (0_u64..0x40, prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, bytes)| Step::Write(at, bytes)),
        4 => configuration.prop_map(Step::Configure),
        1 => Just(Step::Reset),
        6 => Just(Step::Poll),
        2 => Just(Step::Reap),
        2 => (0_usize..6, 0_u32..40).prop_map(|(index, value)| Step::Ring(index, value)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is written: CSTS is a legal state, and a reset leads back to a controller that works.
    #[test]
    fn every_sequence_stays_legal_and_can_be_reset(steps in prop::collection::vec(step(), 0..60)) {
        let (mut machine, mut pair) = ready(Pace::Later(0));
        write(&mut machine, &mut pair);
        for step in steps {
            match step {
                Step::Write(at, bytes) => {
                    let _ = machine.registers.write(at, &bytes);
                }
                Step::Configure(configuration) => {
                    let _ = machine.write32(Register::AQA, 31 << 16 | 31);
                    let _ = machine.registers.write(Register::ASQ.0.into(), &ADMIN_AT.to_le_bytes());
                    let _ = machine.registers.write(Register::ACQ.0.into(), &0x2000_u64.to_le_bytes());
                    let _ = machine.write32(Register::CC, configuration.bits());
                }
                Step::Reset => machine.controller.reset(&mut machine.host),
                Step::Poll => {
                    let before = machine.read32(Register::CC);
                    machine.poll();
                    let enabled = Configuration::from_bits(before).enable();
                    let status = machine.status();
                    // Enabled: ready or failed, unless a disk still works for the life before.
                    let works = machine.controller.in_flight() != 0;
                    let shut_down = status.shutdown() != ShutdownStatus::NONE;
                    prop_assert!(!enabled || status.ready() || status.fatal() || works || shut_down);
                    prop_assert!(enabled || !status.ready() || works);
                    prop_assert!(enabled || !status.fatal() || works);
                }
                Step::Reap => {
                    disk(&mut machine).pace = Pace::Later(1);
                    machine.poll();
                    disk(&mut machine).pace = Pace::Later(0);
                }
                Step::Ring(index, value) => machine.host.doorbells[index] = value,
            }
            let status = machine.status();
            prop_assert_eq!(status.bits() & !0b1111, 0);
            prop_assert_ne!(status.shutdown(), ShutdownStatus(3));
            machine.host.bytes[ADMIN_AT as usize..0x3000].fill(0);
        }
        disk(&mut machine).pace = Pace::Later(4);
        machine.controller.reset(&mut machine.host);
        machine.settle();
        prop_assert!(machine.controller.is_quiet());
        machine.enable();
        machine.create_completion(1, 15, QUEUES_AT, 1).unwrap();
    }
}
