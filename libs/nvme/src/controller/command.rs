//! Submission entries become typed commands, checked as far as they can be without the state of the controller.

use super::completion::Failure;
use super::data::DataPointer;
use super::disk::{Geometry, LbaRange};
use super::queues::{NewCompletionQueue, NewSubmissionQueue};
use crate::spec::{
    Abort, AdminOpcode, Cns, CreateCompletionQueue, CreateQueue, CreateSubmissionQueue, DataPointerType,
    DsmAttributes, DsmCount, FeatureId, FeatureSelect, FormatNvm, GetFeatures, GetLogPage10, GetLogPage11,
    Identify10, LogPageId, NvmOpcode, ReadWrite12, SetFeatures, Status, SubmissionEntry,
};
use crate::{Iova, Lba, Nsid, QueueId};

/// Fused commands are not supported (FUSES is 0).
#[inline]
pub(super) fn check_fused(entry: &SubmissionEntry) -> Result<(), Status> {
    if entry.flags.fused() == 0 { Ok(()) } else { Err(Status::INVALID_FIELD) }
}

/// A command of the NVM command set (section 6) for a namespace. Its range lies on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoCommand {
    Read {
        range: LbaRange,
        bytes: usize,
        data: DataPointer,
    },
    Write {
        range: LbaRange,
        bytes: usize,
        data: DataPointer,
        durable: bool,
    },
    Compare {
        range: LbaRange,
        bytes: usize,
        data: DataPointer,
    },
    Verify {
        range: LbaRange,
    },
    WriteUncorrectable {
        range: LbaRange,
    },
    Flush,
    WriteZeroes {
        range: LbaRange,
        deallocate: bool,
        durable: bool,
    },
    /// The ranges lie in host memory.
    Deallocate {
        ranges: usize,
        data: DataPointer,
    },
    /// Dataset Management without AD: hints that are not used.
    Hint,
}

impl IoCommand {
    /// Decodes a command to a disk of `geometry`; `max_transfer` is MDTS in bytes.
    #[inline]
    pub(super) fn parse(
        entry: &SubmissionEntry,
        geometry: &Geometry,
        max_transfer: usize,
    ) -> Result<Self, Status> {
        check_fused(entry)?;
        let data = DataPointer::of(entry)?;
        let opcode = NvmOpcode(entry.opcode);
        let dword12 = ReadWrite12::from_bits(entry.dword12.get());
        match opcode {
            NvmOpcode::READ => {
                let (range, bytes) = transfer(entry, dword12, geometry, max_transfer)?;
                Ok(Self::Read { range, bytes, data })
            }
            NvmOpcode::WRITE => {
                let (range, bytes) = transfer(entry, dword12, geometry, max_transfer)?;
                check_writable(geometry)?;
                Ok(Self::Write { range, bytes, data, durable: dword12.force_unit_access() })
            }
            NvmOpcode::COMPARE => {
                let (range, bytes) = transfer(entry, dword12, geometry, max_transfer)?;
                Ok(Self::Compare { range, bytes, data })
            }
            // Neither moves data: MDTS is no limit.
            NvmOpcode::VERIFY => Ok(Self::Verify { range: range_of(entry, dword12, geometry)? }),
            NvmOpcode::WRITE_UNCORRECTABLE => {
                let range = range_of(entry, dword12, geometry)?;
                check_writable(geometry)?;
                Ok(Self::WriteUncorrectable { range })
            }
            NvmOpcode::FLUSH => Ok(Self::Flush),
            NvmOpcode::WRITE_ZEROES => {
                let range = range_of(entry, dword12, geometry)?;
                check_writable(geometry)?;
                Ok(Self::WriteZeroes {
                    range,
                    deallocate: dword12.deallocate(),
                    durable: dword12.force_unit_access(),
                })
            }
            NvmOpcode::DATASET_MANAGEMENT => {
                if !DsmAttributes::from_bits(entry.dword11.get()).deallocate() {
                    return Ok(Self::Hint);
                }
                check_writable(geometry)?;
                let count = DsmCount::from_bits(entry.dword10.get());
                Ok(Self::Deallocate { ranges: usize::from(count.ranges()).saturating_add(1), data })
            }
            _ => Err(Status::INVALID_OPCODE),
        }
    }
}

fn check_writable(geometry: &Geometry) -> Result<(), Status> {
    if geometry.read_only { Err(Status::WRITE_PROTECTED) } else { Ok(()) }
}

/// The range of a command; NLB counts from 0, so up to 65536 blocks.
#[inline]
fn range_of(entry: &SubmissionEntry, dword12: ReadWrite12, geometry: &Geometry) -> Result<LbaRange, Status> {
    let range =
        LbaRange { start: Lba(entry.starting_lba()), blocks: u64::from(dword12.blocks()).saturating_add(1) };
    check_range(range, geometry)?;
    Ok(range)
}

/// A range must lie on the disk.
#[inline]
pub(super) fn check_range(range: LbaRange, geometry: &Geometry) -> Result<(), Status> {
    match range.start.0.checked_add(range.blocks) {
        Some(end) if end <= geometry.blocks => Ok(()),
        _ => Err(Status::LBA_OUT_OF_RANGE),
    }
}

#[inline]
fn transfer(
    entry: &SubmissionEntry,
    dword12: ReadWrite12,
    geometry: &Geometry,
    max_transfer: usize,
) -> Result<(LbaRange, usize), Status> {
    // At most 65536 blocks of at most 4096 bytes: below 2^29.
    let blocks = usize::from(dword12.blocks()).saturating_add(1);
    let bytes = blocks.checked_shl(geometry.block_shift).unwrap_or(usize::MAX);
    if bytes > max_transfer {
        return Err(Status::INVALID_FIELD);
    }
    Ok((range_of(entry, dword12, geometry)?, bytes))
}

