//! What CC asks for: enabling, shutdown, reset (Base Specification 1.4, sections 3.1.5, 3.1.6, 7.3, 7.6).

use super::io::Progress;
use super::slots::Owner;
use super::{Controller, Disk, DmaError, Host};
use crate::spec::{Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus};

/// Where the controller is in its life. A reset leads from every state to `Disabled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Disabled,
    Ready,
    /// SHN was written: commands under way end, then the disks are flushed. Whether CSTS.RDY is shown.
    Draining {
        ready: bool,
    },
    Flushing {
        ready: bool,
    },
    ShutDown {
        ready: bool,
    },
    /// The queues are gone; disks still work on commands of the host that used them.
    Resetting,
    /// CSTS.CFS: only a reset helps. Whether it had been ready.
    Failed {
        ready: bool,
    },
}

impl State {
    /// Whether completions are posted and interrupts raised.
    #[inline]
    pub(super) fn posts(self) -> bool {
        matches!(self, Self::Ready | Self::Draining { .. } | Self::Flushing { .. } | Self::ShutDown { .. })
    }

    /// CSTS as the host sees it.
    fn status(self) -> ControllerStatus {
        let status = ControllerStatus::default();
        match self {
            Self::Disabled => status,
            // RDY falls when the reset is over (3.1.6).
            Self::Ready | Self::Resetting => status.with_ready(true),
            Self::Draining { ready } | Self::Flushing { ready } => {
                status.with_ready(ready).with_shutdown(ShutdownStatus::OCCURRING)
            }
            Self::ShutDown { ready } => status.with_ready(ready).with_shutdown(ShutdownStatus::COMPLETE),
            Self::Failed { ready } => status.with_ready(ready).with_fatal(true),
        }
    }
}

impl<H: Host, D: Disk<H>> Controller<H, D> {
    /// Does what CC asks for and goes on with what it asked for before; true if something changed.
    #[inline]
    pub(super) fn follow_registers(&mut self, host: &mut H) -> bool {
        let control = self.registers.control();
        if control == self.control
            && matches!(self.state, State::Ready | State::Disabled | State::Failed { .. })
        {
            return false;
        }
        if control.generation != self.control.generation {
            self.begin_reset(host);
        }
        self.control = control;
        let mut changed = false;
        // Each step is taken at most once or twice: no state is entered again without a change of CC.
        while let Some(next) = self.next_state(host, control.configuration) {
            self.enter(next);
            changed = true;
        }
        changed
    }

    fn enter(&mut self, state: State) {
        tracing::debug!(from = ?self.state, to = ?state, "The controller changes its state");
        self.state = state;
        self.registers.set_status(self.control.generation, state.status());
    }

    /// The state that follows the present one, once its work is done.
    fn next_state(&mut self, host: &mut H, configuration: Configuration) -> Option<State> {
        let shutdown = configuration.shutdown() != ShutdownNotification::NONE;
        match self.state {
            State::Disabled if configuration.enable() => Some(self.enable(host, configuration)),
            State::Disabled if shutdown => Some(State::Draining { ready: false }),
            State::Ready if shutdown => Some(State::Draining { ready: true }),
            State::Draining { ready } if self.in_flight() == 0 && self.barriers.is_empty() => {
                match self.disks.flush_all(host, Owner::Shutdown) {
                    Ok(Progress::Pending) => Some(State::Flushing { ready }),
                    Ok(Progress::Done) => Some(State::ShutDown { ready }),
                    Err(status) => {
                        tracing::warn!(?status, "A disk could not be flushed at shutdown");
                        Some(State::ShutDown { ready })
                    }
                }
            }
            State::Flushing { ready } if self.in_flight() == 0 => Some(State::ShutDown { ready }),
            // What was shut down without having been enabled can be enabled.
            State::ShutDown { ready: false } if configuration.enable() || !shutdown => Some(State::Disabled),
            State::Resetting if self.in_flight() == 0 => Some(State::Disabled),
            _ => None,
        }
    }

    /// CC.EN was set.
    fn enable(&mut self, host: &mut H, configuration: Configuration) -> State {
        let admin = self.registers.admin_queues();
        let supported =
            configuration.page() == 0 && configuration.command_set() == 0 && configuration.arbitration() == 0;
        if !supported || admin.submission_entries < 2 || admin.completion_entries < 2 {
            tracing::warn!(?configuration, ?admin, "The host asks for what the controller cannot do");
            return State::Failed { ready: false };
        }
        self.queues.create_admin(host, &admin);
        self.memory_confirmed = false;
        State::Ready
    }

    /// CC.EN was cleared, or something outside resets the controller.
    fn begin_reset(&mut self, host: &mut H) {
        self.health.counters.resets.add(1);
        let power_cycles = self.registers.power_cycles();
        let cut = std::mem::replace(&mut self.power_cycles, power_cycles) != power_cycles;
        if cut && !matches!(self.state, State::Disabled | State::Resetting | State::ShutDown { .. }) {
            self.health.record_unsafe_shutdown();
        }
        self.queues.clear(host);
        self.drop_barriers();
        self.health.events.reset();
        self.features.reset();
        self.state = State::Resetting;
    }

    /// The host's memory is out of reach where a command or a completion should be: there is no other way to
    /// tell (3.1.6, CFS).
    #[cold]
    pub(super) fn fail(&mut self, host: &mut H, error: &DmaError) {
        if self.health.may_warn() {
            tracing::warn!(%error, "The controller stops: a queue is out of reach");
        }
        self.stop(host);
    }

    /// Takes no further command: CSTS.CFS.
    pub(super) fn stop(&mut self, host: &mut H) {
        self.queues.clear(host);
        self.drop_barriers();
        self.health.events.reset();
        self.enter(State::Failed { ready: true });
    }
}
