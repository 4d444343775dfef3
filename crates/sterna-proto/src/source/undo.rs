//! The way back: undoes the migration's effects on the guest, the last effect first.
//!
//! Order: wait for an action that has not ended, re-acquire the hooks, resume the guest if it ran,
//! stop tracking. If a step fails, the guest stays stopped. The later steps that do not need the
//! failed one are still done.

use super::ledger::{Guest, Hooks};
use super::{Action as A, Cause, End, Event as E, GuestAfter, Hold, Outcome};
use super::{Refusal, Source, State as S};
use crate::limits::after;
use std::time::Duration;

impl Source {
    pub(super) fn cancel(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.begin_undo(now, S::Cancelling, End::Cancelled)
    }

    pub(super) fn fail(&mut self, now: Duration, cause: Cause) -> Result<Vec<A>, Refusal> {
        self.begin_undo(now, S::Failing, End::Failed(cause))
    }

    /// Ends the migration: the destination has the guest.
    pub(super) fn complete(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.enter(now, S::Completed);
        let outcome = Outcome { end: End::Completed, guest: GuestAfter::Given, tracking_left_on: false };
        Ok(vec![A::CloseChannels, A::StopTracking, A::Finish(outcome)])
    }

    /// Retries the failed steps for a held guest at the operator's request.
    pub(super) fn retry(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.ledger.hold = None;
        let state = match self.ledger.end {
            Some(End::Cancelled) => S::Cancelling,
            _ => S::Failing,
        };
        self.set_out(now, state);
        Ok(self.next_undo(now, Vec::new()))
    }

    /// Handles an event that the undoing may be waiting for; other events are late.
    pub(super) fn undo_event(&mut self, now: Duration, event: E) -> Result<Vec<A>, Refusal> {
        let ledger = &mut self.ledger;
        match (ledger.guest, ledger.hooks, event) {
            (Guest::Stopping, _, E::GuestStopped { was_running }) => {
                ledger.guest = Guest::Stopped { was_running };
            }
            (Guest::Stopping, _, E::GuestStopFailed) => ledger.guest = Guest::Free,
            (_, Hooks::Releasing, E::HooksReleased | E::HookReleaseFailed) => {
                ledger.hooks = Hooks::Released;
            }
            (_, Hooks::Reacquiring, E::HooksReacquired) => ledger.hooks = Hooks::Acquired,
            (_, Hooks::Reacquiring, E::HooksReacquireFailed) => {
                if ledger.reacquire_until.is_none_or(|until| now < until) {
                    ledger.hooks = Hooks::Retrying;
                    self.deadline = after(now, self.config.limits.reacquire_interval);
                    return Ok(Vec::new());
                }
                ledger.hooks = Hooks::Released;
                ledger.hold = Some(Hold::Hooks);
            }
            (_, Hooks::Retrying, E::Tick) if self.deadline.is_some_and(|at| now >= at) => {
                ledger.hooks = Hooks::Released;
                self.deadline = None;
            }
            (Guest::Resuming, _, E::GuestResumed) => ledger.guest = Guest::Free,
            (Guest::Resuming, _, E::GuestResumeFailed) => {
                ledger.guest = Guest::Stopped { was_running: true };
                ledger.hold = Some(Hold::Resume);
            }
            (_, _, E::TrackingStopped) if ledger.untracking => ledger.tracking = false,
            (_, _, E::TrackingStopFailed) if ledger.untracking => {
                ledger.tracking = false;
                ledger.tracking_left_on = true;
            }
            _ => return Ok(Vec::new()),
        }
        Ok(self.next_undo(now, Vec::new()))
    }

    /// Begins the undoing after a lost connection; the migration continues over another one
    /// afterwards.
    pub(super) fn suspend(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.set_out(now, S::Suspending);
        Ok(self.next_undo(now, vec![A::BreakOff]))
    }

    fn begin_undo(&mut self, now: Duration, state: S, end: End) -> Result<Vec<A>, Refusal> {
        self.ledger.end = Some(end);
        // In Suspending, a retry may have been planned for a tick. That tick is no longer due.
        if self.ledger.hooks == Hooks::Retrying {
            self.ledger.hooks = Hooks::Released;
        }
        self.set_out(now, state);
        Ok(self.next_undo(now, vec![A::CloseChannels]))
    }

    fn set_out(&mut self, now: Duration, state: S) {
        self.enter(now, state);
        self.ledger.reacquire_until = after(now, self.config.limits.reacquire);
    }

    /// Adds the next step of the undoing, or the end of the migration.
    fn next_undo(&mut self, now: Duration, mut actions: Vec<A>) -> Vec<A> {
        let ledger = &mut self.ledger;
        // Half an effect cannot be taken back: wait for the end of the action.
        let under_way = matches!(ledger.guest, Guest::Stopping | Guest::Resuming)
            || matches!(ledger.hooks, Hooks::Releasing | Hooks::Reacquiring | Hooks::Retrying);
        if under_way {
            return actions;
        }
        if ledger.hold.is_none() {
            if ledger.hooks == Hooks::Released {
                ledger.hooks = Hooks::Reacquiring;
                actions.push(A::ReacquireHooks);
                return actions;
            }
            match ledger.guest {
                Guest::Stopped { was_running: true } => {
                    ledger.guest = Guest::Resuming;
                    actions.push(A::ResumeGuest);
                    return actions;
                }
                _ => ledger.guest = Guest::Free,
            }
        }
        if self.state == S::Suspending {
            return self.next_connection(now, actions);
        }
        if ledger.tracking {
            if !ledger.untracking {
                ledger.untracking = true;
                actions.push(A::StopTracking);
            }
            return actions;
        }
        self.finish(actions)
    }

    /// Reconnects after a complete undoing. After an incomplete one, ends the migration.
    fn next_connection(&mut self, now: Duration, mut actions: Vec<A>) -> Vec<A> {
        if self.ledger.hold.is_some() {
            self.ledger.end = Some(End::Failed(Cause::ConnectionLost));
            self.enter(now, S::Failing);
            return self.next_undo(now, actions);
        }
        self.enter(now, S::Reconnecting);
        self.ledger.reconnect_until = after(now, self.config.limits.reconnect);
        self.deadline = self.ledger.reconnect_until;
        actions.push(A::Reconnect);
        actions
    }

    fn finish(&mut self, mut actions: Vec<A>) -> Vec<A> {
        let ledger = &self.ledger;
        let end = ledger.end.unwrap_or(End::Cancelled);
        self.state = match (ledger.hold, end) {
            (Some(_), _) => S::Held,
            (None, End::Cancelled) => S::Cancelled,
            (None, _) => S::Failed,
        };
        self.deadline = None;
        actions.push(A::Finish(Outcome {
            end,
            guest: ledger.hold.map_or(GuestAfter::AsBefore, GuestAfter::HeldStopped),
            tracking_left_on: ledger.tracking_left_on,
        }));
        actions
    }
}
