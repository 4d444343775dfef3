//! The two sides of a protection over a link that the test controls, and the settings of checkpoints.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::{Capabilities, Compression, Parameters, SourceVm, TargetVm};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_standby::machines::{Ruling, standby};
use sterna_standby::{
    CheckpointCopy, CheckpointMode, Claims, ContactRules, EpochGate, Guardians, Primary, PrimaryOptions,
    ProtectError, Protection, Secret, Standby, StandbyOptions, Terms, VmSurvivor,
};

use super::link::Link;
use crate::common::*;
pub use crate::support::{PATIENCE, wait_for};

/// A lease whose end a test waits for. It is longer on a busy host, where it would otherwise end too early.
pub fn short_lease() -> Duration {
    sterna_testing::stretched(Duration::from_secs(1))
}

/// A lease that does not end on a busy host.
pub const TERMS: Terms = Terms {
    heartbeat: Duration::from_millis(20),
    lease: Duration::from_secs(60),
    drift_per_mille: 10,
    margin: Duration::from_millis(100),
    claim_interval: Duration::from_millis(50),
};

/// Gives the claim to the side that asks first.
#[derive(Default)]
pub struct Arbiter(pub Mutex<Option<&'static str>>, pub Mutex<Favour>);

/// A favoured side gets the claim if it asks. The other side waits for that for a while, because the favoured side
/// may hold no checkpoint and never ask.
#[derive(Default)]
pub struct Favour {
    pub side: Option<&'static str>,
    since: Option<Instant>,
}

impl Arbiter {
    fn of(self: &Arc<Self>, side: &'static str) -> Arc<dyn Claims> {
        let this = Arc::clone(self);
        Arc::new(move || {
            let mut favour = this.1.lock();
            if favour.side.is_some_and(|favoured| favoured != side) && this.0.lock().is_none() {
                let since = *favour.since.get_or_insert_with(Instant::now);
                if since.elapsed() < Duration::from_millis(500) {
                    return Err("not decided".to_owned());
                }
            }
            let owner = *this.0.lock().get_or_insert(side);
            Ok(if owner == side { Ruling::Won } else { Ruling::Lost })
        })
    }
}

pub struct Pair {
    pub guest: Arc<ProcessGuest>,
    /// The VM in which the guest continues after a takeover.
    pub there: Arc<ProcessGuest>,
    pub primary: Primary,
    pub standby: Standby,
    pub arbiter: Arc<Arbiter>,
    pub link: Link,
    /// Output that the survivor has repeated: the number of bytes before it, and the bytes.
    pub said_again: Arc<Mutex<(u64, Vec<u8>)>>,
}

pub fn protect(config: ProcessConfig, way: &Way, terms: Terms, gate: Arc<dyn EpochGate>) -> Pair {
    try_protect((config.clone(), config), way, terms, gate).expect("protected")
}

/// Protects the guest. Returns an error if the primary refuses.
pub fn try_protect(
    (ours, theirs): (ProcessConfig, ProcessConfig),
    way: &Way,
    terms: Terms,
    gate: Arc<dyn EpochGate>,
) -> Result<Pair, ProtectError> {
    let (guest, _) = pair(&ours);
    let there = ProcessGuest::waiting(theirs).expect("destination");
    let vms: (Arc<dyn SourceVm>, Arc<dyn TargetVm>) = (Arc::clone(&guest) as _, Arc::clone(&there) as _);
    join((guest, there), vms, way, terms, gate)
}

/// Protects the guest, with the VMs that contain the two guests.
pub fn join(
    (guest, there): (Arc<ProcessGuest>, Arc<ProcessGuest>),
    (vm, vm_there): (Arc<dyn SourceVm>, Arc<dyn TargetVm>),
    way: &Way,
    terms: Terms,
    gate: Arc<dyn EpochGate>,
) -> Result<Pair, ProtectError> {
    let (params, capabilities) = way.settings();
    let arbiter = Arc::<Arbiter>::default();
    let said_again = Arc::new(Mutex::new((0, Vec::new())));
    let survivor = VmSurvivor::new(vm_there).expect("the place is free").saying_again({
        let said_again = Arc::clone(&said_again);
        move |position, bytes| *said_again.lock() = (position, bytes.to_vec())
    });
    let standby = stand_by(survivor, params.clone(), capabilities, &arbiter);
    let link = Link::new(&standby.address());
    if let Some(pieces) = way.cut_after {
        link.knobs.cut.store(pieces, Ordering::SeqCst);
    }
    let (at, options) = (link.address(), way.options(terms));
    let guardians = guardians(&arbiter, 1, gate);
    let primary = Primary::protect(vm, &at, &options, guardians, params, capabilities, Arc::new(()))?;
    Ok(Pair { guest, there, primary, standby, arbiter, link, said_again })
}

/// Starts the standby.
pub fn stand_by(
    survivor: VmSurvivor,
    params: Parameters,
    capabilities: Capabilities,
    arbiter: &Arc<Arbiter>,
) -> Standby {
    let claims = Arc::clone(arbiter);
    let rules = ContactRules {
        secret: secret(),
        is_required: true,
        claims: Arc::new(move |_| claims.of("standby")),
        fence: Arc::new(|_| panic!("a guest of this process stops by itself")),
        always_fences: false,
    };
    let options = StandbyOptions { insecure: true, ..StandbyOptions::default() };
    let (at, survivor) = ("tcp:127.0.0.1:0".parse().unwrap(), Arc::new(survivor));
    Standby::protect(&at, &options, params, capabilities, Arc::new(()), survivor, Some(rules))
        .expect("listening")
}

/// The primary's guardians.
pub fn guardians(arbiter: &Arc<Arbiter>, generation: u64, gate: Arc<dyn EpochGate>) -> Guardians {
    Guardians {
        protection: Protection { id: [7; 16], generation },
        secret: secret(),
        claims: arbiter.of("primary"),
        gate,
    }
}

fn secret() -> Secret {
    Secret::from_bytes([3; 32])
}

/// Settings of checkpoints.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub lanes: u8,
    pub compression: Compression,
    pub zero_pages: sterna::ZeroPageDetection,
    pub delay: Duration,
    pub mode: CheckpointMode,
    pub in_flight: u8,
    pub copy: CheckpointCopy,
    pub buffer_bytes: u64,
    pub bandwidth_bytes: u64,
    pub downtime_limit: Duration,
    /// Whether checkpoints contain differences.
    pub delta: bool,
    /// Number of pieces after which every connection is closed.
    pub cut_after: Option<i64>,
}

