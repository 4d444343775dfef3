//! Invariants that are checked after every step, and at the end.

use super::schedule::{Blow, Fault};
use super::state::{Lineage, Side};
use super::world::World;
use crate::replica::{primary, standby};
use crate::sim::Micros;

/// Time that a process has after it wakes to stop its guest, in microseconds.
const GRACE: Micros = 10_000;

impl World<'_> {
    /// Handles output that the primary's side releases to the outside.
    pub(super) fn primary_says(&mut self, number: u64) {
        if self.facts.standby_started {
            self.violate("invariant 3: the primary speaks after the standby's guest has started");
        }
        if number <= self.facts.said_by_primary {
            self.violate("invariant 5: the primary says something twice, or out of order");
        }
        self.facts.said_by_primary = number;
        self.facts.heard = self.facts.heard.max(number);
    }

    pub(super) fn check_step(&mut self) {
        let wakes = self.now < self.primary.frozen_until + GRACE && self.primary.frozen_until > 0;
        let is_counted = self.phase.is_qemu || !wakes;
        if is_counted && self.primary.guest.runs() && self.standby.guest.runs() {
            self.violate("invariant 2: two guests run");
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        let primary = &self.primary;
        let standby = &self.standby;
        if self.now < primary.frozen_until.max(standby.frozen_until) {
            return false;
        }
        let is_over = |is_alive: bool, is_final: bool, is_idle: bool| !is_alive || (is_final && is_idle);
        is_over(primary.is_alive, primary.outcome.is_some(), primary.is_idle())
            && is_over(standby.is_alive, standby.outcome.is_some(), standby.is_idle())
    }

    pub(super) fn survivor(&self) -> Option<Lineage> {
        let heard = self.facts.heard;
        [self.primary.guest, self.standby.guest]
            .into_iter()
            .find(|guest| guest.runs())
            .map(|guest| Lineage { state: guest.state, heard })
    }

    pub(super) fn check_end(&mut self) {
        self.check_primary_end();
        self.check_standby_end();
        if self.survivor().is_none() && !self.is_loss_excused() {
            self.violate("liveness: neither side has the guest");
        }
        self.check_planned();
    }

    fn check_primary_end(&mut self) {
        if !self.primary.is_alive {
            return;
        }
        let state = self.primary.machine.state();
        let waits = state == primary::State::Asking && self.phase.is_without_arbiter[Side::Primary as usize];
        if !state.is_final() && !waits {
            self.violate(&format!("liveness: the primary does not end: {state:?}"));
        }
        if state.is_final() && self.primary.outcome.is_none() {
            self.violate("liveness: the primary ended without an outcome");
        }
        if matches!(state, primary::State::Alone | primary::State::Failed) {
            if !self.primary.guest.runs() {
                self.violate("liveness: the primary is alone, and its guest stands");
            }
            if !self.primary.gate.is_empty() {
                self.violate("liveness: the primary is alone, and something waits in the gate");
            }
        }
    }

    fn check_standby_end(&mut self) {
        if !self.standby.is_alive {
            return;
        }
        let state = self.standby.machine.state();
        let waits =
            state == standby::State::Claiming && self.phase.is_without_arbiter[Side::Standby as usize];
        if !state.is_final() && !waits {
            self.violate(&format!("liveness: the standby does not end: {state:?}"));
        }
        if state.is_final() && self.standby.outcome.is_none() {
            self.violate("liveness: the standby ended without an outcome");
        }
    }

    /// Whether a loss of the guest is expected. Expected cases: both sides are gone; one waits for
    /// an arbiter that the schedule blocks; the winner of the claim died.
    fn is_loss_excused(&self) -> bool {
        let (primary, standby) = (&self.primary, &self.standby);
        let waits = [primary.machine.state() == primary::State::Asking && primary.is_alive, {
            standby.machine.state() == standby::State::Claiming && standby.is_alive
        }];
        let is_discarded = standby.machine.state() == standby::State::Discarded;
        waits.contains(&true)
            || ((!primary.is_alive || primary.guest_has_ended) && (!standby.is_alive || is_discarded))
            || (!standby.is_alive && self.arbiter == Some(Side::Standby))
    }

    /// Checks that an undisturbed planned takeover loses nothing. Without an arbiter it must not
    /// begin, or must be taken back.
    fn check_planned(&mut self) {
        let is_planned = |fault: &Fault| {
            let Fault::At { blow, .. } = fault else { return false };
            matches!(blow, Blow::HandOver | Blow::TakeOver { is_planned: true })
        };
        let is_quiet =
            !self.phase.is_slow && !self.phase.is_loaded && self.phase.faults.iter().all(is_planned);
        if is_quiet && self.phase.is_without_arbiter == [true; 2] {
            self.coverage.quiet_refusals += u64::from(self.phase.faults.iter().any(is_planned));
            if !self.primary.guest.runs() {
                self.violate(
                    "invariant: a planned takeover without an arbiter has stopped the guest permanently",
                );
            }
        }
        if self.primary.outcome != Some(primary::Outcome::HandedOver) || !is_quiet {
            return;
        }
        self.coverage.quiet_handovers += 1;
        if !self.primary.gate.is_empty() {
            self.violate("invariant: a planned takeover has lost what waited in the gate");
        }
        if self.facts.standby_started && self.standby.guest.state < self.facts.said_by_primary {
            self.violate("invariant: a planned takeover has lost the guest's last steps");
        }
    }
}
