//! A drive: from reset to shutdown.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::device::{Block, Memory, Registers};
use super::error::Error;
use super::limits::{
    ADMIN_ENTRIES, ADMIN_TIMEOUT, MAX_QUEUE_ENTRIES, MAX_SHUTDOWN_TIMEOUT, MAX_TRANSFER, PAGE_SIZE,
    READY_TIMEOUT, SHUTDOWN_TIMEOUT,
};
use super::queue::{Bell, QueuePair};
use super::shadow::{Shadow, ShadowPages};
use crate::spec::{
    AdminOpcode, AdminQueueAttributes, Capabilities, Cns, CompletionEntry, Configuration, ControllerStatus,
    CreateCompletionQueue, CreateQueue, CreateSubmissionQueue, DOORBELLS, FeatureId, FeatureSelect,
    FormatNvm, GetFeatures, GetLogPage10, Identify10, IdentifyController, IdentifyNamespace, LogPageId,
    NSID_ALL, NumberOfQueues, Register, SetFeatures, ShutdownNotification, ShutdownStatus, SubmissionEntry,
    doorbell_index, doorbell_offset,
};
use crate::{Nsid, QueueId};

/// How patient the driver is.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long an admin command may take.
    pub admin_timeout: Duration,
    /// How long enabling, disabling and shutting down may take, whatever the drive asks for.
    pub ready_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { admin_timeout: ADMIN_TIMEOUT, ready_timeout: READY_TIMEOUT }
    }
}

/// A namespace that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its identifier.
    pub nsid: Nsid,
    /// Its size in blocks.
    pub blocks: u64,
    /// log2 of a block's size in bytes.
    pub block_shift: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdminState {
    Live,
    /// A command was not completed in time, and its page still belongs to the drive.
    Stuck,
}

/// An enabled drive.
#[derive(Debug)]
pub struct Drive<R: Registers, M: Memory> {
    registers: R,
    memory: M,
    options: Options,
    capabilities: Capabilities,
    configuration: Configuration,
    admin: QueuePair<R::Doorbell, M::Block>,
    admin_state: AdminState,
    /// The page that admin commands transfer through.
    page: M::Block,
    controller: IdentifyController,
    /// I/O queue pairs that the drive allows, and those in use.
    allowed: u16,
    used: BTreeSet<u16>,
    shadow: Option<Arc<ShadowPages<M::Block>>>,
}

impl<R: Registers, M: Memory> Drive<R, M> {
    /// Resets and enables the drive (7.6.1), and identifies it.
    pub fn enable(mut registers: R, mut memory: M, options: Options) -> Result<Self, Error> {
        let capabilities = Capabilities::from_bits(registers.read64(Register::CAP)?);
        if capabilities.bits() == u64::MAX {
            return Err(Error::Gone);
        }
        if !capabilities.nvm_command_set() || capabilities.min_page() > 0 {
            return Err(Error::Unsupported(capabilities));
        }
        let ready_limit = ready_limit(capabilities, options);
        disable(&mut registers, ready_limit)?;

        let blocks = queue_blocks(&mut memory, ADMIN_ENTRIES)?;
        let page = memory.allocate(PAGE_SIZE)?;
        let size = ADMIN_ENTRIES.saturating_sub(1);
        let attributes =
            AdminQueueAttributes::default().with_submission_size(size).with_completion_size(size);
        registers.write32(Register::AQA, attributes.bits())?;
        registers.write64(Register::ASQ, blocks.0.iova().0)?;
        registers.write64(Register::ACQ, blocks.1.iova().0)?;
        let configuration =
            Configuration::default().with_enable(true).with_submission_entry(6).with_completion_entry(4);
        registers.write32(Register::CC, configuration.bits())?;
        wait(&mut registers, "become ready", ready_limit, |status| {
            if status.fatal() { Err(Error::Fatal(status)) } else { Ok(status.ready()) }
        })?;

        let bells = bells(&mut registers, QueueId(0), capabilities, None)?;
        let admin = QueuePair::new(QueueId(0), ADMIN_ENTRIES, blocks, bells);
        let mut drive = Self {
            registers,
            memory,
            options,
            capabilities,
            configuration,
            admin,
            admin_state: AdminState::Live,
            page,
            controller: IdentifyController::zeroed(),
            allowed: 0,
            used: BTreeSet::new(),
            shadow: None,
        };
        drive.controller = drive.identify(Cns::CONTROLLER, Nsid(0))?;
        Ok(drive)
    }

    /// The drive's capabilities.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Identify Controller, as it was when the drive was enabled.
    pub fn controller(&self) -> &IdentifyController {
        &self.controller
    }

