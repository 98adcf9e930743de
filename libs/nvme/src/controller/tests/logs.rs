//! Log pages and asynchronous events.

use super::machine::*;
use crate::Iova;
use crate::controller::{DiskError, Options};
use crate::spec::{
    AdminOpcode, AsyncEvent, Cns, CommandsSupportedLog, EntryFlags, ErrorLogEntry, FeatureId,
    FirmwareSlotLog, IdentifyController, LogPageId, NvmOpcode, Register, ShutdownNotification, SmartLog,
    Status, SubmissionEntry,
};

fn ready() -> Machine {
    let disks = vec![RamDisk::new(1024, 9, Pace::AtOnce), RamDisk::new(512, 12, Pace::AtOnce)];
    Machine::enabled(Options::default(), disks, 0, 2).0
}

pub(super) fn log(
    machine: &mut Machine,
    page: LogPageId,
    offset: u32,
    bytes: u32,
    retain: bool,
) -> Result<u32, Status> {
    let mut entry = SubmissionEntry {
        opcode: AdminOpcode::GET_LOG_PAGE.0,
        prp1: DATA_AT.into(),
        prp2: (DATA_AT + 0x1000).into(),
        dword10: ((bytes / 4 - 1) << 16 | u32::from(retain) << 15 | u32::from(page.0)).into(),
        ..SubmissionEntry::default()
    };
    entry.dword12 = offset.into();
    machine.run_admin(entry)
}

#[test]
fn log_pages_have_bounds() {
    let mut machine = ready();
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    let smart: SmartLog = machine.data();
    assert!((300..330).contains(&smart.temperature.get()));
    assert_eq!(smart.critical_warning.bits(), 0);

    log(&mut machine, LogPageId::FIRMWARE_SLOT, 0, 512, false).unwrap();
    assert_eq!(machine.data::<FirmwareSlotLog>().active.current(), 1);

    machine.host.slice(Iova(DATA_AT), 4096).unwrap().fill(0xee);
    log(&mut machine, LogPageId::SMART, 508, 16, false).unwrap();
    assert_eq!(machine.data::<[u8; 20]>()[16..], [0xee; 4], "no more than was asked for");
    assert_eq!(log(&mut machine, LogPageId::SMART, 512, 4, false), Ok(0));
    assert_eq!(log(&mut machine, LogPageId::SMART, 516, 4, false), Err(Status::INVALID_FIELD));
    assert_eq!(log(&mut machine, LogPageId::SMART, 2, 4, false), Err(Status::INVALID_FIELD));
    assert_eq!(log(&mut machine, LogPageId(0x7f), 0, 4, false), Err(Status::INVALID_LOG_PAGE));
    // More than MDTS: 32 bits of dwords.
    let entry = SubmissionEntry {
        opcode: AdminOpcode::GET_LOG_PAGE.0,
        dword10: (0xffff_0000 | u32::from(LogPageId::SMART.0)).into(),
        dword11: 0xffff.into(),
        ..SubmissionEntry::default()
    };
    assert_eq!(machine.run_admin(entry), Err(Status::INVALID_FIELD));
}

#[test]
fn failures_stand_in_the_error_log_the_newest_first() {
    let mut machine = ready();
    for round in 0..70_u32 {
        let opcode = if round % 2 == 0 { 0x84 } else { 0x81 };
        machine.admin(AdminOpcode(opcode), round, 0, 0).unwrap_err();
    }
    log(&mut machine, LogPageId::ERROR_INFORMATION, 0, 4096, false).unwrap();
    let entries: [ErrorLogEntry; 64] = machine.data();
    for (entry, round) in entries.iter().zip((0..70_u32).rev()) {
        assert_eq!(entry.error_count.get(), u64::from(round) + 1);
        assert_eq!(entry.nsid.get(), round);
        assert_eq!(entry.status.status(), Status::INVALID_OPCODE);
        assert!(entry.status.do_not_retry());
    }
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    assert_eq!(machine.data::<SmartLog>().error_log_entries.get(), 70);
}

/// Sends an Asynchronous Event Request and gives its identifier.
pub(super) fn request_event(machine: &mut Machine) -> u16 {
    let command = machine.command_id();
    let opcode = AdminOpcode::ASYNC_EVENT_REQUEST.0;
    let entry = SubmissionEntry { opcode, command_id: command.into(), ..SubmissionEntry::default() };
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    machine.push(&mut admin, &entry);
    machine.admin = admin;
    machine.settle();
    command
}

