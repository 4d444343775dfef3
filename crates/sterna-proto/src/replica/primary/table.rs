//! Every transition of the primary, in one table.

use super::{Action as A, Because, Cause, Event as E, Outcome, Primary, Refusal, State as S};
use crate::replica::claim::Claim;
use crate::replica::{Answer, Protection, Ruling};
use std::time::Duration;

type Step = Result<Vec<A>, Refusal>;

/// The event is accepted, but the machine does not change and returns no action.
const IGNORE: Step = Ok(Vec::new());

impl Primary {
    /// Applies the effects of the time alone first, then the table's row for the event.
    pub(super) fn step(&mut self, now: Duration, event: E) -> Step {
        let mut actions = self.time_passes(now);
        match self.row(now, event) {
            Ok(mut more) => actions.append(&mut more),
            // The effects of the time must be performed. The event itself is too late.
            Err(_) if !actions.is_empty() => {}
            Err(refusal) => return Err(refusal),
        }
        Ok(actions)
    }

    /// Applies the end of the lease, before the event is looked at.
    fn time_passes(&mut self, now: Duration) -> Vec<A> {
        let is_over = self.lease.is_over(now);
        match self.state {
            S::Asking if is_over && !self.is_guest_stopped => {
                self.is_guest_stopped = true;
                vec![A::StopGuest]
            }
            state if state.is_in_contact() && is_over => {
                let mut actions = Vec::new();
                if !std::mem::replace(&mut self.is_guest_stopped, true) {
                    actions.push(A::StopGuest);
                }
                actions.append(&mut self.lose_contact(Cause::LeaseOver));
                actions
            }
            _ => Vec::new(),
        }
    }

    /// The table: (state, event) → next state and actions.
    ///
    /// Rows are read from the top; the first row that matches is used.
    fn row(&mut self, now: Duration, event: E) -> Step {
        match (self.state, event) {
            // Messages about another protection are ignored.
            (_, E::Answered(Answer { protection, .. })) if !self.is_ours(protection) => IGNORE,
            (_, E::Never(other) | E::StandbyRuns(other) | E::HandOverRequested(other))
                if !self.is_ours(other) =>
            {
                IGNORE
            }

            // Checkpoints, and the answers that release output.
            (S::Seeding | S::Protected | S::Ending | S::HandingOver, E::CheckpointTaken(number))
                if self.last.is_none() =>
            {
                self.taken(now, number)
            }
            (S::HandingOver, E::LastCheckpointTaken(number)) => self.last_taken(number),
            (S::Seeding, E::Answered(Answer { held: 0, heartbeat, .. }))
                if self.lease.was_sent(heartbeat) =>
            {
                self.lease.echoed(heartbeat);
                IGNORE
            }
            (state, E::Answered(answer)) if state.is_in_contact() => self.answered(now, answer),
            (state, E::Tick) if state == S::Seeding || state.is_in_contact() => {
                Ok(self.lease.beat(now).map(A::SendHeartbeat).into_iter().collect())
            }

            // The standby's last answer.
            (state, E::Never(_)) if state.is_in_contact() || state == S::Asking => {
                Ok(self.go_on_alone(Because::Never))
            }
            (S::Given, E::StandbyRuns(_)) => Ok(self.give_up(S::HandedOver, Outcome::HandedOver)),
            (state, E::StandbyRuns(_)) if state.is_in_contact() || state == S::Asking => {
                Ok(self.give_up(S::Lost, Outcome::Lost))
            }

            // Requests of operators.
            (S::Seeding, E::Unprotect) => Ok(self.fail(Cause::Cancelled)),
            (S::Protected, E::Unprotect) => {
                self.state = S::Ending;
                Ok(vec![A::SendUnprotect])
            }
            (S::Ending, E::Unprotect) => IGNORE,
            (state, E::Unprotect) => Err(Refusal::CannotUnprotect { state }),
            // Checked before the guest is stopped for it. Without an arbiter the guest would be
            // stopped on both sides.
            (S::Protected, E::HandOver { is_arbiter_in_reach: false }) => Err(Refusal::ArbiterOutOfReach),
            // A standby that requests the takeover has already checked that it reaches the arbiter.
            (S::Protected, E::HandOver { .. } | E::HandOverRequested(_)) if self.held > 0 => {
                self.state = S::HandingOver;
                Ok(vec![A::TakeLastCheckpoint])
            }
            (S::HandingOver | S::Given, E::HandOver { .. }) => IGNORE,
            (state, E::HandOver { .. }) => Err(Refusal::CannotHandOver { state }),
            // The standby cannot know the present state of this side, so its request is no error.
            (_, E::HandOverRequested(_)) => IGNORE,

            // No guest is left here that could be claimed. In Ending and in Given the event is ignored
            // below, because the operator's request and the given guest take their planned course.
            (S::Protected | S::HandingOver, E::GuestGone) => {
                let mut actions = vec![A::SendGone];
                actions.append(&mut self.give_up(S::Lost, Outcome::Lost));
                Ok(actions)
            }
            // The standby cannot be informed. If this side won the claim without a guest, the
            // standby would lose the guest. Therefore this side stops asking for the claim.
            (S::Asking, E::GuestGone) => Ok(self.give_up(S::Lost, Outcome::Lost)),
            (S::Seeding, E::GuestGone) => Ok(self.fail(Cause::LocalFailure)),
            (_, E::GuestGone) => IGNORE,

            // Before the first checkpoint a failure leaves the guest as before.
            (S::Seeding, E::ConnectionLost) => Ok(self.fail(Cause::ConnectionLost)),
            (S::Seeding, E::LocalFailure) => Ok(self.fail(Cause::LocalFailure)),
            (S::Seeding, E::PeerMisbehaved | E::Answered(_) | E::Never(_) | E::StandbyRuns(_)) => {
                Ok(self.fail(Cause::PeerMisbehaved))
            }

            // After the first checkpoint the lease and the arbiter decide.
            (state, E::ConnectionLost) if state.is_in_contact() => {
                Ok(self.lose_contact(Cause::ConnectionLost))
            }
            (state, E::PeerMisbehaved) if state.is_in_contact() => {
                Ok(self.lose_contact(Cause::PeerMisbehaved))
            }
            (state, E::LocalFailure) if state.is_in_contact() => Ok(self.lose_contact(Cause::LocalFailure)),
            (S::Asking, E::Ruled(Ruling::Won)) => Ok(self.go_on_alone(Because::Claim)),
            (S::Asking, E::Ruled(Ruling::Lost)) => Ok(self.give_up(S::Lost, Outcome::Lost)),
            (S::Asking, E::ArbiterOutOfReach) => {
                self.claim.out_of_reach(now, self.config.terms.claim_interval);
                IGNORE
            }
            (S::Asking, E::Tick) if self.claim.is_due(now) => {
                self.claim = Claim::Asking;
                Ok(vec![A::Claim])
            }

            // Too late: these change nothing.
            (_, E::Tick) => IGNORE,
            (S::Asking, E::ConnectionLost | E::PeerMisbehaved | E::LocalFailure | E::Answered(_)) => IGNORE,
            // A checkpoint that was being taken when contact was lost.
            (S::Asking, E::CheckpointTaken(_)) => IGNORE,
            (S::Asking, E::LastCheckpointTaken(_)) => {
                self.is_guest_stopped = true;
                IGNORE
            }
            // The engine has stopped the guest for a takeover that no longer takes place.
            (S::Alone, E::LastCheckpointTaken(_)) => Ok(vec![A::ResumeGuest]),
            // For example a ruling that arrives after the standby's last answer.
            (state, _) if state.is_final() => IGNORE,
            (state, event) => Err(Refusal::OutOfOrder { state, event }),
        }
    }

