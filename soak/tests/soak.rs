//! A sample of the soak; `cargo xtask soak` plays all of it. This binary has one test, because the test
//! counts the resources of the process.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use sterna_soak::{Soak, Stop, schedule, silences};

/// Stops at which the network is silent in the sample. The sample waits for each time limit once.
const SILENT: [Stop; 7] = [
    Stop::Setup,
    Stop::Identifying,
    Stop::FirstPass,
    Stop::Devices,
    Stop::BeforeCommit,
    Stop::AfterCommit,
    Stop::AwaitingAck,
];

#[test]
fn migrations_disturbed_at_every_stop_leave_one_guest_and_nothing_behind() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11);
    println!("STERNA_SEED={seed}");
    let mut cases = schedule(80, seed);
    assert!(Stop::ALL.iter().all(|stop| cases.iter().any(|case| case.stop == *stop)));
    cases.extend(silences(seed).into_iter().filter(|case| SILENT.contains(&case.stop)));
    let count = cases.len() as u64;
    let soak = Soak {
        program: env!("CARGO_BIN_EXE_soak").into(),
        cases,
        interrupted: Arc::new(AtomicBool::new(false)),
    };

    let report = soak.run(|_, _| {});

    assert!(report.failures.is_empty(), "{report}\n{:#?}", report.failures);
    assert_eq!(report.passed(), count);
    assert!(report.drift.grown().is_empty(), "{report}");
}
