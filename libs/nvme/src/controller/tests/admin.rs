//! Admin commands.

use super::machine::*;
use crate::Iova;
use crate::controller::{Host, Options};
use crate::spec::{
    AdminOpcode, Cns, FeatureId, IdentifyController, IdentifyNamespace, LbaRangeType, NvmOpcode, Status,
    SubmissionEntry,
};

fn ready() -> Machine {
    let disks = vec![RamDisk::new(1024, 9, Pace::AtOnce), RamDisk::new(512, 12, Pace::AtOnce)];
    Machine::enabled(Options::default(), disks, 0, 2).0
}

#[test]
fn identify_tells_of_the_controller_and_its_namespaces() {
    let mut machine = ready();
    machine.admin(AdminOpcode::IDENTIFY, 0, Cns::CONTROLLER.0.into(), 0).unwrap();
    let controller: IdentifyController = machine.data();
    assert_eq!(&controller.serial, b"OUTBOARD0001        ");
    assert_eq!(controller.namespaces.get(), 2);
    assert!(!controller.admin_commands.doorbell_buffer());
    assert!(controller.subsystem_name.starts_with(b"nqn.2014-08.org.nvmexpress:uuid:"));

    for (nsid, blocks, shift) in [(1, 1024, 9), (2, 512, 12)] {
        for cns in [Cns::NAMESPACE, Cns::ALLOCATED_NAMESPACE] {
            machine.admin(AdminOpcode::IDENTIFY, nsid, cns.0.into(), 0).unwrap();
            let namespace: IdentifyNamespace = machine.data();
            assert_eq!(namespace.size.get(), blocks);
            assert_eq!(namespace.lba_format().data_shift(), shift);
        }
    }
    for nsid in [0, 3, u32::MAX] {
        for cns in [Cns::NAMESPACE, Cns::ALLOCATED_NAMESPACE, Cns::NAMESPACE_ID_DESCRIPTORS] {
            let result = machine.admin(AdminOpcode::IDENTIFY, nsid, cns.0.into(), 0);
            assert_eq!(result, Err(Status::INVALID_NAMESPACE));
        }
    }
}

#[test]
fn identify_lists_namespaces_and_their_identifiers() {
    let mut machine = ready();
    for cns in [Cns::ACTIVE_NAMESPACES, Cns::ALLOCATED_NAMESPACES] {
        for (above, expected) in [(0, [1, 2, 0]), (1, [2, 0, 0]), (2, [0, 0, 0])] {
            machine.admin(AdminOpcode::IDENTIFY, above, cns.0.into(), 0).unwrap();
            assert_eq!(machine.data::<[u32; 1024]>()[..3], expected);
        }
        for above in [0xffff_fffe, 0xffff_ffff] {
            let result = machine.admin(AdminOpcode::IDENTIFY, above, cns.0.into(), 0);
            assert_eq!(result, Err(Status::INVALID_NAMESPACE));
        }
    }

    let mut uuids = Vec::new();
    for nsid in [1, 2, 1] {
        machine.admin(AdminOpcode::IDENTIFY, nsid, Cns::NAMESPACE_ID_DESCRIPTORS.0.into(), 0).unwrap();
        let data: [u8; 4096] = machine.data();
        assert_eq!(data[..4], [3, 16, 0, 0]);
        assert_eq!((data[4 + 6] >> 4, data[4 + 8] >> 6), (8, 0b10), "version and variant of RFC 9562");
        assert_eq!(data[20..24], [0; 4]);
        uuids.push(data[4..20].to_vec());
    }
    assert_ne!(uuids[0], uuids[1]);
    assert_eq!(uuids[0], uuids[2]);
}

#[test]
fn identify_of_the_command_set_knows_the_nvm_set_only() {
    let mut machine = ready();
    machine.host.slice(Iova(DATA_AT), 4096).unwrap().fill(0xee);
    machine.admin(AdminOpcode::IDENTIFY, 0, Cns::COMMAND_SET_CONTROLLER.0.into(), 0).unwrap();
    assert_eq!(machine.data::<[u8; 4096]>(), [0; 4096]);
    let zoned = machine.admin(AdminOpcode::IDENTIFY, 0, Cns::COMMAND_SET_CONTROLLER.0.into(), 2 << 24);
    assert_eq!(zoned, Err(Status::INVALID_FIELD));
    // What needs NVM sets, namespace management or virtualization.
    for unknown in [4, 5, 7, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x1f, 0xff] {
        let result = machine.admin(AdminOpcode::IDENTIFY, 0, unknown, 0);
        assert_eq!(result, Err(Status::INVALID_FIELD), "CNS {unknown:#x}");
    }
}

