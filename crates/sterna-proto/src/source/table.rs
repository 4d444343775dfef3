//! Every transition of the source, in one table, except those of postcopy and of the undoing.

use super::ledger::{Guest, Hooks};
use super::{
    Action as A, Cause, Decision, Event as E, Peer, Refusal, Source, State as S, SwitchoverAck, first_acks,
};
use crate::Status;
use crate::limits::after;
use std::time::Duration;

pub(super) type Step = Result<Vec<A>, Refusal>;

/// The event is accepted, but the machine does not change and returns no action.
pub(super) const IGNORE: Step = Ok(Vec::new());

impl Source {
    /// The table: (state, event) → next state and actions.
    ///
    /// Rows are read from the top; the first row that matches is used.
    pub(super) fn step(&mut self, now: Duration, event: E) -> Step {
        let event = match event {
            E::ChannelsClosed => return self.channels_closed(now),
            // An acknowledgement that no request of this source preceded.
            E::ResumeAcknowledged if self.state != S::PostcopyRecover => E::PeerMisbehaved,
            event => event,
        };
        if self.ledger.postcopy
            && let Some(step) = self.in_postcopy(now, event)
        {
            return step;
        }
        match (self.state, event) {
            // Progress without failures.
            (S::Setup, E::ChannelsReady) if self.config.return_path => {
                self.go(now, S::Identifying, &[A::Identify])
            }
            (S::Setup, E::ChannelsReady) => self.start_precopy(now, &[]),
            (S::Identifying, E::PeerIdentified(peer)) => self.identified(now, peer),
            (S::Identifying, E::ConfigurationWanted) if !self.is_configured => {
                self.go(now, S::Configuring, &[A::Configure])
            }
            (S::Configuring, E::ConfigurationAccepted) => {
                self.is_configured = true;
                self.go(now, S::Identifying, &[A::Identify])
            }
            // A second VM would be made for one guest.
            (S::Identifying, E::ConfigurationWanted) => self.fail(now, Cause::PeerMisbehaved),
            (S::Comparing, E::CompatibilityAccepted) => self.start_precopy(now, &[]),
            (S::Active, E::SwitchoverRequested { guest_running }) => self.switch_over(now, guest_running),
            (S::Active, E::PostcopyRequested { guest_running }) => {
                self.switch_to_postcopy(now, guest_running)
            }
            // The engine requests postcopy again over the next connection.
            (S::Suspending | S::Reconnecting, E::PostcopyRequested { .. }) => IGNORE,
            (state, E::PostcopyRequested { .. }) => Err(Refusal::NotActive { state }),
            (S::Stopping, E::GuestStopped { was_running }) => self.stopped(now, was_running),
            (S::PreSwitchover, E::OperatorContinue) => self.release_hooks(now),
            (S::Releasing, E::HooksReleased) => {
                self.ledger.hooks = Hooks::Released;
                self.go(now, S::Switchover, &[A::SendFinalState])
            }
            (S::Switchover, E::FinalStateSent) if self.config.protects => {
                self.go(now, S::Seeding, &[A::SendEof])
            }
            (S::Switchover, E::FinalStateSent) => self.prepare(now),
            (S::Preparing, E::PrepareAcknowledged) => self.commit(now),
            (S::Committing, E::EofSent) if self.config.return_path => self.go(now, S::AwaitingAck, &[]),
            (S::Committing, E::EofSent) => self.complete(now),
            // The peer can answer before the engine reports that EOF was sent.
            (S::Committing | S::AwaitingAck | S::Undecided, E::Shut(0)) => self.complete(now),

            // A seeding: the guest stays here. The machines of `crate::replica` decide the end of
            // the protection.
            (S::Seeding, E::EofSent) => IGNORE,
            (S::Seeding, E::EofFailed) => self.fail(now, Cause::Eof),
            (S::Seeding, E::Shut(0)) => self.protected(now),
            (state @ S::Protected, E::ResumeRequested) => Err(Refusal::NotPostcopyPaused { state }),
            (state @ S::Protected, E::PauseRequested) => Err(Refusal::NotPostcopyActive { state }),
            (S::Protected, event) => self.in_protection(now, event),

            // A lost connection that another connection can replace.
            (s, E::MayReconnect) if is_before_commit(s) => {
                self.reconnects = !self.config.limits.reconnect.is_zero() && !self.config.protects;
                IGNORE
            }
            (_, E::ConnectionLost) if self.would_reconnect() => self.suspend(now),
            (S::Suspending, event) if is_undo(event) => self.undo_event(now, event),
            (S::Reconnecting, E::Reconnected) => self.reconnected(now),
            (S::Reconnecting, E::ReconnectFailed) => {
                let next = after(now, self.config.limits.reconnect_interval);
                self.deadline = [next, self.ledger.reconnect_until].into_iter().flatten().min();
                IGNORE
            }
            (S::Reconnecting, E::ReconnectRefused) => self.fail(now, Cause::NotReconnected),
            (S::Reconnecting, E::Tick) if self.ledger.reconnect_until.is_some_and(|until| now >= until) => {
                self.fail(now, Cause::NotReconnected)
            }
            (S::Reconnecting, E::Tick) if self.is_due(now) => {
                self.deadline = self.ledger.reconnect_until;
                Ok(vec![A::Reconnect])
            }
            // Late events of the lost channels and of the threads that used them.
            (S::Suspending | S::Reconnecting, event) if is_of_session(event) => IGNORE,

            // Switchover acknowledgements. One more than due is a violation of the protocol (spec
            // §5.3).
            (s, E::DeviceAsksAck) if is_before_commit(s) => self.device_asks(),
            (s, E::SwitchoverAck) if is_before_commit(s) && self.acks_arrived < self.acks_due => {
                self.acks_arrived += 1;
                IGNORE
            }

            // Failures before the commit: the source resumes the guest.
            (s, E::ConnectionLost) if is_before_commit(s) => self.fail(now, Cause::ConnectionLost),
            (s, E::PeerMisbehaved | E::SwitchoverAck | E::Shut(0) | E::PrepareAcknowledged)
                if is_before_commit(s) =>
            {
                self.fail(now, Cause::PeerMisbehaved)
            }
            (s, E::Shut(code)) if is_before_commit(s) => self.fail(now, Cause::DestinationFailed(code)),
            (s, E::LocalFailure) if is_before_commit(s) => self.fail(now, Cause::LocalFailure),
            (S::Stopping, E::GuestStopFailed) => {
                self.ledger.guest = Guest::Free;
                self.fail(now, Cause::GuestStop)
            }
            (S::Releasing, E::HookReleaseFailed) => {
                self.ledger.hooks = Hooks::Released;
                self.fail(now, Cause::HookRelease)
            }
            (s, E::Tick) if is_before_commit(s) && self.is_due(now) => self.fail(now, Cause::TimedOut(s)),
            (s, E::Cancel) if is_before_commit(s) => self.cancel(now),

            // Failures after the commit: the source asks, and does not run the guest until the
            // answer.
            (S::Committing, E::EofFailed) => self.undecided(now, Cause::Eof),
            // A peer without return path closes when it has read EOF, perhaps before the engine
            // reports EOF as sent. Only the result of this side's own write counts.
            (S::Committing, E::ConnectionLost) if !self.config.return_path => IGNORE,
            (S::Committing | S::AwaitingAck, E::ConnectionLost) => self.undecided(now, Cause::ConnectionLost),
            (S::Committing | S::AwaitingAck, E::PeerMisbehaved) => self.undecided(now, Cause::PeerMisbehaved),
            (S::Committing | S::AwaitingAck, E::LocalFailure) => self.undecided(now, Cause::LocalFailure),
            (s @ (S::Committing | S::AwaitingAck), E::Tick) if self.is_due(now) => {
                self.undecided(now, Cause::TimedOut(s))
            }
            // The destination declares that it never runs the guest.
            (S::Committing | S::AwaitingAck | S::Undecided, E::Shut(code)) => {
                self.fail(now, Cause::DestinationFailed(code))
            }

            // Undecided: facts and the operator decide. Every other answer leads to another
            // question.
            (S::Undecided, E::AskAnswered(Status::Committed)) => self.complete(now),
            (S::Undecided, E::AskAnswered(Status::Never)) => self.fail(now, Cause::DestinationNever),
            (S::Undecided, E::AskAnswered(_) | E::AskFailed) if self.peer.sterna => {
                self.deadline = after(now, self.config.limits.ask_interval);
                IGNORE
            }
            (S::Undecided, E::Tick) if self.is_due(now) => self.go(now, S::Undecided, &[A::AskAgain]),
            (S::Undecided, E::OperatorDecides(Decision::DestinationRuns)) => self.complete(now),
            (S::Undecided, E::OperatorDecides(Decision::SourceRuns)) => {
                self.fail(now, Cause::OperatorDecided)
            }

            // Undoing, after a failure or a cancel.
            (S::Cancelling | S::Failing, e) if is_undo(e) => self.undo_event(now, e),
            (S::Held, E::OperatorRetry) => self.retry(now),

            // Requests of an operator that are refused in the present state.
            (S::Cancelling | S::Failing, E::Cancel) => IGNORE,
            (state @ (S::Committing | S::AwaitingAck), E::Cancel) => {
                Err(Refusal::CancelAfterCommit { state })
            }
            (S::Undecided, E::Cancel) => Err(Refusal::CancelUndecided),
            (state, E::Cancel) => Err(Refusal::NothingToCancel { state }),
            (state, E::OperatorContinue) => Err(Refusal::NotPreSwitchover { state }),
            (state, E::OperatorDecides(_)) => Err(Refusal::NotUndecided { state }),
            (state, E::ResumeRequested) => Err(Refusal::NotPostcopyPaused { state }),
            (state, E::PauseRequested) => Err(Refusal::NotPostcopyActive { state }),
            (state, E::OperatorRetry) => Err(Refusal::NotHeld { state }),

            // Too early or too late. After the commit only facts about who runs the guest count,
            // and after the end no event counts.
            (_, E::Tick) => IGNORE,
            (s, _) if s > S::Undecided => IGNORE,
            (
                S::Committing | S::AwaitingAck | S::Undecided,
                E::PrepareAcknowledged
                | E::SwitchoverAck
                | E::EofSent
                | E::EofFailed
                | E::DestinationStarted
                | E::PagesSent
                | E::ConnectionLost
                | E::PeerMisbehaved
                | E::LocalFailure
                | E::MayReconnect
                | E::AskAnswered(_)
                | E::AskFailed,
            ) => IGNORE,
            (state, event) => Err(Refusal::OutOfOrder { state, event }),
        }
    }

