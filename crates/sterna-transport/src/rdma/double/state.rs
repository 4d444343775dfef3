//! The complete state of a network, under one lock.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::clock::{Clocks, Time};
use super::counts::Counts;
use super::faults::{Fault, Plan};
use super::pair::{Pair, Signal};
use super::region::{Range, Region};
use super::settings::Settings;
use crate::rdma::transitions::QueuePairState;
use crate::rdma::{Event, PortState};

/// State that the hosts, their connections and the network's thread share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) settings: Settings,
    state: Mutex<State>,
    /// Signalled when there may be something to execute.
    pub(super) work: Condvar,
    pub(super) is_over: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) hosts: Vec<HostState>,
    pub(super) regions: HashMap<u32, Region>,
    pub(super) pairs: BTreeMap<u64, Pair>,
    pub(super) listeners: BTreeMap<u64, ListenerState>,
    /// Connect requests that were accepted and not answered: the requesting pair, and the requested host.
    pub(super) requests: HashMap<u64, usize>,
    pub(super) clocks: Clocks,
    pub(super) random: Option<fastrand::Rng>,
    /// Whether execution is stopped by [`super::Network::hold`].
    pub(super) is_held: bool,
    /// Regions that are known to be stale, so that each is counted once.
    stale: HashSet<u32>,
    last: u64,
}

/// State of one host.
#[derive(Debug)]
pub(super) struct HostState {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) has_link: bool,
    /// Whether its adapter supports on-demand paging.
    pub(super) on_demand_paging: bool,
    /// Number of its connections that still confirm: see [`super::Network::withhold_confirmations`].
    pub(super) confirmations: Option<u32>,
    /// The event that made the host unusable: a kill, or the removal of its device.
    pub(super) lost: Option<Event>,
    pub(super) plan: Plan,
    pub(super) counts: Counts,
    /// Virtual time until which its port is sending.
    pub(super) port_busy_until: Time,
}

/// State of a listener.
#[derive(Debug)]
pub(super) struct ListenerState {
    pub(super) host: usize,
    pub(super) address: SocketAddr,
    pub(super) backlog: usize,
    pub(super) waiting: VecDeque<Asking>,
    pub(super) signal: Signal,
}

/// A connect request that waits at a listener.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) pair: u64,
    pub(super) from: SocketAddr,
    pub(super) private_data: Vec<u8>,
    /// RNR retry count that the requesting side asks for the other side's sends.
    pub(super) rnr_retry: u8,
}

impl Core {
    pub(super) fn new(settings: Settings) -> Self {
        let state = State { random: settings.seed.map(fastrand::Rng::with_seed), ..State::default() };
        Self { settings, state: Mutex::new(state), work: Condvar::new(), is_over: AtomicBool::new(false) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Wakes the network's thread, because there may be something to execute.
    pub(super) fn wake(&self) {
        self.work.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}

impl State {
    /// A number that no other object of the network has.
    pub(super) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn counts(&mut self, host: usize) -> &mut Counts {
        &mut self.hosts[host].counts
    }

    pub(super) fn port_state(&self, host: usize) -> PortState {
        let host = &self.hosts[host];
        if host.has_link && host.lost.is_none() { PortState::Active } else { PortState::Down }
    }

    /// The region of a key, if the key, the domain and the range match.
    pub(super) fn region(&self, key: u32, is_remote: bool, domain: usize, range: Range) -> Option<&Region> {
        let region = self.regions.get(&(key >> 8))?;
        let keys = keys(key >> 8);
        let is_key = key == if is_remote { keys.1 } else { keys.0 };
        (is_key && region.domain == domain && region.contains(range)).then_some(region)
    }

    /// Counts a region as stale, once.
    pub(super) fn note_stale(&mut self, index: u32, host: usize) {
        if self.stale.insert(index) {
            self.counts(host).stale_registrations += 1;
        }
    }

    /// Puts a pair into the error state.
    pub(super) fn fail_pair(&mut self, id: u64, at: Time) {
        let Some(pair) = self.pairs.get_mut(&id) else { return };
        let (host, flushed) = (pair.host, pair.fail(at));
        self.counts(host).flushed += flushed;
    }

    /// Ends a pair's connection and notifies the peer, unless the connection has already ended.
    pub(super) fn disconnect(&mut self, id: u64) {
        let now = self.clocks.now();
        let Some(pair) = self.pairs.get(&id) else { return };
        let (peer, was_connected) = (pair.peer, pair.end.is_none());
        self.fail_pair(id, now);
        let Some(pair) = self.pairs.get_mut(&id).filter(|_| was_connected) else { return };
        pair.report(Event::Disconnected);
        if let Some(peer) = peer {
            self.hear_of_disconnect(peer, now);
        }
    }

    /// Handles a disconnect at the peer. The connection manager puts the pair into the error state, and then
    /// reports the event.
    fn hear_of_disconnect(&mut self, id: u64, now: Time) {
        if self.pairs.get(&id).is_none_or(|pair| pair.end.is_some()) {
            return;
        }
        self.fail_pair(id, now);
        if let Some(pair) = self.pairs.get_mut(&id) {
            pair.report(Event::Disconnected);
        }
    }

    /// Ends a pair's connection without notifying the peer.
    pub(super) fn end_by(&mut self, id: u64, event: Event) {
        if let Some(pair) = self.pairs.get_mut(&id).filter(|pair| pair.end.is_none()) {
            pair.report(event);
        }
    }

    /// Whether requests of a pair get no answer.
    pub(super) fn is_silent(&self, pair: &Pair) -> bool {
        let Some(peer) = pair.peer.and_then(|peer| self.pairs.get(&peer)) else { return true };
        peer.state != QueuePairState::ReadyToSend
            || [pair.host, peer.host].iter().any(|host| self.port_state(*host) != PortState::Active)
    }

    /// Applies a fault of a whole host. Faults of a single call or request are applied elsewhere.
    pub(super) fn strike(&mut self, host: usize, fault: Fault) {
        match fault {
            Fault::Kill => self.kill(host),
            Fault::LinkDown => self.set_link(host, false),
            Fault::RemoveDevice => self.lose(host, Event::DeviceRemoved, false),
            Fault::Errno(_) | Fault::Status(_) => {}
        }
    }

    /// Ends the process of a host: its peers see a disconnect.
    pub(super) fn kill(&mut self, host: usize) {
        self.lose(host, Event::Fatal("the process was killed".into()), true);
    }

    pub(super) fn set_link(&mut self, host: usize, is_up: bool) {
        self.hosts[host].has_link = is_up;
        let event = if is_up { Event::PortUp } else { Event::PortDown };
        for pair in self.pairs.values_mut().filter(|pair| pair.host == host) {
            pair.report(event.clone());
        }
    }

    fn lose(&mut self, host: usize, by: Event, is_told: bool) {
        self.hosts[host].lost = Some(by.clone());
        for listener in self.listeners.values().filter(|listener| listener.host == host) {
            listener.signal.set();
        }
        let ids: Vec<u64> =
            self.pairs.iter().filter(|(_, pair)| pair.host == host).map(|(id, _)| *id).collect();
        let now = self.clocks.now();
        for id in ids {
            self.fail_pair(id, now);
            let Some(pair) = self.pairs.get_mut(&id) else { continue };
            pair.report(by.clone());
            if let Some(peer) = pair.peer.filter(|_| is_told) {
                self.hear_of_disconnect(peer, now);
            }
        }
    }
}

/// The local and the remote key of a region. A key is never 0, and the next number is never a key.
pub(super) fn keys(index: u32) -> (u32, u32) {
    (index << 8 | 0x10, index << 8 | 0x80)
}