    /// The most bytes that a command can move (MDTS).
    pub fn max_transfer(&self) -> usize {
        match self.controller.max_transfer {
            0 => MAX_TRANSFER,
            shift => PAGE_SIZE
                .checked_shl(shift.into())
                .filter(|&size| size != 0)
                .map_or(MAX_TRANSFER, |size| size.min(MAX_TRANSFER)),
        }
    }

    /// The largest number of entries of a queue pair.
    pub fn max_queue_entries(&self) -> u16 {
        self.capabilities.max_queue_entries().saturating_add(1).min(MAX_QUEUE_ENTRIES)
    }

    /// The memory that the drive reaches.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// The drive's registers.
    pub fn registers(&mut self) -> &mut R {
        &mut self.registers
    }

    /// The active namespaces' identifiers, at most 1024 (CNS 02h).
    pub fn namespaces(&mut self) -> Result<Vec<Nsid>, Error> {
        let list: [U32; 1024] = self.identify(Cns::ACTIVE_NAMESPACES, Nsid(0))?;
        Ok(list.iter().map(|nsid| Nsid(nsid.get())).take_while(|&nsid| nsid != Nsid(0)).collect())
    }

    /// A namespace, if this driver can use it.
    pub fn namespace(&mut self, nsid: Nsid) -> Result<Namespace, Error> {
        let data: IdentifyNamespace = self.identify(Cns::NAMESPACE, nsid)?;
        let format = data.lba_format();
        let (blocks, shift, metadata) = (data.size.get(), format.data_shift(), format.metadata());
        if blocks == 0 || !(9..=16).contains(&shift) || metadata != 0 {
            return Err(Error::Namespace { nsid, blocks, shift, metadata });
        }
        Ok(Namespace { nsid, blocks, block_shift: shift })
    }

    /// Identify (5.15), for a structure of at most a page.
    pub fn identify<T: FromBytes + IntoBytes>(&mut self, cns: Cns, nsid: Nsid) -> Result<T, Error> {
        let entry = SubmissionEntry {
            opcode: AdminOpcode::IDENTIFY.0,
            nsid: U32::new(nsid.0),
            dword10: U32::new(Identify10::default().with_cns(cns.0).bits()),
            ..SubmissionEntry::default()
        };
        self.receive(entry)
    }

    /// Get Log Page (5.14), for a structure of at most a page and a multiple of 4 bytes.
    pub fn log_page<T: FromBytes + IntoBytes>(&mut self, page: LogPageId) -> Result<T, Error> {
        let dwords = u16::try_from(size_of::<T>() / 4).map_err(|_| Error::TooLong(size_of::<T>()))?;
        let dword10 = GetLogPage10::default().with_page(page.0).with_dwords_low(dwords.saturating_sub(1));
        let entry = SubmissionEntry {
            opcode: AdminOpcode::GET_LOG_PAGE.0,
            nsid: U32::new(NSID_ALL.0),
            dword10: U32::new(dword10.bits()),
            ..SubmissionEntry::default()
        };
        self.receive(entry)
    }

    /// Get Features (5.9), for a feature without data.
    pub fn feature(&mut self, feature: FeatureId, select: FeatureSelect) -> Result<u32, Error> {
        let dword10 = GetFeatures::default().with_feature(feature.0).with_select(select.0);
        self.execute(SubmissionEntry {
            opcode: AdminOpcode::GET_FEATURES.0,
            dword10: U32::new(dword10.bits()),
            ..SubmissionEntry::default()
        })
    }

    /// Set Features (5.21), for a feature without data; gives the command's result.
    pub fn set_feature(&mut self, feature: FeatureId, value: u32) -> Result<u32, Error> {
        self.execute(SubmissionEntry {
            opcode: AdminOpcode::SET_FEATURES.0,
            dword10: U32::new(SetFeatures::default().with_feature(feature.0).bits()),
            dword11: U32::new(value),
            ..SubmissionEntry::default()
        })
    }

    /// Format NVM (5.23) of a namespace, or of all with [`NSID_ALL`]: what they held is gone. What was learnt of
    /// them by [`Self::namespace`] is no longer true.
    pub fn format(&mut self, nsid: Nsid, format: FormatNvm) -> Result<(), Error> {
        self.execute(SubmissionEntry {
            opcode: AdminOpcode::FORMAT_NVM.0,
            nsid: U32::new(nsid.0),
            dword10: U32::new(format.bits()),
            ..SubmissionEntry::default()
        })?;
        Ok(())
    }