pub(super) fn next_admin(machine: &mut Machine) -> Option<(u16, Result<u32, Status>)> {
    machine.settle();
    for _ in 0..200 {
        machine.poll();
    }
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    let completion = machine.pop(&mut admin);
    machine.admin = admin;
    completion.map(|completion| (completion.command_id.get(), result(&completion)))
}

#[test]
fn event_requests_park_until_something_happens() {
    let mut machine = ready();
    let parked: Vec<u16> = (0..4).map(|_| request_event(&mut machine)).collect();
    assert_eq!(next_admin(&mut machine), None);
    let surplus = request_event(&mut machine);
    assert_eq!(next_admin(&mut machine), Some((surplus, Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED))));

    // A doorbell of no queue, then a value that the admin queue cannot have.
    machine.host.doorbells[2 * 9] = 3;
    let (command, event) = next_admin(&mut machine).unwrap();
    let event = AsyncEvent::from_bits(event.unwrap());
    assert_eq!((command, event.information(), event.log_page()), (parked[0], 0, 1));
    machine.host.doorbells[1] = 77;
    assert_eq!(next_admin(&mut machine), None, "errors are silent until their log page is read");
    log(&mut machine, LogPageId::ERROR_INFORMATION, 0, 64, true).unwrap();
    assert_eq!(next_admin(&mut machine), None, "and read without RAE");
    log(&mut machine, LogPageId::ERROR_INFORMATION, 0, 64, false).unwrap();
    let (command, event) = next_admin(&mut machine).unwrap();
    assert_eq!((command, AsyncEvent::from_bits(event.unwrap()).information()), (parked[1], 1));

    // A parked request can be aborted, anything else cannot.
    let abort = |machine: &mut Machine, command: u16| {
        machine.run_admin(SubmissionEntry {
            opcode: AdminOpcode::ABORT.0,
            dword10: (u32::from(command) << 16).into(),
            ..SubmissionEntry::default()
        })
    };
    assert_eq!(abort(&mut machine, 0x7777), Ok(1));
    assert_eq!(abort(&mut machine, parked[3]), Ok(0));
    assert_eq!(next_admin(&mut machine), Some((parked[3], Err(Status::ABORT_REQUESTED))));
}

#[test]
fn a_temperature_threshold_below_the_temperature_is_an_event() {
    let mut machine = ready();
    let parked = request_event(&mut machine);
    let set = |machine: &mut Machine, feature: FeatureId, value| {
        machine.admin(AdminOpcode::SET_FEATURES, 0, feature.0.into(), value).unwrap()
    };
    set(&mut machine, FeatureId::ASYNC_EVENT_CONFIGURATION, 0b10);
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, 300);
    let (command, event) = next_admin(&mut machine).unwrap();
    let event = AsyncEvent::from_bits(event.unwrap());
    assert_eq!((command, event.kind_bits(), event.information(), event.log_page()), (parked, 1, 1, 2));
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    assert!(machine.data::<SmartLog>().critical_warning.temperature());
}

#[test]
fn a_warning_is_told_once_until_it_comes_anew_and_only_if_asked_for() {
    let mut machine = ready();
    for _ in 0..3 {
        request_event(&mut machine);
    }
    let set = |machine: &mut Machine, feature: FeatureId, value| {
        machine.admin(AdminOpcode::SET_FEATURES, 0, feature.0.into(), value).unwrap();
    };
    let under = 1 << 20;
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, 300);
    assert_eq!(next_admin(&mut machine), None, "not asked for");
    set(&mut machine, FeatureId::ASYNC_EVENT_CONFIGURATION, 0b10);
    assert!(next_admin(&mut machine).is_some(), "it holds when it is asked for");
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    assert!(machine.data::<SmartLog>().critical_warning.temperature());
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, 301);
    set(&mut machine, FeatureId::ARBITRATION, 7);
    assert_eq!(next_admin(&mut machine), None, "it is the same warning");
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, 400);
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    assert!(!machine.data::<SmartLog>().critical_warning.temperature());
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, under | 310);
    assert!(next_admin(&mut machine).is_some(), "too cold");
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, under);
    set(&mut machine, FeatureId::TEMPERATURE_THRESHOLD, under | 310);
    assert_eq!(next_admin(&mut machine), None, "the log was not read");
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    assert!(next_admin(&mut machine).is_some());
}