/// Where FUSE and PSDT lie in the command.
const FLAGS: u8 = 1;

/// A command of the admin command set (section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminCommand {
    DeleteSubmissionQueue(QueueId),
    CreateSubmissionQueue(NewSubmissionQueue),
    DeleteCompletionQueue(QueueId),
    CreateCompletionQueue(NewCompletionQueue),
    GetLogPage {
        page: LogPageId,
        nsid: Nsid,
        offset: u64,
        bytes: u64,
        retain: bool,
        data: DataPointer,
    },
    Identify {
        cns: Cns,
        nsid: Nsid,
        /// CSI: the I/O command set that a 2.0 host asks about.
        command_set: u8,
        data: DataPointer,
    },
    Abort {
        queue: QueueId,
        command: u16,
    },
    SetFeatures {
        feature: FeatureId,
        save: bool,
        nsid: Nsid,
        value: u32,
        data: DataPointer,
    },
    GetFeatures {
        feature: FeatureId,
        select: FeatureSelect,
        nsid: Nsid,
        /// Dword 11: which of several values.
        which: u32,
        data: DataPointer,
    },
    AsyncEventRequest,
    Format(FormatNvm),
    DoorbellBufferConfig {
        doorbells: Iova,
        events: Iova,
    },
}

impl AdminCommand {
    pub(super) fn parse(entry: &SubmissionEntry) -> Result<Self, Failure> {
        check_fused(entry).map_err(|status| Failure::at(status, FLAGS, 0))?;
        // Over PCIe admin commands use no SGLs (4.4).
        if entry.flags.data_pointer() != DataPointerType::PRP {
            return Err(Failure::at(Status::INVALID_FIELD, FLAGS, 6));
        }
        let nsid = Nsid(entry.nsid.get());
        let data = DataPointer::prp(entry);
        let (dword10, dword11) = (entry.dword10.get(), entry.dword11.get());
        let queue = CreateQueue::from_bits(dword10);
        let id = QueueId(queue.queue());
        // QSIZE counts from 0: up to 65536 entries.
        let entries = u32::from(queue.size()).saturating_add(1);
        let base = Iova(entry.prp1.get());
        match AdminOpcode(entry.opcode) {
            AdminOpcode::DELETE_SUBMISSION_QUEUE => Ok(Self::DeleteSubmissionQueue(id)),
            AdminOpcode::CREATE_SUBMISSION_QUEUE => {
                let with = CreateSubmissionQueue::from_bits(dword11);
                Ok(Self::CreateSubmissionQueue(NewSubmissionQueue {
                    id,
                    entries,
                    base,
                    contiguous: with.contiguous(),
                    completion: QueueId(with.completion_queue()),
                }))
            }
            AdminOpcode::DELETE_COMPLETION_QUEUE => Ok(Self::DeleteCompletionQueue(id)),
            AdminOpcode::CREATE_COMPLETION_QUEUE => {
                let with = CreateCompletionQueue::from_bits(dword11);
                Ok(Self::CreateCompletionQueue(NewCompletionQueue {
                    id,
                    entries,
                    base,
                    contiguous: with.contiguous(),
                    interrupts: with.interrupts(),
                    vector: with.vector(),
                }))
            }
            AdminOpcode::GET_LOG_PAGE => {
                let low = GetLogPage10::from_bits(dword10);
                let high = GetLogPage11::from_bits(dword11);
                let dwords = u64::from(high.dwords_high()) << 16 | u64::from(low.dwords_low());
                Ok(Self::GetLogPage {
                    page: LogPageId(low.page()),
                    nsid,
                    offset: u64::from(entry.dword13.get()) << 32 | u64::from(entry.dword12.get()),
                    bytes: dwords.saturating_add(1).saturating_mul(4),
                    retain: low.retain_event(),
                    data,
                })
            }
            AdminOpcode::IDENTIFY => Ok(Self::Identify {
                cns: Cns(Identify10::from_bits(dword10).cns()),
                nsid,
                command_set: (dword11 >> 24) as u8,
                data,
            }),
            AdminOpcode::ABORT => {
                let abort = Abort::from_bits(dword10);
                Ok(Self::Abort { queue: QueueId(abort.submission_queue()), command: abort.command_id() })
            }
            AdminOpcode::SET_FEATURES => {
                let set = SetFeatures::from_bits(dword10);
                let feature = FeatureId(set.feature());
                Ok(Self::SetFeatures { feature, save: set.save(), nsid, value: dword11, data })
            }
            AdminOpcode::GET_FEATURES => {
                let get = GetFeatures::from_bits(dword10);
                Ok(Self::GetFeatures {
                    feature: FeatureId(get.feature()),
                    select: FeatureSelect(get.select()),
                    nsid,
                    which: dword11,
                    data,
                })
            }
            AdminOpcode::ASYNC_EVENT_REQUEST => Ok(Self::AsyncEventRequest),
            AdminOpcode::FORMAT_NVM => Ok(Self::Format(FormatNvm::from_bits(dword10))),
            AdminOpcode::DOORBELL_BUFFER_CONFIG => {
                Ok(Self::DoorbellBufferConfig { doorbells: base, events: Iova(entry.prp2.get()) })
            }
            _ => Err(Status::INVALID_OPCODE.into()),
        }
    }
}
