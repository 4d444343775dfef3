//! Counts which states were struck by which kind of fault. Tests use the counts to notice when the
//! simulator no longer reaches a case.

use super::schedule::{Blow, Place};
use crate::{destination, source};
use std::collections::BTreeMap;
use std::fmt;

/// Kinds of blows, as the histogram's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A cut or a reset of the connection.
    Cut,
    /// A cancel at the source, or an abandon at the destination.
    Cancel,
    /// An operator's pause on either side.
    Pause,
    /// A crash of either process.
    Crash,
    /// A local failure, garbage, a stray command.
    Other,
}

impl Kind {
    /// Every kind, in the order of the type.
    pub const ALL: [Self; 5] = [Self::Cut, Self::Cancel, Self::Pause, Self::Crash, Self::Other];

    fn of(blow: Blow) -> Self {
        match blow {
            Blow::CutForward | Blow::CutBack | Blow::CutBoth | Blow::Reset | Blow::CutAsks => Self::Cut,
            Blow::Cancel | Blow::Abandon => Self::Cancel,
            Blow::PauseSource | Blow::PauseDestination => Self::Pause,
            Blow::CrashSource | Blow::CrashDestination | Blow::RestartDestination => Self::Crash,
            _ => Self::Other,
        }
    }
}

/// Counts of visits, blows and results over many schedules.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    visits: BTreeMap<Place, u64>,
    blows: BTreeMap<(Place, Kind), u64>,
    ends: BTreeMap<String, u64>,
    /// Number of schedules that ran.
    pub schedules: u64,
    /// Events that the machines handled.
    pub events: u64,
    /// Schedules in which an unmanaged QEMU source and Sterna's destination both ran the guest. The
    /// documentation states that this pairing does not exclude it.
    pub known_double_runs: u64,
    /// How often a destination with every page lost the connection before the end of the stream.
    pub whole_without_end: u64,
}

impl Coverage {
    /// How often a state was entered.
    #[must_use]
    pub fn visits(&self, place: Place) -> u64 {
        self.visits.get(&place).copied().unwrap_or(0)
    }

    /// How often a state was struck by a kind of blow.
    #[must_use]
    pub fn blows(&self, place: Place, kind: Kind) -> u64 {
        self.blows.get(&(place, kind)).copied().unwrap_or(0)
    }

    /// How often both machines ended in each pair of results.
    #[must_use]
    pub fn ends(&self) -> &BTreeMap<String, u64> {
        &self.ends
    }

    /// States of both machines that a handover can enter, in the order of their types.
    pub fn places() -> impl Iterator<Item = Place> {
        let sources = source::State::ALL.into_iter().filter(|state| !state.is_of_protection());
        let sources = sources.map(Place::Source);
        sources.chain(destination::State::ALL.into_iter().map(Place::Destination))
    }

    pub(super) fn visit(&mut self, place: Place) {
        *self.visits.entry(place).or_default() += 1;
    }

    pub(super) fn strike(&mut self, place: Place, blow: Blow) {
        // An operator's command strikes only the side that gets it.
        let misses = matches!(
            (place, blow),
            (Place::Source(_), Blow::Abandon | Blow::PauseDestination | Blow::LocalDestination)
                | (Place::Destination(_), Blow::Cancel | Blow::PauseSource | Blow::LocalSource)
        );
        if !misses {
            *self.blows.entry((place, Kind::of(blow))).or_default() += 1;
        }
    }

    pub(super) fn end(&mut self, end: String) {
        *self.ends.entry(end).or_default() += 1;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} schedules, {} events", self.schedules, self.events)?;
        write!(f, "{:<28}{:>10}", "state", "entered")?;
        for kind in Kind::ALL {
            write!(f, "{:>10}", format!("{kind:?}"))?;
        }
        writeln!(f)?;
        for place in Self::places() {
            write!(f, "{:<28}{:>10}", format!("{place:?}"), self.visits(place))?;
            for kind in Kind::ALL {
                write!(f, "{:>10}", self.blows(place, kind))?;
            }
            writeln!(f)?;
        }
        writeln!(f, "ends (source / destination):")?;
        for (end, count) in &self.ends {
            writeln!(f, "{end:<40}{count:>10}")?;
        }
        writeln!(f, "whole without the end of the stream: {}", self.whole_without_end)?;
        writeln!(f, "unmanaged QEMU source, both ran (documented): {}", self.known_double_runs)
    }
}