    pub(super) fn go(&mut self, now: Duration, state: S, actions: &[A]) -> Step {
        self.enter(now, state);
        Ok(actions.to_vec())
    }

    pub(super) fn is_due(&self, now: Duration) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    fn identified(&mut self, now: Duration, peer: Peer) -> Step {
        self.peer = peer;
        if !peer.sterna {
            return self.start_precopy(now, &[]);
        }
        if self.config.compatibility {
            return self.go(now, S::Comparing, &[A::SendHandoverId, A::Compare]);
        }
        self.start_precopy(now, &[A::SendHandoverId])
    }

    fn start_precopy(&mut self, now: Duration, before: &[A]) -> Step {
        self.ledger.tracking = true;
        self.enter(now, S::Active);
        Ok([before, &[A::StartPrecopy]].concat())
    }

    fn reconnected(&mut self, now: Duration) -> Step {
        // The engine counts the devices again, and the destination acknowledges again.
        self.acks_due = first_acks(&self.config);
        self.acks_arrived = 0;
        self.go(now, S::Active, &[A::ResumePrecopy])
    }

    fn device_asks(&mut self) -> Step {
        if self.config.switchover_ack == SwitchoverAck::Modern {
            self.acks_due = self.acks_due.saturating_add(1);
        }
        IGNORE
    }

