//! The one place where commands end: the entry is written, counted and, when it tells of an error, logged.

use super::health::Health;
use super::queue::SubmissionState;
use super::queues::Queues;
use super::{DiskError, DmaError, Host};
use crate::spec::{CompletionEntry, Status, StatusField};
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
        result: Result<u32, Status>,
    ) -> Result<(), DmaError> {
        let (result, status) = match result {
            Ok(result) => (result, StatusField::default()),
            Err(status) => (0, StatusField::new(status).with_do_not_retry(is_final(status)).with_more(true)),
        };
        if !status.status().is_success() {
            report(health, origin, status);
        }
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
            return self.complete(host, health, deleter, Ok(0));
        }
        Ok(())
    }
}

/// Tells of a failed command. What a host can cause at will is logged below the level that is shown by
/// default, and the medium's own failures at most once a second.
#[cold]
fn report(health: &mut Health, origin: Origin, status: StatusField) {
    let code = status.status();
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
    health.record_error(origin, status);
}