#[test]
fn bad_commands_get_the_status_that_the_specification_names() {
    let mut machine = ready();
    for opcode in [AdminOpcode(0x84), AdminOpcode(0xc0), AdminOpcode(0x10), AdminOpcode(0x7c), AdminOpcode(3)]
    {
        assert_eq!(machine.admin(opcode, 0, 0, 0), Err(Status::INVALID_OPCODE), "{opcode:?}");
    }
    for flags in [0x01, 0x02, 0x40, 0x80] {
        let mut entry = SubmissionEntry { opcode: AdminOpcode::IDENTIFY.0, ..SubmissionEntry::default() };
        entry.flags = crate::spec::EntryFlags::from_bits(flags);
        entry.dword10 = u32::from(Cns::CONTROLLER.0).into();
        assert_eq!(machine.run_admin(entry), Err(Status::INVALID_FIELD));
    }
    // Data out of reach, or not aligned.
    for (prp1, status) in [(1 << 40, Status::DATA_TRANSFER_ERROR), (DATA_AT + 1, Status::INVALID_PRP_OFFSET)]
    {
        let entry = SubmissionEntry {
            opcode: AdminOpcode::IDENTIFY.0,
            prp1: prp1.into(),
            dword10: u32::from(Cns::CONTROLLER.0).into(),
            ..SubmissionEntry::default()
        };
        assert_eq!(machine.run_admin(entry), Err(status));
    }
}

/// Fault 37.
#[test]
fn queues_are_created_only_as_the_specification_allows() {
    let mut machine = ready();
    let at = QUEUES_AT;
    for id in [0, 65, 66, 0xffff] {
        assert_eq!(machine.create_completion(id, 7, at, 1), Err(Status::INVALID_QUEUE_ID));
    }
    for size in [0, 1024, 0xffff] {
        assert_eq!(machine.create_completion(1, size, at, 1), Err(Status::INVALID_QUEUE_SIZE));
    }
    assert_eq!(machine.create_completion(1, 7, at, 65 << 16 | 3), Err(Status::INVALID_INTERRUPT_VECTOR));
    assert_eq!(machine.create_completion(1, 7, at, 2), Err(Status::INVALID_FIELD), "not contiguous");
    assert_eq!(machine.create_completion(1, 7, at + 8, 1), Err(Status::INVALID_PRP_OFFSET));
    assert_eq!(machine.create_completion(1, 1023, at, 64 << 16 | 3), Ok(0));
    assert_eq!(machine.create_completion(1, 7, at, 1), Err(Status::INVALID_QUEUE_ID), "in use");

    for id in [0, 65, 0xffff] {
        assert_eq!(machine.create_submission(id, 7, at, 1), Err(Status::INVALID_QUEUE_ID));
    }
    for size in [0, 1024] {
        assert_eq!(machine.create_submission(1, size, at, 1), Err(Status::INVALID_QUEUE_SIZE));
    }
    assert_eq!(machine.create_submission(1, 7, at, 0), Err(Status::INVALID_QUEUE_ID));
    for completion in [2, 64, 65, 0xffff] {
        assert_eq!(machine.create_submission(1, 7, at, completion), Err(Status::INVALID_COMPLETION_QUEUE));
    }
    assert_eq!(machine.create_submission(64, 1, at, 1), Ok(0));
    assert_eq!(machine.create_submission(64, 1, at, 1), Err(Status::INVALID_QUEUE_ID));
}

/// Fault 36.
#[test]
fn queues_are_deleted_only_as_the_specification_allows() {
    let mut machine = ready();
    machine.create_completion(1, 7, QUEUES_AT, 1).unwrap();
    machine.create_submission(1, 7, QUEUES_AT + 0x1000, 1).unwrap();
    machine.create_submission(2, 7, QUEUES_AT + 0x2000, 1).unwrap();
    for opcode in [AdminOpcode::DELETE_COMPLETION_QUEUE, AdminOpcode::DELETE_SUBMISSION_QUEUE] {
        for id in [0, 3, 65, 0xffff] {
            assert_eq!(machine.admin(opcode, 0, id, 0), Err(Status::INVALID_QUEUE_ID));
        }
    }
    let delete = |machine: &mut Machine, opcode, id| machine.admin(opcode, 0, id, 0);
    let (submission, completion) =
        (AdminOpcode::DELETE_SUBMISSION_QUEUE, AdminOpcode::DELETE_COMPLETION_QUEUE);
    assert_eq!(delete(&mut machine, completion, 1), Err(Status::INVALID_QUEUE_DELETION));
    assert_eq!(delete(&mut machine, submission, 1), Ok(0));
    assert_eq!(delete(&mut machine, submission, 1), Err(Status::INVALID_QUEUE_ID));
    assert_eq!(delete(&mut machine, completion, 1), Err(Status::INVALID_QUEUE_DELETION));
    assert_eq!(delete(&mut machine, submission, 2), Ok(0));
    assert_eq!(delete(&mut machine, completion, 1), Ok(0));
    // The admin queue lives (SPDK#2172), and identifiers can be used again.
    machine.create_completion(1, 7, QUEUES_AT, 1).unwrap();
}