    pub(super) fn switch_over(&mut self, now: Duration, guest_running: bool) -> Step {
        if guest_running && !self.is_acknowledged() {
            return Err(Refusal::AcknowledgementsMissing { arrived: self.acks_arrived, due: self.acks_due });
        }
        self.ledger.guest = Guest::Stopping;
        self.go(now, S::Stopping, &[A::StopGuest])
    }

    fn stopped(&mut self, now: Duration, was_running: bool) -> Step {
        self.ledger.guest = Guest::Stopped { was_running };
        if self.config.protects {
            // The guest stays here, so the hooks are not released.
            return self.go(now, S::Switchover, &[A::SendFinalState]);
        }
        if self.config.pause_before_switchover {
            return self.go(now, S::PreSwitchover, &[]);
        }
        self.release_hooks(now)
    }

    fn release_hooks(&mut self, now: Duration) -> Step {
        self.ledger.hooks = Hooks::Releasing;
        self.go(now, S::Releasing, &[A::ReleaseHooks])
    }

    fn protected(&mut self, now: Duration) -> Step {
        let mut actions = Vec::new();
        match self.ledger.guest {
            Guest::Stopped { was_running: true } => {
                self.ledger.guest = Guest::Resuming;
                actions.push(A::ResumeGuest);
            }
            _ => self.ledger.guest = Guest::Free,
        }
        actions.push(A::TakeCheckpoints);
        self.go(now, S::Protected, &actions)
    }

