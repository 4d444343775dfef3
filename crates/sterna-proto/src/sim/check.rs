//! Invariants that are checked after every step, and at the end of a schedule.

use super::qemu_state::Stage;
use super::recovery::ALL;
use super::schedule::{Effect, Pairing};
use super::world::{Owner, World};
use crate::destination::State as D;
use crate::source::{Decision, GuestAfter, Hold, Outcome, State as S};

impl World<'_> {
    /// Checks invariant 1 after every step.
    pub(super) fn check_step(&mut self) {
        let unmanaged = matches!(self.schedule.pairing, Pairing::FromQemu { managed: false, .. });
        if self.source.running && self.destination.running {
            if unmanaged {
                // Documented as not guaranteed for this pairing: the case is counted, not reported.
                if !std::mem::replace(&mut self.facts.double_run, true) {
                    self.coverage.known_double_runs += 1;
                }
            } else {
                self.violate("invariant 1: the guest runs on both sides");
            }
        }
        let (source, destination) = (&self.source, &self.destination);
        if let (Some(source), Some(destination)) = (&source.machine, &destination.machine) {
            let alive = self.source.alive && self.destination.alive;
            if alive && source.may_guest_run() && destination.may_guest_run() {
                self.violate("invariant 1: both machines would let the guest run");
            }
        }
        if let Some(machine) = &self.source.machine
            && self.source.running
        {
            if !machine.may_guest_run() && !machine_is_stopping_or_resuming(machine.state()) {
                self.violate("invariant 1: the source's guest runs against its machine's word");
            }
            if !self.holds_all(Owner::Source) {
                self.violate("invariant 1: the source's guest runs without its hooks");
            }
        }
        let is_suspended = self.destination_state() == Some(D::Suspended) && self.destination.alive;
        if is_suspended && self.locks_some(Owner::Destination) {
            self.violate("invariant 3: the destination waits for its source and keeps hooks");
        }
        if self.destination.running && !self.holds_all(Owner::Destination) {
            self.violate("invariant 1: the destination's guest runs without its hooks");
        }
    }

    /// Checks invariant 3 when the source's machine ends.
    pub(super) fn check_source_outcome(&mut self, outcome: Outcome) {
        let running = self.source.running;
        match outcome.guest {
            GuestAfter::AsBefore => {
                if running != self.schedule.was_running {
                    self.violate("invariant 3: the source's guest is not as it was");
                }
                if !self.holds_all(Owner::Source) {
                    self.violate("invariant 3: the source misses hooks");
                }
            }
            GuestAfter::Given if running => {
                self.violate("invariant 1: the source gave away a guest that runs");
            }
            GuestAfter::Given => {}
            GuestAfter::HeldStopped(why) => {
                let reason = match why {
                    Hold::Hooks => self.plans_failure(Effect::Reacquire) || self.facts.give_back_failed,
                    Hold::Resume => self.plans_failure(Effect::Resume),
                };
                if !reason {
                    self.violate("invariant 3: the source's guest is held for no reason");
                }
                if running {
                    self.violate("invariant 3: a guest said to be held runs");
                }
            }
        }
        let given = outcome.guest == GuestAfter::Given;
        if !given && self.facts.tracking && !outcome.tracking_left_on {
            self.violate("invariant 3: dirty tracking was left on");
        }
        if outcome.tracking_left_on && !self.plans_failure(Effect::Untrack) {
            self.violate("invariant 3: dirty tracking was left on for no reason");
        }
    }

    /// Checks at the end that both sides have ended and where the guest is.
    pub(super) fn check_end(&mut self) {
        let source = self.source_state().filter(|_| self.source.alive);
        let destination = self.destination_state().filter(|_| self.destination.alive);
        if let Some(state) = source {
            self.check_source_end(state);
        }
        if let Some(state) = destination {
            self.check_destination_end(state);
        }
        if let (Some(source), Some(destination)) = (source, destination) {
            self.check_both(source, destination);
        }
        if source.is_none() && self.source.alive {
            self.check_qemu_source();
        }
        let quiet =
            self.schedule.faults.is_empty() && !self.schedule.slow_network && !self.schedule.slow_local;
        if quiet && source.is_some_and(|state| state != S::Completed) {
            self.violate("liveness: nothing went wrong and the migration did not complete");
        }
        let name = |state: Option<String>| state.unwrap_or_else(|| "-".into());
        let end = format!(
            "{} / {}",
            name(source.map(|s| format!("{s:?}"))),
            name(destination.map(|s| format!("{s:?}")))
        );
        self.coverage.end(end);
    }

    fn check_source_end(&mut self, state: S) {
        let asks =
            self.schedule.pairing == Pairing::Sternas && self.schedule.questions && self.destination.alive;
        match state {
            S::Undecided if asks => {
                self.violate("liveness: undecided although the destination can be asked");
            }
            S::Undecided if self.schedule.operator_decides => {
                self.violate("liveness: undecided although the operator decided");
            }
            S::Completed => {
                let told = self.facts.committed;
                let decided = match self.schedule.postcopy {
                    true => self.facts.pages_given_up,
                    false => self.facts.decided == Some(Decision::DestinationRuns),
                };
                let weak = self.schedule.pairing == Pairing::ToQemu { return_path: false };
                if !told && !decided && !weak {
                    self.violate("invariant 1: the source gave the guest up for nothing");
                }
            }
            S::PostcopyPaused if self.schedule.operator_decides => {
                self.violate("liveness: paused in postcopy although the operator decided");
            }
            S::PostcopyPaused | S::Undecided | S::Held | S::Cancelled | S::Failed => {}
            _ => self.violate("liveness: the source does not end"),
        }
        let over = state.is_final() || state == S::Held;
        if over && self.facts.source_outcome.is_none() {
            self.violate("liveness: the source ended without an outcome");
        }
        if self.source.open {
            self.violate("invariant 3: the source left its channels open");
        }
    }

    fn check_destination_end(&mut self, state: D) {
        match state {
            D::Failed => {
                let held = self.locks_some(Owner::Destination);
                if held && !self.facts.give_back_failed {
                    self.violate("invariant 3: the failed destination kept hooks");
                }
                if self.facts.memory_used {
                    self.violate("invariant 3: the failed destination kept memory");
                }
                if self.destination.running {
                    self.violate("invariant 1: the failed destination runs the guest");
                }
            }
            D::Running if !self.destination.running => {
                self.violate("invariant 1: the destination's guest does not run");
            }
            // A guest that could not be started after the source was informed waits for an
            // operator.
            D::Paused if self.facts.run_out && self.plans_failure(Effect::Start) => {}
            D::Paused if self.schedule.was_running && self.schedule.autostart => {
                self.violate("invariant 1: the destination's guest was left paused");
            }
            D::Running | D::Paused if self.facts.run_out && self.facts.placed != ALL => {
                self.violate("invariant 2: the destination is done with postcopy, and a page is missing");
            }
            D::Running | D::Paused => {}
            D::PostcopyPaused if self.facts.placed == ALL => {
                self.violate("liveness: the destination waits for pages and has all");
            }
            D::PostcopyPaused => {}
            D::Held => {
                let stuck = self.plans_failure(Effect::Start)
                    || self.plans_failure(Effect::Acquire)
                    || !self.source.alive;
                let is_final = self.schedule.pairing != Pairing::Sternas || self.facts.written;
                if !is_final || !stuck {
                    self.violate("liveness: the destination holds the guest for no reason");
                }
            }
            _ => self.violate("liveness: the destination does not end"),
        }
        let over = state.is_final();
        if over && self.facts.destination_outcome.is_none() {
            self.violate("liveness: the destination ended without an outcome");
        }
        if self.destination.open {
            self.violate("invariant 3: the destination left its channels open");
        }
    }

    /// Checks that two living Sternas agree on which side has the guest.
    fn check_both(&mut self, source: S, destination: D) {
        let here = matches!(source, S::Cancelled | S::Failed | S::Held);
        // Held, or discarded by an operator, after its memory was written there.
        let is_kept = self.facts.written && matches!(destination, D::Held | D::Failed);
        let there = matches!(destination, D::Running | D::Paused) || is_kept;
        let completed = source == S::Completed;
        if destination == D::PostcopyPaused {
            let given_up = completed && self.facts.pages_given_up;
            if source != S::PostcopyPaused && !given_up {
                self.violate("invariant 1: pages are missing, and the source does not keep them");
            }
            return;
        }
        if here == there || completed != there {
            self.violate("invariant 1: the sides do not agree on who has the guest");
        }
    }

    /// Checks that the outcome of a completed QEMU source with return path is true.
    fn check_qemu_source(&mut self) {
        let return_path = matches!(self.schedule.pairing, Pairing::FromQemu { return_path: true, .. });
        let lost =
            self.destination.alive && self.destination_state() == Some(D::Failed) && !self.facts.abandoned;
        if return_path && lost && self.source.qemu.stage == Stage::Completed {
            self.violate("invariant 1: a QEMU source completed and the guest is gone");
        }
    }
}

/// Whether the guest may change before the machine, between an action and its report.
fn machine_is_stopping_or_resuming(state: S) -> bool {
    matches!(state, S::Stopping | S::Suspending | S::Cancelling | S::Failing)
}