    fn is_ours(&self, protection: Protection) -> bool {
        protection == self.config.protection
    }

    fn taken(&mut self, now: Duration, number: u64) -> Step {
        let expected = self.taken + 1;
        if number != expected {
            return Err(Refusal::CheckpointOutOfOrder { taken: number, expected });
        }
        if self.taken - self.held >= self.config.in_flight.max(1) {
            return Err(Refusal::TooManyInFlight { in_flight: self.taken - self.held });
        }
        self.taken = number;
        if self.state == S::Seeding {
            self.state = S::Protected;
            self.lease.begin(now);
        }
        IGNORE
    }

    fn last_taken(&mut self, number: u64) -> Step {
        let expected = self.taken + 1;
        if number != expected {
            return Err(Refusal::CheckpointOutOfOrder { taken: number, expected });
        }
        self.taken = number;
        self.last = Some(number);
        self.is_guest_stopped = true;
        IGNORE
    }

    /// Handles the standby's answer: extends the lease, then releases output.
    ///
    /// Output is released only if the lease, as extended by this answer, is valid.
    fn answered(&mut self, now: Duration, answer: Answer) -> Step {
        let Answer { held, heartbeat, .. } = answer;
        if held > self.taken || held < self.held || !self.lease.was_sent(heartbeat) {
            return Ok(self.lose_contact(Cause::PeerMisbehaved));
        }
        self.lease.echoed(heartbeat);
        let mut actions = Vec::new();
        if held > self.held {
            self.held = held;
            if !self.lease.is_over(now) {
                actions.push(A::Release(held));
            }
        }
        if self.state == S::HandingOver && self.last == Some(held) {
            self.state = S::Given;
            actions.push(A::SendGive);
        }
        Ok(actions)
    }

    fn fail(&mut self, cause: Cause) -> Vec<A> {
        (self.state, self.cause) = (S::Failed, Some(cause));
        vec![A::CloseChannels, A::OpenGate, A::Finish(Outcome::Failed(cause))]
    }

    fn lose_contact(&mut self, cause: Cause) -> Vec<A> {
        (self.state, self.cause, self.claim) = (S::Asking, Some(cause), Claim::Asking);
        vec![A::CloseChannels, A::Claim]
    }

    fn go_on_alone(&mut self, because: Because) -> Vec<A> {
        let mut actions = Vec::new();
        if self.state != S::Asking {
            actions.push(A::CloseChannels);
        }
        self.state = S::Alone;
        actions.push(A::OpenGate);
        if std::mem::replace(&mut self.is_guest_stopped, false) {
            actions.push(A::ResumeGuest);
        }
        actions.push(A::Finish(Outcome::Alone(because)));
        actions
    }

    fn give_up(&mut self, state: S, outcome: Outcome) -> Vec<A> {
        let mut actions = Vec::new();
        if !std::mem::replace(&mut self.is_guest_stopped, true) {
            actions.push(A::StopGuest);
        }
        if self.state != S::Asking {
            actions.push(A::CloseChannels);
        }
        self.state = state;
        actions.extend([A::DropOutput, A::DestroyGuest, A::Finish(outcome)]);
        actions
    }
}
