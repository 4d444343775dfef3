//! A queue pair of the double, its completion queues, and the state of its connection.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use super::clock::Time;
use crate::rdma::transitions::{self, QueuePairState, attribute};
use crate::rdma::{
    Completion, CompletionKind, CompletionStatus, Event, Piece, Queue, QueuePairAttributes, RejectReason,
    SendRequest,
};

/// A queue pair with its queues and connection state.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) host: usize,
    pub(super) domain: usize,
    pub(super) attributes: QueuePairAttributes,
    pub(super) state: QueuePairState,
    pub(super) peer: Option<u64>,
    /// Whether the peer may write, if the state permits it.
    pub(super) is_writable: bool,
    /// Whether the peer has confirmed the connection, if this side accepted it.
    pub(super) is_confirmed: bool,
    /// Number of retries of a send that finds no receive; 7 is without limit.
    pub(super) rnr_retry: u8,
    /// Posted requests that are not executed yet.
    pub(super) requests: VecDeque<Posted>,
    pub(super) receives: VecDeque<(u64, Piece)>,
    /// Occupied slots of the send queue: requests whose completion was not polled.
    pub(super) taken_requests: u32,
    pub(super) taken_receives: u32,
    /// Executed requests without a completion. The next completion frees their slots.
    unsignalled: u32,
    pub(super) sent: CompletionQueue,
    pub(super) received: CompletionQueue,
    /// Virtual time until which the adapter is busy with requests of this pair.
    pub(super) busy_until: Time,
    pub(super) events: VecDeque<Event>,
    pub(super) end: Option<Event>,
    pub(super) connecting: Connecting,
    pub(super) manager: Signal,
}

/// Progress of the connecting side's request.
#[derive(Debug, Clone)]
pub(super) enum Connecting {
    No,
    /// The request waits for the peer's answer.
    Asked,
    /// The peer accepted: the reply's private data, the peer's queue pair and its RNR retry count.
    Accepted {
        reply: Vec<u8>,
        peer: u64,
        rnr_retry: u8,
    },
    Rejected(RejectReason, Vec<u8>),
}

/// A posted request that is not executed yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub(super) request: SendRequest,
    /// Position in the order of posting over all queue pairs.
    pub(super) sequence: u64,
    pub(super) posted_at: Time,
    /// Number of bytes already written.
    pub(super) done: u64,
    /// The obstacle that blocks the request, and since when.
    pub(super) blocked: Option<(Obstacle, Instant)>,
    /// Whether the request was counted for planned faults.
    pub(super) is_counted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// The peer does not answer.
    Silence,
    /// The peer has posted no receive.
    NoReceive,
}

impl Pair {
    pub(super) fn new(host: usize, domain: usize, attributes: QueuePairAttributes) -> io::Result<Self> {
        Ok(Self {
            host,
            domain,
            attributes,
            state: QueuePairState::Init,
            peer: None,
            // The initial right of librdmacm. No peer is connected yet that could write.
            is_writable: attributes.remote_write,
            is_confirmed: false,
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

    /// Completes the first request. With `is_late`, the completion waits until it is delivered.
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

    /// Completes a receive that was removed from its queue.
    pub(super) fn complete_receive(&mut self, completion: Completion, at: Time, is_late: bool) {
        self.received.push(Entry { completion, frees: 1, at }, is_late);
    }

    /// Changes attributes as `ibv_modify_qp` does. Returns the kernel's error number if the change is not allowed.
    pub(super) fn modify(&mut self, next: Option<QueuePairState>, named: u32) -> Result<(), i32> {
        let named = named | if next.is_some() { attribute::STATE } else { 0 };
        let next = next.unwrap_or(self.state);
        if !transitions::is_allowed(self.state, next, named) {
            return Err(libc::EINVAL);
        }
        self.state = next;
        Ok(())
    }

    /// Connects as librdmacm does. The right to write exists until the manager's caller revokes it, which the
    /// double does immediately.
    pub(super) fn connect(&mut self, peer: u64, rnr_retry: u8) -> Result<(), i32> {
        self.modify(Some(QueuePairState::ReadyToReceive), transitions::TO_RECEIVE)?;
        self.modify(Some(QueuePairState::ReadyToSend), transitions::TO_SEND)?;
        (self.peer, self.rnr_retry) = (Some(peer), rnr_retry);
        self.is_writable = self.attributes.remote_write;
        Ok(())
    }

    /// Puts the pair into the error state, which flushes everything outstanding. Returns the number of flushed
    /// entries.
    pub(super) fn fail(&mut self, at: Time) -> u64 {
        // Allowed in every state that a pair can have.
        let _ = self.modify(Some(QueuePairState::Error), 0);
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

    /// Reports an event. An event that ends the connection is delivered after all completions before it.
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

/// A completion, with the number of slots that polling it frees, and its virtual time.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) completion: Completion,
    pub(super) frees: u32,
    pub(super) at: Time,
}

/// Completions that can be polled, and those that are delayed.
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

    /// Delivers the first delayed completion.
    pub(super) fn let_one_through(&mut self) {
        self.ready.extend(self.late.pop_front());
        self.signal.set();
    }

    fn let_all_through(&mut self) {
        self.ready.extend(self.late.drain(..));
        self.signal.set();
    }
}

/// A descriptor that is readable after a change.
#[derive(Debug, Clone)]
pub(super) struct Signal(Arc<OwnedFd>);

impl Signal {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(super) fn set(&self) {
        // The write cannot fail: the counter is far from full.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable. Check the state afterwards.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