    fn in_protection(&mut self, now: Duration, event: E) -> Step {
        match event {
            E::GuestResumed => self.ledger.guest = Guest::Free,
            E::GuestResumeFailed => self.ledger.guest = Guest::Stopped { was_running: true },
            E::GuestWithheld { was_running } => self.ledger.guest = Guest::Stopped { was_running },
            E::GuestGivenBack => self.ledger.guest = Guest::Free,
            E::ProtectionEnded { guest_is_here: true } => return self.cancel(now),
            E::ProtectionEnded { guest_is_here: false } => return self.complete(now),
            E::Cancel => return Err(Refusal::CancelProtected),
            E::OperatorContinue => return Err(Refusal::NotPreSwitchover { state: S::Protected }),
            E::OperatorDecides(_) => return Err(Refusal::NotUndecided { state: S::Protected }),
            E::OperatorRetry => return Err(Refusal::NotHeld { state: S::Protected }),
            // The protection's machine handles the loss of a connection.
            _ => {}
        }
        IGNORE
    }

    fn prepare(&mut self, now: Duration) -> Step {
        // A QEMU reads RUN together with the devices, so there is no earlier moment to prepare.
        if !self.config.return_path || self.ledger.postcopy && !self.peer.sterna {
            return self.commit(now);
        }
        self.go(now, S::Preparing, &[A::SendPrepare])
    }

    /// The commit: the state changes before the first byte of EOF, or of RUN, is sent.
    fn commit(&mut self, now: Duration) -> Step {
        let action = if self.ledger.postcopy { A::SendRun } else { A::SendEof };
        self.go(now, S::Committing, &[action])
    }

    pub(super) fn undecided(&mut self, now: Duration, cause: Cause) -> Step {
        self.enter(now, S::Undecided);
        let mut actions = vec![A::CloseChannels, A::ReportUndecided(cause)];
        if self.peer.sterna {
            actions.push(A::AskAgain);
        }
        Ok(actions)
    }
}

/// Events that a session's channels cause, or that the work over these channels causes.
fn is_of_session(event: E) -> bool {
    matches!(
        event,
        E::ConnectionLost
            | E::PeerMisbehaved
            | E::Shut(_)
            | E::SwitchoverAck
            | E::DeviceAsksAck
            | E::SwitchoverRequested { .. }
            | E::FinalStateSent
            | E::PrepareAcknowledged
    )
}

fn is_before_commit(state: S) -> bool {
    state < S::Committing
}

/// Events that report the end of an action that the undoing waits for.
fn is_undo(event: E) -> bool {
    matches!(
        event,
        E::GuestStopped { .. }
            | E::GuestStopFailed
            | E::HooksReleased
            | E::HookReleaseFailed
            | E::HooksReacquired
            | E::HooksReacquireFailed
            | E::GuestResumed
            | E::GuestResumeFailed
            | E::TrackingStopped
            | E::TrackingStopFailed
            | E::Tick
    )
}
