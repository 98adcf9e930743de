//! Admin commands (Base Specification 1.4, section 5).

use zerocopy::{FromZeros, IntoBytes};

use super::barrier::Then;
use super::command::AdminCommand;
use super::completion::{Failure, Origin};
use super::data::DataPointer;
use super::features::Data;
use super::limits::PAGE_SIZE;
use super::{Controller, Disk, Host, identify};
use crate::spec::{
    AdminOpcode, AsyncEventType, Cns, CommandEffects, CommandsSupportedLog, CriticalWarning, FeatureId,
    FirmwareSlotInfo, FirmwareSlotLog, IDENTIFY_SIZE, LogPageId, NSID_ALL, NvmOpcode, Status,
    SubmissionEntry,
};
use crate::{Nsid, QueueId};

/// What became of an admin command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is over; dword 0 of its completion.
    Done(u32),
    /// Something else completes it: a disk, or the last command of a queue that is deleted.
    Pending,
    /// It waits for an event.
    Parked,
}

const DONE: Result<Answer, Failure> = Ok(Answer::Done(0));

// Where parameters lie in the command, for the error log.
const NSID: u8 = 4;
const PRP1: u8 = 24;
const PRP2: u8 = 32;
const DWORD10: u8 = 40;

/// The Abort command could not abort: bit 0 of its dword 0 (5.1.1).
const NOT_ABORTED: u32 = 1;

impl<H: Host, D: Disk<H>> Controller<H, D> {
    /// Carries an admin command out.
    pub(super) fn admin(
        &mut self,
        host: &mut H,
        origin: Origin,
        entry: &SubmissionEntry,
    ) -> Result<Answer, Failure> {
        match AdminCommand::parse(entry)? {
            AdminCommand::Identify { cns, nsid, command_set, data } => {
                self.identify(host, cns, nsid, command_set, data)
            }
            AdminCommand::CreateCompletionQueue(new) => {
                // IOCQES must have been set (3.1.5).
                if self.control.configuration.completion_entry() != 4 {
                    return Err(Status::INVALID_QUEUE_SIZE.into());
                }
                self.queues.create_completion(host, &new)?;
                DONE
            }
            AdminCommand::CreateSubmissionQueue(new) => {
                if self.control.configuration.submission_entry() != 6 {
                    return Err(Status::INVALID_QUEUE_SIZE.into());
                }
                self.queues.create_submission(host, &new)?;
                DONE
            }
            AdminCommand::DeleteCompletionQueue(id) => {
                self.queues.delete_completion(host, id)?;
                DONE
            }
            AdminCommand::DeleteSubmissionQueue(id) => {
                match self.queues.delete_submission(host, id, origin.command)? {
                    true => DONE,
                    false => Ok(Answer::Pending),
                }
            }
            AdminCommand::GetLogPage { page, nsid, offset, bytes, retain, data } => {
                self.log_page(host, page, nsid, offset, bytes, retain, data)
            }
            AdminCommand::Abort { queue, command } => {
                // What a disk has begun cannot be taken back; a parked request can.
                let aborted = queue == QueueId(0) && self.health.events.abort(command);
                Ok(Answer::Done(if aborted { 0 } else { NOT_ABORTED }))
            }
            AdminCommand::SetFeatures { feature, save, nsid, value, data } => {
                let bytes = self.features.check_set(feature, save, nsid, value)?;
                let mut content = Data::default();
                if let Some(content) = content.get_mut(..bytes).filter(|content| !content.is_empty()) {
                    self.disks.receive(host, data, content)?;
                }
                self.set_features(origin, feature, nsid, value, &content)
            }
            AdminCommand::GetFeatures { feature, select, nsid, which, data } => {
                let value = self.features.get(feature, select, nsid, self.disks.geometry(nsid), which)?;
                if !value.data.is_empty() {
                    self.disks.send(host, data, &value.data)?;
                }
                Ok(Answer::Done(value.result))
            }
            AdminCommand::AsyncEventRequest => {
                self.health.events.park(origin.command)?;
                Ok(Answer::Parked)
            }
            AdminCommand::Format(format) => {
                self.format(origin, format)?;
                Ok(Answer::Pending)
            }
            AdminCommand::DoorbellBufferConfig { doorbells, events } if self.options.shadow_doorbells => {
                for (page, at) in [(doorbells, PRP1), (events, PRP2)] {
                    if !page.0.is_multiple_of(PAGE_SIZE as u64) {
                        return Err(Failure::at(Status::INVALID_FIELD, at, 0));
                    }
                }
                self.queues.share_doorbells(host, &mut self.health, doorbells, events);
                DONE
            }
            AdminCommand::DoorbellBufferConfig { .. } => Err(Status::INVALID_OPCODE.into()),
        }
    }

