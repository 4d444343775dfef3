//! A queue pair, its completion queues, and what its connection has come to.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use super::clock::Time;
use crate::rdma::{
    Completion, CompletionKind, CompletionStatus, Event, Piece, Queue, QueuePairAttributes, RejectReason,
    SendRequest,
};

/// A queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) host: usize,
    pub(super) domain: usize,
    pub(super) attributes: QueuePairAttributes,
    pub(super) state: PairState,
    pub(super) peer: Option<u64>,
    /// Whether the peer may write.
    pub(super) is_writable: bool,
    /// How often a send is tried again that finds no receive.
    pub(super) rnr_retry: u8,
    /// Requests that are not executed yet.
    pub(super) requests: VecDeque<Posted>,
    pub(super) receives: VecDeque<(u64, Piece)>,
    /// Places taken in the send queue: requests whose completion was not polled.
    pub(super) taken_requests: u32,
    pub(super) taken_receives: u32,
    /// Requests that were executed and gave no completion: the next completion frees their places.
    unsignalled: u32,
    pub(super) sent: CompletionQueue,
    pub(super) received: CompletionQueue,
    /// Until when the adapter is busy with requests of this pair.
    pub(super) busy_until: Time,
    pub(super) events: VecDeque<Event>,
    pub(super) end: Option<Event>,
    pub(super) connecting: Connecting,
    pub(super) manager: Signal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PairState {
    /// Not connected: receives may be posted.
    Initialised,
    ReadyToSend,
    Error,
}

/// How far the active side's connect request has come.
#[derive(Debug, Clone)]
pub(super) enum Connecting {
    No,
    /// The request lies at the peer.
    Asked,
    /// With the reply's private data.
    Accepted(Vec<u8>),
    Rejected(RejectReason, Vec<u8>),
}

/// A request that is not executed yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub(super) request: SendRequest,
    /// The order of posting over all queue pairs.
    pub(super) sequence: u64,
    pub(super) posted_at: Time,
    /// Bytes that were written already.
    pub(super) done: u64,
    /// Since when it cannot go on, and what for.
    pub(super) blocked: Option<(Obstacle, Instant)>,
    /// Whether a plan was asked about it.
    pub(super) is_counted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// Nobody answers.
    Silence,
    /// The peer has no receive posted.
    NoReceive,
}

impl Pair {
    pub(super) fn new(host: usize, domain: usize, attributes: QueuePairAttributes) -> io::Result<Self> {
        Ok(Self {
            host,
            domain,
            attributes,
            state: PairState::Initialised,
            peer: None,
            is_writable: true,
            rnr_retry: 0,
            requests: VecDeque::new(),
            receives: VecDeque::new(),
            taken_requests: 0,
            taken_receives: 0,
            unsignalled: 0,
            sent: CompletionQueue::new()?,
            received: CompletionQueue::new()?,
            busy_until: Time::ZERO,
            events: VecDeque::new(),
            end: None,
            connecting: Connecting::No,
            manager: Signal::new()?,
        })
    }

    pub(super) fn queue(&mut self, queue: Queue) -> &mut CompletionQueue {
        match queue {
            Queue::Send => &mut self.sent,
            Queue::Receive => &mut self.received,
        }
    }

    /// The first request was executed. `is_late`: its completion waits until it is let through.
    pub(super) fn complete_first(&mut self, status: CompletionStatus, at: Time, is_late: bool) {
        let Some(posted) = self.requests.pop_front() else { return };
        self.unsignalled += 1;
        if posted.request.is_signalled || !status.is_success() {
            let frees = std::mem::take(&mut self.unsignalled);
            let kind = match posted.request.operation {
                crate::rdma::Operation::Send => CompletionKind::Send,
                _ => CompletionKind::Write,
            };
            let completion = Completion { id: posted.request.id, status, kind, bytes: 0 };
            self.sent.push(Entry { completion, frees, at }, is_late);
        }
    }

    /// Completes a receive that was taken out of the queue.
    pub(super) fn complete_receive(&mut self, completion: Completion, at: Time, is_late: bool) {
        self.received.push(Entry { completion, frees: 1, at }, is_late);
    }

    /// Puts the pair into the error state: everything outstanding is flushed. Gives how much that was.
    pub(super) fn fail(&mut self, at: Time) -> u64 {
        self.state = PairState::Error;
        let mut flushed = 0;
        while !self.requests.is_empty() {
            self.complete_first(CompletionStatus::WorkRequestFlushed, at, false);
            flushed += 1;
        }
        while let Some((id, _)) = self.receives.pop_front() {
            let status = CompletionStatus::WorkRequestFlushed;
            let completion = Completion { id, status, kind: CompletionKind::Receive, bytes: 0 };
            self.complete_receive(completion, at, false);
            flushed += 1;
        }
        flushed
    }

    /// Reports an event; one that ends the connection comes after all that was received before.
    pub(super) fn report(&mut self, event: Event) {
        if event.is_end() {
            self.sent.let_all_through();
            self.received.let_all_through();
            if self.end.is_none() {
                self.end = Some(event.clone());
            }
        }
        self.events.push_back(event);
        self.signal_all();
    }

    pub(super) fn signal_all(&self) {
        for signal in [&self.sent.signal, &self.received.signal, &self.manager] {
            signal.set();
        }
    }
}

/// A completion, how many places it frees when it is polled, and when it happened.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) completion: Completion,
    pub(super) frees: u32,
    pub(super) at: Time,
}

/// Completions that can be polled, and those that are on their way.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    pub(super) ready: VecDeque<Entry>,
    late: VecDeque<Entry>,
    pub(super) signal: Signal,
}

impl CompletionQueue {
    fn new() -> io::Result<Self> {
        Ok(Self { ready: VecDeque::new(), late: VecDeque::new(), signal: Signal::new()? })
    }

    fn push(&mut self, entry: Entry, is_late: bool) {
        self.late.push_back(entry);
        if !is_late {
            self.let_all_through();
        }
    }

    pub(super) fn has_late(&self) -> bool {
        !self.late.is_empty()
    }

    /// Lets the first one that is on its way arrive.
    pub(super) fn let_one_through(&mut self) {
        self.ready.extend(self.late.pop_front());
        self.signal.set();
    }

    fn let_all_through(&mut self) {
        self.ready.extend(self.late.drain(..));
        self.signal.set();
    }
}

/// A descriptor that is readable when there is something new.
#[derive(Debug, Clone)]
pub(super) struct Signal(Arc<OwnedFd>);

impl Signal {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(super) fn set(&self) {
        // It cannot fail: the counter is far from full.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Forgets what came before; look at the state afterwards.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
