//! A VMM that uses the crate `log` and no subscriber of `tracing`.
//!
//! `cargo test --manifest-path testing/embedder/Cargo.toml --features log --test log`

use std::sync::{Arc, Mutex};

use log::{LevelFilter, Log, Metadata, Record};
use sterna::{Capabilities, Incoming, Migration, Parameters};
use sterna_embedder::Machine;

static TARGETS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Collector;

impl Log for Collector {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        TARGETS.lock().unwrap().push(record.target().to_owned());
    }

    fn flush(&self) {}
}

#[test]
fn events_of_a_migration_reach_the_vmms_logger() {
    log::set_logger(&Collector).unwrap();
    log::set_max_level(LevelFilter::Trace);
    let (params, capabilities) = (Parameters::default(), Capabilities::default());
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(Machine::new(), &at, params.clone(), capabilities, Arc::new(())).unwrap();
    let to = incoming.address();
    Migration::start(Machine::with_guest(), &to, params, capabilities, Arc::new(())).unwrap().wait();

    let targets = TARGETS.lock().unwrap();
    assert!(targets.iter().any(|target| target.starts_with("sterna::outgoing")), "{targets:?}");
}
