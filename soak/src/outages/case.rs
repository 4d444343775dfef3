//! The random choices of a case.

use std::time::Duration;

use sterna::ram::Backing;
use sterna::{Capabilities, Compression, NonConvergence, Parameters, WaitLimits, ZeroPageDetection};
use sterna_devices::statebank::StateBankConfig;
use sterna_guests::model::Acts;
use sterna_guests::process::{ProcessConfig, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern};

use super::LONGEST;
use super::messages::{self, MessageCut};
use super::plants::Plant;
use super::trouble::{self, Moment, Order, Trouble, Way, What, Which};
use crate::settings::banks;
use crate::stop::Side;

/// A window that is longer than the network is down in any case.
const LONG_WINDOW: Duration = LONGEST;

/// A window that is shorter than some outages.
const SHORT_WINDOW: Duration = Duration::from_millis(120);

/// The kind of migration that a case disturbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A migration that switches to postcopy.
    Postcopy,
    /// A precopy with a window for reconnection.
    Resumed,
    /// A precopy with a window that is cut once before it commits, and must arrive.
    Cuts,
    /// Precopies and postcopy migrations, each cut at one message of the handover. Some have a window, others
    /// have none.
    Handover,
}

impl Kind {
    /// Name of the kind in command-line options.
    pub fn label(self) -> &'static str {
        match self {
            Self::Postcopy => "postcopy",
            Self::Resumed => "resumed",
            Self::Cuts => "cuts",
            Self::Handover => "handover",
        }
    }

    /// Finds the kind with this label.
    pub fn of_label(label: &str) -> Option<Self> {
        let all = [Self::Postcopy, Self::Resumed, Self::Cuts, Self::Handover];
        all.into_iter().find(|kind| kind.label() == label)
    }
}

/// A migration, and its disturbances.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) kind: Kind,
    /// Kind, seed and number from which the case is made.
    pub(super) origin: (Kind, u64, u64),
    pub(super) guest: ProcessConfig,
    /// Devices with large state; only in cases with lanes.
    pub(super) banks: Vec<StateBankConfig>,
    pub(super) lanes: u8,
    pub(super) preempt: bool,
    pub(super) tls: bool,
    pub(super) compression: Compression,
    pub(super) zero_pages: ZeroPageDetection,
    /// Bytes per second before the switch to postcopy, and after it.
    pub(super) bandwidth: [u64; 2],
    /// Window for reconnection. Zero: connections are not replaced automatically.
    pub(super) window: Duration,
    /// Number of bytes after which the migration switches to postcopy.
    pub(super) switch: u64,
    /// The destination listens at another address after each pause.
    pub(super) moves: bool,
    /// The disturbances, in their order.
    pub(super) troubles: Vec<Trouble>,
    /// A message at which every connection is cut, before all troubles.
    pub(super) cut: Option<MessageCut>,
    pub(super) plant: Option<Plant>,
}

impl Case {
    pub(super) fn new(kind: Kind, seed: u64, number: u64, plant: Option<Plant>) -> Self {
        let origin = (kind, seed, number);
        let seed = seed.wrapping_mul(1 << 20).wrapping_add(number);
        let mut random = fastrand::Rng::with_seed(seed);
        let lanes = random.u8(..5);
        let compressions = [Compression::None, Compression::Zlib, Compression::Zstd];
        let compression = if lanes == 0 { Compression::None } else { compressions[random.usize(..3)] };
        // Without lanes, a device stream uses the main channel, and its loss ends the migration.
        let count = if lanes == 0 || random.u8(..4) > 0 { 0 } else { 1 + random.u64(..2) };
        let banks = banks(&mut random, count);
        let megabytes = |random: &mut fastrand::Rng| [16, 64, 256, 0][random.usize(..4)] << 20;
        let mut case = Self {
            kind,
            origin,
            guest: guest(&mut random, seed),
            banks,
            lanes,
            preempt: random.bool(),
            tls: random.u8(..4) == 0,
            compression,
            zero_pages: [ZeroPageDetection::Multifd, ZeroPageDetection::Legacy, ZeroPageDetection::None]
                [random.usize(..3)],
            bandwidth: [megabytes(&mut random), megabytes(&mut random)],
            window: match kind {
                Kind::Postcopy => [Duration::ZERO, SHORT_WINDOW, LONG_WINDOW, LONG_WINDOW],
                Kind::Resumed => [SHORT_WINDOW, LONG_WINDOW, LONG_WINDOW, LONG_WINDOW],
                Kind::Cuts | Kind::Handover => [LONG_WINDOW; 4],
            }[random.usize(..4)],
            switch: [0, random.u64(..8 << 20), random.u64(..24 << 20)][random.usize(..3)],
            moves: random.u8(..4) == 0,
            troubles: Vec::new(),
            cut: None,
            plant,
        };
        case.troubles = match kind {
            Kind::Postcopy | Kind::Resumed => trouble::draw(&mut random, kind),
            Kind::Cuts => {
                // Random pages need more bytes, so the first round passes every byte position that can be
                // drawn.
                case.guest.fill = Fill::Random(seed);
                case.guest.acts = Acts::new(12, 6, 1).unwrap_or_default();
                let bytes = case.guest.blocks.iter().map(|(_, bytes)| bytes).sum::<u64>();
                vec![trouble::one_cut(&mut random, bytes / 2)]
            }
            Kind::Handover => {
                // The cable must read the main channel, so TLS is off.
                case.tls = false;
                case.guest.acts = Acts::MIXED;
                let (cut, has_window) = messages::draw(&mut random, number);
                case.cut = Some(cut);
                if !has_window {
                    case.window = Duration::ZERO;
                }
                // In one of four cases, a second loss occurs while the first one is being repaired.
                if random.u8(..4) == 0 { vec![trouble::another_cut(&mut random)] } else { Vec::new() }
            }
        };
        if case.kills() {
            // The surviving side waits until the window has passed.
            case.window = case.window.min(3 * SHORT_WINDOW);
        }
        if let Some(plant) = plant {
            case.plant_needs(plant);
        }
        case
    }

