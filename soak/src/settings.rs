//! The random choices of a case. They are the same in every process that takes part.

use std::time::Duration;

use sterna::{Capabilities, Parameters, WaitLimits};
use sterna_devices::statebank::StateBankConfig;
use sterna_guests::model::Acts;
use sterna_guests::process::{ProcessConfig, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern};

use crate::stop::Stop;

/// Time limits, short where a case may wait until they end.
const LIMITS: WaitLimits = WaitLimits {
    setup: Duration::from_secs(10),
    stall: Duration::from_secs(10),
    switchover: Duration::from_secs(10),
    prepare: Duration::from_secs(10),
    acknowledge: Duration::from_secs(10),
    ask_interval: Duration::from_millis(5),
};

/// Guest, parameters and capabilities of a case.
pub struct Settings {
    /// The guest's configuration, the same on both sides.
    pub guest: ProcessConfig,
    /// Devices with large state, the same on both sides. Half of the cases have them.
    pub banks: Vec<StateBankConfig>,
    /// Parameters of both sides.
    pub params: Parameters,
    /// Capabilities of both sides.
    pub capabilities: Capabilities,
    /// Whether an operator ends an undecided migration, and not the destination's answer.
    pub operator_decides: bool,
}

/// Time limits of a case of silence, which waits until they end.
const SHORT_LIMITS: WaitLimits = WaitLimits {
    setup: Duration::from_millis(800),
    stall: Duration::from_millis(400),
    switchover: Duration::from_secs(10),
    prepare: Duration::from_millis(600),
    acknowledge: Duration::from_millis(400),
    ..LIMITS
};

impl Settings {
    /// The same settings with limits that a test can wait for.
    pub fn impatient(mut self) -> Self {
        self.params.limits = SHORT_LIMITS;
        self
    }

    /// The same settings for a migration that is not disturbed.
    pub fn undisturbed(mut self) -> Self {
        self.params.downtime_limit = Duration::from_secs(1);
        self.capabilities.pause_before_switchover = false;
        self
    }

    /// The settings of a case with `seed` that is disturbed at `stop`.
    pub fn new(seed: u64, stop: Stop) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let tracking = Tracking::available();
        let lanes = [0, 1, 2, 3][random.usize(..4)];
        let guest = ProcessConfig {
            blocks: vec![("ram.low".into(), 6 << 20), ("ram.high".into(), (2 + random.u64(..8)) << 20)],
            tracking: tracking[random.usize(..tracking.len())],
            stop_point: [StopPoint::StepBoundary, StopPoint::MidPage][random.usize(..2)],
            pattern: [Pattern::Sequential, Pattern::Random, Pattern::HotSet, Pattern::Mixed]
                [random.usize(..4)],
            acts: [Acts::WRITES, Acts::MIXED, Acts::MIXED][random.usize(..3)],
            fill: [Fill::Zero, Fill::Half(seed), Fill::Random(seed)][random.usize(..3)],
            workers: 1 + random.usize(..3),
            rate: 3_000,
            seed,
            ..ProcessConfig::default()
        };
        let params = Parameters {
            max_bandwidth_bytes: 0,
            // The stop is in the third round. With a limit of zero, the migration does not complete earlier.
            downtime_limit: if stop == Stop::LaterPass { Duration::ZERO } else { Duration::from_secs(1) },
            multifd_channels: lanes.max(1),
            limits: LIMITS,
            ..Parameters::default()
        };
        let capabilities = Capabilities {
            multifd: lanes > 0,
            pause_before_switchover: stop == Stop::PreSwitchover,
            ..Capabilities::default()
        };
        let operator_decides = random.u64(..2) == 0;
        let count = if stop.needs_banks() { 1 + random.u64(..3) } else { random.u64(..2) * random.u64(..4) };
        let banks = banks(&mut random, count);
        // The smallest value has room for one chunk.
        let max_queued_stream_bytes = [1, 1 << 20, 16 << 20][random.usize(..3)];
        let params = Parameters { max_queued_stream_bytes, ..params };
        Self { guest, banks, params, capabilities, operator_decides }
    }
}

/// Makes `count` devices, with state of every kind.
pub(crate) fn banks(random: &mut fastrand::Rng, count: u64) -> Vec<StateBankConfig> {
    let bank = |number| StateBankConfig {
        name: format!("bank {number}"),
        state_bytes: 1 + random.u64(..1 << 20),
        precopy_percent: [0, 50, 90][random.usize(..3)],
        dirty_rate: [0, 4 << 20][random.usize(..2)],
        seed: random.u64(..),
        p2p: random.u64(..4) > 0,
        ..StateBankConfig::default()
    };
    (0..count).map(bank).collect()
}
