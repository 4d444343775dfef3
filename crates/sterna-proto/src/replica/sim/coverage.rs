//! Counts which states were entered and struck. Tests use the counts to notice when the simulator
//! no longer reaches a case.

use super::schedule::{Blow, Place};
use std::collections::BTreeMap;
use std::fmt;

/// Counts of visits, blows and results over many schedules.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    visits: BTreeMap<Place, u64>,
    blows: BTreeMap<Place, u64>,
    /// Number of schedules that ran.
    pub schedules: u64,
    /// Events that the machines handled.
    pub events: u64,
    /// Planned takeovers without a disturbance.
    pub quiet_handovers: u64,
    /// Requests for a planned takeover without a disturbance, but also without an arbiter in reach.
    pub quiet_refusals: u64,
}

impl Coverage {
    /// How often a state was entered.
    #[must_use]
    pub fn visits(&self, place: Place) -> u64 {
        self.visits.get(&place).copied().unwrap_or(0)
    }

    /// How often a state was struck.
    #[must_use]
    pub fn blows(&self, place: Place) -> u64 {
        self.blows.get(&place).copied().unwrap_or(0)
    }

    pub(super) fn visit(&mut self, place: Place) {
        *self.visits.entry(place).or_default() += 1;
    }

    pub(super) fn strike(&mut self, place: Place, _: Blow) {
        *self.blows.entry(place).or_default() += 1;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} schedules, {} events, {} planned takeovers in quiet, {} without an arbiter",
            self.schedules, self.events, self.quiet_handovers, self.quiet_refusals
        )?;
        for (place, visits) in &self.visits {
            writeln!(f, "{place:?}: entered {visits}, struck {}", self.blows(*place))?;
        }
        Ok(())
    }
}
