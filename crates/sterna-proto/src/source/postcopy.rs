//! Every transition behind the commit of a migration that goes on in postcopy.
//!
//! Once the destination has said that it started the guest, the source never
//! runs it again: what is here is the guest's past. Before that, only the word
//! of a Sterna that it never started it, or an operator's, brings it back.

use super::table::{IGNORE, Step};
use super::{Action as A, Cause, Decision, Event as E, Refusal, Source, State as S};
use crate::Status;
use crate::limits::after;
use std::time::Duration;

impl Source {
    /// The rows that differ from those of a migration without postcopy. Before
    /// the commit there are none.
    pub(super) fn in_postcopy(&mut self, now: Duration, event: E) -> Option<Step> {
        let step = match (self.state, event) {
            // The way forward.
            (S::Committing | S::AwaitingAck, E::DestinationStarted) => {
                self.go(now, S::Postcopy, &[A::SendPages])
            }
            (S::Undecided, E::DestinationStarted) => self.paused(now, Cause::ConnectionLost),
            (S::Postcopy, E::EofSent | E::EofFailed | E::DestinationStarted) => IGNORE,
            (S::Postcopy, E::PagesSent) => {
                self.ledger.pages_sent = true;
                IGNORE
            }
            (S::Postcopy | S::PostcopyPaused | S::Undecided, E::Shut(0)) if self.ledger.pages_sent => {
                self.complete(now)
            }

            // It cannot have all pages: it lies, and may run the guest.
            (S::Committing | S::AwaitingAck, E::Shut(0)) => self.undecided(now, Cause::PeerMisbehaved),
            // A QEMU says so after it has run the guest, too.
            (S::Committing | S::AwaitingAck, E::Shut(code)) if !self.peer.sterna => {
                self.undecided(now, Cause::DestinationFailed(code))
            }
            (S::Undecided, E::Shut(0)) => IGNORE,
            (S::Undecided, E::Shut(_)) if !self.peer.sterna => IGNORE,

            // It was started there: whatever happens, it is not run here.
            (S::Postcopy, E::ConnectionLost) => self.paused(now, Cause::ConnectionLost),
            (S::Postcopy, E::PeerMisbehaved | E::Shut(0) | E::PrepareAcknowledged | E::SwitchoverAck) => {
                self.paused(now, Cause::PeerMisbehaved)
            }
            (S::Postcopy, E::Shut(code)) => self.paused(now, Cause::DestinationFailed(code)),
            (S::Postcopy, E::LocalFailure) => self.paused(now, Cause::LocalFailure),
            (state @ (S::Postcopy | S::PostcopyPaused), E::Cancel) => {
                Err(Refusal::CancelAfterCommit { state })
            }

            // Facts and the operator decide, all else asks again.
            (S::Undecided | S::PostcopyPaused, E::AskAnswered(Status::Committed)) => self.complete(now),
            (S::Undecided, E::AskAnswered(Status::Incomplete)) => self.paused(now, Cause::ConnectionLost),
            (S::PostcopyPaused, E::AskAnswered(_) | E::AskFailed) if self.peer.sterna => {
                self.deadline = after(now, self.config.limits.ask_interval);
                IGNORE
            }
            (S::PostcopyPaused, E::Tick) if self.is_due(now) => {
                self.go(now, S::PostcopyPaused, &[A::AskAgain])
            }
            (S::PostcopyPaused, E::OperatorDecides(Decision::DestinationRuns)) => self.complete(now),
            (S::PostcopyPaused, E::OperatorDecides(Decision::SourceRuns)) => Err(Refusal::RanElsewhere),

            // Too late to matter.
            (
                S::PostcopyPaused,
                E::EofSent
                | E::EofFailed
                | E::DestinationStarted
                | E::PagesSent
                | E::Shut(_)
                | E::PrepareAcknowledged
                | E::SwitchoverAck
                | E::ConnectionLost
                | E::PeerMisbehaved
                | E::LocalFailure
                | E::AskAnswered(_)
                | E::AskFailed,
            ) => IGNORE,
            _ => return None,
        };
        Some(step)
    }

    /// What remains shall follow the guest.
    pub(super) fn switch_to_postcopy(&mut self, now: Duration, guest_running: bool) -> Step {
        if !self.config.postcopy || !self.config.return_path {
            return Err(Refusal::NoPostcopy);
        }
        let actions = self.switch_over(now, guest_running)?;
        self.ledger.postcopy = true;
        Ok(actions)
    }

    fn paused(&mut self, now: Duration, cause: Cause) -> Step {
        let was_closed = self.state == S::Undecided;
        self.enter(now, S::PostcopyPaused);
        let mut actions = Vec::new();
        if !was_closed {
            actions.push(A::CloseChannels);
        }
        actions.push(A::ReportPaused(cause));
        if self.peer.sterna {
            actions.push(A::AskAgain);
        }
        Ok(actions)
    }
}