#[test]
fn types_of_events_are_masked_apart() {
    let mut machine = ready();
    let parked: Vec<u16> = (0..3).map(|_| request_event(&mut machine)).collect();
    let kind = |event: Option<(u16, Result<u32, Status>)>| {
        event.map(|(command, event)| (command, AsyncEvent::from_bits(event.unwrap()).kind_bits()))
    };
    machine.host.doorbells[2 * 9] = 3;
    assert_eq!(kind(next_admin(&mut machine)), Some((parked[0], 0)));
    machine.admin(AdminOpcode::SET_FEATURES, 0, FeatureId::ASYNC_EVENT_CONFIGURATION.0.into(), 2).unwrap();
    machine.admin(AdminOpcode::SET_FEATURES, 0, FeatureId::TEMPERATURE_THRESHOLD.0.into(), 300).unwrap();
    machine.host.doorbells[2 * 9] = 3;
    assert_eq!(kind(next_admin(&mut machine)), Some((parked[1], 1)), "errors are masked, health is not");
    assert_eq!(next_admin(&mut machine), None);
    log(&mut machine, LogPageId::SMART, 0, 512, false).unwrap();
    assert_eq!(next_admin(&mut machine), None, "another log page");
    log(&mut machine, LogPageId::ERROR_INFORMATION, 0, 64, false).unwrap();
    assert_eq!(kind(next_admin(&mut machine)), Some((parked[2], 0)));
}

/// The newest entry of the error log.
fn last_error(machine: &mut Machine) -> ErrorLogEntry {
    log(machine, LogPageId::ERROR_INFORMATION, 0, 64, true).unwrap();
    machine.data()
}

#[test]
fn the_error_log_tells_which_parameter_was_wrong() {
    let mut machine = ready();
    let entry = |opcode: AdminOpcode, nsid: u32, dword10: u32, dword11: u32| SubmissionEntry {
        opcode: opcode.0,
        nsid: nsid.into(),
        prp1: DATA_AT.into(),
        dword10: dword10.into(),
        dword11: dword11.into(),
        ..SubmissionEntry::default()
    };
    let fused = EntryFlags::from_bits(1);
    let sgl = EntryFlags::from_bits(0x40);
    let identify = entry(AdminOpcode::IDENTIFY, 0, 1, 0);
    let (create, set, get) =
        (AdminOpcode::CREATE_COMPLETION_QUEUE, AdminOpcode::SET_FEATURES, AdminOpcode::GET_FEATURES);
    for (entry, status, byte, bit) in [
        (entry(AdminOpcode(0xc0), 0, 0, 0), Status::INVALID_OPCODE, 0, 0),
        (SubmissionEntry { flags: fused, ..identify }, Status::INVALID_FIELD, 1, 0),
        (SubmissionEntry { flags: sgl, ..identify }, Status::INVALID_FIELD, 1, 6),
        (SubmissionEntry { prp1: 1.into(), ..identify }, Status::INVALID_PRP_OFFSET, 24, 0),
        (SubmissionEntry { prp1: (1 << 40).into(), ..identify }, Status::DATA_TRANSFER_ERROR, 24, 0),
        (entry(AdminOpcode::IDENTIFY, 9, 0, 0), Status::INVALID_NAMESPACE, 4, 0),
        (entry(AdminOpcode::IDENTIFY, 0, 0x55, 0), Status::INVALID_FIELD, 40, 0),
        (entry(create, 0, 7 << 16, 1), Status::INVALID_QUEUE_ID, 40, 0),
        (entry(create, 0, 1, 1), Status::INVALID_QUEUE_SIZE, 42, 0),
        (entry(create, 0, 7 << 16 | 1, 0), Status::INVALID_FIELD, 44, 0),
        (entry(create, 0, 7 << 16 | 1, 999 << 16 | 1), Status::INVALID_INTERRUPT_VECTOR, 46, 0),
        (entry(AdminOpcode::CREATE_SUBMISSION_QUEUE, 0, 7 << 16 | 1, 1), Status::INVALID_QUEUE_ID, 46, 0),
        (
            entry(AdminOpcode::CREATE_SUBMISSION_QUEUE, 0, 7 << 16 | 1, 5 << 16 | 1),
            Status::INVALID_COMPLETION_QUEUE,
            46,
            0,
        ),
        (entry(set, 0, 1 << 31 | 1, 0), Status::FEATURE_NOT_SAVEABLE, 43, 7),
        (entry(set, 1, 1, 0), Status::FEATURE_NOT_NAMESPACE_SPECIFIC, 4, 0),
        (entry(set, 0, 0xee, 0), Status::INVALID_FIELD, 40, 0),
        (entry(set, 0, 2, 1), Status::INVALID_FIELD, 44, 0),
        (entry(set, 0, 4, 1 << 16), Status::INVALID_FIELD, 46, 0),
        (entry(set, 0, 4, 2 << 20), Status::INVALID_FIELD, 46, 4),
        (entry(set, 0, 7, 0xffff_0000), Status::INVALID_FIELD, 46, 0),
        (entry(get, 0, 4 << 8 | 1, 0), Status::INVALID_FIELD, 41, 0),
        (entry(AdminOpcode::GET_LOG_PAGE, 0, 0x7f, 0), Status::INVALID_LOG_PAGE, 40, 0),
        (entry(AdminOpcode::GET_LOG_PAGE, 1, 2, 0), Status::INVALID_FIELD, 4, 0),
        (entry(AdminOpcode::GET_LOG_PAGE, 0, 2, 0xffff), Status::INVALID_FIELD, 42, 0),
    ] {
        assert_eq!(machine.run_admin(entry), Err(status), "{entry:?}");
        let error = last_error(&mut machine);
        assert_eq!(error.status.status(), status);
        assert!(error.status.more());
        let location = (error.parameter_location.byte(), error.parameter_location.bit());
        assert_eq!(location, (byte, bit), "{entry:?}");
        assert_eq!((error.submission_queue.get(), error.nsid), (0, entry.nsid));
    }
}

