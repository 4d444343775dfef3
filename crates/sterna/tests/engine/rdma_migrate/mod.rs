//! A guest that runs and writes is migrated between two Sternas over RDMA, on adapters inside the process.
#![allow(clippy::print_stdout, reason = "whoever reads of a failure needs the seed")]

mod content;
mod ended;
mod ends;
mod faults;
mod handover;
mod huge_pages;
mod on_demand;
mod order;
mod pinned;
mod slow;
mod stale;

use std::sync::Arc;
use std::time::Duration;

use sterna::{
    Address, Arrival, Capabilities, ChunkSize, Incoming, Migration, Outcome, Parameters, RdmaParameters,
    SourceVm, Statistics, TargetVm,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_guests::{Fill, Pattern};
use sterna_transport::rdma::Fabric;
use sterna_transport::rdma::double::{Host, Network, Settings};

use crate::common::*;
use crate::support::eventually;

const MIB: u64 = 1 << 20;

/// Two hosts in one simulated RDMA network.
struct Lab {
    network: Network,
    source: Arc<dyn Fabric>,
    source_host: Host,
    destination: Host,
    /// The destination's fabric, possibly wrapped.
    destination_fabric: Arc<dyn Fabric>,
}

/// Both sides of a migration.
struct Run {
    source: Arc<ProcessGuest>,
    target: Arc<ProcessGuest>,
    migration: Migration,
    incoming: Incoming,
    /// Events of source and destination.
    logs: [Arc<Log>; 2],
}

impl Lab {
    fn new(settings: Settings) -> Self {
        trace();
        let network = Network::new(settings).unwrap();
        let (source, destination) =
            (network.host(&[[10, 0, 0, 1].into()]), network.host(&[[10, 0, 0, 2].into()]));
        let destination_fabric = Arc::new(destination.clone());
        Self {
            network,
            source: Arc::new(source.clone()),
            source_host: source,
            destination,
            destination_fabric,
        }
    }

    fn parameters(&self, fabric: &Arc<dyn Fabric>, chunk_mib: u64) -> Parameters {
        let chunk = ChunkSize::new(chunk_mib * MIB).unwrap();
        let rdma = RdmaParameters { chunk, fabric: Some(Arc::clone(fabric)), ..RdmaParameters::default() };
        Parameters { rdma, ..parameters() }
    }

    /// Starts a migration; `change` changes the settings of both sides.
    fn start(
        &self,
        config: &ProcessConfig,
        capabilities: Capabilities,
        change: impl Fn(&mut Parameters),
    ) -> Run {
        let (source, target) = pair(config);
        let (mut ours, mut theirs) =
            (self.parameters(&self.source, 1), self.parameters(&self.destination_fabric, 1));
        change(&mut ours);
        change(&mut theirs);
        let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
        let at: Address = "rdma:10.0.0.2:0".parse().unwrap();
        let logs = [(); 2].map(|()| Arc::new(Log::default()));
        let incoming = Incoming::listen(vm, &at, theirs, capabilities, logs[1].clone()).expect("listening");
        let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
        let to = incoming.address();
        let migration = Migration::start(vm, &to, ours, capabilities, logs[0].clone()).expect("started");
        Run { source, target, migration, incoming, logs }
    }

    /// Asserts that no connection and no registered memory is left.
    fn assert_empty(&self) {
        eventually(&format!("{:?} are left", self.network.leaks()), || self.network.leaks().is_empty());
        let counts = self.network.counts();
        assert_eq!((counts.rnrs, counts.stale_registrations), (0, 0));
    }
}

impl Run {
    /// Runs rounds for this time, then the switchover.
    fn finish(self, rounds_for: Duration) -> (Statistics, Run) {
        std::thread::sleep(rounds_for);
        self.migration.set_live(|params| params.downtime_limit = Duration::from_secs(2)).unwrap();
        let (outcome, arrival) = (self.migration.wait(), self.incoming.wait());
        assert_arrived(&outcome, &arrival, &self.target);
        (self.migration.statistics(), self)
    }
}

/// A guest that writes pages at random.
fn writer(rate: u64) -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 3 << 20)],
        tracking: Tracking::Software,
        pattern: Pattern::Random,
        fill: Fill::Half(7),
        workers: 2,
        rate,
        ..ProcessConfig::default()
    }
}
