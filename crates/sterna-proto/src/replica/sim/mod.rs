//! A seeded simulator of protections that drives the machines themselves.
//!
//! It owns what the machines do not: time and two clocks that drift, two
//! processes that freeze and die, a guest that says numbered things, the gate,
//! checkpoints that are staged and travel in two parts, an ordered stream in
//! each direction, an arbiter that each side reaches or not, a fence, and an
//! observer that hears what is said. A [`Schedule`] follows from one seed.
//! Half of the schedules protect the survivor again, in the next generation.
//!
//! Checked after every step, absolutely:
//!
//! 1. What the observer has heard is never ahead of the state that survives.
//! 2. Two guests never run at once. A guest of a frozen process counts when
//!    the process wakes, and has a few milliseconds to stop.
//! 3. Once the standby's guest runs, the primary says nothing.
//! 4. The standby starts from a checkpoint that came whole and was consistent.
//! 5. Nothing is said twice by the primary.
//!
//! And at the end: one side has the guest or waits for something that the
//! schedule names; a planned takeover without faults has lost nothing; one for which no
//! arbiter is in reach leaves the guest where it runs.

mod check;
mod coverage;
mod network;
mod planted;
mod primary_side;
mod schedule;
mod standby_side;
mod state;
#[cfg(test)]
mod tests;
mod world;

pub use coverage::Coverage;
pub use planted::Planted;
pub use schedule::{Blow, Effect, Fault, Phase, Place, Schedule};

use state::Lineage;
use std::fmt;
use world::World;

/// A schedule that violated an invariant, shrunk.
#[derive(Debug)]
pub struct Failure {
    /// What it needs.
    pub schedule: Schedule,
    /// What was violated.
    pub violation: String,
    /// What happened, one line an event.
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.violation)?;
        writeln!(f, "replay: STERNA_SEED={} STERNA_SCHEDULES=1", self.schedule.seed)?;
        writeln!(f, "shrunk: {:#?}", self.schedule)?;
        for line in &self.trace {
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

/// Runs the schedules of the seeds from `seed` on, with a bug planted or none.
///
/// # Errors
/// The first schedule that violates an invariant.
pub fn campaign(
    seed: u64,
    schedules: u64,
    planted: Option<Planted>,
    coverage: &mut Coverage,
) -> Result<(), Box<Failure>> {
    for index in 0..schedules {
        let mut schedule = Schedule::from_seed(seed.wrapping_add(index));
        schedule.planted = planted;
        if run(&schedule, coverage, false).0.is_some() {
            return Err(Box::new(shrink(schedule)));
        }
    }
    Ok(())
}

/// One generation after the other. The first violation, and the trace.
fn run(schedule: &Schedule, coverage: &mut Coverage, traced: bool) -> (Option<String>, Vec<String>) {
    coverage.schedules += 1;
    let (mut lineage, mut trace) = (Lineage::default(), Vec::new());
    for (number, phase) in schedule.phases.iter().enumerate() {
        let world = World::new(schedule, phase, number as u64 + 1, lineage, coverage, traced);
        let end = world.run();
        trace.extend(end.trace);
        if end.violation.is_some() {
            return (end.violation, trace);
        }
        match end.survivor {
            Some(survivor) => lineage = survivor,
            None => break,
        }
    }
    (None, trace)
}

/// Drops faults, one at a time, while an invariant is still violated.
fn shrink(mut schedule: Schedule) -> Failure {
    let mut ignored = Coverage::default();
    for phase in (0..schedule.phases.len()).rev() {
        let mut index = 0;
        while index < schedule.phases[phase].faults.len() {
            let mut smaller = schedule.clone();
            smaller.phases[phase].faults.remove(index);
            if run(&smaller, &mut ignored, false).0.is_some() {
                schedule = smaller;
            } else {
                index += 1;
            }
        }
    }
    let (violation, trace) = run(&schedule, &mut ignored, true);
    Failure { violation: violation.unwrap_or_default(), schedule, trace }
}
