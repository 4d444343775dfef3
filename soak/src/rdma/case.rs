//! One migration over RDMA, and the properties that it must have at its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{
    Address, Arrival, Capabilities, ChunkSize, Decision, Incoming, Migration, Outcome, Parameters,
    RdmaParameters, RunState, SourceVm, Status, TargetVm, WaitLimits,
};
use sterna_guests::model::Acts;
use sterna_guests::process::{ProcessConfig, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern, ProcessGuest};
use sterna_transport::rdma::double::{Host, Network, Settings};

use super::disturbance::Disturbance;
use crate::judge::whole;

/// Limit of every wait, also on a busy machine.
const LONGEST: Duration = Duration::from_secs(120);
/// Time for which an undecided source may ask.
const ASKING: Duration = Duration::from_millis(500);

/// The random choices of a case.
#[derive(Debug)]
pub(super) struct Case {
    seed: u64,
    guest: ProcessConfig,
    pin_all: bool,
    /// Chunk sizes of source and destination, in MiB.
    chunks_mib: (u64, u64),
    /// Limits of pinned memory of source and destination, in MiB.
    pinned_limits_mib: (Option<u64>, Option<u64>),
    pauses: bool,
    /// Number of multifd channels; zero without multifd.
    lanes: u8,
    disturbance: Disturbance,
    /// For each side, whether its adapter has on-demand paging.
    on_demand: [bool; 2],
}

/// Two hosts on one network, and the migration between them.
struct Play {
    network: Network,
    source: Host,
    destination: Host,
    migration: Migration,
    incoming: Incoming,
}

impl Case {
    pub(super) fn new(seed: u64, number: u64) -> Self {
        let seed = seed.wrapping_mul(1 << 20).wrapping_add(number);
        let mut random = fastrand::Rng::with_seed(seed);
        let tracking = Tracking::available();
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
        let pin_all = random.u8(..4) == 0;
        // With pin-all, a destination refuses a limit that is smaller than all of RAM.
        let limits = if pin_all { [None; 4] } else { [None, None, Some(16), Some(2)] };
        Self {
            seed,
            guest,
            pin_all,
            chunks_mib: (1 << random.u32(..4), 1 << random.u32(..4)),
            pinned_limits_mib: (limits[random.usize(..4)], limits[random.usize(..4)]),
            pauses: random.u8(..4) == 0,
            lanes: [0, 0, 1, 2, 4][random.usize(..5)],
            disturbance: Disturbance::draw(&mut random),
            on_demand: [(); 2].map(|()| random.u8(..4) == 0),
        }
    }

