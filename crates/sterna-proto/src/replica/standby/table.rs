//! Every transition of the standby, in one table.

use super::{Action as A, Because, Event as E, Outcome, Refusal, Standby, State as S};
use crate::replica::claim::Claim;
use crate::replica::{Answer, Protection, Ruling};
use std::time::Duration;

type Step = Result<Vec<A>, Refusal>;

/// Nothing changes, and nothing is to be done.
const IGNORE: Step = Ok(Vec::new());

impl Standby {
    /// What the time alone changes comes first, then the table's row.
    pub(super) fn step(&mut self, now: Duration, event: E) -> Step {
        let mut actions = Vec::new();
        if self.state == S::Following && self.deadline().is_some_and(|deadline| now >= deadline) {
            actions = self.take_over();
        }
        match self.row(now, event) {
            Ok(mut more) => actions.append(&mut more),
            // What the time has changed must be performed; the event came too late for it.
            Err(_) if !actions.is_empty() => {}
            Err(refusal) => return Err(refusal),
        }
        Ok(actions)
    }

    /// The table: (state, event) → next state and actions. Rows are read from
    /// the top; the first that fits counts.
    fn row(&mut self, now: Duration, event: E) -> Step {
        match (self.state, event) {
            // What another protection says is not for this one.
            (_, E::Heartbeat(other, _) | E::UnprotectRead(other) | E::GiveRead(other))
                if !self.is_ours(other) =>
            {
                IGNORE
            }

            // Checkpoints and heartbeats.
            (S::Seeding | S::Following, E::CheckpointHeld(number)) => self.checkpoint_held(now, number),
            (S::Seeding | S::Following, E::Heartbeat(_, number)) if self.is_in_contact => {
                self.heard = self.heard.max(number);
                self.last_echo = Some(now);
                Ok(vec![self.answer()])
            }

            // The end that the primary wants.
            (S::Following, E::UnprotectRead(_)) if self.is_in_contact => {
                Ok(self.say_never(Because::Unprotected))
            }
            (S::Following, E::GiveRead(_)) => {
                self.is_given = true;
                Ok(self.take_over())
            }

            // Failures.
            (
                S::Seeding,
                E::ConnectionLost
                | E::PeerMisbehaved
                | E::LocalFailure
                | E::UnprotectRead(_)
                | E::GiveRead(_),
            ) => Ok(self.discard(Because::NothingHeld)),
            (S::Following, E::ConnectionLost | E::PeerMisbehaved) if self.is_in_contact => {
                Ok(self.lose_contact())
            }
            (S::Following, E::LocalFailure) if self.is_in_contact => {
                Ok(self.say_never(Because::LocalFailure))
            }

            // The operator's takeover.
            (S::Seeding, E::TakeOver { .. }) => Err(Refusal::NothingHeld),
            (S::Following, E::TakeOver { is_planned: true, .. }) if !self.is_in_contact => {
                Err(Refusal::NoContact)
            }
            // Before the primary stops its guest for it: without an arbiter it would stand on both sides.
            (S::Following, E::TakeOver { is_planned: true, is_arbiter_in_reach: false }) => {
                Err(Refusal::ArbiterOutOfReach)
            }
            (S::Following, E::TakeOver { is_planned: true, .. }) => Ok(vec![A::SendHandOver]),
            (S::Following, E::TakeOver { is_planned: false, .. }) => Ok(self.lose_contact()),
            (state, E::TakeOver { .. }) => Err(Refusal::TakeoverUnderWay { state }),

            // The takeover.
            // Nothing was claimed, and the primary waits for word: its guest goes on there.
            (S::Preparing, E::Prepared { is_arbiter_in_reach: false })
                if self.is_given && self.is_in_contact =>
            {
                Ok(self.say_never(Because::ArbiterOutOfReach))
            }
            (S::Preparing, E::Prepared { .. }) => Ok(self.ask()),
            // The primary is in contact and has its guest: it goes on there.
            (S::Preparing, E::PrepareFailed) if self.is_given && self.is_in_contact => {
                Ok(self.say_never(Because::LocalFailure))
            }
            (S::Preparing, E::PrepareFailed) => self.go(S::Unready, &[]),
            (S::Unready, E::Retry) => self.go(S::Preparing, &[A::Prepare(self.held)]),
            (S::Claiming, E::Ruled(Ruling::Lost)) => Ok(self.discard(Because::ClaimLost)),
            (S::Claiming, E::Ruled(Ruling::Won)) if self.config.needs_fence && !self.is_given => {
                self.go(S::Fencing, &[A::Fence])
            }
            (S::Claiming, E::Ruled(Ruling::Won)) => self.go(S::Starting, &[A::Start]),
            (S::Claiming, E::ArbiterOutOfReach) => {
                self.claim.out_of_reach(now, self.config.terms.claim_interval);
                IGNORE
            }
            (S::Claiming, E::Tick) if self.claim.is_due(now) => Ok(self.ask()),
            (S::Fencing, E::Fenced) | (S::Unfenced, E::Vouch) => self.go(S::Starting, &[A::Start]),
            (S::Fencing, E::FenceFailed) => self.go(S::Unfenced, &[]),
            (S::Unfenced, E::Retry) => self.go(S::Fencing, &[A::Fence]),
            (S::Starting, E::Started) if self.is_in_contact => {
                self.go(S::Running, &[A::SendRuns, A::CloseChannels, A::Finish(Outcome::Running(self.held))])
            }
            (S::Starting, E::Started) => self.go(S::Running, &[A::Finish(Outcome::Running(self.held))]),
            (S::Starting, E::StartFailed) => self.go(S::Held, &[]),
            (S::Held, E::Retry) => self.go(S::Starting, &[A::Start]),
            (state, E::Retry | E::Vouch) => Err(Refusal::NothingWaits { state }),

            // Too late to matter. From `Preparing` on nothing is answered, and
            // a checkpoint that comes now is not the one that is made ready.
            (_, E::Tick) => IGNORE,
            (state, E::ConnectionLost | E::PeerMisbehaved) if state > S::Seeding => {
                self.is_in_contact = false;
                IGNORE
            }
            (
                _,
                E::CheckpointHeld(_)
                | E::Heartbeat(..)
                | E::UnprotectRead(_)
                | E::GiveRead(_)
                | E::LocalFailure,
            ) => IGNORE,
            (state, _) if state.is_final() => IGNORE,
            (state, event) => Err(Refusal::OutOfOrder { state, event }),
        }
    }