/// Fault 40.
#[test]
fn a_deleted_queue_completes_what_was_taken_and_drops_the_rest() {
    let disk = RamDisk::new(1024, 9, Pace::Later(0));
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 64);
    let mut pair = pairs.remove(0);
    for command in 0..40 {
        let mut entry = transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0);
        entry.command_id = command.into();
        machine.push(&mut pair, &entry);
    }
    machine.poll();
    let taken = machine.controller.in_flight();
    assert!(taken > 0 && taken < 40, "{taken}");
    let mut delete = SubmissionEntry { opcode: 0, dword10: 1.into(), ..SubmissionEntry::default() };
    delete.command_id = 0x77.into();
    let mut admin = std::mem::replace(&mut machine.admin, Pair::new(0, 0, 2));
    machine.push(&mut admin, &delete);
    for _ in 0..10 {
        machine.poll();
    }
    assert_eq!(machine.pop(&mut admin), None, "commands are still at the disk");
    machine.controller.disks.namespaces[0].disk.pace = Pace::Later(7);
    machine.settle();
    for _ in 0..taken {
        assert_eq!(result(&machine.pop(&mut pair).unwrap()), Ok(0));
    }
    assert_eq!(machine.pop(&mut pair), None);
    let completion = machine.pop(&mut admin).unwrap();
    assert_eq!((completion.command_id.get(), result(&completion)), (0x77, Ok(0)));
}

#[test]
fn features_have_a_current_a_default_and_a_saved_value() {
    let mut machine = ready();
    let get = |machine: &mut Machine, feature: FeatureId, select: u32, which| {
        machine.admin(AdminOpcode::GET_FEATURES, 0, select << 8 | u32::from(feature.0), which)
    };
    let set = |machine: &mut Machine, feature: FeatureId, value| {
        machine.admin(AdminOpcode::SET_FEATURES, 0, feature.0.into(), value)
    };
    for (feature, default, new) in [
        (FeatureId::ARBITRATION, 7, 0x0102_0303),
        (FeatureId::POWER_MANAGEMENT, 0, 0x20),
        (FeatureId::TEMPERATURE_THRESHOLD, 343, 350),
        (FeatureId::VOLATILE_WRITE_CACHE, 1, 0),
        (FeatureId::INTERRUPT_COALESCING, 0, 0x0102),
        (FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 0, 1 << 16),
        (FeatureId::WRITE_ATOMICITY, 0, 1),
        (FeatureId::ASYNC_EVENT_CONFIGURATION, 0, 0x1f),
    ] {
        assert_eq!(get(&mut machine, feature, 0, 0), Ok(default), "{feature:?}");
        assert_eq!(set(&mut machine, feature, new), Ok(0), "{feature:?}");
        assert_eq!(get(&mut machine, feature, 0, 0), Ok(new), "{feature:?}");
        for select in [1, 2] {
            assert_eq!(get(&mut machine, feature, select, 0), Ok(default), "{feature:?}");
        }
        assert_eq!(get(&mut machine, feature, 3, 0), Ok(0b100), "{feature:?}");
        assert_eq!(get(&mut machine, feature, 4, 0), Err(Status::INVALID_FIELD));
        let save = machine.admin(AdminOpcode::SET_FEATURES, 0, 1 << 31 | u32::from(feature.0), new);
        assert_eq!(save, Err(Status::FEATURE_NOT_SAVEABLE));
        let namespace = machine.admin(AdminOpcode::SET_FEATURES, 1, feature.0.into(), new);
        assert_eq!(namespace, Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC));
    }
    assert_eq!(set(&mut machine, FeatureId::POWER_MANAGEMENT, 1), Err(Status::INVALID_FIELD));
    assert_eq!(set(&mut machine, FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 65), Err(Status::INVALID_FIELD));
    assert_eq!(
        get(&mut machine, FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 0, 65),
        Err(Status::INVALID_FIELD)
    );
    assert_eq!(get(&mut machine, FeatureId(0xff), 0, 0), Err(Status::INVALID_FIELD));
    assert_eq!(set(&mut machine, FeatureId(0xff), 0), Err(Status::INVALID_FIELD));

    // Error recovery is the namespace's own.
    let error_recovery = u32::from(FeatureId::ERROR_RECOVERY.0);
    let recovery =
        |machine: &mut Machine, nsid| machine.admin(AdminOpcode::GET_FEATURES, nsid, error_recovery, 0);
    let recover = |machine: &mut Machine, nsid, value| {
        machine.admin(AdminOpcode::SET_FEATURES, nsid, error_recovery, value)
    };
    assert_eq!(recover(&mut machine, 2, 100), Ok(0));
    assert_eq!((recovery(&mut machine, 1), recovery(&mut machine, 2)), (Ok(0), Ok(100)));
    assert_eq!(recover(&mut machine, u32::MAX, 7), Ok(0));
    assert_eq!((recovery(&mut machine, 1), recovery(&mut machine, 2)), (Ok(7), Ok(7)));
    assert_eq!(get(&mut machine, FeatureId::ERROR_RECOVERY, 3, 0), Ok(0b110));
    for nsid in [0, 3] {
        assert_eq!(recover(&mut machine, nsid, 1), Err(Status::INVALID_NAMESPACE));
        assert_eq!(recovery(&mut machine, nsid), Err(Status::INVALID_NAMESPACE));
    }
    assert_eq!(recover(&mut machine, 1, 1 << 16), Err(Status::INVALID_FIELD), "no deallocated block error");

    // A reset brings the defaults back.
    machine.controller.reset(&mut machine.host);
    machine.settle();
    machine.enable();
    assert_eq!(get(&mut machine, FeatureId::VOLATILE_WRITE_CACHE, 0, 0), Ok(1));
    assert_eq!(recovery(&mut machine, 2), Ok(0));
}