    /// Asks for `count` I/O queue pairs; gives how many there may be (5.21.1.7). To be called once, before any
    /// is created.
    pub fn request_queues(&mut self, count: NonZeroU16) -> Result<u16, Error> {
        // 65535 is illegal: a zero-based count of 65536 queues, when there are 65535 at most.
        let asked = count.get().saturating_sub(1).min(0xfffe);
        let wanted = NumberOfQueues::default().with_submission(asked).with_completion(asked);
        let granted =
            NumberOfQueues::from_bits(self.set_feature(FeatureId::NUMBER_OF_QUEUES, wanted.bits())?);
        self.allowed = granted.submission().min(granted.completion()).min(asked).saturating_add(1);
        Ok(self.allowed)
    }

    /// Lets queue pairs that are created from now on use shadow doorbells (5.7).
    pub fn use_shadow_doorbells(&mut self) -> Result<(), Error> {
        if !self.controller.admin_commands.doorbell_buffer() {
            return Err(Error::NoShadow("the drive does not support them"));
        }
        let pages = ShadowPages {
            doorbells: self.memory.allocate(PAGE_SIZE)?,
            events: self.memory.allocate(PAGE_SIZE)?,
        };
        self.execute(SubmissionEntry {
            opcode: AdminOpcode::DOORBELL_BUFFER_CONFIG.0,
            prp1: U64::new(pages.doorbells.iova().0),
            prp2: U64::new(pages.events.iova().0),
            ..SubmissionEntry::default()
        })?;
        self.shadow = Some(Arc::new(pages));
        Ok(())
    }

    /// Creates an I/O queue pair with the lowest free identifier, without interrupts. One command less than
    /// `entries` can be outstanding.
    pub fn create_queue_pair(&mut self, entries: u16) -> Result<QueuePair<R::Doorbell, M::Block>, Error> {
        let max = self.max_queue_entries();
        if !(2..=max).contains(&entries) {
            return Err(Error::QueueSize { entries, max });
        }
        let id =
            (1..=self.allowed).find(|id| !self.used.contains(id)).ok_or(Error::NoQueueLeft(self.allowed))?;
        let blocks = queue_blocks(&mut self.memory, entries)?;
        let bells = bells(&mut self.registers, QueueId(id), self.capabilities, self.shadow.as_ref())?;

        let queue = CreateQueue::default().with_queue(id).with_size(entries.saturating_sub(1));
        self.execute(SubmissionEntry {
            opcode: AdminOpcode::CREATE_COMPLETION_QUEUE.0,
            prp1: U64::new(blocks.1.iova().0),
            dword10: U32::new(queue.bits()),
            dword11: U32::new(CreateCompletionQueue::default().with_contiguous(true).bits()),
            ..SubmissionEntry::default()
        })?;
        let submission = CreateSubmissionQueue::default().with_contiguous(true).with_completion_queue(id);
        let created = self.execute(SubmissionEntry {
            opcode: AdminOpcode::CREATE_SUBMISSION_QUEUE.0,
            prp1: U64::new(blocks.0.iova().0),
            dword10: U32::new(queue.bits()),
            dword11: U32::new(submission.bits()),
            ..SubmissionEntry::default()
        });
        if let Err(error) = created {
            self.delete(AdminOpcode::DELETE_COMPLETION_QUEUE, id)?;
            return Err(error);
        }
        self.used.insert(id);
        Ok(QueuePair::new(QueueId(id), entries, blocks, bells))
    }

    /// Deletes an I/O queue pair. Commands that are outstanding are lost.
    pub fn delete_queue_pair(&mut self, queue: QueuePair<R::Doorbell, M::Block>) -> Result<(), Error> {
        let id = queue.id().0;
        self.delete(AdminOpcode::DELETE_SUBMISSION_QUEUE, id)?;
        self.delete(AdminOpcode::DELETE_COMPLETION_QUEUE, id)?;
        self.used.remove(&id);
        Ok(())
    }

    fn delete(&mut self, opcode: AdminOpcode, id: u16) -> Result<(), Error> {
        self.execute(SubmissionEntry {
            opcode: opcode.0,
            dword10: U32::new(CreateQueue::default().with_queue(id).bits()),
            ..SubmissionEntry::default()
        })?;
        Ok(())
    }

    /// Runs an admin command; gives its result.
    pub fn execute(&mut self, entry: SubmissionEntry) -> Result<u32, Error> {
        if self.admin_state == AdminState::Stuck {
            return Err(Error::Stuck);
        }
        let outcome = self.admin.execute(entry, self.options.admin_timeout, || self.registers.pause());
        if let Err(Error::TimedOut { .. } | Error::Forged { .. }) = outcome {
            self.admin_state = AdminState::Stuck;
        }
        outcome
    }

