//! The random choices of a case.

use std::time::Duration;

use sterna::ram::Backing;
use sterna::{Capabilities, Compression, Parameters};
use sterna_guests::model::Acts;
use sterna_guests::process::{ProcessConfig, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern};
use sterna_standby::{CheckpointCopy, CheckpointMode, Terms};

use super::arbiter::Side;
use super::trouble::{Moment, Trouble};

/// Maximum time to stop a guest, with a reserve. A case on a slower host is not judged by time.
const MARGIN: Duration = Duration::from_millis(400);

/// The arbiter's behaviour in a case.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rulings {
    /// The side whose question is decided first.
    pub(super) favoured: Option<Side>,
    /// For each side, how long the arbiter is unreachable from the disturbance on.
    pub(super) hidden: [Option<Duration>; 2],
    /// Only the arbiter's answers are lost.
    pub(super) hears: bool,
}

/// A protection, and its disturbance.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) guest: ProcessConfig,
    pub(super) lanes: u8,
    pub(super) compression: Compression,
    /// Number of pages in the cache for differences. `None`: checkpoints contain whole pages.
    pub(super) delta_pages: Option<u64>,
    pub(super) delay: Duration,
    pub(super) mode: CheckpointMode,
    pub(super) in_flight: u8,
    pub(super) copy: CheckpointCopy,
    pub(super) buffer_bytes: u64,
    pub(super) terms: Terms,
    /// Time that the observer takes to read a piece of output.
    pub(super) slow: Duration,
    pub(super) rulings: Rulings,
    pub(super) moment: Moment,
    pub(super) trouble: Trouble,
    /// A protection that outlives the trouble is ended by a takeover, otherwise by a message.
    pub(super) ends_by_takeover: bool,
    /// The survivor is protected again, otherwise migrated.
    pub(super) protects_again: bool,
}

impl Case {
    pub(super) fn new(seed: u64, number: u64) -> Self {
        let seed = seed.wrapping_mul(1 << 20).wrapping_add(number);
        let mut random = fastrand::Rng::with_seed(seed);
        let tracking = Tracking::available();
        let guest = ProcessConfig {
            blocks: vec![("ram.low".into(), 4 << 20), ("ram.high".into(), (1 + random.u64(..6)) << 20)],
            backing: [Backing::Memfd, Backing::Anonymous][random.usize(..2)],
            tracking: tracking[random.usize(..tracking.len())],
            stop_point: [StopPoint::StepBoundary, StopPoint::MidPage][random.usize(..2)],
            pattern: [Pattern::Sequential, Pattern::Random, Pattern::HotSet, Pattern::Mixed]
                [random.usize(..4)],
            acts: [Acts::WRITES, Acts::MIXED, Acts::MIXED][random.usize(..3)],
            fill: [Fill::Zero, Fill::Half(seed), Fill::Random(seed)][random.usize(..3)],
            workers: 1 + random.usize(..3),
            rate: 2_000,
            seed,
            ..ProcessConfig::default()
        };
        let lanes = [0, 0, 1, 2, 4][random.usize(..5)];
        let compressions = [Compression::None, Compression::Zlib, Compression::Zstd];
        let lease = Duration::from_millis(100 + random.u64(..300));
        let milliseconds = |value| Duration::from_millis(value);
        Self {
            guest,
            lanes,
            compression: if lanes == 0 { Compression::None } else { compressions[random.usize(..3)] },
            delay: milliseconds(1 + random.u64(..30)),
            mode: match random.u8(..4) {
                0 => CheckpointMode::Output(milliseconds(1 + random.u64(..20))),
                1 => CheckpointMode::Load(1 + random.u8(..50)),
                _ => CheckpointMode::Interval,
            },
            buffer_bytes: [4096, 64 << 20, 64 << 20][random.usize(..3)],
            terms: Terms {
                heartbeat: milliseconds(10),
                lease,
                drift_per_mille: 10,
                margin: MARGIN,
                claim_interval: milliseconds(20 + random.u64(..40)),
            },
            slow: [Duration::ZERO, Duration::ZERO, milliseconds(15)][random.usize(..3)],
            rulings: Rulings::draw(&mut random),
            moment: Moment::draw(&mut random),
            trouble: Trouble::draw(&mut random, lease, lanes > 0),
            ends_by_takeover: random.bool(),
            protects_again: random.bool(),
            // These values are drawn last, so that the other values of a given seed do not change.
            delta_pages: [None, Some(64), Some(1 << 14)][random.usize(..3)],
            in_flight: [1, 1, 2, 4][random.usize(..4)],
            copy: [CheckpointCopy::Auto, CheckpointCopy::Copy, CheckpointCopy::CopyOnWrite]
                [random.usize(..3)],
        }
    }

    pub(super) fn settings(&self) -> (Parameters, Capabilities) {
        let params = Parameters {
            max_bandwidth_bytes: 0,
            // On a busy host, the seeding would not converge within the default limit.
            downtime_limit: super::LONGEST,
            multifd_channels: self.lanes.max(1),
            multifd_compression: self.compression,
            xbzrle_cache_bytes: self.delta_pages.unwrap_or(1) << 12,
            ..Parameters::default()
        };
        let xbzrle = self.delta_pages.is_some();
        (params, Capabilities { multifd: self.lanes > 0, xbzrle, ..Capabilities::default() })
    }

    /// The same case without a disturbance.
    pub(super) fn undisturbed(&self) -> Self {
        // The lease is so long that it does not expire even on a busy host.
        let terms = Terms { lease: Duration::from_secs(60), ..self.terms };
        Self {
            terms,
            trouble: Trouble::Nothing,
            rulings: Rulings::default(),
            slow: Duration::ZERO,
            ..self.clone()
        }
    }
}

impl Rulings {
    fn draw(random: &mut fastrand::Rng) -> Self {
        let favoured = [None, None, None, Some(Side::Primary), Some(Side::Standby)][random.usize(..5)];
        let long = Duration::from_millis(random.u64(200..1500));
        let hidden = match random.u8(..6) {
            0 => [Some(long), Some(long)],
            1 => [Some(long), None],
            2 => [None, Some(long)],
            _ => [None, None],
        };
        Self { favoured, hidden, hears: random.bool() }
    }
}
