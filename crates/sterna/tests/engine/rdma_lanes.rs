//! Complete migrations over RDMA, on adapters inside the process: lanes, devices, guests that write.

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use sterna::error::{Difference, RdmaDifference};
use sterna::{
    Address, Arrival, Capabilities, ChunkSize, Incoming, Migration, MigrationError, Outcome, Parameters,
    SettingsError, SourceVm, StartError, TargetVm,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest, StopPoint, Tracking};
use sterna_guests::{Fill, Pattern};
use sterna_transport::CancelFlag;
use sterna_transport::rdma::double::{Host, Network, Settings};
use sterna_transport::rdma::{AdapterInfo, Fabric, Listener, RdmaError, Route};

use crate::common;

/// Two hosts in one simulated RDMA network.
struct Hosts {
    network: Network,
    source: Host,
    destination: Host,
}

impl Hosts {
    fn new(settings: Settings) -> Self {
        let network = Network::new(settings).unwrap();
        let (source, destination) =
            (network.host(&[[10, 0, 0, 1].into()]), network.host(&[[10, 0, 0, 2].into()]));
        Self { network, source, destination }
    }

    fn assert_empty(self) {
        assert_eq!(self.network.counts().rnrs, 0, "every message met a receive");
        assert_eq!(self.network.counts().stale_registrations, 0);
        assert_eq!(self.network.leaks(), Vec::<String>::new());
    }
}

/// Settings of one side.
fn params(host: &Host, lanes: u8) -> (Parameters, Capabilities) {
    let (mut params, capabilities) = common::multifd(lanes.max(1));
    params.rdma.fabric = Some(Arc::new(host.clone()));
    (params, Capabilities { multifd: lanes > 0, ..capabilities })
}

fn at() -> Address {
    "rdma:10.0.0.2:0".parse().unwrap()
}

fn guests(config: &ProcessConfig) -> (Arc<ProcessGuest>, Arc<ProcessGuest>) {
    let source = ProcessGuest::boot(config.clone()).unwrap();
    source.cont().unwrap();
    (source, ProcessGuest::waiting(config.clone()).unwrap())
}

/// A guest that writes at full speed during many rounds: a page of a later round must never be overwritten by an
/// earlier one.
#[test]
fn guest_under_full_tide_is_one_cut_over_any_number_of_lanes() {
    for (seed, lanes) in [(1, 0), (2, 1), (3, 2), (4, 4)] {
        let hosts = Hosts::new(Settings::seeded(seed));
        let tracking = Tracking::available();
        let config = ProcessConfig {
            blocks: vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 4 << 20)],
            pattern: Pattern::Mixed,
            stop_point: StopPoint::MidPage,
            fill: Fill::Random(seed),
            rate: 0,
            tracking: tracking[seed as usize % tracking.len()],
            seed,
            ..ProcessConfig::default()
        };
        let (source, target) = guests(&config);
        let (mut params_of_target, capabilities) = params(&hosts.destination, lanes);
        params_of_target.rdma.chunk = ChunkSize::new(2 << 20).unwrap();
        let incoming = Incoming::listen(
            Arc::clone(&target) as Arc<dyn TargetVm>,
            &at(),
            params_of_target,
            capabilities,
            Arc::new(()),
        )
        .unwrap();
        let (mut params, capabilities) = params(&hosts.source, lanes);
        // No page fits this limit, so rounds continue until it is changed below.
        params.downtime_limit = Duration::ZERO;
        let vm = Arc::clone(&source) as Arc<dyn SourceVm>;
        let migration =
            Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(())).unwrap();
        while migration.statistics().rounds_begun < 6 && migration.outcome().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        migration.set_live(|params| params.downtime_limit = Duration::from_secs(20)).unwrap();

        let (outcome, arrival) = (migration.wait(), incoming.wait());

        common::assert_arrived(&outcome, &arrival, &target);
        let statistics = migration.statistics();
        let rdma = statistics.rdma.expect("over RDMA");
        assert!(rdma.writes > 0 && rdma.windows > 0, "{rdma:?}");
        assert_eq!((rdma.in_flight_bytes, rdma.pinned_bytes), (0, 0), "{rdma:?}");
        assert!(rdma.written_bytes >= 16 << 20, "{rdma:?}");
        assert_eq!(statistics.channels, u32::from(lanes.max(1)));
        // Pages were written by WRITEs. Messages of lanes contained only headers.
        let sent = hosts.network.counts().send_bytes;
        assert!(sent < rdma.written_bytes / 4, "{sent} bytes in messages, {rdma:?}");
        drop((incoming, migration));
        hosts.assert_empty();
    }
}

