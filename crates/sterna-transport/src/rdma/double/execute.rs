//! The network's thread: executes requests piece by piece, and delivers completions.

use std::time::{Duration, Instant};

use super::clock::Time;
use super::faults::Fault;
use super::pair::{Obstacle, Pair, Posted};
use super::region::{Range, Region};
use super::settings::Settings;
use super::state::{Core, State};
use crate::rdma::transitions::QueuePairState;
use crate::rdma::{Completion, CompletionKind, CompletionStatus, Operation, Piece, Queue};

/// Bytes of a write that are copied before rights, keys and other pairs are checked again.
const PIECE: u64 = 256 << 10;
/// Size of the last part of a write with immediate, in bytes. It is not written without a receive.
const PACKET: u64 = 4096;

/// Executes requests until the network is dropped.
pub(super) fn run(core: &Core) {
    let mut state = core.state();
    while !core.is_over() {
        let now = Instant::now();
        match state.choose(&core.settings, now) {
            Some(Step::Execute(id)) => state.execute(id, &core.settings, now),
            Some(Step::Deliver(id, queue)) => {
                if let Some(pair) = state.pairs.get_mut(&id) {
                    pair.queue(queue).let_one_through();
                }
            }
            None => {
                match state.next_try(&core.settings) {
                    Some(at) => drop(core.work.wait_until(&mut state, at)),
                    None => core.work.wait(&mut state),
                }
                continue;
            }
        }
        // With a seed, one step in eight is followed by a pause, in which the program's threads continue.
        let longest = core.settings.longest_delay.as_micros() as u64;
        let pause = state.random.as_mut().and_then(|random| {
            (longest > 0 && random.u8(..8) == 0).then(|| Duration::from_micros(random.u64(..longest)))
        });
        parking_lot::MutexGuard::unlocked(&mut state, || {
            if let Some(pause) = pause {
                std::thread::sleep(pause);
            }
        });
    }
}

enum Step {
    /// Execute the first request of a pair.
    Execute(u64),
    /// Deliver the first delayed completion to a queue of a pair.
    Deliver(u64, Queue),
}

/// Result of executing a pair's first request.
enum Outcome {
    /// Part of a write was done. The value is the number of bytes done in total.
    Progress(u64),
    /// The request cannot continue yet.
    Blocked(Obstacle),
    Done(Option<Received>),
    /// The request fails. With `is_both`, the peer's queue pair fails too. `receive` is the status of the peer's
    /// receive if it is the cause.
    Failed {
        status: CompletionStatus,
        is_both: bool,
        receive: Option<CompletionStatus>,
    },
}

/// Result for the peer's first receive.
struct Received {
    kind: CompletionKind,
    bytes: u32,
}

impl Outcome {
    fn local(status: CompletionStatus) -> Self {
        Outcome::Failed { status, is_both: false, receive: None }
    }

    /// The peer's adapter refuses the request. As with soft-RoCE, the peer's queue pair stays usable until this
    /// side disconnects; other adapters put it into the error state immediately.
    fn refused(status: CompletionStatus) -> Self {
        Outcome::local(status)
    }

    fn remote(status: CompletionStatus) -> Self {
        Outcome::Failed { status, is_both: true, receive: None }
    }
}

impl State {
    fn choose(&mut self, settings: &Settings, now: Instant) -> Option<Step> {
        if self.is_held {
            return None;
        }
        let runnable = self.pairs.iter().filter_map(|(id, pair)| {
            let first = pair.requests.front()?;
            self.may_go_on(pair, first, settings, now).then_some((first.sequence, *id))
        });
        let Some(random) = &self.random else {
            return runnable.min().map(|(_, id)| Step::Execute(id));
        };
        let mut random = random.clone();
        let mut steps: Vec<Step> = runnable.map(|(_, id)| Step::Execute(id)).collect();
        for (id, pair) in &self.pairs {
            steps.extend(pair.sent.has_late().then_some(Step::Deliver(*id, Queue::Send)));
            steps.extend(pair.received.has_late().then_some(Step::Deliver(*id, Queue::Receive)));
        }
        let chosen = (!steps.is_empty()).then(|| steps.swap_remove(random.usize(..steps.len())));
        self.random = Some(random);
        chosen
    }

    fn may_go_on(&self, pair: &Pair, posted: &Posted, settings: &Settings, now: Instant) -> bool {
        let Some((obstacle, since)) = posted.blocked else { return true };
        let is_removed = match obstacle {
            Obstacle::Silence => !self.is_silent(pair),
            Obstacle::NoReceive => self.is_silent(pair) || self.peer_has_receive(pair),
        };
        is_removed || patience(pair, obstacle, settings).is_some_and(|patience| now >= since + patience)
    }

    fn peer_has_receive(&self, pair: &Pair) -> bool {
        pair.peer.and_then(|peer| self.pairs.get(&peer)).is_some_and(|peer| !peer.receives.is_empty())
    }

