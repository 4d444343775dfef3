//! The soak: migrations that are cancelled, cut off or killed in every state, or whose callbacks panic there.
//! It checks the guest and the resources that remain.
//!
//! A case is a [`Stop`] and a [`Blow`]. Two VMs of the process guest migrate over a network that is a proxy
//! of this process. All calls of the engine (observers, hooks, devices, the dirty log) pass a [`stage`].
//! There the migration waits in a known state of both handover machines while the blow is applied. A side
//! that is to be killed lives in a process of its own ([`child`]).
//!
//! The judge (`judge.rs`) checks each case:
//!
//! - Exactly one side may run the guest. A killed guest is gone. An undecided guest runs on neither side
//!   until a decision.
//! - Its memory is one consistent cut.
//! - Its devices with large state are whole and run with it.
//! - Its lease is held by the side that runs it.
//! - Cancels after the commit were refused.
//! - The next migration works.
//! - No descriptor, thread or mapping is left.
//!
//! Over all cases, resident memory must not grow.
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

/// A soak that is ready to run.
pub struct Soak {
    /// The program for sides that are killed: this crate's binary.
    pub program: PathBuf,
    /// The cases, in their order.
    pub cases: Vec<Case>,
    /// Ends the soak after the current case.
    pub interrupted: Arc<AtomicBool>,
}

impl Soak {
    /// Plays all cases in order. `tell` is called after each.
    pub fn run(&self, mut tell: impl FnMut(&Case, &Result<(), String>)) -> Report {
        let mut report = Report::of(self.cases.len() as u64);
        // A first migration opens everything that a process opens once and keeps (/proc/self/pagemap) before
        // resources are counted.
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
