//! Features, log pages and events against a model, over random sequences of commands, errors and resets.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::logs::{log, next_admin, request_event};
use super::machine::*;
use crate::Iova;
use crate::controller::{Host, Options};
use crate::spec::{AdminOpcode, ErrorLogEntry, LogPageId, Register, SmartLog, Status, SubmissionEntry};

const ALL: u32 = u32::MAX;
const VECTORS: u32 = 65;
/// The drive's temperature in kelvin.
const TEMPERATURE: u32 = 308;
/// What Asynchronous Event Request tells of a doorbell of no queue, and of a temperature.
const STRAY: u32 = 0x01_0000;
const WARNING: u32 = 0x02_0101;

#[derive(Clone, Debug)]
enum Step {
    Set { feature: u8, save: bool, nsid: u32, value: u32, data: [u8; 16] },
    Get { feature: u8, select: u32, nsid: u32, which: u32 },
    ErrorLog { offset: u32, bytes: u32, retain: bool },
    Smart { offset: u32, bytes: u32, retain: bool },
    Unknown { opcode: u8, nsid: u32 },
    Request,
    Stray,
    Reset(Reset),
}

#[derive(Clone, Copy, Debug)]
enum Reset {
    Disable,
    Outside,
    Subsystem,
    Power,
}

fn step() -> impl Strategy<Value = Step> {
    let feature = || {
        // Temperatures and their events are what has a history.
        prop_oneof![6 => 1_u8..=0x0b, 5 => Just(0x04), 5 => Just(0x0b), 1 => Just(0x0e), 3 => Just(0x81), 1 => any::<u8>()]
    };
    let nsid = || prop_oneof![9 => Just(0), 3 => 1_u32..=2, 1 => Just(3), 2 => Just(ALL)];
    let value = || {
        prop_oneof![
            2 => 0_u32..0x400,
            // Thresholds around the temperature, over and under, of sensors that exist or do not.
            3 => (300_u32..320, prop_oneof![8 => Just(0_u32), 1 => Just(1), 1 => Just(15)], 0_u32..3)
                .prop_map(|(kelvin, sensor, kind)| kelvin | sensor << 16 | kind << 20),
            1 => any::<u32>(),
        ]
    };
    let part = || (prop_oneof![5 => (0_u32..1100).prop_map(|dword| dword * 4), 1 => 0_u32..600], 1_u32..100);
    prop_oneof![
        8 => (feature(), prop::bool::weighted(0.1), nsid(), value(), any::<[u8; 16]>()).prop_map(
            |(feature, save, nsid, value, data)| Step::Set { feature, save, nsid, value, data }
        ),
        8 => (feature(), prop_oneof![3 => Just(0), 2 => 0_u32..5], nsid(), value())
            .prop_map(|(feature, select, nsid, which)| Step::Get { feature, select, nsid, which }),
        3 => (part(), any::<bool>())
            .prop_map(|((offset, dwords), retain)| Step::ErrorLog { offset, bytes: dwords * 4, retain }),
        3 => (part(), any::<bool>())
            .prop_map(|((offset, dwords), retain)| Step::Smart { offset, bytes: dwords * 4, retain }),
        2 => (0xc0_u8.., nsid()).prop_map(|(opcode, nsid)| Step::Unknown { opcode, nsid }),
        3 => Just(Step::Request),
        2 => Just(Step::Stray),
        1 => prop_oneof![
            Just(Reset::Disable), Just(Reset::Outside), Just(Reset::Subsystem), Just(Reset::Power)
        ]
        .prop_map(Step::Reset),
    ]
}

/// The values that are not at their default, by feature and by which of its values.
type Values = BTreeMap<(u8, u32), u32>;

#[derive(Default)]
struct Model {
    values: Values,
    host: [u8; 16],
    /// Status, namespace and queue of each error, the newest first.
    errors: VecDeque<(Status, u32, u16)>,
    error_count: u64,
    power_cycles: u128,
    unsafe_shutdowns: u128,
    parked: VecDeque<u16>,
    pending: Vec<u32>,
    /// By type.
    masked: [bool; 8],
    warned: bool,
}

fn default(feature: u8, which: u32) -> u32 {
    match (feature, which) {
        (0x01, _) => 7,
        (0x04, 0) => 343,
        (0x06, _) => 1,
        (0x07, _) => 0x003f_003f,
        (0x09, vector) => vector,
        _ => 0,
    }
}

impl Model {
    fn value(&self, select: u32, feature: u8, which: u32) -> u32 {
        let current = self.values.get(&(feature, which)).filter(|_| select == 0);
        current.copied().unwrap_or(default(feature, which))
    }