    /// Runs an admin command that answers a structure of at most a page.
    fn receive<T: FromBytes + IntoBytes>(&mut self, mut entry: SubmissionEntry) -> Result<T, Error> {
        if size_of::<T>() > PAGE_SIZE {
            return Err(Error::TooLong(size_of::<T>()));
        }
        entry.prp1 = U64::new(self.page.iova().0);
        self.execute(entry)?;
        let mut data = T::new_zeroed();
        self.page.read(0, data.as_mut_bytes());
        Ok(data)
    }

    /// Shuts the drive down in good order (7.6.2): caches are flushed. Queues are gone afterwards.
    pub fn shutdown(&mut self) -> Result<(), Error> {
        let asked = Duration::from_micros(self.controller.rtd3_entry.get().into());
        let limit = asked.clamp(SHUTDOWN_TIMEOUT, MAX_SHUTDOWN_TIMEOUT).min(self.options.ready_timeout);
        let configuration = self.configuration.with_shutdown(ShutdownNotification::NORMAL);
        self.registers.write32(Register::CC, configuration.bits())?;
        wait(&mut self.registers, "shut down", limit, |status| {
            Ok(status.shutdown() == ShutdownStatus::COMPLETE)
        })
    }

    /// Disables the drive (7.6.2): all queues are gone, and the drive reaches no memory afterwards. Gives back
    /// registers and memory.
    pub fn disable(mut self) -> Result<(R, M), Error> {
        disable(&mut self.registers, ready_limit(self.capabilities, self.options))?;
        Ok((self.registers, self.memory))
    }
}

fn ready_limit(capabilities: Capabilities, options: Options) -> Duration {
    let asked = Duration::from_millis(u64::from(capabilities.timeout().max(1)).saturating_mul(500));
    asked.min(options.ready_timeout)
}

/// Clears CC.EN and waits for CSTS.RDY to follow (3.1.5).
fn disable<R: Registers>(registers: &mut R, limit: Duration) -> Result<(), Error> {
    let configuration = Configuration::from_bits(registers.read32(Register::CC)?);
    if configuration.bits() == u32::MAX {
        return Err(Error::Gone);
    }
    if configuration.enable() {
        let disabled = configuration.with_enable(false).with_shutdown(ShutdownNotification::NONE);
        registers.write32(Register::CC, disabled.bits())?;
    }
    wait(registers, "become disabled", limit, |status| Ok(!status.ready()))
}

/// Looks at CSTS until `done`.
fn wait<R: Registers>(
    registers: &mut R,
    change: &'static str,
    limit: Duration,
    mut done: impl FnMut(ControllerStatus) -> Result<bool, Error>,
) -> Result<(), Error> {
    let start = Instant::now();
    loop {
        let status = ControllerStatus::from_bits(registers.read32(Register::CSTS)?);
        if status.bits() == u32::MAX {
            return Err(Error::Gone);
        }
        if done(status)? {
            return Ok(());
        }
        if start.elapsed() > limit {
            return Err(Error::NotReady { change, limit, status });
        }
        registers.pause();
    }
}

/// Zeroed blocks for a submission and a completion queue.
fn queue_blocks<M: Memory>(memory: &mut M, entries: u16) -> Result<(M::Block, M::Block), Error> {
    let entries = usize::from(entries);
    Ok((
        memory.allocate(entries.saturating_mul(size_of::<SubmissionEntry>()))?,
        memory.allocate(entries.saturating_mul(size_of::<CompletionEntry>()))?,
    ))
}

/// A queue pair's tail and head doorbells.
#[expect(clippy::type_complexity, reason = "the pair is taken apart at once")]
fn bells<R: Registers, B: Block>(
    registers: &mut R,
    queue: QueueId,
    capabilities: Capabilities,
    shadow: Option<&Arc<ShadowPages<B>>>,
) -> Result<(Bell<R::Doorbell, B>, Bell<R::Doorbell, B>), Error> {
    let mut bell = |completion| {
        let offset = doorbell_offset(doorbell_index(queue, completion), capabilities.doorbell_stride());
        let shadow = match shadow {
            None => None,
            Some(pages) => {
                let at = offset.saturating_sub(DOORBELLS.into());
                let at = usize::try_from(at).ok().filter(|&at| at < PAGE_SIZE);
                let at = at.ok_or(Error::NoShadow("the doorbell lies beyond their page"))?;
                Some(Shadow::new(pages.clone(), at))
            }
        };
        Ok::<_, Error>(Bell { register: registers.doorbell(offset)?, shadow })
    };
    Ok((bell(false)?, bell(true)?))
}
