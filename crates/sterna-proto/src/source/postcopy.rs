//! Every transition behind the commit of a migration that goes on in postcopy.
//!
//! Once the destination has said that it started the guest, the source never
//! runs it again: what is here is the guest's past. Before that, only the word
//! of a Sterna that it never started it, or an operator's, brings it back.
//!
//! A recovery (PostcopyRecover) begins when nothing of the lost channels is fed
//! any more, so that nothing old can pass for something new.

use super::table::{IGNORE, Step};
use super::{Action as A, Cause, Decision, Event as E, Refusal, Source, State as S};
use crate::Status;
use crate::limits::after;
use std::time::Duration;

/// SHUT of a destination that ends the connection on purpose, and keeps the guest (specs/extension.md §14).
const PAUSED: u32 = 2;
const PAGE_FAILED: u32 = 3;

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

            // Once more, over other channels.
            (S::PostcopyPaused, E::ResumeRequested) if self.ledger.channels_closed => self.recover(now),
            (S::PostcopyPaused, E::ResumeRequested) => {
                self.ledger.resumes = true;
                IGNORE
            }
            (S::PostcopyRecover, E::ResumeAcknowledged) => {
                self.ledger.pages_sent = false;
                self.ledger.recover_until = None;
                self.go(now, S::Postcopy, &[A::SendPages])
            }

            // The last word of a Sterna on purpose, which runs the guest, even if its word of the start did not come.
            (S::Committing | S::AwaitingAck | S::Undecided, E::Shut(code @ (PAUSED | PAGE_FAILED)))
                if self.peer.sterna =>
            {
                self.paused(now, Cause::DestinationFailed(code))
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
            (S::Postcopy | S::PostcopyRecover, E::ConnectionLost) => self.paused(now, Cause::ConnectionLost),
            (
                S::Postcopy | S::PostcopyRecover,
                E::PeerMisbehaved | E::Shut(0) | E::PrepareAcknowledged | E::SwitchoverAck,
            ) => self.paused(now, Cause::PeerMisbehaved),
            (S::Postcopy | S::PostcopyRecover, E::Shut(code)) => {
                self.paused(now, Cause::DestinationFailed(code))
            }
            (S::Postcopy | S::PostcopyRecover, E::LocalFailure) => self.paused(now, Cause::LocalFailure),
            (S::Postcopy | S::PostcopyRecover, E::PauseRequested) => self.paused(now, Cause::OperatorPaused),
            // Until an operator says otherwise this side connects no more by itself.
            (S::PostcopyPaused, E::PauseRequested) if self.ledger.recover_until.take().is_some() => {
                Ok(vec![A::ReportPaused(Cause::OperatorPaused)])
            }
            // The destination's last word on a connection that was noticed to be lost before.
            (S::PostcopyPaused, E::Shut(code)) if code != 0 && self.ledger.recover_until.take().is_some() => {
                Ok(vec![A::ReportPaused(Cause::DestinationFailed(code))])
            }
            (state @ S::PostcopyRecover, E::Tick) if self.is_due(now) => {
                self.paused(now, Cause::TimedOut(state))
            }
            (S::Postcopy, E::Cancel) => Err(Refusal::CancelAfterCommit { state: self.state }),
            (state @ (S::PostcopyPaused | S::PostcopyRecover), E::Cancel) => {
                Err(Refusal::CancelPaused { state })
            }

            // Facts and the operator decide, all else asks again.
            (S::Undecided | S::PostcopyPaused | S::PostcopyRecover, E::AskAnswered(Status::Committed)) => {
                self.complete(now)
            }
            (S::Undecided, E::AskAnswered(Status::Incomplete)) => self.paused(now, Cause::ConnectionLost),
            (S::PostcopyPaused, E::AskAnswered(_) | E::AskFailed) if self.peer.sterna => {
                let limits = &self.config.limits;
                let interval = match self.ledger.recover_until {
                    Some(_) => limits.reconnect_interval,
                    None => limits.ask_interval,
                };
                self.deadline = after(now, interval);
                IGNORE
            }
            (S::PostcopyPaused, E::Tick) if self.is_due(now) => self.tries_again(now),
            (S::PostcopyPaused | S::PostcopyRecover, E::OperatorDecides(Decision::DestinationRuns)) => {
                self.complete(now)
            }
            (S::PostcopyPaused | S::PostcopyRecover, E::OperatorDecides(Decision::SourceRuns)) => {
                Err(Refusal::RanElsewhere)
            }

            // Too late to matter.
            (S::Postcopy, E::AskAnswered(_) | E::AskFailed) => IGNORE,
            (
                S::PostcopyPaused | S::PostcopyRecover,
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

    /// Nothing of the last channels is fed any more.
    pub(super) fn channels_closed(&mut self, now: Duration) -> Step {
        self.ledger.channels_closed = true;
        if self.state == S::PostcopyPaused && self.ledger.resumes { self.recover(now) } else { IGNORE }
    }

    fn recover(&mut self, now: Duration) -> Step {
        self.ledger.resumes = false;
        self.go(now, S::PostcopyRecover, &[A::Recover])
    }

    fn paused(&mut self, now: Duration, cause: Cause) -> Step {
        let before = self.state;
        let tries = self.ledger.recover_until.is_some();
        if before != S::PostcopyRecover {
            let window = self.config.limits.reconnect;
            let may = cause == Cause::ConnectionLost && self.peer.sterna && !window.is_zero();
            self.ledger.recover_until = if may { after(now, window) } else { None };
        } else if !matches!(cause, Cause::ConnectionLost | Cause::TimedOut(_)) {
            // It would end so every time, or is not wanted.
            self.ledger.recover_until = None;
        }
        self.enter(now, S::PostcopyPaused);
        let mut actions = Vec::new();
        if before != S::Undecided {
            self.ledger.channels_closed = false;
            actions.push(A::CloseChannels);
        }
        // An attempt of the source's own that fails is no news.
        if !(before == S::PostcopyRecover && tries && self.ledger.recover_until.is_some()) {
            actions.push(A::ReportPaused(cause));
        }
        if self.peer.sterna {
            actions.push(A::AskAgain);
        }
        Ok(actions)
    }

    /// What is due in a pause: to connect again within the window, to ask behind it.
    fn tries_again(&mut self, now: Duration) -> Step {
        match self.ledger.recover_until {
            Some(until) if now < until && self.ledger.channels_closed => self.recover(now),
            Some(until) if now >= until => {
                self.ledger.recover_until = None;
                let cause = Cause::TimedOut(S::PostcopyPaused);
                self.go(now, S::PostcopyPaused, &[A::ReportPaused(cause), A::AskAgain])
            }
            _ => self.go(now, S::PostcopyPaused, &[A::AskAgain]),
        }
    }
}
