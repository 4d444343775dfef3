//! The connection manager of the double: listeners, connect requests and routes.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::adapter::{DoubleAdapter, MOST_WORK_REQUESTS};
use super::asking::reject;
use super::asking::{Unanswered, check_private_data};
use super::connection::DoubleConnection;
use super::pair::{Pair, Signal};
use super::state::{Asking, ListenerState, State};
use crate::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::rdma::{
    Adapter, Connection, Listener, PRIVATE_DATA, PortState, QueuePairAttributes, RdmaError, RejectReason,
    Request, Route,
};

/// First port that the network assigns when a listener asks for port 0.
const FIRST_PORT: u16 = 49152;

pub(super) fn listen(
    adapter: &DoubleAdapter,
    address: SocketAddr,
    backlog: u32,
) -> Result<Arc<dyn Listener>, RdmaError> {
    let system = |source| RdmaError::Bind { address: address.to_string(), source };
    let signal = Signal::new().map_err(system)?;
    let core = &adapter.world.core;
    let mut state = core.state();
    if !address.ip().is_unspecified() && !state.hosts[adapter.host].addresses.contains(&address.ip()) {
        return Err(no_device(&state, adapter.host, address));
    }
    let is_free = |state: &State, port| {
        let mut of_host = state.listeners.values().filter(|listener| listener.host == adapter.host);
        of_host.all(|listener| listener.address.port() != port)
    };
    let mut address = address;
    if address.port() == 0 {
        let port = (FIRST_PORT..).find(|port| is_free(&state, *port)).unwrap_or(FIRST_PORT);
        address.set_port(port);
    }
    if !is_free(&state, address.port()) {
        return Err(system(io::Error::from_raw_os_error(libc::EADDRINUSE)));
    }
    let id = state.next();
    let waiting = Default::default();
    let listener = ListenerState {
        host: adapter.host,
        address,
        backlog: backlog as usize,
        waiting,
        signal: signal.clone(),
    };
    state.listeners.insert(id, listener);
    state.counts(adapter.host).listeners += 1;
    Ok(Arc::new(DoubleListener { adapter: adapter.clone(), id, address, signal, closed: CancelFlag::new() }))
}

pub(super) fn resolve(
    adapter: &DoubleAdapter,
    address: SocketAddr,
    limit: Duration,
    cancel: &CancelFlag,
) -> Result<Box<dyn Route>, RdmaError> {
    let state = adapter.world.core.state();
    if address.ip().is_loopback() || state.port_state(adapter.host) != PortState::Active {
        return Err(no_device(&state, adapter.host, address));
    }
    let reached = state.hosts.iter().position(|host| host.addresses.contains(&address.ip()));
    let Some(reached) = reached else {
        let why = "no route to host".to_owned();
        return Err(RdmaError::Resolve { what: "address", address: address.to_string(), why });
    };
    let is_up = state.hosts[reached].has_link;
    drop(state);
    if !is_up || cancel.is_cancelled() {
        wait_in_vain(address, limit, cancel)?;
    }
    Ok(Box::new(DoubleRoute { adapter: adapter.clone(), peer: address }))
}

/// Waits until the limit or a cancel, because no side answers.
fn wait_in_vain(address: SocketAddr, limit: Duration, cancel: &CancelFlag) -> Result<(), RdmaError> {
    let system = |source| RdmaError::System { subject: address.to_string(), call: "poll", source };
    let never = Signal::new().map_err(system)?;
    let deadline = Instant::now().checked_add(limit);
    let address = address.to_string();
    match wait(rustix::fd::AsFd::as_fd(&never), PollFlags::IN, &[cancel], deadline).map_err(system)? {
        Waited::Cancelled => Err(RdmaError::Cancelled { address }),
        _ => Err(RdmaError::TimedOut { what: "resolving", address, after: limit }),
    }
}

fn no_device(state: &State, host: usize, address: SocketAddr) -> RdmaError {
    let has_any = state.port_state(host) == PortState::Active;
    let having = state.hosts[host].addresses.iter().filter(|_| has_any).map(IpAddr::to_string).collect();
    RdmaError::NoDevice { address: address.to_string(), having }
}

#[derive(Debug)]
struct DoubleRoute {
    adapter: DoubleAdapter,
    peer: SocketAddr,
}