    /// Time at which the next blocked request exceeds its retry limit.
    fn next_try(&self, settings: &Settings) -> Option<Instant> {
        let tries = self.pairs.values().filter_map(|pair| {
            let (obstacle, since) = pair.requests.front()?.blocked?;
            Some(since + patience(pair, obstacle, settings)?)
        });
        tries.min().filter(|_| !self.is_held)
    }

    fn execute(&mut self, id: u64, settings: &Settings, now: Instant) {
        let Some(pair) = self.pairs.get_mut(&id) else { return };
        let host = pair.host;
        let Some(first) = pair.requests.front_mut() else { return };
        let is_new = !std::mem::replace(&mut first.is_counted, true);
        let fault = is_new.then(|| self.hosts[host].plan.request()).flatten();
        let outcome = match fault {
            Some(Fault::Errno(_)) => Outcome::remote(CompletionStatus::RemoteOperation),
            Some(Fault::Status(status)) => Outcome::remote(status),
            Some(other) => return self.strike(host, other),
            None => self.examine(id, settings, now),
        };
        self.settle(id, outcome, settings, now);
    }

    /// Executes the next piece of a pair's first request, or returns the obstacle.
    fn examine(&mut self, id: u64, settings: &Settings, now: Instant) -> Outcome {
        let Some((pair, posted)) = self.pairs.get(&id).and_then(|pair| Some((pair, *pair.requests.front()?)))
        else {
            return Outcome::local(CompletionStatus::WorkRequestFlushed);
        };
        let from = posted.request.from;
        let source = Range { address: from.address, len: from.len.into() };
        if from.len > 0 && self.region(from.lkey, false, pair.domain, source).is_none() {
            // The status of soft-RoCE; other adapters report "local protection error".
            return Outcome::local(CompletionStatus::WorkRequestFlushed);
        }
        if from.len > settings.max_message_bytes {
            return Outcome::local(CompletionStatus::LocalLength);
        }
        let is_out_of_patience = |obstacle| {
            posted.blocked.is_some_and(|(of, since)| {
                of == obstacle
                    && patience(pair, obstacle, settings).is_some_and(|patience| now >= since + patience)
            })
        };
        if self.is_silent(pair) {
            if is_out_of_patience(Obstacle::Silence) {
                return Outcome::local(CompletionStatus::RetryExceeded);
            }
            return Outcome::Blocked(Obstacle::Silence);
        }
        let Some(peer) = pair.peer.and_then(|peer| self.pairs.get(&peer)) else {
            return Outcome::Blocked(Obstacle::Silence);
        };
        let no_receive = || match pair.rnr_retry {
            0 => Outcome::local(CompletionStatus::RnrRetryExceeded),
            _ if is_out_of_patience(Obstacle::NoReceive) => {
                Outcome::local(CompletionStatus::RnrRetryExceeded)
            }
            _ => Outcome::Blocked(Obstacle::NoReceive),
        };
        match posted.request.operation {
            Operation::Send => match peer.receives.front() {
                None => no_receive(),
                Some((_, into)) => self.send(from, *into, peer.domain),
            },
            Operation::Write { address, rkey } => {
                self.write(pair, peer, &posted, address, rkey, from.len.into(), settings)
            }
            Operation::WriteWithImmediate { address, rkey, immediate } => {
                let len = u64::from(from.len);
                let has_receive = !peer.receives.is_empty();
                let last = if has_receive { len } else { len.saturating_sub(1) / PACKET * PACKET };
                match self.write(pair, peer, &posted, address, rkey, last, settings) {
                    Outcome::Done(_) if !has_receive => no_receive(),
                    Outcome::Done(_) => Outcome::Done(Some(Received {
                        kind: CompletionKind::ReceiveImmediate(immediate),
                        bytes: from.len,
                    })),
                    other => other,
                }
            }
        }
    }

    fn send(&self, from: Piece, into: Piece, domain: usize) -> Outcome {
        let failed = |status, receive| Outcome::Failed { status, is_both: true, receive: Some(receive) };
        if from.len > into.len {
            return failed(CompletionStatus::RemoteOperation, CompletionStatus::LocalLength);
        }
        if from.len > 0 {
            let range = Range { address: into.address, len: into.len.into() };
            let target =
                self.region(into.lkey, false, domain, range).filter(|region| region.access.local_write);
            let Some(target) = target else {
                return failed(CompletionStatus::RemoteOperation, CompletionStatus::LocalProtection);
            };
            let Some(source) = self.regions.get(&(from.lkey >> 8)) else {
                return Outcome::local(CompletionStatus::WorkRequestFlushed);
            };
            if Region::copy((source, from.address), (target, into.address), from.len.into()).is_err() {
                return failed(CompletionStatus::RemoteOperation, CompletionStatus::LocalAccess);
            }
        }
        Outcome::Done(Some(Received { kind: CompletionKind::Receive, bytes: from.len }))
    }

