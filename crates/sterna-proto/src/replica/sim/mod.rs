//! A seeded simulator of protections that drives the machines themselves.
//!
//! It simulates everything outside the machines:
//! * time, and two clocks that drift;
//! * two processes that freeze and die;
//! * a guest that outputs consecutive numbers, and the gate;
//! * checkpoints that are staged and travel in two parts;
//! * an ordered stream in each direction;
//! * an arbiter that each side can or cannot reach, and a fence;
//! * an observer that receives the released output.
//!
//! A [`Schedule`] follows from one seed. Half of the schedules protect the surviving guest again,
//! in the next generation.
//!
//! Checked after every step:
//!
//! 1. The output that the observer has received is never newer than the state that survives.
//! 2. Two guests never run at the same time. A guest of a frozen process counts when the process
//!    wakes, and has a few milliseconds to stop.
//! 3. Once the standby's guest runs, the primary releases no output.
//! 4. The standby starts from a checkpoint that arrived complete and was consistent.
//! 5. The primary releases no output twice.
//!
//! Checked at the end: one side has the guest, or waits for a resource that the schedule blocks. A
//! planned takeover without faults has lost nothing. A planned takeover without an arbiter in reach
//! leaves the guest where it runs.

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

/// A schedule that violated an invariant, reduced to the necessary faults.
#[derive(Debug)]
pub struct Failure {
    /// The schedule with only the necessary faults.
    pub schedule: Schedule,
    /// The violated invariant, as text.
    pub violation: String,
    /// The events of the run, one per line.
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

/// Runs schedules with consecutive seeds from `seed` on, with or without a planted bug.
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

/// Runs one generation after the other; returns the first violation and the trace.
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

/// Drops faults, one at a time, as long as an invariant is still violated.
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
