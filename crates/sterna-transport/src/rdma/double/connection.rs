//! Connections of the double: establishing, posting, polling and ending them.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;

use super::adapter::DoubleAdapter;
use super::asking::{Unanswered, ask, check_private_data, padded};
use super::execute::is_running;
use super::pair::{Connecting, Pair, Posted, Signal};
use super::state::{Asking, State};
use crate::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::rdma::transitions::{QueuePairState, attribute};
use crate::rdma::{
    Adapter, Completion, ConnectParameters, Connection, Event, PRIVATE_DATA, Piece, PortState, Queue,
    RdmaError, RejectReason, SendRequest, Wake,
};

/// A queue pair of the double with its connection.
#[derive(Debug)]
pub(super) struct DoubleConnection {
    adapter: DoubleAdapter,
    id: u64,
    peer: SocketAddr,
    sent: Signal,
    received: Signal,
    manager: Signal,
    role: Mutex<Role>,
}

/// Reason for the end of a connection whose adapter has reported none.
const IN_ERROR: &str = "the queue pair is in the error state";

/// The action of the next call of `establish`.
#[derive(Debug)]
enum Role {
    Connect,
    Accept(Unanswered),
    Done,
}

impl DoubleConnection {
    pub(super) fn new(
        adapter: DoubleAdapter,
        id: u64,
        peer: SocketAddr,
        [sent, received, manager]: [Signal; 3],
        asking: Option<Unanswered>,
    ) -> Self {
        let role = Mutex::new(asking.map_or(Role::Connect, Role::Accept));
        Self { adapter, id, peer, sent, received, manager, role }
    }

    fn with_pair<T>(
        &self,
        act: impl FnOnce(&mut State, u64) -> Result<T, RdmaError>,
    ) -> Result<T, RdmaError> {
        let mut state = self.adapter.world.core.state();
        if !state.pairs.contains_key(&self.id) {
            return Err(self.ended(None));
        }
        act(&mut state, self.id)
    }

    fn ended(&self, event: Option<Event>) -> RdmaError {
        RdmaError::Ended { peer: self.peer.to_string(), event }
    }

    fn system(&self, call: &'static str, number: i32) -> RdmaError {
        let source = io::Error::from_raw_os_error(number);
        RdmaError::System { subject: self.peer.to_string(), call, source }
    }

