//! A guest arrives over RDMA, from hand-made sources, on adapters inside the process.

mod half_open;
mod hostile;
mod memory;
mod rights;
mod rounds;
mod source;
mod strangers;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::ram::GuestRam;
use sterna::{Address, Arrival, Capabilities, Incoming, MigrationError, Parameters, TargetVm, Vm};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_transport::rdma::double::{Host, Network, Settings};

use crate::common;
use crate::support::{TestVm, assert_reset, eventually};
use source::{Guest, Habits, Source};

const LONG: Duration = Duration::from_secs(60);
const LIMIT: Option<Duration> = Some(LONG);
const MIB: u64 = 1 << 20;

/// Two hosts, and a destination that listens.
struct Lab {
    network: Network,
    source: Host,
    destination: Host,
    target: Arc<TestVm>,
    incoming: Mutex<Incoming>,
    log: Arc<common::Log>,
}

/// A guest with several chunks.
fn config() -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 20 << 20), ("ram.high".into(), 5 << 20)],
        fill: Fill::Half(7),
        working_set_pages: Some(64),
        ..common::config()
    }
}

/// A guest that is small enough for a fast migration.
fn small() -> ProcessConfig {
    ProcessConfig { blocks: vec![("ram.low".into(), 3 << 20), ("ram.high".into(), 1 << 20)], ..config() }
}

fn capabilities() -> Capabilities {
    // As for an unmanaged QEMU: the guest starts, or is taken over paused.
    Capabilities { unmanaged: true, ..Capabilities::default() }
}

impl Lab {
    fn with(settings: Settings, config: &ProcessConfig, change: impl FnOnce(&mut Parameters)) -> Self {
        common::trace();
        let network = Network::new(settings).unwrap();
        let (source, destination) = (network.host(&[address(1)]), network.host(&[address(2)]));
        let target = TestVm::new(ProcessGuest::waiting(config.clone()).unwrap());
        let mut params = common::parameters();
        change(&mut params);
        let log = Arc::new(common::Log::default());
        let incoming = Mutex::new(listen(&target, &destination, params, &log));
        Self { network, source, destination, target, incoming, log }
    }

    fn incoming(&self) -> Incoming {
        self.incoming.lock().unwrap().clone()
    }

    fn to(&self) -> SocketAddr {
        let at = self.incoming().address();
        let Address::Rdma { port, .. } = at else { panic!("{at}") };
        assert_ne!(port, 0, "the port that was chosen");
        SocketAddr::new(address(2), port)
    }

    /// Asserts that the destination can receive another guest.
    fn assert_next_works(&self, guest: &Guest) {
        if self.incoming().status().is_terminal() {
            let mut incoming = self.incoming.lock().unwrap();
            *incoming = listen(&self.target, &self.destination, common::parameters(), &self.log);
        }
        // A QEMU's connection request does not name its part. Until the destination notices the end of the last
        // source, it treats the request as that source's return path, and rejects it.
        let mut started = None;
        eventually("the next source to be let in", || {
            started = Source::try_start(self, guest, Habits::qemu(1)).ok();
            started.is_some()
        });
        let stream = started.expect("it was let in").run();
        self.assert_arrived(guest);
        drop(stream);
    }

    /// Asserts that every byte of the guest has arrived.
    fn assert_arrived(&self, guest: &Guest) {
        let arrival = self.incoming().wait();
        assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
        assert_same(&guest.ram, &self.target.ram());
        assert!(self.target.guest.check().unwrap().is_consistent());
        self.target.guest.cont().unwrap();
        common::assert_lives_on(&self.target.guest);
        assert_eq!(
            self.network.counts().stale_registrations,
            0,
            "pages were given back under a registration"
        );
        assert_eq!(self.incoming().statistics().rdma.unwrap().pinned_bytes, 0);
    }

    /// Asserts that the destination failed, and has released its resources. Returns the reason.
    fn assert_failed(&self) -> MigrationError {
        eventually("the destination's end", || self.incoming().status().is_terminal());
        let Arrival::Failed(error) = self.incoming().wait() else { panic!("{:?}", self.incoming().wait()) };
        assert_reset(&self.target);
        assert_eq!(*self.target.starts.lock().unwrap(), 0);
        // Connections that have not begun a migration end a moment later.
        let counts = || self.network.counts_of(&self.destination);
        eventually(&format!("{error}: something is left"), || {
            (counts().queue_pairs, counts().pinned_bytes) == (0, 0)
        });
        error
    }

    /// Ends the destination, and asserts that no connection and no registered memory is left.
    fn assert_empty(self) {
        let Self { network, incoming, target, .. } = self;
        drop((incoming, target));
        // A greeter may end a moment later.
        eventually(&format!("{:?} are left", network.leaks()), || network.leaks().is_empty());
    }
}

fn listen(target: &Arc<TestVm>, host: &Host, mut params: Parameters, log: &Arc<common::Log>) -> Incoming {
    params.rdma.fabric = Some(Arc::new(host.clone()));
    let vm: Arc<dyn TargetVm> = target.clone();
    let at = "rdma:10.0.0.2:0".parse().unwrap();
    Incoming::listen(vm, &at, params, capabilities(), log.clone()).unwrap()
}

fn address(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn assert_same(ours: &GuestRam, theirs: &GuestRam) {
    for (ours, theirs) in ours.blocks().iter().zip(theirs.blocks()) {
        assert_eq!((ours.name(), ours.len_bytes()), (theirs.name(), theirs.len_bytes()));
        let bytes = |block: &sterna::ram::RamBlock| {
            let mut bytes = vec![0; block.len_bytes() as usize];
            block.read(0, &mut bytes).unwrap();
            bytes
        };
        let (ours_bytes, theirs_bytes) = (bytes(ours), bytes(theirs));
        let differs = ours_bytes.iter().zip(&theirs_bytes).position(|(ours, theirs)| ours != theirs);
        assert_eq!(differs, None, "the first byte of {:?} that differs", ours.name());
    }
}
