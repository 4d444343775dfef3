//! A request to connect on its way to a listener.

use crate::rdma::PRIVATE_DATA;
use crate::rdma::double::pair::Connecting;
use std::net::SocketAddr;

use crate::rdma::double::adapter::DoubleAdapter;
use crate::rdma::double::state::{Asking, ListenerState, State};
use crate::rdma::{RdmaError, RejectReason};

/// A connect request without an answer. Dropping it rejects it.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) adapter: DoubleAdapter,
    /// The queue pair of the requesting side.
    pub(super) pair: u64,
    /// RNR retry count that the requesting side asks for this side's sends.
    pub(super) rnr_retry: u8,
}

impl Unanswered {
    /// Marks the request as answered. Returns false if it already was.
    pub(super) fn answer(state: &mut State, pair: u64) -> bool {
        let Some(host) = state.requests.remove(&pair) else { return false };
        state.counts(host).requests -= 1;
        true
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let mut state = self.adapter.world.core.state();
        if Self::answer(&mut state, self.pair) {
            reject(&mut state, self.pair, RejectReason::BY_PEER, &[]);
        }
    }
}

/// Delivers a connect request to the listener at `to`, or returns the reason of refusal.
pub(super) fn ask(state: &mut State, to: SocketAddr, asking: Asking) -> Result<(), RejectReason> {
    let host = state.hosts.iter().position(|host| host.addresses.contains(&to.ip()));
    let host = host.ok_or(RejectReason::NO_LISTENER)?;
    let takes = |listener: &ListenerState| {
        let at = listener.address;
        let is_any = at.ip().is_unspecified() && (at.is_ipv6() || to.is_ipv4());
        listener.host == host && at.port() == to.port() && (is_any || at.ip() == to.ip())
    };
    let listener = state.listeners.values_mut().find(|listener| takes(listener));
    let listener = listener.ok_or(RejectReason::NO_LISTENER)?;
    if listener.waiting.len() >= listener.backlog {
        return Err(RejectReason::BY_PEER);
    }
    listener.waiting.push_back(asking);
    listener.signal.set();
    state.counts(host).requests += 1;
    Ok(())
}

pub(super) fn check_private_data(what: &'static str, data: &[u8], limit: usize) -> Result<(), RdmaError> {
    if data.len() > limit {
        return Err(RdmaError::PrivateData { what, len: data.len(), limit });
    }
    Ok(())
}

/// The private data as the receiver gets it. Random bytes (zeros without a seed) follow the sender's bytes.
pub(super) fn padded(state: &mut State, data: &[u8], len: usize) -> Vec<u8> {
    let mut whole = vec![0; len];
    if let Some(random) = &mut state.random {
        whole.fill_with(|| random.u8(..));
    }
    whole[..data.len()].copy_from_slice(data);
    whole
}

/// Rejects the request of `pair` if that still waits for an answer.
pub(super) fn reject(state: &mut State, pair: u64, reason: RejectReason, private_data: &[u8]) {
    let private_data = padded(state, private_data, PRIVATE_DATA.reject);
    let Some(pair) = state.pairs.get_mut(&pair) else { return };
    if matches!(pair.connecting, Connecting::Asked) {
        pair.connecting = Connecting::Rejected(reason, private_data);
        pair.manager.set();
    }
}
