//! Every transition after the commit of a migration that continues in postcopy.
//!
//! Once the destination has reported the start of the guest, the source never runs it again,
//! because the copy here is out of date. Before that report, the guest returns to the source in two
//! cases only. Either a Sterna destination declares that it never started the guest, or an operator
//! decides it.
//!
//! An operator's decision for the destination is final: a later *never* does not revoke it, because
//! the operator may have started the guest elsewhere. The decision leads from Undecided to
//! PostcopyPaused, and only a second one there gives up the pages that the destination lacks.
//!
//! A recovery (PostcopyRecover) begins when the lost channels are closed and the engine feeds no
//! event of theirs any more. Otherwise an old event could be taken for one of the new channels.

use super::table::{IGNORE, Step};
use super::{Action as A, Cause, Decision, Event as E, Refusal, Source, State as S};
use crate::Status;
use crate::limits::after;
use std::time::Duration;

/// Value of SHUT: the destination ends the connection on purpose and keeps the guest.
///
/// specs/extension.md §14 defines it.
const PAUSED: u32 = 2;
const PAGE_FAILED: u32 = 3;

impl Source {
    /// The transitions that differ from a migration without postcopy.
    ///
    /// Before the commit there are none: `None` is returned.
    pub(super) fn in_postcopy(&mut self, now: Duration, event: E) -> Option<Step> {
        let step = match (self.state, event) {
            // Progress without failures.
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

            // Another attempt, over new channels.
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

            // A Sterna sends these values only if it runs the guest, even if its report of the
            // start was lost.
            (S::Committing | S::AwaitingAck | S::Undecided, E::Shut(code @ (PAUSED | PAGE_FAILED)))
                if self.peer.sterna =>
            {
                self.paused(now, Cause::DestinationFailed(code))
            }

            // SHUT 0 is false here, because the destination cannot have all pages. It may run the
            // guest.
            (S::Committing | S::AwaitingAck, E::Shut(0)) => self.undecided(now, Cause::PeerMisbehaved),
            // A QEMU sends this value even after it has run the guest, so the value decides
            // nothing.
            (S::Committing | S::AwaitingAck, E::Shut(code)) if !self.peer.sterna => {
                self.undecided(now, Cause::DestinationFailed(code))
            }
            (S::Undecided, E::Shut(0)) => IGNORE,
            (S::Undecided, E::Shut(_)) if !self.peer.sterna => IGNORE,

            // The guest was started at the destination. From here on it never runs at the source.
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
            // The source reconnects no more by itself until an operator requests `resume`.
            (S::PostcopyPaused, E::PauseRequested) if self.ledger.recover_until.take().is_some() => {
                Ok(vec![A::ReportPaused(Cause::OperatorPaused)])
            }
            // The destination's final SHUT, on a connection whose loss was noticed before.
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

            // Facts and the operator decide. Every other answer leads to another question.
            (S::Undecided | S::PostcopyPaused | S::PostcopyRecover, E::AskAnswered(Status::Committed)) => {
                self.complete(now)
            }
            // No page list was sent to its end before the report of the start. The destination
            // therefore lacks pages, and only this side has them.
            (
                S::Undecided,
                E::AskAnswered(Status::Incomplete) | E::OperatorDecides(Decision::DestinationRuns),
            ) => self.paused(now, Cause::ConnectionLost),
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

            // Too late: these change nothing any more.
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

    /// Switches over while memory remains: the source sends the remaining pages after the guest has
    /// moved.
    pub(super) fn switch_to_postcopy(&mut self, now: Duration, guest_running: bool) -> Step {
        if !self.config.postcopy || !self.config.return_path {
            return Err(Refusal::NoPostcopy);
        }
        let actions = self.switch_over(now, guest_running)?;
        self.ledger.postcopy = true;
        Ok(actions)
    }

    /// The engine feeds no event of the last channels any more: a requested recovery can start.
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
            // The next attempt would fail for the same reason, or the operator does not want it.
            self.ledger.recover_until = None;
        }
        self.enter(now, S::PostcopyPaused);
        let mut actions = Vec::new();
        if before != S::Undecided {
            self.ledger.channels_closed = false;
            actions.push(A::CloseChannels);
        }
        // A failed attempt that the source made by itself is not reported to the operator.
        if !(before == S::PostcopyRecover && tries && self.ledger.recover_until.is_some()) {
            actions.push(A::ReportPaused(cause));
        }
        if self.peer.sterna {
            actions.push(A::AskAgain);
        }
        Ok(actions)
    }

    /// Handles a tick in a pause: reconnects within the window, and asks after it.
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