    fn set(&mut self, feature: u8, save: bool, nsid: u32, value: u32, data: [u8; 16]) -> Result<u32, Status> {
        let of_namespace = match feature {
            0x03 | 0x05 => true,
            0x01..=0x0b | 0x0e | 0x81 => false,
            _ => return Err(Status::INVALID_FIELD),
        };
        if save {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        match (of_namespace, nsid) {
            (true, 1 | 2 | ALL) | (false, 0 | ALL) => {}
            (true, _) => return Err(Status::INVALID_NAMESPACE),
            (false, _) => return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
        }
        let mut put = |which: u32, value: u32| {
            self.values.insert((feature, which), value);
        };
        match feature {
            0x03 => return Err(Status::FEATURE_NOT_CHANGEABLE),
            0x01 => put(0, value & 0xffff_ff07),
            0x02 if value & 0x1f == 0 => put(0, value & 0xff),
            0x04 if matches!(value >> 16 & 0xf, 0 | 15) && value >> 20 & 3 < 2 => {
                put(value >> 20 & 3, value & 0xffff);
            }
            0x05 if value & 1 << 16 == 0 => {
                for each in (1..=2).filter(|each| nsid == ALL || nsid == *each) {
                    put(each, value & 0xffff);
                }
            }
            0x06 | 0x0a => put(0, value & 1),
            0x07 if value & 0xffff != 0xffff && value >> 16 != 0xffff => return Ok(default(0x07, 0)),
            0x08 => put(0, value & 0xffff),
            0x09 if value & 0xffff < VECTORS => put(value & 0xffff, value & 0x1_ffff),
            0x0b => put(0, value & 0x1ff),
            0x0e => {}
            0x81 => {
                self.host = data;
                if value & 1 == 0 {
                    self.host[8..].fill(0);
                }
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        let beyond = TEMPERATURE >= self.value(0, 0x04, 0) || TEMPERATURE <= self.value(0, 0x04, 1);
        let warn = beyond && self.value(0, 0x0b, 0) & 2 != 0;
        if warn && !self.warned {
            self.raise(WARNING);
        }
        self.warned = warn;
        Ok(0)
    }

    fn get(&self, feature: u8, select: u32, nsid: u32, which: u32) -> Result<u32, Status> {
        let capabilities = match feature {
            0x03 => 0b010,
            0x05 => 0b110,
            0x01..=0x0b | 0x0e | 0x81 => 0b100,
            _ => return Err(Status::INVALID_FIELD),
        };
        match (select, feature) {
            (3, _) => Ok(capabilities),
            (4.., _) => Err(Status::INVALID_FIELD),
            (_, 0x03 | 0x05) if !(1..=2).contains(&nsid) => Err(Status::INVALID_NAMESPACE),
            (_, 0x05) => Ok(self.value(select, feature, nsid)),
            (_, 0x04) if which >> 16 & 0xf == 0 && which >> 20 & 3 < 2 => {
                Ok(self.value(select, feature, which >> 20 & 3))
            }
            (_, 0x09) if which & 0xffff < VECTORS => Ok(self.value(select, feature, which & 0xffff)),
            (_, 0x04 | 0x09) => Err(Status::INVALID_FIELD),
            _ => Ok(self.value(select, feature, 0)),
        }
    }

    fn raise(&mut self, event: u32) {
        if !self.pending.contains(&event) {
            self.pending.push(event);
        }
    }

    fn error(&mut self, status: Status, nsid: u32, queue: u16) {
        self.error_count += 1;
        self.errors.push_front((status, nsid, queue));
        self.errors.truncate(64);
    }

    fn reset(&mut self) {
        self.values.clear();
        self.host = [0; 16];
        self.parked.clear();
        self.pending.clear();
        self.masked = [false; 8];
        self.warned = false;
    }

    /// The request that completes next, and with what.
    fn next_event(&mut self) -> Option<(u16, Result<u32, Status>)> {
        let kind = |event: &u32| (event & 7) as usize;
        let place = self.pending.iter().position(|event| !self.masked[kind(event)])?;
        let command = self.parked.pop_front()?;
        let event = self.pending.remove(place);
        self.masked[kind(&event)] = true;
        Some((command, Ok(event)))
    }
}

/// Reads a part of a page, and compares it with the same part of all of it.
fn read_part(
    machine: &mut Machine,
    model: &mut Model,
    page: LogPageId,
    size: u32,
    (offset, bytes, retain): (u32, u32, bool),
    kind: usize,
) -> Vec<u8> {
    log(machine, page, 0, size, true).unwrap();
    let whole = machine.host.slice(Iova(DATA_AT), size as usize).unwrap().to_vec();
    machine.host.slice(Iova(DATA_AT), 8192).unwrap().fill(0xee);
    let result = log(machine, page, offset, bytes, retain);
    if offset % 4 != 0 || offset > size {
        assert_eq!(result, Err(Status::INVALID_FIELD));
        model.error(Status::INVALID_FIELD, 0, 0);
    } else {
        assert_eq!(result, Ok(0));
        let mut expected = whole[offset as usize..].to_vec();
        expected.resize(bytes as usize, 0);
        expected.resize(8192, 0xee);
        assert!(machine.host.slice(Iova(DATA_AT), 8192).unwrap() == expected, "{page:?} {offset} {bytes}");
        if !retain {
            model.masked[kind] = false;
        }
    }
    whole
}

fn run(steps: Vec<Step>) {
    let disks = vec![RamDisk::new(1024, 9, Pace::AtOnce), RamDisk::new(512, 12, Pace::AtOnce)];
    let mut machine = Machine::enabled(Options::default(), disks, 0, 2).0;
    let mut model = Model { power_cycles: 1, ..Model::default() };
    for step in steps {
        let text = format!("{step:?}");
        match step {
            Step::Set { feature, save, nsid, value, data } => {
                machine.host.write(Iova(DATA_AT), &data).unwrap();
                let dword10 = u32::from(save) << 31 | u32::from(feature);
                let result = machine.admin(AdminOpcode::SET_FEATURES, nsid, dword10, value);
                let expected = model.set(feature, save, nsid, value, data);
                assert_eq!(result, expected, "{text}");
                expected.err().into_iter().for_each(|status| model.error(status, nsid, 0));
            }
            Step::Get { feature, select, nsid, which } => {
                machine.host.slice(Iova(DATA_AT), 16).unwrap().fill(0xee);
                let dword10 = select << 8 | u32::from(feature);
                let result = machine.admin(AdminOpcode::GET_FEATURES, nsid, dword10, which);
                let expected = model.get(feature, select, nsid, which);
                assert_eq!(result, expected, "{text}");
                expected.err().into_iter().for_each(|status| model.error(status, nsid, 0));
                if feature == 0x81 && select < 3 {
                    let size = if which & 1 == 0 { 8 } else { 16 };
                    let mut expected = [0xee; 16];
                    let host = if select == 0 { model.host } else { [0; 16] };
                    expected[..size].copy_from_slice(&host[..size]);
                    assert_eq!(machine.data::<[u8; 16]>(), expected, "{text}");
                }
            }
            Step::ErrorLog { offset, bytes, retain } => {
                let expected = model.errors.clone();
                let (mut count, part) = (model.error_count, (offset, bytes, retain));
                let page = LogPageId::ERROR_INFORMATION;
                let whole = read_part(&mut machine, &mut model, page, 4096, part, 0);
                let entries = <[ErrorLogEntry; 64]>::read_from_bytes(&whole).unwrap();
                for (place, entry) in entries.iter().enumerate() {
                    let Some((status, nsid, queue)) = expected.get(place) else {
                        assert_eq!(entry.as_bytes(), [0; 64]);
                        continue;
                    };
                    assert_eq!((entry.status.status(), entry.nsid.get()), (*status, *nsid), "{text}");
                    assert_eq!((entry.error_count.get(), entry.submission_queue.get()), (count, *queue));
                    count -= 1;
                }
            }
            Step::Smart { offset, bytes, retain } => {
                let (count, part) = (model.error_count, (offset, bytes, retain));
                let whole = read_part(&mut machine, &mut model, LogPageId::SMART, 512, part, 1);
                let smart = SmartLog::read_from_bytes(&whole).unwrap();
                assert_eq!(smart.error_log_entries.get(), count.into());
                assert_eq!(smart.power_cycles.get(), model.power_cycles);
                assert_eq!(smart.unsafe_shutdowns.get(), model.unsafe_shutdowns);
                let beyond = TEMPERATURE >= model.value(0, 4, 0) || TEMPERATURE <= model.value(0, 4, 1);
                assert_eq!(smart.critical_warning.temperature(), beyond);
            }
            Step::Unknown { opcode, nsid } => {
                let entry = SubmissionEntry { opcode, nsid: nsid.into(), ..SubmissionEntry::default() };
                assert_eq!(machine.run_admin(entry), Err(Status::INVALID_OPCODE));
                model.error(Status::INVALID_OPCODE, nsid, 0);
            }
            Step::Request => {
                let command = request_event(&mut machine);
                if model.parked.len() == 4 {
                    let limit = Status::ASYNC_EVENT_LIMIT_EXCEEDED;
                    assert_eq!(next_admin(&mut machine), Some((command, Err(limit))));
                    model.error(limit, 0, 0);
                } else {
                    model.parked.push_back(command);
                }
            }
            Step::Stray => {
                machine.host.doorbells[2 * 9] = 3;
                for _ in 0..200 {
                    machine.poll();
                }
                model.error(Status::INVALID_QUEUE_ID, 0, 0xffff);
                model.raise(STRAY);
            }
            Step::Reset(reset) => {
                let _ = match reset {
                    Reset::Disable => machine.write32(Register::CC, 0),
                    Reset::Outside => machine.registers.reset(),
                    Reset::Subsystem => machine.write32(Register::NSSR, 0x4e56_4d65),
                    Reset::Power => machine.registers.power_cycle(),
                };
                machine.settle();
                let occurred = machine.status().subsystem_reset_occurred();
                assert_eq!(occurred, matches!(reset, Reset::Subsystem), "{text}");
                let _ = machine.write32(Register::CSTS, 0x10);
                machine.enable();
                model.reset();
                if matches!(reset, Reset::Power) {
                    model.power_cycles += 1;
                    model.unsafe_shutdowns += 1;
                }
            }
        }
        while let Some(expected) = model.next_event() {
            assert_eq!(next_admin(&mut machine), Some(expected), "{text}");
        }
        assert_eq!(next_admin(&mut machine), None, "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn features_logs_and_events_are_those_of_the_model(steps in prop::collection::vec(step(), 1..120)) {
        run(steps);
    }
}
