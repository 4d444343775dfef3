//! Shared parts of the failure tests: guests that fail on request, a proxy that disturbs connections, and hand-made
//! peers.
//!
//! Every test runs inside [`case`], which proves that no descriptor and no thread is left behind.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

pub mod bank;
pub mod causes;
pub mod census;
pub mod destination;
pub mod hook;
pub mod pairs;
pub mod patience;
pub mod proxy;
pub mod recording;
pub mod trapped;
pub mod vm;

use std::sync::Arc;
use std::time::Duration;

use sterna::{Address, Arrival, Event, Incoming, Migration, Outcome, Parameters, Status, Vm, WaitLimits};
use sterna_guests::model::Fill;
use sterna_guests::process::ProcessConfig;

pub use causes::{cause, has_warning, vm_error};
pub use census::case;
pub use patience::{PATIENCE, wait_for};
pub use vm::TestVm;

use crate::common;

/// Limits for peers that are silent on purpose. On a busy machine they are longer, so that no other peer exceeds them.
pub fn short_limits() -> WaitLimits {
    let limit = sterna_testing::stretched(Duration::from_millis(400));
    WaitLimits {
        setup: limit,
        stall: limit,
        switchover: Duration::from_secs(10),
        prepare: limit,
        acknowledge: limit,
        ask_interval: Duration::from_millis(50),
    }
}

/// A guest that is small enough for a fast migration, with pages of every kind.
pub fn small() -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 3 << 20), ("ram.high".into(), 1 << 20)],
        fill: Fill::Half(7),
        working_set_pages: Some(64),
        ..common::config()
    }
}

pub fn short() -> Parameters {
    Parameters { limits: short_limits(), ..common::parameters() }
}

/// Two VMs of [`small`]; the first one runs.
pub fn vms() -> (Arc<TestVm>, Arc<TestVm>) {
    let (source, target) = common::pair(&small());
    (TestVm::new(source), TestVm::new(target))
}

/// Asserts that the destination has given everything back and never had a guest.
pub fn assert_reset(target: &TestVm) {
    use sterna::TargetVm;
    assert!(!target.guest.has_guest(), "a guest at the destination");
    let resident: u64 = target.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
    assert_eq!(resident, 0, "bytes left at the destination");
}

/// Asserts that both sides failed, the guest runs at its previous side, and the destination has nothing. Returns both
/// reasons.
pub fn assert_failed(
    outcome: &Outcome,
    arrival: &Arrival,
    source: &TestVm,
    target: &TestVm,
) -> (sterna::MigrationError, sterna::MigrationError) {
    let Outcome::Failed { error: ours, held: false } = outcome else { panic!("{outcome:?}") };
    let Arrival::Failed(theirs) = arrival else { panic!("{arrival:?}") };
    common::assert_lives_on(&source.guest);
    assert_reset(target);
    (ours.clone(), theirs.clone())
}

/// The result of a destination whose source has ended. A destination that no complete migration has reached waits for
/// the next one, so it is cancelled.
pub fn ended(incoming: &Incoming) -> Arrival {
    let began = std::time::Instant::now();
    eventually("the destination's end", || {
        if incoming.status() == Status::Setup && began.elapsed() > Duration::from_secs(1) {
            let _ = incoming.cancel();
        }
        incoming.status().is_terminal()
    });
    incoming.wait()
}

/// Asserts that a further migration between the two succeeds.
pub fn assert_next_works(source: &Arc<TestVm>, target: &Arc<TestVm>) {
    let (params, capabilities) = common::multifd(2);
    let incoming = vm::listen(target, &params, capabilities);
    let migration = vm::start(source, &incoming.address(), &params, capabilities, Arc::new(()));
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    common::assert_arrived(&outcome, &arrival, &target.guest);
}

/// Waits until `done` returns true, for longer than a machine with a load of 16 needs.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}: never");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn until_status(migration: &Migration, status: Status) {
    eventually(&format!("{status:?}, is {:?}", migration.status()), || migration.status() == status);
}

pub fn port(address: &Address) -> u16 {
    let Address::Tcp { port, .. } = address else { panic!("{address}") };
    *port
}

pub fn warnings(events: &[Event]) -> Vec<String> {
    let warning = |event: &Event| match event {
        Event::Warning(text) => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(warning).collect()
}

/// A destination for bytes that the test sends.
pub fn waiting(params: &Parameters, capabilities: sterna::Capabilities) -> (Arc<TestVm>, Incoming) {
    common::trace();
    let guest = sterna_guests::process::ProcessGuest::waiting(small()).expect("destination");
    let vm = TestVm::new(guest);
    let incoming = vm::listen(&vm, params, capabilities);
    (vm, incoming)
}

/// Handle of a migration for its own observer, which may be called before the handle exists.
#[derive(Default)]
pub struct Handle(std::sync::Mutex<Option<Migration>>);

impl Handle {
    pub fn set(&self, migration: &Migration) {
        *self.0.lock().unwrap() = Some(migration.clone());
    }

    pub fn get(&self) -> Migration {
        loop {
            if let Some(migration) = &*self.0.lock().unwrap() {
                return migration.clone();
            }
            std::thread::yield_now();
        }
    }

    /// Removes the handle. The migration owns the observer, so the two would otherwise keep each other alive.
    pub fn clear(&self) {
        *self.0.lock().unwrap() = None;
    }
}