    fn identify(
        &mut self,
        host: &mut H,
        cns: Cns,
        nsid: Nsid,
        command_set: u8,
        data: DataPointer,
    ) -> Result<Answer, Failure> {
        let geometry = self.disks.geometry(nsid).copied();
        match cns {
            // All namespaces are active: none is only allocated.
            Cns::NAMESPACE | Cns::ALLOCATED_NAMESPACE => {
                let geometry = geometry.ok_or(Status::INVALID_NAMESPACE)?;
                self.disks.send(host, data, identify::namespace(&geometry).as_bytes())?;
            }
            Cns::CONTROLLER => {
                let geometries: Vec<_> =
                    self.disks.namespaces.iter().map(|namespace| namespace.geometry).collect();
                let identity = identify::controller(&self.options, &geometries);
                self.disks.send(host, data, identity.as_bytes())?;
            }
            Cns::ACTIVE_NAMESPACES | Cns::ALLOCATED_NAMESPACES => {
                // There is none above these (5.15.2.3).
                if nsid.0 >= 0xffff_fffe {
                    return Err(Status::INVALID_NAMESPACE.into());
                }
                let list = identify::namespaces(nsid, self.disks.namespaces.len());
                self.disks.send(host, data, &list)?;
            }
            Cns::NAMESPACE_ID_DESCRIPTORS => {
                geometry.ok_or(Status::INVALID_NAMESPACE)?;
                let descriptors = identify::descriptors(&self.options.serial, nsid);
                self.disks.send(host, data, &descriptors)?;
            }
            // Of the NVM command set: no limits beyond those of 1.4, so all of it is zero (2.0, 4.1.5.3).
            Cns::COMMAND_SET_CONTROLLER if command_set == 0 => {
                self.disks.send(host, data, &[0; IDENTIFY_SIZE])?;
            }
            _ => return Err(Failure::at(Status::INVALID_FIELD, DWORD10, 0)),
        }
        DONE
    }

