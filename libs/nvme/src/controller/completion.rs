//! The one place where commands end: the entry is written, counted and, when it tells of an error, logged.

use super::health::Health;
use super::queue::SubmissionState;
use super::queues::Queues;
use super::{DiskError, DmaError, Host};
use crate::spec::{CompletionEntry, ParameterErrorLocation, Status, StatusField};
use crate::{Lba, Nsid, QueueId};

/// Where a command came from and what it was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) queue: QueueId,
    pub(super) command: u16,
    pub(super) nsid: Nsid,
    /// The first block, for the error log; 0 where there is none.
    pub(super) lba: Lba,
}

/// The table of what a disk's errors are to the host.
impl From<DiskError> for Status {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::DataTransfer => Self::DATA_TRANSFER_ERROR,
            DiskError::Read => Self::UNRECOVERED_READ_ERROR,
            DiskError::Write => Self::WRITE_FAULT,
            DiskError::Mismatch => Self::COMPARE_FAILURE,
            DiskError::Capacity => Self::CAPACITY_EXCEEDED,
            DiskError::Internal => Self::INTERNAL_ERROR,
        }
    }
}

/// Why a command failed, and which of its parameters was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) status: Status,
    pub(super) location: ParameterErrorLocation,
}

/// The error lies in no parameter.
const NOWHERE: ParameterErrorLocation = ParameterErrorLocation::from_bits(0xffff);

impl Failure {
    /// The parameter begins at this byte and bit of the submission entry.
    pub(super) const fn at(status: Status, byte: u8, bit: u8) -> Self {
        Self { status, location: ParameterErrorLocation::from_bits(0).with_byte(byte).with_bit(bit) }
    }
}

/// A status that is always about the same parameter tells where it lies.
impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let (byte, bit) = match status {
            Status::INVALID_OPCODE => (0, 0),
            Status::INVALID_NAMESPACE | Status::FEATURE_NOT_NAMESPACE_SPECIFIC | Status::WRITE_PROTECTED => {
                (4, 0)
            }
            Status::INVALID_PRP_OFFSET
            | Status::DATA_TRANSFER_ERROR
            | Status::INVALID_SGL_SEGMENT
            | Status::INVALID_SGL_COUNT
            | Status::INVALID_SGL_LENGTH
            | Status::INVALID_SGL_TYPE
            | Status::INVALID_SGL_OFFSET => (24, 0),
            Status::LBA_OUT_OF_RANGE
            | Status::INVALID_QUEUE_ID
            | Status::INVALID_QUEUE_DELETION
            | Status::INVALID_LOG_PAGE
            | Status::FEATURE_NOT_CHANGEABLE
            | Status::INVALID_FORMAT => (40, 0),
            Status::INVALID_QUEUE_SIZE => (42, 0),
            Status::FEATURE_NOT_SAVEABLE => (43, 7),
            Status::INVALID_COMPLETION_QUEUE | Status::INVALID_INTERRUPT_VECTOR => (46, 0),
            _ => return Self { status, location: NOWHERE },
        };
        Self::at(status, byte, bit)
    }
}

/// Whether the same command would fail again (DNR): all errors that lie in the command itself.
fn is_final(status: Status) -> bool {
    !matches!(
        status,
        Status::DATA_TRANSFER_ERROR
            | Status::INTERNAL_ERROR
            | Status::ABORT_REQUESTED
            | Status::FORMAT_IN_PROGRESS
            | Status::WRITE_FAULT
            | Status::UNRECOVERED_READ_ERROR
            | Status::CAPACITY_EXCEEDED
    )
}

impl Queues {
    /// Ends a command, for whose completion a slot was reserved; dword 0 is `Ok`'s value.
    ///
    /// # Errors
    /// The completion queue's memory is out of reach: a controller fatal error.
    #[inline]
    pub(super) fn complete<H: Host>(
        &mut self,
        host: &mut H,
        health: &mut Health,
        origin: Origin,
        result: Result<u32, impl Into<Failure>>,
    ) -> Result<(), DmaError> {
        let (result, status) = match result {
            Ok(result) => (result, StatusField::default()),
            Err(failure) => (0, report(health, origin, failure.into())),
        };
        let Some(submission) = self.submission_mut(origin.queue) else { return Ok(()) };
        let entry = CompletionEntry {
            result: result.into(),
            submission_head: submission.head().into(),
            submission_queue: origin.queue.0.into(),
            command_id: origin.command.into(),
            status,
            ..CompletionEntry::default()
        };
        submission.in_flight = submission.in_flight.saturating_sub(1);
        let deletion = match submission.state {
            SubmissionState::Deleting { command } if submission.in_flight == 0 => Some(command),
            _ => None,
        };
        let completion = submission.completion;
        let Some(completion) = self.completion_mut(completion) else { return Ok(()) };
        let (at, phase) = completion.push();
        host.publish(at, CompletionEntry { status: status.with_phase(phase), ..entry }.dwords())?;

        if let Some(command) = deletion {
            self.remove_submission(host, origin.queue);
            let deleter = Origin { queue: QueueId(0), command, nsid: Nsid(0), lba: Lba(0) };
            return self.complete(host, health, deleter, Ok::<_, Failure>(0));
        }
        Ok(())
    }
}

/// Tells of a failed command. What a host can cause at will is logged below the level that is shown by
/// default, and the medium's own failures at most once a second.
#[cold]
fn report(health: &mut Health, origin: Origin, failure: Failure) -> StatusField {
    let code = failure.status;
    let medium = matches!(
        code,
        Status::INTERNAL_ERROR
            | Status::WRITE_FAULT
            | Status::UNRECOVERED_READ_ERROR
            | Status::CAPACITY_EXCEEDED
            | Status::DATA_TRANSFER_ERROR
    );
    if medium && health.may_warn() {
        tracing::warn!(?origin, status = ?code, "A command failed");
    } else {
        tracing::debug!(?origin, status = ?code, "A command failed");
    }
    // The error log tells more.
    let status = StatusField::new(code).with_do_not_retry(is_final(code)).with_more(true);
    health.record_error(origin, status, failure.location);
    status
}
