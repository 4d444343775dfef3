//! A guest that writes at full speed migrates there and back many times. It is checked each time.

use std::sync::Arc;
use std::time::Duration;

use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm};
use sterna_guests::model::Acts;
use sterna_guests::process::{ProcessConfig, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern, ProcessGuest};

/// Time for which each migration runs with a downtime limit of zero.
const ROUNDS_FOR: Duration = Duration::from_millis(100);

/// Totals over all migrations.
#[derive(Debug, Default)]
pub struct Figures {
    /// Number of migrations that were checked and whole.
    pub migrations: u64,
    /// Total number of steps of the guest.
    pub steps: u64,
    /// Total number of rounds.
    pub rounds: u64,
    /// Total number of bytes moved.
    pub bytes: u64,
    /// The longest downtime of a migration.
    pub longest_downtime: Duration,
}

/// Migrates a guest at full speed `count` times. `seed` decides about lanes, patterns and tracking.
///
/// # Errors
/// The number of the migration that failed, and the reason.
pub fn run(count: u64, seed: u64, mut tell: impl FnMut(u64, &Figures)) -> Result<Figures, String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut config = config(seed);
    let mut here = ProcessGuest::boot(config.clone()).map_err(|error| error.to_string())?;
    here.cont().map_err(|error| error.to_string())?;
    let mut figures = Figures::default();
    for number in 1..=count {
        let tracking = Tracking::available();
        config.tracking = tracking[random.usize(..tracking.len())];
        let there = ProcessGuest::waiting(config.clone()).map_err(|error| error.to_string())?;
        let lanes = random.u8(..5);
        once(&here, &there, lanes, &mut figures).map_err(|error| {
            format!("migration {number} of {count} over {lanes} lanes, seed {seed}: {error}")
        })?;
        figures.migrations += 1;
        figures.steps = there.progress().total_steps();
        tell(number, &figures);
        let pattern = [Pattern::Sequential, Pattern::Random, Pattern::HotSet, Pattern::Mixed];
        there.set_pattern(pattern[random.usize(..4)], None).map_err(|error| error.to_string())?;
        there.cont().map_err(|error| error.to_string())?;
        here = there;
    }
    Ok(figures)
}

fn config(seed: u64) -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 24 << 20), ("ram.high".into(), 8 << 20)],
        pattern: Pattern::Mixed,
        stop_point: StopPoint::MidPage,
        acts: Acts::MIXED,
        fill: Fill::Random(seed),
        rate: 0,
        seed,
        ..ProcessConfig::default()
    }
}

fn once(
    here: &Arc<ProcessGuest>,
    there: &Arc<ProcessGuest>,
    lanes: u8,
    figures: &mut Figures,
) -> Result<(), String> {
    let params = Parameters {
        max_bandwidth_bytes: 0,
        multifd_channels: lanes.max(1),
        // With a limit of zero, the migration keeps sending rounds until the limit is changed below.
        downtime_limit: Duration::ZERO,
        ..Parameters::default()
    };
    let capabilities = Capabilities { multifd: lanes > 0, ..Capabilities::default() };
    let any = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let target = Arc::clone(there) as Arc<dyn TargetVm>;
    let incoming = Incoming::listen(target, &any, params.clone(), capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;
    let source = Arc::clone(here) as Arc<dyn SourceVm>;
    let migration = Migration::start(source, &incoming.address(), params, capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;
    // No link is faster than a guest that writes at the speed of memory, so an operator's setting ends the
    // rounds.
    std::thread::sleep(ROUNDS_FOR);
    migration.set_live(|params| params.downtime_limit = Duration::from_secs(2)).expect("a live setting");
    match (migration.wait(), incoming.wait()) {
        (Outcome::Completed, Arrival::Completed(_)) => {}
        (outcome, arrival) => return Err(format!("source {outcome:?}, destination {arrival:?}")),
    }
    if !there.wait_progress(1, Duration::from_secs(20)) {
        return Err("the guest stands still".into());
    }
    there.pause().map_err(|error| error.to_string())?;
    let verdict = there.check().map_err(|error| error.to_string())?;
    let statistics = migration.statistics();
    figures.rounds += statistics.rounds_begun;
    figures.bytes += statistics.transferred_bytes;
    figures.longest_downtime = figures.longest_downtime.max(statistics.downtime.unwrap_or_default());
    if verdict.is_consistent() { Ok(()) } else { Err(verdict.to_string()) }
}