    /// Plays the case and returns a description of its end.
    pub(super) fn play(self) -> Result<String, String> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let here = ProcessGuest::boot(self.guest.clone()).map_err(|error| said(&error))?;
        here.cont().map_err(|error| said(&error))?;
        let there = ProcessGuest::waiting(self.guest.clone()).map_err(|error| said(&error))?;
        let play = self.start(&here, &there)?;
        self.disturb(&play);
        let (outcome, arrival) = play.settle()?;
        let owner = self.owner(&here, &there, &outcome, &arrival)?;
        whole(owner)?;
        let how = format!("{outcome:?}, {arrival:?}");
        play.nothing_is_left()?;
        let again = if Arc::ptr_eq(owner, &here) { Some(&there) } else { None };
        self.next(owner, again).map_err(|why| format!("the next migration after {how}: {why}"))?;
        Ok(how)
    }

    fn start(&self, here: &Arc<ProcessGuest>, there: &Arc<ProcessGuest>) -> Result<Play, String> {
        let network = Network::new(Settings::seeded(self.seed)).map_err(|error| error.to_string())?;
        let (source, destination) =
            (network.host(&[[10, 0, 0, 1].into()]), network.host(&[[10, 0, 0, 2].into()]));
        for (host, has) in [&source, &destination].into_iter().zip(self.on_demand) {
            network.set_on_demand_paging(host, has);
        }
        self.disturbance.plan(&network, &source, &destination);
        let capabilities = Capabilities {
            rdma_pin_all: self.pin_all,
            pause_before_switchover: self.pauses,
            multifd: self.lanes > 0,
            ..Capabilities::default()
        };
        let at = Address::Rdma { host: "10.0.0.2".into(), port: 0 };
        let params = self.params(&destination, self.chunks_mib.1, self.pinned_limits_mib.1);
        let target = Arc::clone(there) as Arc<dyn TargetVm>;
        let incoming = Incoming::listen(target, &at, params, capabilities, Arc::new(()))
            .map_err(|error| format!("listening: {error}"))?;
        let params = self.params(&source, self.chunks_mib.0, self.pinned_limits_mib.0);
        let vm = Arc::clone(here) as Arc<dyn SourceVm>;
        let migration = Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(()))
            .map_err(|error| format!("starting: {error}"))?;
        Ok(Play { network, source, destination, migration, incoming })
    }

    fn params(&self, host: &Host, chunk_mib: u64, pinned_limit_mib: Option<u64>) -> Parameters {
        // In an undisturbed case, no wait may reach its limit.
        let short = if self.disturbance.is_harmless() { LONGEST } else { Duration::from_secs(1) };
        Parameters {
            max_bandwidth_bytes: 0,
            multifd_channels: self.lanes.max(1),
            downtime_limit: Duration::from_secs(1),
            rdma: RdmaParameters {
                chunk: ChunkSize::new(chunk_mib << 20).unwrap_or_default(),
                pinned_limit_bytes: pinned_limit_mib.map(|mib| mib << 20),
                fabric: Some(Arc::new(host.clone())),
            },
            limits: WaitLimits {
                setup: 3 * short,
                stall: short,
                switchover: 3 * short,
                prepare: 3 * short,
                acknowledge: short,
                ask_interval: Duration::from_millis(20),
            },
            ..Parameters::default()
        }
    }

    fn disturb(&self, play: &Play) {
        match self.disturbance {
            Disturbance::Nothing | Disturbance::Fault(..) => {}
            Disturbance::Cancel(after) => {
                std::thread::sleep(after);
                // Cancel is refused after the commit.
                let _ = play.migration.cancel();
            }
            Disturbance::Abandon(after) => {
                std::thread::sleep(after);
                let _ = play.incoming.cancel();
            }
            Disturbance::Link(side, after, lasting) => {
                let host = side.of(&play.source, &play.destination);
                std::thread::sleep(after);
                play.network.set_link(host, false);
                std::thread::sleep(lasting);
                play.network.set_link(host, true);
            }
        }
    }

    /// Checks that exactly one side runs the guest, and that both outcomes agree. Returns that side.
    fn owner<'a>(
        &self,
        here: &'a Arc<ProcessGuest>,
        there: &'a Arc<ProcessGuest>,
        outcome: &Outcome,
        arrival: &Arrival,
    ) -> Result<&'a Arc<ProcessGuest>, String> {
        let run = (here.run_state() == RunState::Running, there.run_state() == RunState::Running);
        let is_gone = matches!(outcome, Outcome::Completed);
        let has_arrived = matches!(arrival, Arrival::Completed(RunState::Running));
        if run != (!is_gone, has_arrived) || is_gone != has_arrived {
            return Err(format!("runs at (source, destination): {run:?} after {outcome:?}, {arrival:?}"));
        }
        if self.disturbance.is_harmless() && !is_gone {
            return Err(format!("undisturbed, and it ended with {outcome:?}, {arrival:?}"));
        }
        Ok(if is_gone { there } else { here })
    }

    /// Migrates the guest again without disturbance. The destination is the side where it did not arrive, or
    /// a new place.
    fn next(&self, owner: &Arc<ProcessGuest>, again: Option<&Arc<ProcessGuest>>) -> Result<(), String> {
        let undisturbed =
            Self { disturbance: Disturbance::Nothing, pauses: false, guest: self.guest.clone(), ..*self };
        let place = match again {
            Some(place) => Arc::clone(place),
            None => ProcessGuest::waiting(self.guest.clone()).map_err(|error| error.to_string())?,
        };
        let play = undisturbed.start(owner, &place)?;
        let (outcome, arrival) = play.settle()?;
        whole(undisturbed.owner(owner, &place, &outcome, &arrival)?)?;
        play.nothing_is_left()
    }
}

impl Play {
    /// Waits for the outcomes of both sides.
    fn settle(&self) -> Result<(Outcome, Arrival), String> {
        let until = Instant::now() + LONGEST;
        let mut undecided_since = None;
        loop {
            match self.migration.status() {
                Status::PreSwitchover => drop(self.migration.continue_switchover()),
                Status::Undecided => {
                    let since = *undecided_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > ASKING {
                        self.decide()?;
                    }
                }
                _ => {}
            }
            if let Some(outcome) = self.migration.outcome() {
                return Ok((outcome, self.arrival(until)?));
            }
            if Instant::now() > until {
                return Err(format!("the source stays {:?}", self.migration.status()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Decides as an operator after a look at the destination. A destination without the guest is given up
    /// first, so that it cannot get it.
    fn decide(&self) -> Result<(), String> {
        let decision = match self.incoming.cancel() {
            Ok(()) => Decision::SourceRuns,
            Err(_) => match self.arrival(Instant::now() + LONGEST)? {
                Arrival::Completed(_) => Decision::DestinationRuns,
                _ => Decision::SourceRuns,
            },
        };
        // The destination may have answered in the meantime.
        let _ = self.migration.decide(decision);
        Ok(())
    }

    /// The outcome at the destination. A destination that waits for another source is given up.
    fn arrival(&self, until: Instant) -> Result<Arrival, String> {
        while Instant::now() < until {
            if let Some(arrival) = self.incoming.arrival() {
                return Ok(arrival);
            }
            if matches!(self.incoming.status(), Status::Setup | Status::None) {
                let _ = self.incoming.cancel();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(format!("the destination stays {:?}", self.incoming.status()))
    }

    /// Drops both migrations, and checks that adapters and memory are in their initial state.
    fn nothing_is_left(self) -> Result<(), String> {
        let Self { network, source, destination, migration, incoming } = self;
        drop((migration, incoming));
        let until = Instant::now() + LONGEST;
        loop {
            let mut left = network.leaks();
            let stale = network.counts().stale_registrations;
            if stale > 0 {
                left.push(format!("{stale} registrations below which memory was discarded"));
            }
            if left.is_empty() {
                drop((source, destination));
                return Ok(());
            }
            if Instant::now() > until || stale > 0 {
                return Err(left.join("; "));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