impl Route for DoubleRoute {
    fn adapter(&self) -> Arc<dyn Adapter> {
        Arc::new(self.adapter.clone())
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError> {
        open(&self.adapter, attributes, self.peer, None)
    }
}

fn open(
    adapter: &DoubleAdapter,
    attributes: &QueuePairAttributes,
    peer: SocketAddr,
    asking: Option<Unanswered>,
) -> Result<Arc<dyn Connection>, RdmaError> {
    let system = |source| RdmaError::System { subject: peer.to_string(), call: "rdma_create_qp", source };
    let mut state = adapter.world.core.state();
    if state.hosts[adapter.host].lost.is_some() {
        return Err(system(io::Error::from_raw_os_error(libc::EIO)));
    }
    let most = [attributes.send_requests, attributes.receives].into_iter().max();
    if most.is_some_and(|most| most > MOST_WORK_REQUESTS) {
        return Err(system(io::Error::from_raw_os_error(libc::EINVAL)));
    }
    let mut adapter = adapter.clone();
    if attributes.is_apart {
        adapter.domain = state.next() as usize;
    }
    let pair = Pair::new(adapter.host, adapter.domain, *attributes).map_err(system)?;
    let signals = [pair.sent.signal.clone(), pair.received.signal.clone(), pair.manager.clone()];
    let id = state.next();
    state.pairs.insert(id, pair);
    let counts = state.counts(adapter.host);
    counts.queue_pairs += 1;
    counts.queue_pairs_made += 1;
    drop(state);
    Ok(Arc::new(DoubleConnection::new(adapter, id, peer, signals, asking)))
}

#[derive(Debug)]
struct DoubleListener {
    adapter: DoubleAdapter,
    id: u64,
    address: SocketAddr,
    signal: Signal,
    closed: CancelFlag,
}

impl Listener for DoubleListener {
    fn local_address(&self) -> SocketAddr {
        self.address
    }

    fn accept(&self, limit: Option<Duration>, cancel: &CancelFlag) -> Result<Box<dyn Request>, RdmaError> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let address = || self.address.to_string();
        let system = |source| RdmaError::System { subject: address(), call: "poll", source };
        loop {
            if self.closed.is_cancelled() || cancel.is_cancelled() {
                return Err(RdmaError::Cancelled { address: address() });
            }
            self.signal.clear();
            if let Some(request) = self.next()? {
                // The descriptor is shared, and another thread may wait for the next request.
                self.signal.set();
                return Ok(Box::new(request));
            }
            let waited =
                wait(rustix::fd::AsFd::as_fd(&self.signal), PollFlags::IN, &[cancel, &self.closed], deadline);
            if let (Waited::TimedOut, Some(after)) = (waited.map_err(system)?, limit) {
                return Err(RdmaError::TimedOut { what: "accepting on", address: address(), after });
            }
        }
    }

    fn close(&self) {
        self.closed.cancel();
    }
}

impl DoubleListener {
    fn next(&self) -> Result<Option<DoubleRequest>, RdmaError> {
        let mut state = self.adapter.world.core.state();
        if state.hosts[self.adapter.host].lost.is_some() {
            let source = io::Error::from_raw_os_error(libc::EIO);
            return Err(RdmaError::System {
                subject: self.address.to_string(),
                call: "rdma_get_cm_event",
                source,
            });
        }
        let Some(asking) = state.listeners.get_mut(&self.id).and_then(|own| own.waiting.pop_front()) else {
            return Ok(None);
        };
        state.requests.insert(asking.pair, self.adapter.host);
        let Asking { pair, from, private_data, rnr_retry } = asking;
        let unanswered = Unanswered { adapter: self.adapter.clone(), pair, rnr_retry };
        Ok(Some(DoubleRequest { unanswered, from, private_data }))
    }
}

impl Drop for DoubleListener {
    fn drop(&mut self) {
        let mut state = self.adapter.world.core.state();
        let host = self.adapter.host;
        let Some(listener) = state.listeners.remove(&self.id) else { return };
        state.counts(host).listeners -= 1;
        for asking in listener.waiting {
            state.counts(host).requests -= 1;
            reject(&mut state, asking.pair, RejectReason::BY_PEER, &[]);
        }
    }
}

#[derive(Debug)]
struct DoubleRequest {
    unanswered: Unanswered,
    from: SocketAddr,
    private_data: Vec<u8>,
}

impl Request for DoubleRequest {
    fn adapter(&self) -> Arc<dyn Adapter> {
        Arc::new(self.unanswered.adapter.clone())
    }

    fn peer(&self) -> SocketAddr {
        self.from
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn reject(self: Box<Self>, private_data: &[u8]) -> Result<(), RdmaError> {
        check_private_data("reject", private_data, PRIVATE_DATA.reject)?;
        let mut state = self.unanswered.adapter.world.core.state();
        if Unanswered::answer(&mut state, self.unanswered.pair) {
            reject(&mut state, self.unanswered.pair, RejectReason::BY_PEER, private_data);
        }
        drop(state);
        Ok(())
    }

    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError> {
        let adapter = self.unanswered.adapter.clone();
        open(&adapter, attributes, self.from, Some(self.unanswered))
    }
}