#[test]
fn the_error_log_tells_of_io_commands_and_of_doorbells() {
    let disk = RamDisk::new(1024, 9, Pace::AtOnce);
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 2, 16);
    let pair = &mut pairs[1];
    let completion = machine.run(pair, transfer(NvmOpcode::READ, 2000, 1, BUFFER_AT, 0));
    let error = last_error(&mut machine);
    assert_eq!((error.submission_queue.get(), error.command_id), (2, completion.command_id));
    assert_eq!((error.lba.get(), error.nsid.get(), error.parameter_location.byte()), (2000, 1, 40));
    assert_eq!(error.status.with_phase(completion.status.phase()), completion.status);

    machine.controller.disks.namespaces[0].disk.fail = Some(DiskError::Read);
    machine.run(pair, transfer(NvmOpcode::READ, 3, 1, BUFFER_AT, 0));
    let error = last_error(&mut machine);
    assert_eq!((error.status.status(), error.lba.get()), (Status::UNRECOVERED_READ_ERROR, 3));
    assert_eq!(error.parameter_location.bits(), 0xffff, "no parameter is wrong");

    for (doorbell, status) in [(2 * 9, Status::INVALID_QUEUE_ID), (2 * 2, Status::INVALID_FIELD)] {
        machine.host.doorbells[doorbell] = 99;
        for _ in 0..200 {
            machine.poll();
        }
        let error = last_error(&mut machine);
        assert_eq!((error.submission_queue.get(), error.command_id.get()), (0xffff, 0xffff));
        assert_eq!((error.status.status(), error.parameter_location.bits()), (status, 0xffff));
    }
}