    /// The same case without disturbances.
    pub(super) fn undisturbed(&self) -> Self {
        Self { troubles: Vec::new(), cut: None, plant: None, bandwidth: [0; 2], ..self.clone() }
    }

    pub(super) fn settings(&self) -> (Parameters, Capabilities) {
        let is_postcopy = self.is_postcopy();
        let params = Parameters {
            max_bandwidth_bytes: self.bandwidth[0],
            max_postcopy_bandwidth_bytes: self.bandwidth[1],
            // With this limit, a postcopy migration does not complete before its switch.
            downtime_limit: if is_postcopy { Duration::ZERO } else { Duration::from_secs(1) },
            // On a busy machine, the guest may write pages as fast as they are compressed.
            non_convergence: if is_postcopy { NonConvergence::KeepGoing } else { NonConvergence::Switchover },
            multifd_channels: self.lanes.max(1),
            multifd_compression: self.compression,
            zero_page_detection: self.zero_pages,
            reconnect_window: self.window,
            limits: WaitLimits {
                setup: LONGEST / 4,
                stall: LONGEST / 4,
                switchover: LONGEST / 4,
                prepare: LONGEST / 4,
                acknowledge: LONGEST / 4,
                ask_interval: Duration::from_millis(5),
            },
            ..Parameters::default()
        };
        let capabilities = Capabilities {
            multifd: self.lanes > 0,
            postcopy_ram: is_postcopy,
            postcopy_preempt: is_postcopy && self.preempt,
            ..Capabilities::default()
        };
        (params, capabilities)
    }

    /// Whether the case switches to postcopy.
    pub(super) fn is_postcopy(&self) -> bool {
        self.kind == Kind::Postcopy || self.cut.is_some_and(|cut| cut.is_postcopy)
    }

    /// Name of the case in tables.
    pub(super) fn label(&self) -> &'static str {
        if let Some(cut) = self.cut {
            return cut.message.name;
        }
        match self.troubles.last().map(|trouble| trouble.what) {
            None => "nothing",
            Some(What::Cut(..)) if self.troubles.len() == 1 => "cut",
            Some(What::Cut(..)) => "cuts",
            Some(What::Order(Order::Cancel)) => "cancel",
            Some(What::Order(Order::Abandon)) => "abandon",
            Some(What::Order(Order::Pause(_))) => "pause",
            Some(What::Kill(Side::Source)) => "source killed",
            Some(What::Kill(_)) => "destination killed",
        }
    }

    /// Whether the case kills a side.
    pub(super) fn kills(&self) -> bool {
        self.troubles.iter().any(|trouble| matches!(trouble.what, What::Kill(_)))
    }

    /// Whether the guest must end at the destination in every run.
    pub(super) fn must_arrive(&self) -> bool {
        self.kind == Kind::Cuts
    }

    /// Whether the window is long enough for every outage of the case.
    pub(super) fn reconnects(&self) -> bool {
        self.window == LONG_WINDOW
    }

    /// Changes the case so that it reveals this fault.
    fn plant_needs(&mut self, plant: Plant) {
        let cut = What::Cut(Which::All, Duration::ZERO);
        let moment = Moment { side: Side::Source, mark: "round", bytes: Some((Way::Forward, 2 << 20)) };
        self.window = LONG_WINDOW;
        self.troubles = Vec::new();
        self.cut = None;
        match plant {
            Plant::StaleAfterReconnection => {
                self.guest.fill = Fill::Random(1);
                self.bandwidth[0] = 16 << 20;
                self.troubles = vec![Trouble { moment, what: cut }];
            }
            Plant::UntoldZeros => {
                self.guest.fill = Fill::Random(1);
                self.guest.acts = Acts::MIXED;
                self.bandwidth[0] = 16 << 20;
            }
            Plant::ChangedPages | Plant::RunsAgain => {
                self.switch = 0;
                self.guest.fill = Fill::Random(1);
                // A small working set overwrites only few pages before they are checked.
                self.guest.working_set_pages = Some(64);
                self.bandwidth = [16 << 20, 4 << 20];
            }
            Plant::NoWindow => {
                self.window = Duration::ZERO;
                self.troubles = vec![Trouble { moment, what: cut }];
            }
            Plant::Descriptor | Plant::Mapping => {}
        }
    }
}

fn guest(random: &mut fastrand::Rng, seed: u64) -> ProcessConfig {
    let tracking = Tracking::available();
    ProcessConfig {
        blocks: vec![("ram.low".into(), 6 << 20), ("ram.high".into(), (2 + random.u64(..8)) << 20)],
        backing: [Backing::Memfd, Backing::Anonymous][random.usize(..2)],
        tracking: tracking[random.usize(..tracking.len())],
        stop_point: [StopPoint::StepBoundary, StopPoint::MidPage][random.usize(..2)],
        pattern: [Pattern::Sequential, Pattern::Random, Pattern::HotSet, Pattern::Mixed][random.usize(..4)],
        fill: [Fill::Zero, Fill::Half(seed), Fill::Random(seed)][random.usize(..3)],
        acts: [Acts::WRITES, Acts::MIXED, Acts::MIXED][random.usize(..3)],
        workers: 1 + random.usize(..3),
        rate: 3_000,
        seed,
        ..ProcessConfig::default()
    }
}