#[test]
fn a_drive_without_a_write_cache_has_no_feature_for_it() {
    let mut disk = RamDisk::new(1024, 9, Pace::AtOnce);
    disk.geometry.volatile_cache = false;
    let mut machine = Machine::enabled(Options::default(), vec![disk], 0, 2).0;
    let feature = u32::from(FeatureId::VOLATILE_WRITE_CACHE.0);
    for opcode in [AdminOpcode::GET_FEATURES, AdminOpcode::SET_FEATURES] {
        assert_eq!(machine.admin(opcode, 0, feature, 1), Err(Status::INVALID_FIELD));
    }
    assert_eq!(machine.admin(AdminOpcode::GET_FEATURES, 0, 3 << 8 | feature, 0), Err(Status::INVALID_FIELD));
}

#[test]
fn a_namespace_is_one_range_of_blocks() {
    let mut machine = ready();
    let feature = u32::from(FeatureId::LBA_RANGE_TYPE.0);
    for (nsid, blocks) in [(1, 1024), (2, 512)] {
        for select in [0, 1, 2] {
            machine.host.slice(Iova(DATA_AT), 4096).unwrap().fill(0xee);
            assert_eq!(machine.admin(AdminOpcode::GET_FEATURES, nsid, select << 8 | feature, 0), Ok(0));
            let ranges: [LbaRangeType; 64] = machine.data();
            assert_eq!((ranges[0].start.get(), ranges[0].blocks.get(), ranges[0].kind), (0, blocks - 1, 0));
            assert_eq!(ranges[1..], [LbaRangeType::default(); 63]);
        }
    }
    assert_eq!(machine.admin(AdminOpcode::GET_FEATURES, 1, 3 << 8 | feature, 0), Ok(0b010));
    for nsid in [0, 3, u32::MAX] {
        let result = machine.admin(AdminOpcode::GET_FEATURES, nsid, feature, 0);
        assert_eq!(result, Err(Status::INVALID_NAMESPACE));
    }
    let set = machine.admin(AdminOpcode::SET_FEATURES, 1, feature, 0);
    assert_eq!(set, Err(Status::FEATURE_NOT_CHANGEABLE));
}