#[test]
fn health_is_counted() {
    let disk = RamDisk::new(4096, 9, Pace::AtOnce);
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 16);
    let pair = &mut pairs[0];
    let smart = |machine: &mut Machine| {
        log(machine, LogPageId::SMART, 0, 512, false).unwrap();
        machine.data::<SmartLog>()
    };
    for _ in 0..1001 {
        machine.run(pair, transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
    }
    machine.run(pair, transfer(NvmOpcode::WRITE, 0, 8, BUFFER_AT, 0));
    machine.run(pair, transfer(NvmOpcode::WRITE, 5000, 8, BUFFER_AT, 0));
    let log = smart(&mut machine);
    assert_eq!((log.host_reads.get(), log.data_units_read.get()), (1001, 2), "thousands, rounded up");
    assert_eq!((log.host_writes.get(), log.data_units_written.get()), (1, 1));
    assert_eq!((log.error_log_entries.get(), log.media_errors.get()), (1, 0));
    for (error, media) in [(DiskError::Read, 1), (DiskError::Internal, 1), (DiskError::Write, 2)] {
        machine.controller.disks.namespaces[0].disk.fail = Some(error);
        machine.run(pair, transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
        assert_eq!(smart(&mut machine).media_errors.get(), media);
    }
    assert_eq!(smart(&mut machine).error_log_entries.get(), 4);
}

#[test]
fn unsafe_shutdowns_are_those_without_notice() {
    let mut machine = ready();
    let count = |machine: &mut Machine| {
        machine.settle();
        machine.enable();
        log(machine, LogPageId::SMART, 0, 512, false).unwrap();
        let log = machine.data::<SmartLog>();
        (log.power_cycles.get(), log.unsafe_shutdowns.get())
    };
    let _ = machine.registers.power_cycle();
    assert_eq!(count(&mut machine), (2, 1));
    let shutdown = Machine::configuration().with_enable(true).with_shutdown(ShutdownNotification::NORMAL);
    let _ = machine.write32(Register::CC, shutdown.bits());
    machine.settle();
    let _ = machine.registers.power_cycle();
    assert_eq!(count(&mut machine), (3, 1));
    let _ = machine.write32(Register::CC, 0);
    machine.settle();
    let _ = machine.registers.power_cycle();
    assert_eq!(count(&mut machine), (4, 1), "it was off");
}

/// Commands Supported and Effects: exactly what is executed.
#[test]
fn what_is_said_to_be_supported_is_and_nothing_else() {
    for (shadow_doorbells, deallocates) in [(false, true), (true, false)] {
        let mut disk = RamDisk::new(1024, 9, Pace::AtOnce);
        disk.geometry.deallocates = deallocates;
        let options = Options { shadow_doorbells, ..Options::default() };
        let (mut machine, mut pairs) = Machine::enabled(options, vec![disk], 1, 16);
        log(&mut machine, LogPageId::COMMANDS_SUPPORTED, 0, 4096, false).unwrap();
        let said: CommandsSupportedLog = machine.data();
        for opcode in 0..=255_u8 {
            // What it is about does not matter: an opcode that is known is refused for something else, or done.
            let io = SubmissionEntry { opcode, nsid: 1.into(), ..SubmissionEntry::default() };
            let executed = result(&machine.run(&mut pairs[0], io)) != Err(Status::INVALID_OPCODE);
            assert_eq!(said.io[usize::from(opcode)].supported(), executed, "I/O {:?}", NvmOpcode(opcode));
            if AdminOpcode(opcode) == AdminOpcode::ASYNC_EVENT_REQUEST {
                assert!(said.admin[usize::from(opcode)].supported());
                continue;
            }
            let admin = SubmissionEntry {
                opcode,
                prp1: 1.into(),
                dword10: 0xffff.into(),
                ..SubmissionEntry::default()
            };
            let executed = machine.run_admin(admin) != Err(Status::INVALID_OPCODE);
            assert_eq!(said.admin[usize::from(opcode)].supported(), executed, "{:?}", AdminOpcode(opcode));
        }
        machine.admin(AdminOpcode::IDENTIFY, 0, Cns::CONTROLLER.0.into(), 0).unwrap();
        let identity: IdentifyController = machine.data();
        let supported = |opcode: NvmOpcode| said.io[usize::from(opcode.0)].supported();
        let offered = identity.nvm_commands;
        assert_eq!(offered.compare(), supported(NvmOpcode::COMPARE));
        assert_eq!(offered.verify(), supported(NvmOpcode::VERIFY));
        assert_eq!(offered.write_uncorrectable(), supported(NvmOpcode::WRITE_UNCORRECTABLE));
        assert_eq!(offered.write_zeroes(), supported(NvmOpcode::WRITE_ZEROES));
        assert_eq!(offered.dataset_management(), supported(NvmOpcode::DATASET_MANAGEMENT));
        assert_eq!(offered.dataset_management(), deallocates);
        let supported = |opcode: AdminOpcode| said.admin[usize::from(opcode.0)].supported();
        let offered = identity.admin_commands;
        assert_eq!(offered.doorbell_buffer(), supported(AdminOpcode::DOORBELL_BUFFER_CONFIG));
        assert_eq!(offered.format(), supported(AdminOpcode::FORMAT_NVM));
        assert_eq!(offered.security(), supported(AdminOpcode::SECURITY_SEND));
        assert_eq!(offered.firmware(), supported(AdminOpcode::FIRMWARE_COMMIT));
    }
}
