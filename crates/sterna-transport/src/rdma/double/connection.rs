//! Connections of a network.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;

use super::adapter::DoubleAdapter;
use super::execute::is_running;
use super::manager::{Unanswered, ask, check_private_data, padded};
use super::pair::{Connecting, Pair, PairState, Posted, Signal};
use super::state::{Asking, State};
use crate::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::rdma::{
    Adapter, Completion, ConnectParameters, Connection, Event, PRIVATE_DATA, Piece, PortState, Queue,
    RdmaError, RejectReason, SendRequest, Wake,
};

/// A queue pair and its connection.
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

/// What `establish` does.
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
                Ok((pair.connecting.clone(), pair.end.clone()))
            })?;
            match answer {
                (Connecting::Accepted(reply), _) => break Ok(reply),
                (Connecting::Rejected(reason, data), _) => break Err(self.rejected(reason, data)),
                (_, Some(event)) => break Err(self.ended(Some(event))),
                _ => {}
            }
            let waited = wait(self.manager.as_fd(), PollFlags::IN, &[cancel], deadline);
            match waited.map_err(|source| RdmaError::System {
                subject: self.peer.to_string(),
                call: "poll",
                source,
            })? {
                Waited::Ready => {}
                Waited::Cancelled => break Err(RdmaError::Cancelled { address: self.peer.to_string() }),
                Waited::TimedOut => {
                    let address = self.peer.to_string();
                    break Err(RdmaError::TimedOut { what: "connecting to", address, after: limit });
                }
            }
        };
        self.with_pair(|state, id| {
            // An answer that comes now is too late.
            pair(state, id)?.connecting = Connecting::No;
            Ok(())
        })?;
        reply
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

    fn accept(&self, asking: &Unanswered, parameters: &ConnectParameters<'_>) -> Result<(), RdmaError> {
        check_private_data("reply", parameters.private_data, PRIVATE_DATA.reply)?;
        self.with_pair(|state, id| {
            if let Some(event) = pair(state, id)?.end.clone() {
                return Err(self.ended(Some(event)));
            }
            let reply = padded(state, parameters.private_data, PRIVATE_DATA.reply);
            let is_open = Unanswered::answer(state, asking.pair);
            let active = state.pairs.get_mut(&asking.pair);
            let active = active.filter(|active| is_open && matches!(active.connecting, Connecting::Asked));
            let Some(active) = active else { return Err(self.ended(Some(Event::Disconnected))) };
            active.connecting = Connecting::Accepted(reply);
            // What one side asks for governs the other side's sends.
            join(active, id, parameters.rnr_retry_count);
            join(pair(state, id)?, asking.pair, asking.rnr_retry);
            Ok(())
        })
    }
}

/// The pair is connected.
fn join(pair: &mut Pair, peer: u64, rnr_retry: u8) {
    pair.peer = Some(peer);
    pair.rnr_retry = rnr_retry;
    pair.state = PairState::ReadyToSend;
    pair.report(Event::Established);
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
            Role::Accept(asking) => self.accept(&asking, parameters).map(|()| Vec::new()),
            Role::Done => Err(self.system("rdma_connect", libc::EINVAL)),
        }
    }

    fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError> {
        self.with_pair(|state, of| {
            let pair = pair(state, of)?;
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
            if pair(state, of)?.state == PairState::Initialised {
                return Err(self.system("ibv_post_send", libc::EINVAL));
            }
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
        self.with_pair(|state, id| {
            pair(state, id)?.is_writable = allowed;
            Ok(())
        })
    }

    fn poll_event(&self) -> Option<Event> {
        self.with_pair(|state, id| Ok(pair(state, id)?.events.pop_front())).ok().flatten()
    }

    fn end(&self) -> Option<Event> {
        // A destroyed queue pair was disconnected from this side.
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
        // A request that has no answer is rejected first.
        *self.role.get_mut() = Role::Done;
        self.destroy();
    }
}
