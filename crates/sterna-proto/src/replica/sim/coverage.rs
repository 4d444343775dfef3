//! Which states were entered and struck, so that the simulator cannot silently
//! go blind.

use super::schedule::{Blow, Place};
use std::collections::BTreeMap;
use std::fmt;

/// Counts over many schedules.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    visits: BTreeMap<Place, u64>,
    blows: BTreeMap<Place, u64>,
    /// Schedules that ran.
    pub schedules: u64,
    /// Events that were handled.
    pub events: u64,
    /// Planned takeovers that nothing disturbed.
    pub quiet_handovers: u64,
    /// Wishes for a planned takeover that nothing disturbed, and for which no arbiter was in reach.
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
