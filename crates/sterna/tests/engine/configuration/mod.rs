//! Destinations that make their VM from the source's configuration.

mod arrives;
mod callback;
mod lost;
mod refused;
mod strangers;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{self, Log, assert_lives_on};
use crate::support::{TestVm, eventually, small, vm, warnings};
use sterna::error::ConfigurationDifference;
use sterna::{
    Address, Arrival, Capabilities, Difference, Incoming, Migration, MigrationError, Outcome, Parameters,
    SettingLimits, SharedSettings, TargetVm, VmError,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest};

/// Name and size of each block: what a destination of these tests must know.
fn written(config: &ProcessConfig) -> Vec<u8> {
    let lines = config.blocks.iter().map(|(name, bytes)| format!("{name} {bytes}\n"));
    lines.collect::<String>().into_bytes()
}

fn read(configuration: &[u8]) -> Result<ProcessConfig, VmError> {
    let refused = |why: &str| VmError::new("read the configuration", why);
    let text = std::str::from_utf8(configuration).map_err(|_| refused("it is no text"))?;
    let block = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        Some((name.to_owned(), bytes.parse().ok()?))
    };
    let blocks: Option<Vec<_>> = text.lines().map(block).collect();
    let blocks = blocks.filter(|blocks| !blocks.is_empty()).ok_or_else(|| refused("it names no block"))?;
    Ok(ProcessConfig { blocks, ..small() })
}

/// A running guest whose destination makes its machine from this configuration.
fn source(config: &ProcessConfig) -> Arc<TestVm> {
    common::trace();
    let guest = ProcessGuest::boot(config.clone()).expect("source");
    guest.cont().expect("the guest starts");
    let source = TestVm::new(guest);
    *source.configuration.lock().unwrap() = Some(written(config));
    source
}

/// A host that makes a machine from a configuration.
#[derive(Default)]
struct Host {
    made: Mutex<Option<Arc<TestVm>>>,
    calls: AtomicU32,
    /// The thread of the last call.
    thread: Mutex<String>,
    told: Arc<Log>,
}

impl Host {
    fn make(&self, configuration: &[u8]) -> Result<Arc<dyn TargetVm>, VmError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        *self.thread.lock().unwrap() = std::thread::current().name().unwrap_or_default().to_owned();
        let config = read(configuration)?;
        let guest = ProcessGuest::waiting(config).map_err(|error| VmError::new("make the VM", error))?;
        let vm = TestVm::new(guest);
        *self.made.lock().unwrap() = Some(Arc::clone(&vm));
        Ok(vm)
    }

    fn vm(&self) -> Arc<TestVm> {
        self.made.lock().unwrap().clone().expect("a VM was made")
    }

    fn calls(&self) -> u32 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Waits at `at` for a source, with a VM that this host makes.
    fn wait_at(
        self: &Arc<Self>,
        at: &str,
        (params, capabilities): (Parameters, Capabilities),
        shared: SharedSettings,
    ) -> Incoming {
        let host = Arc::clone(self);
        let make = move |configuration: &[u8]| host.make(configuration);
        let at: Address = at.parse().unwrap();
        Incoming::listen_with(&at, params, capabilities, shared, self.told.clone(), make).expect("listening")
    }

    /// As [`Host::wait_at`], on loopback, with the source's settings.
    fn wait(self: &Arc<Self>) -> Incoming {
        self.wait_at(LOOPBACK, own(), as_source())
    }

    fn is_warned_of(&self, what: &str) {
        let told = || warnings(&self.told.events());
        eventually(&format!("{what:?} in {:?}", told()), || told().iter().any(|text| text.contains(what)));
    }
}

const LOOPBACK: &str = "tcp:127.0.0.1:0";

/// The destination's own settings.
fn own() -> (Parameters, Capabilities) {
    (common::parameters(), Capabilities::default())
}

fn as_source() -> SharedSettings {
    SharedSettings::AsSource(SettingLimits::default())
}

fn start(
    source: &Arc<TestVm>,
    incoming: &Incoming,
    (params, capabilities): &(Parameters, Capabilities),
) -> Migration {
    vm::start(source, &incoming.address(), params, *capabilities, Arc::new(()))
}

/// Asserts that the guest arrives at the VM that was made for it.
fn assert_arrives(migration: &Migration, incoming: &Incoming, host: &Host) {
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}; the destination: {arrival:?}");
    common::assert_arrived(&outcome, &arrival, &host.vm().guest);
    assert_eq!(host.calls(), 1);
}

/// The error of a migration whose guest continues at the source.
fn failed(migration: &Migration, source: &TestVm) -> MigrationError {
    let outcome = migration.wait();
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    assert_lives_on(&source.guest);
    error
}

/// The difference between the sides because of which the migration has failed.
fn difference(error: MigrationError) -> ConfigurationDifference {
    match error {
        MigrationError::PeerIncompatible(Difference::Configuration(why)) => why,
        error => panic!("{error}"),
    }
}

fn not_arrived(incoming: &Incoming) -> MigrationError {
    match incoming.wait() {
        Arrival::Failed(error) => error,
        arrival => panic!("{arrival:?}"),
    }
}