    fn set_features(
        &mut self,
        origin: Origin,
        feature: FeatureId,
        nsid: Nsid,
        value: u32,
        data: &Data,
    ) -> Result<Answer, Failure> {
        // Only before the queues are made (5.21.1.7).
        if feature == FeatureId::NUMBER_OF_QUEUES && self.queues.has_io_queues() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        let cached = self.features.write_cache();
        let result = self.features.set(feature, nsid, value, data)?;
        let asked = self.features.async_events().critical_warnings();
        self.health.events.watch(CriticalWarning::from_bits(self.features.warnings().bits() & asked));
        if cached && !self.features.write_cache() {
            // Nothing may be left in a cache that is off, nor get there.
            self.barriers.push(origin, Then::Flush);
            return Ok(Answer::Pending);
        }
        Ok(Answer::Done(result))
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of the command")]
    fn log_page(
        &mut self,
        host: &mut H,
        page: LogPageId,
        nsid: Nsid,
        offset: u64,
        bytes: u64,
        retain: bool,
        data: DataPointer,
    ) -> Result<Answer, Failure> {
        let (content, event) = match page {
            LogPageId::ERROR_INFORMATION => (self.health.error_log(), Some(AsyncEventType::ERROR)),
            LogPageId::SMART => {
                // Not per namespace (LPA bit 0).
                if nsid != Nsid(0) && nsid != NSID_ALL {
                    return Err(Failure::at(Status::INVALID_FIELD, NSID, 0));
                }
                let log = self.health.smart_log(self.features.warnings(), self.registers.power_cycles());
                (log.as_bytes().to_vec(), Some(AsyncEventType::SMART))
            }
            LogPageId::FIRMWARE_SLOT => {
                let mut log = FirmwareSlotLog::new_zeroed();
                log.active = FirmwareSlotInfo::default().with_current(1);
                let identity = identify::controller(&self.options, &[]);
                log.revisions[0] = identity.firmware;
                (log.as_bytes().to_vec(), None)
            }
            LogPageId::CHANGED_NAMESPACES => {
                (self.health.events.changed_namespaces(), Some(AsyncEventType::NOTICE))
            }
            LogPageId::COMMANDS_SUPPORTED => (self.commands_supported().as_bytes().to_vec(), None),
            _ => return Err(Status::INVALID_LOG_PAGE.into()),
        };
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
        if wanted > self.disks.max_transfer {
            return Err(Failure::at(Status::INVALID_FIELD, DWORD10 + 2, 0));
        }
        let beyond = Failure::at(Status::INVALID_FIELD, DWORD10 + 8, 0);
        if !offset.is_multiple_of(4) {
            return Err(beyond);
        }
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut answer = content.get(from..).ok_or(beyond)?.to_vec();
        // What lies beyond the page is not defined (5.14): zeroes.
        answer.resize(wanted, 0);
        self.disks.send(host, data, &answer)?;
        if let Some(event) = event
            && !retain
        {
            self.health.events.unmask(event);
        }
        DONE
    }

    fn commands_supported(&self) -> CommandsSupportedLog {
        let supported = CommandEffects::default().with_supported(true);
        let mut log = CommandsSupportedLog::new_zeroed();
        let admin = [
            AdminOpcode::DELETE_SUBMISSION_QUEUE,
            AdminOpcode::CREATE_SUBMISSION_QUEUE,
            AdminOpcode::GET_LOG_PAGE,
            AdminOpcode::DELETE_COMPLETION_QUEUE,
            AdminOpcode::CREATE_COMPLETION_QUEUE,
            AdminOpcode::IDENTIFY,
            AdminOpcode::ABORT,
            AdminOpcode::SET_FEATURES,
            AdminOpcode::GET_FEATURES,
            AdminOpcode::ASYNC_EVENT_REQUEST,
            AdminOpcode::FORMAT_NVM,
        ];
        let mut mark = |opcode: AdminOpcode| {
            if let Some(effects) = log.admin.get_mut(usize::from(opcode.0)) {
                *effects = supported;
            }
        };
        admin.into_iter().for_each(&mut mark);
        if self.options.shadow_doorbells {
            mark(AdminOpcode::DOORBELL_BUFFER_CONFIG);
        }
        if let Some(effects) = log.admin.get_mut(usize::from(AdminOpcode::FORMAT_NVM.0)) {
            // One at a time on a namespace (CSE 001b).
            *effects = effects.with_data_change(true).with_namespace_change(true).with_restrictions(1);
        }
        let io = [
            (NvmOpcode::FLUSH, supported),
            (NvmOpcode::READ, supported),
            (NvmOpcode::COMPARE, supported),
            (NvmOpcode::VERIFY, supported),
            (NvmOpcode::WRITE_UNCORRECTABLE, supported.with_data_change(true)),
            (NvmOpcode::WRITE, supported.with_data_change(true)),
            (NvmOpcode::WRITE_ZEROES, supported.with_data_change(true)),
        ];
        let deallocate = (NvmOpcode::DATASET_MANAGEMENT, supported.with_data_change(true));
        for (opcode, effects) in io.into_iter().chain(self.disks.deallocate().then_some(deallocate)) {
            if let Some(place) = log.io.get_mut(usize::from(opcode.0)) {
                *place = effects;
            }
        }
        log
    }
}