    fn connect(
        &self,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, RdmaError> {
        check_private_data("request", parameters.private_data, PRIVATE_DATA.request)?;
        let deadline = Instant::now().checked_add(limit);
        self.with_pair(|state, id| {
            let private_data = padded(state, parameters.private_data, PRIVATE_DATA.request);
            let from = state.hosts[self.adapter.host].addresses.first().copied();
            let from = SocketAddr::new(from.unwrap_or(self.peer.ip()), 0);
            let asking = Asking { pair: id, from, private_data, rnr_retry: parameters.rnr_retry_count };
            if self.reaches_peer(state) {
                ask(state, self.peer, asking).map_err(|reason| self.rejected(reason, Vec::new()))?;
            }
            pair(state, id)?.connecting = Connecting::Asked;
            Ok(())
        })?;
        let reply = loop {
            self.manager.clear();
            let answer = self.with_pair(|state, id| {
                let pair = pair(state, id)?;
                let answer = (std::mem::replace(&mut pair.connecting, Connecting::No), pair.end.clone());
                match answer {
                    (Connecting::Accepted { reply, peer, rnr_retry }, _) => {
                        self.connected(state, id, peer, rnr_retry)?;
                        Ok(Some(Ok(reply)))
                    }
                    (Connecting::Rejected(reason, data), _) => Ok(Some(Err(self.rejected(reason, data)))),
                    (_, Some(event)) => Ok(Some(Err(self.ended(Some(event))))),
                    (still, None) => {
                        pair.connecting = still;
                        Ok(None)
                    }
                }
            })?;
            if let Some(reply) = answer {
                break reply;
            }
            if let Err(error) = self.wait_for_manager("connecting to", (deadline, limit), cancel) {
                break Err(error);
            }
        };
        self.with_pair(|state, id| {
            // From here on an answer is too late and is ignored.
            pair(state, id)?.connecting = Connecting::No;
            Ok(())
        })?;
        self.adapter.world.core.wake();
        reply
    }

    /// The peer has accepted: makes this side's queue pair ready and confirms the connection.
    fn connected(&self, state: &mut State, id: u64, peer: u64, rnr_retry: u8) -> Result<(), RdmaError> {
        let left = state.hosts[self.adapter.host].confirmations.as_mut();
        let withholds = left.is_some_and(|left| std::mem::replace(left, left.saturating_sub(1)) == 0);
        let own = pair(state, id)?;
        own.connect(peer, rnr_retry).map_err(|number| self.system("ibv_modify_qp", number))?;
        own.report(Event::Established);
        if let Some(peer) = state.pairs.get_mut(&peer).filter(|_| !withholds) {
            peer.is_confirmed = true;
            peer.report(Event::Established);
        }
        Ok(())
    }

    /// Waits for a change at the connection manager.
    fn wait_for_manager(
        &self,
        what: &'static str,
        (deadline, after): (Option<Instant>, Duration),
        cancel: &CancelFlag,
    ) -> Result<(), RdmaError> {
        let address = || self.peer.to_string();
        let waited = wait(self.manager.as_fd(), PollFlags::IN, &[cancel], deadline);
        match waited.map_err(|source| RdmaError::System { subject: address(), call: "poll", source })? {
            Waited::Ready => Ok(()),
            Waited::Cancelled => Err(RdmaError::Cancelled { address: address() }),
            Waited::TimedOut => Err(RdmaError::TimedOut { what, address: address(), after }),
        }
    }

    fn reaches_peer(&self, state: &State) -> bool {
        let peer = state.hosts.iter().position(|host| host.addresses.contains(&self.peer.ip()));
        [Some(self.adapter.host), peer]
            .iter()
            .flatten()
            .all(|host| state.port_state(*host) == PortState::Active)
    }

    fn rejected(&self, reason: RejectReason, private_data: Vec<u8>) -> RdmaError {
        RdmaError::Rejected { peer: self.peer.to_string(), reason, private_data }
    }

    fn accept(
        &self,
        asking: &Unanswered,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<(), RdmaError> {
        check_private_data("reply", parameters.private_data, PRIVATE_DATA.reply)?;
        let deadline = Instant::now().checked_add(limit);
        self.with_pair(|state, id| {
            if let Some(event) = pair(state, id)?.end.clone() {
                return Err(self.ended(Some(event)));
            }
            let reply = padded(state, parameters.private_data, PRIVATE_DATA.reply);
            let is_open = Unanswered::answer(state, asking.pair);
            let active = state.pairs.get_mut(&asking.pair);
            let active = active.filter(|active| is_open && matches!(active.connecting, Connecting::Asked));
            let Some(active) = active else { return Err(self.ended(Some(Event::Disconnected))) };
            // Each side's RNR retry count applies to the sends of the other side.
            active.connecting =
                Connecting::Accepted { reply, peer: id, rnr_retry: parameters.rnr_retry_count };
            active.peer = Some(id);
            active.manager.set();
            // This side is ready before the peer confirms.
            let own = pair(state, id)?;
            own.connect(asking.pair, asking.rnr_retry).map_err(|number| self.system("ibv_modify_qp", number))
        })?;
        loop {
            self.manager.clear();
            let is_over = self.with_pair(|state, id| {
                let pair = pair(state, id)?;
                match (pair.is_confirmed, pair.end.clone()) {
                    (true, _) => Ok(true),
                    (false, Some(event)) => Err(self.ended(Some(event))),
                    (false, None) => Ok(false),
                }
            })?;
            if is_over {
                return Ok(());
            }
            self.wait_for_manager("accepting the request of", (deadline, limit), cancel)?;
        }
    }

    /// Refuses a request in the error state, as some drivers do, if the settings select it.
    fn refuse_in_error(&self, pair: &Pair) -> Result<(), RdmaError> {
        let refuses = self.adapter.world.core.settings.refuses_posts_in_error;
        match pair.state {
            QueuePairState::Error if refuses => {
                let event = pair.end.clone().unwrap_or_else(|| Event::Fatal(IN_ERROR.to_owned()));
                Err(self.ended(Some(event)))
            }
            _ => Ok(()),
        }
    }
}

fn pair(state: &mut State, id: u64) -> Result<&mut Pair, RdmaError> {
    state.pairs.get_mut(&id).ok_or_else(|| RdmaError::Ended { peer: String::new(), event: None })
}

impl Connection for DoubleConnection {
    fn adapter(&self) -> Arc<dyn Adapter> {
        Arc::new(self.adapter.clone())
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn establish(
        &self,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, RdmaError> {
        let role = std::mem::replace(&mut *self.role.lock(), Role::Done);
        match role {
            Role::Connect => self.connect(parameters, limit, cancel),
            Role::Accept(asking) => self.accept(&asking, parameters, limit, cancel).map(|()| Vec::new()),
            Role::Done => Err(self.system("rdma_connect", libc::EINVAL)),
        }
    }

    fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError> {
        self.with_pair(|state, of| {
            let pair = pair(state, of)?;
            self.refuse_in_error(pair)?;
            if pair.taken_receives >= pair.attributes.receives {
                return Err(RdmaError::QueueFull {
                    peer: self.peer.to_string(),
                    queue: "receive",
                    posted: 0,
                });
            }
            pair.taken_receives += 1;
            pair.receives.push_back((id, into));
            if !is_running(pair) {
                let now = state.clocks.now();
                state.fail_pair(of, now);
            }
            Ok(())
        })?;
        self.adapter.world.core.wake();
        Ok(())
    }

    fn post_send(&self, requests: &[SendRequest]) -> Result<(), RdmaError> {
        self.with_pair(|state, of| {
            if pair(state, of)?.state == QueuePairState::Init {
                return Err(self.system("ibv_post_send", libc::EINVAL));
            }
            self.refuse_in_error(pair(state, of)?)?;
            let now = state.clocks.now();
            for (posted, request) in requests.iter().enumerate() {
                let sequence = state.next();
                let since = state.regions.get(&(request.from.lkey >> 8)).map(|region| region.since);
                let pair = pair(state, of)?;
                if pair.taken_requests >= pair.attributes.send_requests {
                    return Err(RdmaError::QueueFull { peer: self.peer.to_string(), queue: "send", posted });
                }
                pair.taken_requests += 1;
                pair.requests.push_back(Posted {
                    request: *request,
                    sequence,
                    posted_at: now.max(since.unwrap_or_default()),
                    done: 0,
                    blocked: None,
                    is_counted: false,
                });
            }
            if !is_running(pair(state, of)?) {
                state.fail_pair(of, now);
            }
            Ok(())
        })
        .inspect_err(|_| self.adapter.world.core.wake())?;
        self.adapter.world.core.wake();
        Ok(())
    }

    fn poll(&self, queue: Queue, to: &mut Vec<Completion>, most: usize) -> Result<usize, RdmaError> {
        self.with_pair(|state, id| {
            let pair = pair(state, id)?;
            let count = most.min(pair.queue(queue).ready.len());
            let (mut frees, mut latest) = (0, Duration::ZERO);
            for entry in pair.queue(queue).ready.drain(..count) {
                frees += entry.frees;
                latest = latest.max(entry.at);
                to.push(entry.completion);
            }
            match queue {
                Queue::Send => pair.taken_requests -= frees,
                Queue::Receive => pair.taken_receives -= frees,
            }
            if count > 0 {
                state.clocks.learn(latest);
            }
            Ok(count)
        })
    }

    fn wait(&self, queue: Queue, deadline: Option<Instant>, cancel: &CancelFlag) -> Result<Wake, RdmaError> {
        let signal = match queue {
            Queue::Send => &self.sent,
            Queue::Receive => &self.received,
        };
        loop {
            signal.clear();
            let found = self.with_pair(|state, id| {
                let pair = pair(state, id)?;
                let has_ended = pair.end.is_some();
                let queue = pair.queue(queue);
                if !queue.ready.is_empty() {
                    return Ok(Some(Wake::Completion));
                }
                Ok((has_ended && !queue.has_late()).then_some(Wake::Ended))
            })?;
            if let Some(found) = found {
                return Ok(found);
            }
            let waited = wait(signal.as_fd(), PollFlags::IN, &[cancel], deadline);
            match waited.map_err(|source| RdmaError::System {
                subject: self.peer.to_string(),
                call: "poll",
                source,
            })? {
                Waited::Ready => {}
                Waited::Cancelled => return Ok(Wake::Cancelled),
                Waited::TimedOut => return Ok(Wake::TimedOut),
            }
        }
    }

    fn set_remote_write(&self, allowed: bool) -> Result<(), RdmaError> {
        let is_dead = self.adapter.world.core.settings.refuses_changes_in_error;
        let changed = self.with_pair(|state, id| {
            let now = state.clocks.now();
            let pair = pair(state, id)?;
            if is_dead && pair.state == QueuePairState::Error {
                return Err(self.system("ibv_modify_qp", libc::EIO));
            }
            match pair.modify(None, attribute::ACCESS_FLAGS) {
                Ok(()) => pair.is_writable = allowed,
                Err(number) if allowed => return Err(self.system("ibv_modify_qp", number)),
                Err(_) => {
                    state.fail_pair(id, now);
                    state.end_by(id, Event::Fatal(IN_ERROR.to_owned()));
                }
            }
            Ok(())
        });
        self.adapter.world.core.wake();
        changed
    }

    fn poll_event(&self) -> Option<Event> {
        self.with_pair(|state, id| Ok(pair(state, id)?.events.pop_front())).ok().flatten()
    }

    fn end(&self) -> Option<Event> {
        // A missing queue pair was destroyed, which disconnected it from this side.
        self.with_pair(|state, id| Ok(pair(state, id)?.end.clone())).unwrap_or(Some(Event::Disconnected))
    }

    fn disconnect(&self) {
        self.adapter.world.core.state().disconnect(self.id);
        self.adapter.world.core.wake();
    }

    fn destroy(&self) {
        let mut state = self.adapter.world.core.state();
        state.disconnect(self.id);
        if let Some(pair) = state.pairs.remove(&self.id) {
            state.counts(self.adapter.host).queue_pairs -= 1;
            pair.signal_all();
        }
        drop(state);
        self.adapter.world.core.wake();
    }
}

impl Drop for DoubleConnection {
    fn drop(&mut self) {
        // A request without an answer is rejected before the queue pair is destroyed.
        *self.role.get_mut() = Role::Done;
        self.destroy();
    }
}