    fn go(&mut self, state: S, actions: &[A]) -> Step {
        self.state = state;
        Ok(actions.to_vec())
    }

    fn is_ours(&self, protection: Protection) -> bool {
        protection == self.config.protection
    }

    fn checkpoint_held(&mut self, now: Duration, number: u64) -> Step {
        let expected = self.held + 1;
        if number != expected {
            return Err(Refusal::CheckpointOutOfOrder { held: number, expected });
        }
        // The primary's lease began when it took the first one, however long the last echo is ago by then. A later one does not
        // extend it: no heartbeat is echoed that was not echoed before.
        if self.state == S::Seeding {
            self.last_echo = Some(now);
        }
        (self.held, self.state) = (number, S::Following);
        // Without contact it is kept all the same: it is the newest state.
        if self.is_in_contact {
            return Ok(vec![self.answer()]);
        }
        IGNORE
    }

    fn answer(&self) -> A {
        let Self { held, heard: heartbeat, .. } = *self;
        A::SendAnswer(Answer { protection: self.config.protection, held, heartbeat })
    }

    /// No more answers; the patience runs from the last echo.
    fn lose_contact(&mut self) -> Vec<A> {
        self.is_in_contact = false;
        vec![A::CloseChannels]
    }

    fn take_over(&mut self) -> Vec<A> {
        self.state = S::Preparing;
        let mut actions = Vec::new();
        // Who has given the guest waits for word.
        if !self.is_given && std::mem::replace(&mut self.is_in_contact, false) {
            actions.push(A::CloseChannels);
        }
        actions.push(A::Prepare(self.held));
        actions
    }

    fn ask(&mut self) -> Vec<A> {
        (self.state, self.claim) = (S::Claiming, Claim::Asking);
        vec![A::Claim]
    }

    fn say_never(&mut self, because: Because) -> Vec<A> {
        let mut actions = vec![A::SendNever];
        actions.append(&mut self.discard(because));
        actions
    }

    fn discard(&mut self, because: Because) -> Vec<A> {
        self.state = S::Discarded;
        let mut actions = Vec::new();
        if std::mem::replace(&mut self.is_in_contact, false) {
            actions.push(A::CloseChannels);
        }
        actions.extend([A::Discard, A::Finish(Outcome::Discarded(because))]);
        actions
    }
}
