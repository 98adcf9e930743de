//! Asynchronous events and the requests that wait for them (Base Specification 1.4, section 5.2).

use std::collections::BTreeSet;

use super::limits::{MAX_PARKED_EVENTS, MAX_PENDING_EVENTS};
use crate::Nsid;
use crate::spec::{AsyncEvent, AsyncEventType, CriticalWarning, LogPageId, Status};

/// Bytes of the Changed Namespace List: 1024 identifiers.
const CHANGED_NAMESPACES_SIZE: usize = 4096;

/// A write to the doorbell of a queue that does not exist (figure 147).
pub(super) const INVALID_DOORBELL_REGISTER: AsyncEvent =
    AsyncEvent::new(AsyncEventType::ERROR, 0, LogPageId::ERROR_INFORMATION);
/// A doorbell value that its queue cannot have (figure 147).
pub(super) const INVALID_DOORBELL_VALUE: AsyncEvent =
    AsyncEvent::new(AsyncEventType::ERROR, 1, LogPageId::ERROR_INFORMATION);
/// A temperature is beyond its threshold (figure 148).
pub(super) const TEMPERATURE: AsyncEvent = AsyncEvent::new(AsyncEventType::SMART, 1, LogPageId::SMART);

/// The attributes of a namespace have changed (figure 149).
pub(super) const NAMESPACE_CHANGED: AsyncEvent =
    AsyncEvent::new(AsyncEventType::NOTICE, 0, LogPageId::CHANGED_NAMESPACES);

/// Parked requests, and events that wait for one.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Command identifiers of Asynchronous Event Requests, the oldest first.
    parked: Vec<u16>,
    /// Requests that were aborted and whose completion waits for room.
    aborted: Vec<u16>,
    pending: Vec<AsyncEvent>,
    /// Types that were reported, a bit each: silent until the host reads their log page.
    masked: u32,
    /// The Changed Namespace List: what changed since the host read it.
    changed: BTreeSet<u32>,
    /// The critical warnings that hold and that the host wants to hear of.
    warnings: CriticalWarning,
}

const fn bit(kind: AsyncEventType) -> u32 {
    1 << (kind.0 & 7)
}

impl Events {
    /// A request waits.
    pub(super) fn park(&mut self, command: u16) -> Result<(), Status> {
        if self.parked.len() >= usize::from(MAX_PARKED_EVENTS) {
            return Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED);
        }
        self.parked.push(command);
        Ok(())
    }

    /// A request is to be aborted: whether it was parked.
    pub(super) fn abort(&mut self, command: u16) -> bool {
        let found = self.parked.iter().position(|parked| *parked == command);
        if let Some(index) = found {
            self.aborted.push(self.parked.remove(index));
        }
        found.is_some()
    }

    /// Something happened. An event that waits already is not added again.
    pub(super) fn raise(&mut self, event: AsyncEvent) {
        if self.pending.len() < MAX_PENDING_EVENTS && !self.pending.contains(&event) {
            self.pending.push(event);
        }
    }

    /// A namespace has changed; `wanted`: the host wants to hear of it.
    pub(super) fn namespace_changed(&mut self, nsid: Nsid, wanted: bool) {
        self.changed.insert(nsid.0);
        if wanted {
            self.raise(NAMESPACE_CHANGED);
        }
    }

    /// The Changed Namespace List log page (5.14.1.4). There are never more namespaces than fit.
    pub(super) fn changed_namespaces(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.changed.iter().flat_map(|nsid| nsid.to_le_bytes()).collect();
        page.resize(CHANGED_NAMESPACES_SIZE, 0);
        page
    }

    /// The critical warnings that hold and that the host wants to hear of: an event when there is a new one
    /// (5.21.1.11).
    pub(super) fn watch(&mut self, warnings: CriticalWarning) {
        if warnings.temperature() && !self.warnings.temperature() {
            self.raise(TEMPERATURE);
        }
        self.warnings = warnings;
    }

    /// Whether [`Events::next`] has something to complete.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        !self.aborted.is_empty()
            || (!self.parked.is_empty() && self.pending.iter().any(|event| self.may_report(event)))
    }

    /// The next request that is over: with the event that it carries, or aborted.
    pub(super) fn next(&mut self) -> Option<(u16, Result<AsyncEvent, Status>)> {
        if let Some(command) = self.aborted.pop() {
            return Some((command, Err(Status::ABORT_REQUESTED)));
        }
        let event = self.pending.iter().position(|event| self.may_report(event))?;
        if self.parked.is_empty() {
            return None;
        }
        let event = self.pending.remove(event);
        self.masked |= bit(event.kind());
        Some((self.parked.remove(0), Ok(event)))
    }

    fn may_report(&self, event: &AsyncEvent) -> bool {
        self.masked & bit(event.kind()) == 0
    }

    /// The host read the log page of this type.
    pub(super) fn unmask(&mut self, kind: AsyncEventType) {
        self.masked &= !bit(kind);
        if kind == AsyncEventType::NOTICE {
            self.changed.clear();
        }
    }

    /// A controller reset: requests and events are gone.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}