#[test]
fn destination_with_fewer_lanes_is_named_before_anything_moves() {
    let hosts = Hosts::new(Settings::new());
    let (source, target) = guests(&ProcessConfig::default());
    let (of_target, capabilities) = params(&hosts.destination, 1);
    let vm = target as Arc<dyn TargetVm>;
    let incoming = Incoming::listen(vm, &at(), of_target, capabilities, Arc::new(())).unwrap();
    let (of_source, capabilities) = params(&hosts.source, 3);
    let vm = Arc::clone(&source) as Arc<dyn SourceVm>;

    let migration = Migration::start(vm, &incoming.address(), of_source, capabilities, Arc::new(())).unwrap();

    let Outcome::Failed { error, held: false } = migration.wait() else {
        panic!("{:?}", migration.outcome())
    };
    let channels = RdmaDifference::Channels { theirs: 1, ours: 3 };
    assert!(
        matches!(&error, MigrationError::PeerIncompatible(Difference::Rdma(why)) if *why == channels),
        "{error}"
    );
    common::assert_lives_on(&source);
    incoming.cancel().unwrap();
    assert!(matches!(incoming.wait(), Arrival::Failed(_)));
    drop((incoming, migration));
    hosts.assert_empty();
}

#[test]
fn compression_over_lanes_is_refused_with_the_reason() {
    let hosts = Hosts::new(Settings::new());
    let (source, _) = guests(&ProcessConfig::default());
    let (mut params, capabilities) = params(&hosts.source, 2);
    params.multifd_compression = sterna::Compression::Zstd;

    let refused =
        Migration::start(source, &"rdma:10.0.0.2:1".parse().unwrap(), params, capabilities, Arc::new(()));

    assert!(matches!(refused.err(), Some(StartError::Settings(SettingsError::RdmaIsUncompressed))));
    hosts.assert_empty();
}

/// A host whose connections get no route until [`Meeting::LANES`] wait for one. These are the lanes, which connect
/// after the other connections are open.
#[derive(Debug)]
struct Meeting {
    host: Host,
    /// Number of routes for connections that precede the lanes.
    before: Mutex<usize>,
    waiting: Mutex<usize>,
    more: Condvar,
}

impl Meeting {
    const LANES: usize = 4;
    /// The main connection and the return path.
    const BEFORE: usize = 2;
}

impl Fabric for Meeting {
    fn adapters(&self) -> Result<Vec<AdapterInfo>, RdmaError> {
        self.host.adapters()
    }
    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Arc<dyn Listener>, RdmaError> {
        self.host.listen(address, backlog)
    }
    fn resolve(
        &self,
        address: SocketAddr,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Route>, RdmaError> {
        let mut before = self.before.lock().unwrap();
        if *before < Self::BEFORE {
            *before += 1;
            return self.host.resolve(address, limit, cancel);
        }
        drop(before);
        let mut waiting = self.waiting.lock().unwrap();
        *waiting += 1;
        self.more.notify_all();
        let all = |waiting: &mut usize| *waiting < Self::LANES;
        let (waiting, ended) = self.more.wait_timeout_while(waiting, Duration::from_secs(20), all).unwrap();
        assert!(!ended.timed_out(), "lanes connect one after another: {waiting} at the same time");
        drop(waiting);
        self.host.resolve(address, limit, cancel)
    }
}

#[test]
fn lanes_are_connected_in_parallel() {
    let hosts = Hosts::new(Settings::new());
    let (source, target) = guests(&ProcessConfig::default());
    let (of_target, capabilities) = params(&hosts.destination, Meeting::LANES as u8);
    let vm = Arc::clone(&target) as Arc<dyn TargetVm>;
    let incoming = Incoming::listen(vm, &at(), of_target, capabilities, Arc::new(())).unwrap();
    let (mut of_source, capabilities) = params(&hosts.source, Meeting::LANES as u8);
    of_source.rdma.fabric = Some(Arc::new(Meeting {
        host: hosts.source.clone(),
        before: Mutex::default(),
        waiting: Mutex::default(),
        more: Condvar::new(),
    }));

    let migration =
        Migration::start(source, &incoming.address(), of_source, capabilities, Arc::new(())).unwrap();

    common::assert_arrived(&migration.wait(), &incoming.wait(), &target);
    drop((incoming, migration));
    hosts.assert_empty();
}
