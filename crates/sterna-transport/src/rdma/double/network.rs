//! A network, its hosts, and what a test does to them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::adapter::DoubleAdapter;
use super::counts::Counts;
use super::execute;
use super::faults::{Fault, Trigger};
use super::manager;
use super::pair::{Pair, PairState};
use super::region::Region;
use super::settings::Settings;
use super::state::{Core, HostState};
use crate::CancelFlag;
use crate::rdma::{Adapter as _, AdapterInfo, Fabric, Listener, RdmaError, Route};

/// Hosts that reach each other over RDMA inside this process. Cloning shares it. Its thread ends when the network, its
/// hosts and all that they made are dropped.
#[derive(Debug, Clone)]
pub struct Network {
    world: Arc<World>,
}

/// One host: a fabric with a protection domain.
#[derive(Debug, Clone)]
pub struct Host {
    adapter: DoubleAdapter,
}

/// The network and its thread.
#[derive(Debug)]
pub(super) struct World {
    pub(super) core: Arc<Core>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Network {
    /// A network without hosts.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(settings: Settings) -> io::Result<Self> {
        let core = Arc::new(Core::new(settings));
        let of_thread = core.clone();
        let thread = std::thread::Builder::new().name("rdma double".into());
        let thread = thread.spawn(move || execute::run(&of_thread))?;
        Ok(Self { world: Arc::new(World { core, thread: Mutex::new(Some(thread)) }) })
    }

    /// Adds a host with these addresses.
    pub fn host(&self, addresses: &[IpAddr]) -> Host {
        let mut state = self.world.core.state();
        state.hosts.push(HostState {
            addresses: addresses.to_vec(),
            has_link: true,
            on_demand_paging: self.world.core.settings.on_demand_paging,
            lost: None,
            plan: Default::default(),
            counts: Counts::default(),
            port_busy_until: Duration::ZERO,
        });
        let (host, domain) = (state.hosts.len() - 1, state.next() as usize);
        Host { adapter: DoubleAdapter { world: self.world.clone(), host, domain } }
    }

    /// What happened at all hosts together.
    pub fn counts(&self) -> Counts {
        let state = self.world.core.state();
        let mut sum = Counts::default();
        state.hosts.iter().for_each(|host| sum.add(&host.counts));
        // What was discarded and not noticed yet.
        let stale = state.regions.values().filter(|region| Region::is_stale_anywhere(region)).count();
        sum.stale_registrations += stale as u64;
        sum
    }

    /// What happened at one host.
    pub fn counts_of(&self, host: &Host) -> Counts {
        self.world.core.state().hosts[host.adapter.host].counts
    }

    /// What is still there and should not be at the end of a test.
    pub fn leaks(&self) -> Vec<String> {
        self.counts().leaks()
    }

    /// The latest of the threads' virtual clocks: see [`super::Costs`].
    pub fn elapsed(&self) -> Duration {
        self.world.core.state().clocks.latest()
    }

    /// The caller works for so long in virtual time.
    pub fn spend(&self, time: Duration) {
        self.world.core.state().clocks.spend(time);
    }

    /// Through how many connected queue pairs of a host its peers may write its memory.
    pub fn writable_queue_pairs(&self, host: &Host) -> usize {
        let state = self.world.core.state();
        let is_open = |pair: &&Pair| pair.is_writable && pair.state == PairState::ReadyToSend;
        state.pairs.values().filter(|pair| pair.host == host.adapter.host).filter(is_open).count()
    }

    /// Holds everything: nothing is executed until [`Network::resume`]. What is posted waits.
    pub fn hold(&self) {
        self.world.core.state().is_held = true;
    }

    /// Goes on after [`Network::hold`].
    pub fn resume(&self) {
        self.world.core.state().is_held = false;
        self.world.core.wake();
    }

    /// Plans a fault at a host.
    pub fn plan(&self, host: &Host, trigger: Trigger, fault: Fault) {
        self.world.core.state().hosts[host.adapter.host].plan.add(trigger, fault);
    }

    /// The host's process is gone, for good: its peers see a disconnect, and all that it calls fails.
    pub fn kill(&self, host: &Host) {
        self.strike(host, Fault::Kill);
    }

    /// The host's device is removed, for good. Its peers see nothing but silence.
    pub fn remove_device(&self, host: &Host) {
        self.strike(host, Fault::RemoveDevice);
    }

    /// Takes the link of a host away, or gives it back. A connection survives a time without a link that is shorter than
    /// [`Settings::retry_limit`].
    pub fn set_link(&self, host: &Host, is_up: bool) {
        self.world.core.state().set_link(host.adapter.host, is_up);
        self.world.core.wake();
    }

    /// Gives the adapter of one host on-demand paging, or takes it away.
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

impl Drop for World {
    fn drop(&mut self) {
        {
            // Under the lock: the thread has not looked yet, or waits already.
            let _state = self.core.state();
            self.core.is_over.store(true, Ordering::SeqCst);
        }
        self.core.wake();
        if let Some(thread) = self.thread.lock().take() {
            // A panic of it was printed, and the test that waited for it has failed.
            let _ = thread.join();
        }
    }
}
