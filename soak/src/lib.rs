//! The soak: migrations that are cancelled, cut off or killed in every state, or whose callbacks panic there, and what they
//! leave behind.
//!
//! A case is a [`Stop`] and a [`Blow`]. Two VMs of the process guest migrate over a network that is a
//! proxy of this process. Whatever the engine calls (observers, hooks, devices, the dirty log) passes a
//! [`stage`], where the migration stands still in a known state of both handover machines; there the blow
//! falls. A side that is to be killed lives in a process of its own ([`child`]).
//!
//! Each case is judged ([`judge`]): exactly one side may run the guest (a killed one is gone; an undecided
//! one runs it nowhere until it is told), its memory is one consistent cut, its devices with large state are whole
//! and run with it, its lease is where it runs, cancels after the commit were refused, the next migration works, and no descriptor, thread or
//! mapping is left. Over all cases resident memory must not grow.
#![forbid(unsafe_code)]

mod bank;
mod case;
pub mod child;
pub mod colo;
pub mod drift;
mod judge;
mod leaks;
mod ledger;
mod mappings;
mod network;
pub mod outages;
mod panics;
pub mod rdma;
mod report;
pub mod round_trips;
mod schedule;
mod settings;
pub mod stage;
mod staged;
mod stop;
mod strangers;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub use report::Report;
pub use schedule::{Blow, Case, schedule, silences};
pub use stop::Stop;

/// A soak to be run.
pub struct Soak {
    /// The program that plays sides that are killed: this crate's binary.
    pub program: PathBuf,
    /// The cases.
    pub cases: Vec<Case>,
    /// Ends the soak after the running case.
    pub interrupted: Arc<AtomicBool>,
}

impl Soak {
    /// Plays every case, one after the other; `tell` hears of each.
    pub fn run(&self, mut tell: impl FnMut(&Case, &Result<(), String>)) -> Report {
        let mut report = Report::of(self.cases.len() as u64);
        // What a process opens once and keeps (/proc/self/pagemap) is open before anything is counted.
        if let Err(why) = round_trips::run(1, 0, |_, _| {}) {
            tracing::error!(why, "a migration that nobody disturbs");
        }
        let began = Instant::now();
        for case in &self.cases {
            let result = case::run(*case, &self.program);
            if self.interrupted.load(Ordering::SeqCst) {
                report.interrupted = true;
                break;
            }
            tell(case, &result);
            report.add(*case, result);
            report.drift.played();
        }
        report.took = began.elapsed();
        report.drift.end(drift::LIMIT);
        report
    }
}