pub const PLAIN: Way = Way {
    lanes: 0,
    compression: Compression::None,
    zero_pages: sterna::ZeroPageDetection::Multifd,
    delay: Duration::from_millis(5),
    mode: CheckpointMode::Interval,
    in_flight: 1,
    copy: CheckpointCopy::Auto,
    buffer_bytes: 64 << 20,
    bandwidth_bytes: 0,
    // On a busy host the seeding would not converge within the default limit.
    downtime_limit: PATIENCE,
    delta: false,
    cut_after: None,
};

impl Way {
    pub fn options(&self, terms: Terms) -> PrimaryOptions {
        PrimaryOptions {
            checkpoint_delay: self.delay,
            checkpoint_mode: self.mode,
            checkpoints_in_flight: self.in_flight,
            checkpoint_copy: self.copy,
            terms,
            buffer_bytes: self.buffer_bytes,
        }
    }

    pub fn settings(&self) -> (Parameters, Capabilities) {
        let (params, capabilities) =
            if self.lanes == 0 { (parameters(), Capabilities::default()) } else { multifd(self.lanes) };
        let params = Parameters {
            multifd_compression: self.compression,
            zero_page_detection: self.zero_pages,
            max_bandwidth_bytes: self.bandwidth_bytes,
            downtime_limit: self.downtime_limit,
            ..params
        };
        (params, Capabilities { xbzrle: self.delta, ..capabilities })
    }
}

/// A guest that writes continuously, with pages of every kind.
pub fn writer() -> ProcessConfig {
    let blocks = vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 4 << 20)];
    ProcessConfig { blocks, fill: Fill::Half(7), workers: 4, ..config() }
}

impl Pair {
    pub fn wait_for_held(&self, number: u64) {
        let begin = Instant::now();
        while self.primary.statistics().held < number {
            let (state, statistics) = (self.primary.state(), self.primary.statistics());
            assert_eq!(state.outcome, None, "{state:?}");
            assert!(
                begin.elapsed() < PATIENCE,
                "checkpoint {number} did not come: {state:?}, {statistics:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The outcome at the standby.
    pub fn ended_there(&self) -> standby::Outcome {
        self.standby.contact().expect("a contact").wait(PATIENCE).expect("an end")
    }
}
