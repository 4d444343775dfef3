//! Every transition of the standby, in one table.

use super::{Action as A, Because, Event as E, Outcome, Refusal, Standby, State as S};
use crate::replica::claim::Claim;
use crate::replica::{Answer, Protection, Ruling};
use std::time::Duration;

type Step = Result<Vec<A>, Refusal>;

/// The event is accepted, but the machine does not change and returns no action.
const IGNORE: Step = Ok(Vec::new());

impl Standby {
    /// Applies the effects of the time alone first, then the table's row for the event.
    pub(super) fn step(&mut self, now: Duration, event: E) -> Step {
        let mut actions = Vec::new();
        if self.state == S::Following && self.deadline().is_some_and(|deadline| now >= deadline) {
            actions = self.take_over();
        }
        match self.row(now, event) {
            Ok(mut more) => actions.append(&mut more),
            // The effects of the time must be performed. The event itself is too late.
            Err(_) if !actions.is_empty() => {}
            Err(refusal) => return Err(refusal),
        }
        Ok(actions)
    }

    /// The table: (state, event) → next state and actions.
    ///
    /// Rows are read from the top; the first row that matches is used.
    fn row(&mut self, now: Duration, event: E) -> Step {
        match (self.state, event) {
            // Messages about another protection are ignored.
            (
                _,
                E::Heartbeat(other, _) | E::UnprotectRead(other) | E::GiveRead(other) | E::GoneRead(other),
            ) if !self.is_ours(other) => IGNORE,

            // Checkpoints and heartbeats.
            (S::Seeding | S::Following, E::CheckpointHeld(number)) => self.checkpoint_held(now, number),
            (S::Seeding | S::Following, E::Heartbeat(_, number)) if self.is_in_contact => {
                self.heard = self.heard.max(number);
                self.last_echo = Some(now);
                Ok(vec![self.answer()])
            }

            // The end of the protection at the primary's request.
            (S::Following, E::UnprotectRead(_)) if self.is_in_contact => {
                Ok(self.say_never(Because::Unprotected))
            }
            (S::Following, E::GiveRead(_)) => {
                self.is_given = true;
                Ok(self.take_over())
            }

            // No guest runs at the primary, so there is no lease to wait for.
            (S::Following, E::GoneRead(_)) if self.is_in_contact => Ok(self.take_over()),

            // Failures of the channels and of this side.
            (
                S::Seeding,
                E::ConnectionLost
                | E::PeerMisbehaved
                | E::LocalFailure
                | E::UnprotectRead(_)
                | E::GiveRead(_)
                | E::GoneRead(_),
            ) => Ok(self.discard(Because::NothingHeld)),
            (S::Following, E::ConnectionLost | E::PeerMisbehaved) if self.is_in_contact => {
                Ok(self.lose_contact())
            }
            (S::Following, E::LocalFailure) if self.is_in_contact => {
                Ok(self.say_never(Because::LocalFailure))
            }

            // A takeover at the operator's request.
            (S::Seeding, E::TakeOver { .. }) => Err(Refusal::NothingHeld),
            (S::Following, E::TakeOver { is_planned: true, .. }) if !self.is_in_contact => {
                Err(Refusal::NoContact)
            }
            // Checked before the primary stops its guest for it. Without an arbiter the guest would
            // be stopped on both sides.
            (S::Following, E::TakeOver { is_planned: true, is_arbiter_in_reach: false }) => {
                Err(Refusal::ArbiterOutOfReach)
            }
            (S::Following, E::TakeOver { is_planned: true, .. }) => Ok(vec![A::SendHandOver]),
            (S::Following, E::TakeOver { is_planned: false, .. }) => Ok(self.lose_contact()),
            (state, E::TakeOver { .. }) => Err(Refusal::TakeoverUnderWay { state }),

            // The takeover. If nothing was claimed and the primary waits for an answer, *never*
            // lets its guest continue there.
            (S::Preparing, E::Prepared { is_arbiter_in_reach: false })
                if self.is_given && self.is_in_contact =>
            {
                Ok(self.say_never(Because::ArbiterOutOfReach))
            }
            (S::Preparing, E::Prepared { .. }) => Ok(self.ask()),
            // The primary is in contact and has its guest: after *never* the guest continues there.
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

            // Too late: these change nothing. From `Preparing` on no answer is sent, and a
            // checkpoint that arrives now is not the one that is being prepared.
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
                | E::GoneRead(_)
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
        // The primary's lease began when it took the first checkpoint, however old the last echo is
        // by then. A later checkpoint does not extend the lease, because it echoes no further
        // heartbeat.
        if self.state == S::Seeding {
            self.last_echo = Some(now);
        }
        (self.held, self.state) = (number, S::Following);
        // A checkpoint that is complete is kept even without contact, because it is the newest
        // state.
        if self.is_in_contact {
            return Ok(vec![self.answer()]);
        }
        IGNORE
    }

    fn answer(&self) -> A {
        let Self { held, heard: heartbeat, .. } = *self;
        A::SendAnswer(Answer { protection: self.config.protection, held, heartbeat })
    }

    /// Ends contact: no more answers are sent. The patience counts from the last echo.
    fn lose_contact(&mut self) -> Vec<A> {
        self.is_in_contact = false;
        vec![A::CloseChannels]
    }

    fn take_over(&mut self) -> Vec<A> {
        self.state = S::Preparing;
        let mut actions = Vec::new();
        // A primary that has given its guest waits for an answer, so its channels stay open.
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
