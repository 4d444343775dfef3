//! What a case leaves to chance, the same in every process that takes part.

use std::time::Duration;

use sterna::{Capabilities, Parameters, WaitLimits};
use sterna_devices::statebank::StateBankConfig;
use sterna_guests::process::{ProcessConfig, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern};

use crate::schedule::Random;
use crate::stop::Stop;

/// Short where a case may have to wait one out.
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
    /// Of both sides.
    pub guest: ProcessConfig,
    /// Of both sides: devices with large state, in half of the cases.
    pub banks: Vec<StateBankConfig>,
    /// Of both sides.
    pub params: Parameters,
    /// Of both sides.
    pub capabilities: Capabilities,
    /// Whether an undecided migration is ended by an operator rather than by the destination's answer.
    pub operator_decides: bool,
}

/// What a case of silence waits out.
const SHORT_LIMITS: WaitLimits = WaitLimits {
    setup: Duration::from_millis(800),
    stall: Duration::from_millis(400),
    switchover: Duration::from_secs(10),
    prepare: Duration::from_millis(600),
    acknowledge: Duration::from_millis(400),
    ..LIMITS
};

impl Settings {
    /// The same with limits that a test can wait for.
    pub fn impatient(mut self) -> Self {
        self.params.limits = SHORT_LIMITS;
        self
    }

    /// The same for a migration that nobody disturbs.
    pub fn undisturbed(mut self) -> Self {
        self.params.downtime_limit = Duration::from_secs(1);
        self.capabilities.pause_before_switchover = false;
        self
    }

    /// Those of a case with `seed` that is disturbed at `stop`.
    pub fn new(seed: u64, stop: Stop) -> Self {
        let mut random = Random::new(seed);
        let tracking = Tracking::available();
        let lanes = [0, 1, 2, 3][random.below(4) as usize];
        let guest = ProcessConfig {
            blocks: vec![("ram.low".into(), 6 << 20), ("ram.high".into(), (2 + random.below(8)) << 20)],
            tracking: tracking[random.below(tracking.len() as u64) as usize],
            stop_point: [StopPoint::StepBoundary, StopPoint::MidPage][random.below(2) as usize],
            pattern: [Pattern::Sequential, Pattern::Random, Pattern::HotSet, Pattern::Mixed]
                [random.below(4) as usize],
            fill: [Fill::Zero, Fill::Half(seed), Fill::Random(seed)][random.below(3) as usize],
            workers: 1 + random.below(3) as usize,
            rate: 3_000,
            seed,
            ..ProcessConfig::default()
        };
        let params = Parameters {
            max_bandwidth_bytes: 0,
            // A third pass must come: nothing fits until it has.
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
        let operator_decides = random.below(2) == 0;
        let banks = banks(&mut random, stop);
        // From room for one chunk on.
        let max_queued_stream_bytes = [1, 1 << 20, 16 << 20][random.below(3) as usize];
        let params = Parameters { max_queued_stream_bytes, ..params };
        Self { guest, banks, params, capabilities, operator_decides }
    }
}

fn banks(random: &mut Random, stop: Stop) -> Vec<StateBankConfig> {
    let count = if stop.needs_banks() { 1 + random.below(3) } else { random.below(2) * random.below(4) };
    let bank = |number| StateBankConfig {
        name: format!("bank {number}"),
        state_bytes: 1 + random.below(1 << 20),
        precopy_percent: [0, 50, 90][random.below(3) as usize],
        dirty_rate: [0, 4 << 20][random.below(2) as usize],
        seed: random.below(u64::MAX),
        p2p: random.below(4) > 0,
        ..StateBankConfig::default()
    };
    (0..count).map(bank).collect()
}