#[test]
fn the_host_identifier_has_8_or_16_bytes() {
    let mut machine = ready();
    let feature = u32::from(FeatureId::HOST_IDENTIFIER.0);
    let id: Vec<u8> = (1..=16).collect();
    let get = |machine: &mut Machine, select: u32, extended| {
        machine.host.slice(Iova(DATA_AT), 17).unwrap().fill(0xee);
        machine.admin(AdminOpcode::GET_FEATURES, 0, select << 8 | feature, extended).unwrap();
        machine.data::<[u8; 17]>()
    };
    for (extended, bytes) in [(1, 16), (0, 8)] {
        machine.host.write(Iova(DATA_AT), &id).unwrap();
        assert_eq!(machine.admin(AdminOpcode::SET_FEATURES, 0, feature, extended), Ok(0));
        let current = get(&mut machine, 0, extended);
        assert_eq!((&current[..bytes], &current[bytes..]), (&id[..bytes], &[0xee; 17][bytes..]));
        assert_eq!(get(&mut machine, 1, extended)[..bytes], [0; 16][..bytes]);
    }
    assert_eq!(get(&mut machine, 0, 1)[8..16], [0; 8], "8 bytes replace all 16");
    machine.controller.reset(&mut machine.host);
    machine.settle();
    machine.enable();
    assert_eq!(get(&mut machine, 0, 1)[..16], [0; 16]);
}

#[test]
fn a_burst_limits_what_is_taken_from_a_queue_at_once() {
    let disk = RamDisk::new(1024, 9, Pace::Later(0));
    let (mut machine, mut pairs) = Machine::enabled(Options::default(), vec![disk], 1, 64);
    for (burst, taken) in [(1, 2), (7, 34)] {
        let feature = FeatureId::ARBITRATION.0.into();
        machine.admin(AdminOpcode::SET_FEATURES, 0, feature, burst).unwrap();
        for _ in 0..33 {
            machine.push(&mut pairs[0], &transfer(NvmOpcode::READ, 0, 1, BUFFER_AT, 0));
        }
        machine.poll();
        assert_eq!(machine.controller.in_flight(), taken);
        if burst == 1 {
            // Of these, 31 wait.
            machine.host.doorbells[2] = 2;
            pairs[0].tail = 2;
        }
    }
}

#[test]
fn the_number_of_queues_is_asked_before_queues_are_made() {
    let mut machine = ready();
    let feature = FeatureId::NUMBER_OF_QUEUES.0.into();
    assert_eq!(machine.admin(AdminOpcode::SET_FEATURES, 0, feature, 0x0007_0007), Ok(0x003f_003f));
    for wrong in [0xffff, 0xffff_0000, 0xffff_ffff] {
        assert_eq!(machine.admin(AdminOpcode::SET_FEATURES, 0, feature, wrong), Err(Status::INVALID_FIELD));
    }
    machine.create_completion(1, 7, QUEUES_AT, 1).unwrap();
    let late = machine.admin(AdminOpcode::SET_FEATURES, 0, feature, 0x0007_0007);
    assert_eq!(late, Err(Status::COMMAND_SEQUENCE_ERROR));
    assert_eq!(machine.admin(AdminOpcode::GET_FEATURES, 0, feature, 0), Ok(0x003f_003f));
}

#[test]
fn the_timestamp_goes_on_from_what_the_host_set() {
    let mut machine = ready();
    let feature = FeatureId::TIMESTAMP.0.into();
    machine.host.write(Iova(DATA_AT), &1_700_000_000_000_u64.to_le_bytes()).unwrap();
    machine.admin(AdminOpcode::SET_FEATURES, 0, feature, 0).unwrap();
    machine.admin(AdminOpcode::GET_FEATURES, 0, feature, 0).unwrap();
    let value: u64 = machine.data();
    assert!((1_700_000_000_000..1_700_000_100_000).contains(&(value & 0xffff_ffff_ffff)));
    assert_eq!(value >> 49, 1, "set by the host");
}

/// Fault 38: QSIZE FFFFh is 65536 entries, of which all are used, and the first one again.
#[test]
fn qsize_ffff_is_65536_entries() {
    let options = Options { queue_entries: 0x1_0000, ..Options::default() };
    let mut machine = Machine::new(options, vec![RamDisk::new(1024, 9, Pace::AtOnce)]);
    machine.host.bytes.resize(0x90_0000, 0);
    machine.enable();
    let mut pair = Pair::new(1, QUEUES_AT, 0x1_0000);
    machine.create(&pair);
    for _ in 0..0x1_0010 {
        let completion = machine.run(&mut pair, transfer(NvmOpcode::READ, 0, 1, 0x80_0000, 0));
        assert_eq!(result(&completion), Ok(0));
    }
    assert_eq!(pair.tail, 0x10);
}
