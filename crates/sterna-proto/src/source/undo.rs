//! The way back: what was done to the guest is undone, last first.
//!
//! Order: wait for an effect that is under way, hooks back, guest resumed if
//! it ran, tracking stopped. A step that fails holds the guest stopped, but
//! the steps after it that do not need it are still done.

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

    /// The destination has the guest.
    pub(super) fn complete(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.enter(now, S::Completed);
        let outcome = Outcome { end: End::Completed, guest: GuestAfter::Given, tracking_left_on: false };
        Ok(vec![A::CloseChannels, A::StopTracking, A::Finish(outcome)])
    }

    /// The operator tries to free a held guest.
    pub(super) fn retry(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.ledger.hold = None;
        let state = match self.ledger.end {
            Some(End::Cancelled) => S::Cancelling,
            _ => S::Failing,
        };
        self.set_out(now, state);
        Ok(self.next_undo(now, Vec::new()))
    }

    /// An event that the undoing may be waiting for; others are late.
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

    /// The connection is lost, and the migration goes on over another one once the guest is as before the switchover.
    pub(super) fn suspend(&mut self, now: Duration) -> Result<Vec<A>, Refusal> {
        self.set_out(now, S::Suspending);
        Ok(self.next_undo(now, vec![A::BreakOff]))
    }

    fn begin_undo(&mut self, now: Duration, state: S, end: End) -> Result<Vec<A>, Refusal> {
        self.ledger.end = Some(end);
        // From Suspending: the tick that it waits for is not due any more.
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

    /// Adds the next step of the way back, or the end of it.
    fn next_undo(&mut self, now: Duration, mut actions: Vec<A>) -> Vec<A> {
        let ledger = &mut self.ledger;
        // Half an effect cannot be taken back: wait for its end.
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

    /// All is as before the switchover; or it is not, and then the migration is over.
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