    /// Writes the next piece of a request, up to byte `until`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one request")]
    fn write(
        &self,
        pair: &Pair,
        peer: &Pair,
        posted: &Posted,
        address: u64,
        rkey: u32,
        until: u64,
        settings: &Settings,
    ) -> Outcome {
        if !peer.is_writable {
            return Outcome::refused(CompletionStatus::RemoteInvalidRequest);
        }
        let from = posted.request.from;
        if from.len == 0 {
            return Outcome::Done(None);
        }
        let whole = Range { address, len: from.len.into() };
        let target = self.region(rkey, true, peer.domain, whole).filter(|region| region.access.remote_write);
        let Some(target) = target else { return Outcome::refused(CompletionStatus::RemoteAccess) };
        let all = Range { address: from.address, len: from.len.into() };
        let Some(source) = self.region(from.lkey, false, pair.domain, all) else {
            return Outcome::local(CompletionStatus::WorkRequestFlushed);
        };
        let end = if settings.copies_writes { until.min(posted.done + PIECE) } else { until };
        if settings.copies_writes && end > posted.done {
            let len = end - posted.done;
            let (from, to) = (from.address + posted.done, address + posted.done);
            // A real adapter would continue to write the discarded pages, where the bytes are invisible.
            let is_lost = target.is_stale(Range { address: to, len });
            let _ = source.is_stale(Range { address: from, len });
            if !is_lost && Region::copy((source, from), (target, to), len).is_err() {
                return Outcome::remote(CompletionStatus::RemoteOperation);
            }
        }
        if end < until { Outcome::Progress(end) } else { Outcome::Done(None) }
    }

    fn settle(&mut self, id: u64, outcome: Outcome, settings: &Settings, now: Instant) {
        let is_late = self.random.is_some();
        let Some(pair) = self.pairs.get_mut(&id) else { return };
        let (host, peer) = (pair.host, pair.peer);
        let Some(first) = pair.requests.front_mut() else { return };
        match outcome {
            Outcome::Progress(done) => (first.done, first.blocked) = (done, None),
            Outcome::Blocked(obstacle) => {
                let is_new = first.blocked.is_none_or(|(of, _)| of != obstacle);
                if is_new {
                    first.blocked = Some((obstacle, now));
                    self.counts(host).rnrs += u64::from(obstacle == Obstacle::NoReceive);
                }
            }
            Outcome::Done(received) => {
                let request = first.request;
                let start = first.posted_at.max(pair.busy_until).max(self.hosts[host].port_busy_until);
                let end = start + settings.costs.transfer(request.from.len.into());
                pair.busy_until = end;
                pair.complete_first(CompletionStatus::Success, end + settings.costs.round_trip, is_late);
                self.hosts[host].port_busy_until = end;
                self.count(host, request.operation, request.from.len.into());
                let arrived = end + settings.costs.round_trip / 2;
                if let Some(Received { kind, bytes }) = received {
                    self.complete_receive(peer, CompletionStatus::Success, kind, bytes, arrived, is_late);
                }
            }
            Outcome::Failed { status, is_both, receive } => {
                let was_waiting = matches!(first.blocked, Some((Obstacle::NoReceive, _)));
                let at = first.posted_at + settings.costs.round_trip;
                pair.complete_first(status, at, false);
                let counts = self.counts(host);
                counts.failed_requests += 1;
                counts.rnrs += u64::from(status == CompletionStatus::RnrRetryExceeded && !was_waiting);
                self.fail_pair(id, at);
                if let Some(status) = receive {
                    self.complete_receive(peer, status, CompletionKind::Receive, 0, at, false);
                }
                if let Some(peer) = peer.filter(|_| is_both) {
                    self.fail_pair(peer, at);
                }
            }
        }
    }

    fn complete_receive(
        &mut self,
        peer: Option<u64>,
        status: CompletionStatus,
        kind: CompletionKind,
        bytes: u32,
        at: Time,
        is_late: bool,
    ) {
        let Some(peer) = peer.and_then(|peer| self.pairs.get_mut(&peer)) else { return };
        if let Some((id, _)) = peer.receives.pop_front() {
            peer.complete_receive(Completion { id, status, kind, bytes }, at, is_late);
        }
    }

    fn count(&mut self, host: usize, operation: Operation, bytes: u64) {
        let counts = self.counts(host);
        if operation == Operation::Send {
            counts.sends += 1;
            counts.send_bytes += bytes;
        } else {
            counts.writes += 1;
            counts.write_bytes += bytes;
            counts.write_bytes_most = counts.write_bytes_most.max(bytes);
        }
    }
}

/// Time for which a request of this pair is retried; `None` is without limit.
fn patience(pair: &Pair, obstacle: Obstacle, settings: &Settings) -> Option<Duration> {
    match obstacle {
        Obstacle::Silence => Some(settings.retry_limit),
        Obstacle::NoReceive if pair.rnr_retry >= 7 => None,
        Obstacle::NoReceive => Some(settings.rnr_timer * u32::from(pair.rnr_retry)),
    }
}

/// Whether posted requests are executed rather than flushed.
pub(super) fn is_running(pair: &Pair) -> bool {
    pair.state != QueuePairState::Error
}
