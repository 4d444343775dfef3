//! A network with its hosts, and the test's controls over them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::adapter::DoubleAdapter;
use super::counts::Counts;
use super::execute;
use super::faults::{Fault, Trigger};
use super::manager;
use super::pair::Pair;
use super::region::Region;
use super::settings::Settings;
use super::state::{Core, HostState};
use super::world::World;
use crate::CancelFlag;
use crate::rdma::transitions::QueuePairState;
use crate::rdma::{Adapter as _, AdapterInfo, Fabric, Listener, RdmaError, Route};

/// Hosts that reach each other over RDMA inside this process. Clones share the network.
///
/// Its thread ends when the network, its hosts and all their objects are dropped.
#[derive(Debug, Clone)]
pub struct Network {
    world: Arc<World>,
}

/// One host of the network: a fabric with a protection domain.
#[derive(Debug, Clone)]
pub struct Host {
    adapter: DoubleAdapter,
}

impl Network {
    /// Creates a network without hosts and starts its thread.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub fn new(settings: Settings) -> io::Result<Self> {
        let core = Arc::new(Core::new(settings));
        let of_thread = core.clone();
        let thread = std::thread::Builder::new().name("rdma double".into());
        let thread = thread.spawn(move || execute::run(&of_thread))?;
        Ok(Self { world: Arc::new(World { core, thread: Mutex::new(Some(thread)) }) })
    }

    /// Adds a host with these IP addresses.
    pub fn host(&self, addresses: &[IpAddr]) -> Host {
        let mut state = self.world.core.state();
        state.hosts.push(HostState {
            addresses: addresses.to_vec(),
            has_link: true,
            on_demand_paging: self.world.core.settings.on_demand_paging,
            confirmations: None,
            lost: None,
            plan: Default::default(),
            counts: Counts::default(),
            port_busy_until: Duration::ZERO,
        });
        let (host, domain) = (state.hosts.len() - 1, state.next() as usize);
        Host { adapter: DoubleAdapter { world: self.world.clone(), host, domain } }
    }

    /// Counters of all hosts together.
    pub fn counts(&self) -> Counts {
        let state = self.world.core.state();
        let mut sum = Counts::default();
        state.hosts.iter().for_each(|host| sum.add(&host.counts));
        // Regions that became stale and were not counted yet.
        let stale = state.regions.values().filter(|region| Region::is_stale_anywhere(region)).count();
        sum.stale_registrations += stale as u64;
        sum
    }

    /// Counters of one host.
    pub fn counts_of(&self, host: &Host) -> Counts {
        self.world.core.state().hosts[host.adapter.host].counts
    }

    /// Objects that still exist and should not at the end of a test, in words.
    pub fn leaks(&self) -> Vec<String> {
        self.counts().leaks()
    }

    /// The latest of the threads' virtual clocks: see [`super::Costs`].
    pub fn elapsed(&self) -> Duration {
        self.world.core.state().clocks.latest()
    }

    /// Advances the calling thread's virtual clock by `time`.
    pub fn spend(&self, time: Duration) {
        self.world.core.state().clocks.spend(time);
    }

    /// Number of a host's connected queue pairs through which its peers may write.
    pub fn writable_queue_pairs(&self, host: &Host) -> usize {
        let state = self.world.core.state();
        let is_open = |pair: &&Pair| pair.is_writable && pair.state == QueuePairState::ReadyToSend;
        state.pairs.values().filter(|pair| pair.host == host.adapter.host).filter(is_open).count()
    }

    /// Stops execution until [`Network::resume`]. Posted requests wait.
    pub fn hold(&self) {
        self.world.core.state().is_held = true;
    }

    /// Resumes execution after [`Network::hold`].
    pub fn resume(&self) {
        self.world.core.state().is_held = false;
        self.world.core.wake();
    }

    /// Plans a fault of a host for a later event.
    pub fn plan(&self, host: &Host, trigger: Trigger, fault: Fault) {
        self.world.core.state().hosts[host.adapter.host].plan.add(trigger, fault);
    }

    /// Ends the host's process permanently: its peers see a disconnect, and all its calls fail.
    pub fn kill(&self, host: &Host) {
        self.strike(host, Fault::Kill);
    }

    /// Removes the host's device permanently. Its peers get no answers and no event.
    pub fn remove_device(&self, host: &Host) {
        self.strike(host, Fault::RemoveDevice);
    }

    /// Removes or restores the link of a host. A connection survives an outage shorter than [`Settings::retry_limit`].
    pub fn set_link(&self, host: &Host, is_up: bool) {
        self.world.core.state().set_link(host.adapter.host, is_up);
        self.world.core.wake();
    }

    /// Makes connections of this host omit the connection manager's last message (RTU).
    ///
    /// The next `first` connections still send it.
    ///
    /// This host's side is connected. The accepting side has a queue pair that is ready, and waits for the message
    /// until its limit passes.
    pub fn withhold_confirmations(&self, host: &Host, first: u32) {
        self.world.core.state().hosts[host.adapter.host].confirmations = Some(first);
    }

    /// Enables or disables on-demand paging of one host's adapter.
    pub fn set_on_demand_paging(&self, host: &Host, has: bool) {
        self.world.core.state().hosts[host.adapter.host].on_demand_paging = has;
    }

    fn strike(&self, host: &Host, fault: Fault) {
        self.world.core.state().strike(host.adapter.host, fault);
        self.world.core.wake();
    }
}

impl Host {
    /// Another program on the same host: the same device with another protection domain.
    #[must_use]
    pub fn other_program(&self) -> Host {
        let domain = self.adapter.world.core.state().next() as usize;
        Host { adapter: DoubleAdapter { domain, ..self.adapter.clone() } }
    }
}

impl Fabric for Host {
    fn adapters(&self) -> Result<Vec<AdapterInfo>, RdmaError> {
        Ok(vec![self.adapter.info()])
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Arc<dyn Listener>, RdmaError> {
        manager::listen(&self.adapter, address, backlog)
    }

    fn resolve(
        &self,
        address: SocketAddr,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Route>, RdmaError> {
        manager::resolve(&self.adapter, address, limit, cancel)
    }
}
