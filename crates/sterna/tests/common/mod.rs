//! Two process guests, and a migration between them over loopback.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::{
    Address, Arrival, Capabilities, Event, Incoming, Migration, Observer, Outcome, Parameters, SourceVm,
    TargetVm, WaitLimits,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};

/// Short limits for tests.
pub const LIMITS: WaitLimits = WaitLimits {
    setup: Duration::from_secs(10),
    stall: Duration::from_secs(5),
    switchover: Duration::from_secs(10),
    prepare: Duration::from_secs(10),
    acknowledge: Duration::from_secs(5),
    ask_interval: Duration::from_millis(50),
};

/// QEMU's defaults, without a limit on bandwidth.
pub fn parameters() -> Parameters {
    Parameters { max_bandwidth_bytes: 0, limits: LIMITS, ..Parameters::default() }
}

pub fn multifd(channels: u8) -> (Parameters, Capabilities) {
    (
        Parameters { multifd_channels: channels, ..parameters() },
        Capabilities { multifd: true, ..Capabilities::default() },
    )
}

/// A small guest that writes at full speed and reports writes as KVM does: bits stay set until re-armed.
pub fn config() -> ProcessConfig {
    ProcessConfig { tracking: Tracking::Software, rate: 5_000, ..ProcessConfig::default() }
}

/// Records every event.
#[derive(Default)]
pub struct Log(Mutex<Vec<Event>>);

impl Observer for Log {
    fn event(&self, event: &Event) {
        self.0.lock().unwrap().push(event.clone());
    }
}

impl Log {
    pub fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }
}

pub fn trace() {
    sterna_testing::log_from_env();
}

/// A running guest, and a VM that waits for it.
pub fn pair(config: &ProcessConfig) -> (Arc<ProcessGuest>, Arc<ProcessGuest>) {
    trace();
    let source = ProcessGuest::boot(config.clone()).expect("source");
    let target = ProcessGuest::waiting(config.clone()).expect("destination");
    source.cont().expect("the guest starts");
    (source, target)
}

pub fn listen(target: &Arc<ProcessGuest>, params: &Parameters, capabilities: Capabilities) -> Incoming {
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    Incoming::listen(vm, &address, params.clone(), capabilities, Arc::new(())).expect("listening")
}

pub fn start(
    source: &Arc<ProcessGuest>,
    to: &Address,
    params: &Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Migration {
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    Migration::start(vm, to, params.clone(), capabilities, observer).expect("started")
}

/// Migrates to the end, with the same settings on both sides.
pub fn migrate(
    source: &Arc<ProcessGuest>,
    target: &Arc<ProcessGuest>,
    params: &Parameters,
    capabilities: Capabilities,
) -> (Migration, Outcome, Arrival) {
    let incoming = listen(target, params, capabilities);
    let migration = start(source, &incoming.address(), params, capabilities, Arc::new(()));
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    (migration, outcome, arrival)
}

/// Asserts that the guest at `vm` is complete and continues to run.
pub fn assert_lives_on(vm: &ProcessGuest) {
    assert!(vm.wait_progress(10, Duration::from_secs(20)), "the guest stands still");
    vm.pause().expect("pausing");
    let verdict = vm.check().expect("checking");
    assert!(verdict.is_consistent(), "{verdict:?}");
    vm.cont().expect("going on");
}

/// Asserts that the guest is complete where it arrived, before and after it resumes.
pub fn assert_arrived(outcome: &Outcome, arrival: &Arrival, target: &ProcessGuest) {
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}; the destination: {arrival:?}");
    assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
    assert_lives_on(target);
}
