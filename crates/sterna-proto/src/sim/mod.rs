//! A seeded simulator of handovers that drives the machines themselves.
//!
//! It simulates everything outside the machines:
//! * time;
//! * two processes with a guest, two exclusive hooks and dirty tracking;
//! * the main connection: an ordered stream in each direction that delays, is cut permanently, or
//!   loses the data under way;
//! * connections of the status question, and connections that replace a lost one.
//!
//! A [`Schedule`] follows from one seed: the pairing (two Sternas, or QEMU as either side), the
//! configuration, and the faults with their places. After every step the simulator checks
//! invariants 1 and 3 of the design. At the end it checks that both sides have ended and agree.
//!
//! [`campaign`] runs many schedules. The first schedule that violates an invariant is reduced to
//! the faults that it needs and returned with its trace. Schedule `i` of a campaign has the seed
//! `seed + i`, so `STERNA_SEED=<its seed> STERNA_SCHEDULES=1` replays it alone.
//!
//! The bugs of [`Planted`] prove that the checks work: the tests plant each bug between a machine
//! and its process, and expect the simulator to find it.

mod blows;
mod check;
mod coverage;
mod destination_side;
mod dials;
mod network;
mod planted;
mod qemu;
mod qemu_state;
mod reconnect;
mod recovery;
mod rng;
mod schedule;
mod source_side;
#[cfg(test)]
mod tests;
mod world;

pub use coverage::{Coverage, Kind};
pub use planted::Planted;
pub use rng::Rng;
pub use schedule::{Blow, Effect, Fault, Micros, Pairing, Place, Schedule};

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
        let seed = self.schedule.seed;
        writeln!(f, "replay: STERNA_SEED={seed} STERNA_SCHEDULES=1")?;
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
        if World::new(&schedule, coverage, false).run().0.is_some() {
            return Err(Box::new(shrink(schedule)));
        }
    }
    Ok(())
}

/// Drops faults, one at a time, as long as an invariant is still violated.
fn shrink(mut schedule: Schedule) -> Failure {
    let mut ignored = Coverage::default();
    let mut index = 0;
    while index < schedule.faults.len() {
        let mut smaller = schedule.clone();
        smaller.faults.remove(index);
        if World::new(&smaller, &mut ignored, false).run().0.is_some() {
            schedule = smaller;
        } else {
            index += 1;
        }
    }
    let (violation, trace) = World::new(&schedule, &mut ignored, true).run();
    Failure { violation: violation.unwrap_or_default(), schedule, trace }
}
