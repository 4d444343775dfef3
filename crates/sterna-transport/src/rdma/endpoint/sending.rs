//! The sending half of an endpoint: messages, writes and their completions.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::failure::failed;
use super::sizes::place;
use super::sizes::{EndpointSizes, Write};
use crate::cancel::CancelFlag;
use crate::rdma::connection::{Connection, Queue, Wake};
use crate::rdma::error::RdmaError;
use crate::rdma::memory::Registration;
use crate::rdma::work::{Completion, CompletionStatus, Operation, SendRequest};

/// Maximum number of completions per poll.
const BATCH: usize = 64;

/// Send queue of an endpoint with its buffers.
#[derive(Debug)]
pub(super) struct Sending {
    message_bytes: u32,
    buffers: Registration,
    free: Vec<u32>,
    /// Number of requests that the send queue can contain.
    capacity: usize,
    /// Posted requests without a known completion, in the order of posting.
    outstanding: VecDeque<Outstanding>,
    /// Number of writes in `outstanding`.
    writes: usize,
    /// Number of the next request.
    next: u64,
    /// The first failure, which every later call returns.
    failure: Option<(&'static str, CompletionStatus, Option<u64>)>,
}

#[derive(Debug)]
struct Outstanding {
    id: u64,
    bytes: u64,
    what: What,
}

#[derive(Debug)]
enum What {
    Message { slot: u32 },
    Write { address: u64 },
}

/// Arguments of a wait for completions.
pub(super) struct Waiter<'a> {
    pub(super) connection: &'a dyn Connection,
    pub(super) closed: &'a CancelFlag,
    pub(super) in_flight: &'a AtomicU64,
    pub(super) limit: Option<Duration>,
}

impl Sending {
    pub(super) fn new(sizes: &EndpointSizes, buffers: Registration) -> Self {
        Self {
            message_bytes: sizes.message_bytes,
            buffers,
            free: (0..sizes.sends).collect(),
            capacity: (sizes.sends + sizes.writes) as usize,
            outstanding: VecDeque::new(),
            writes: 0,
            next: 0,
            failure: None,
        }
    }

    pub(super) fn send(&mut self, parts: &[&[u8]], len: u32, waiter: &Waiter<'_>) -> Result<(), RdmaError> {
        self.reap(waiter)?;
        while self.free.is_empty() || self.outstanding.len() >= self.capacity {
            self.wait(waiter)?;
        }
        let Some(slot) = self.free.pop() else { return Ok(()) };
        let mut offset = slot as usize * self.message_bytes as usize;
        for part in parts {
            let window = self.buffers.memory().slice().part(offset, part.len());
            let copied = window.map_or(Ok(()), |window| window.copy_from(part));
            copied.map_err(|fault| RdmaError::System {
                subject: waiter.connection.peer().to_string(),
                call: "writing a message",
                source: io::Error::other(fault),
            })?;
            offset += part.len();
        }
        let request = SendRequest {
            id: self.next,
            operation: Operation::Send,
            from: place(&self.buffers, self.message_bytes, slot, len),
            is_signalled: true,
        };
        self.post(&[request], waiter, |_| What::Message { slot })
    }

    pub(super) fn write(&mut self, writes: &[Write], waiter: &Waiter<'_>) -> Result<(), RdmaError> {
        // Half a queue at a time, so that one part completes while the next is posted.
        for writes in writes.chunks((self.capacity / 2).max(1)) {
            self.reap(waiter)?;
            while self.outstanding.len() + writes.len() > self.capacity {
                self.wait(waiter)?;
            }
            let last = writes.len() - 1;
            let requests: Vec<SendRequest> = writes
                .iter()
                .enumerate()
                .map(|(at, write)| SendRequest {
                    id: self.next + at as u64,
                    operation: Operation::Write { address: write.address, rkey: write.rkey },
                    from: write.from,
                    is_signalled: at == last,
                })
                .collect();
            self.post(&requests, waiter, |at| What::Write { address: writes[at].address })?;
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, waiter: &Waiter<'_>) -> Result<(), RdmaError> {
        self.reap(waiter)?;
        while !self.outstanding.is_empty() {
            self.wait(waiter)?;
        }
        Ok(())
    }

    pub(super) fn wait_for_writes(&mut self, most: usize, waiter: &Waiter<'_>) -> Result<(), RdmaError> {
        self.reap(waiter)?;
        while self.writes > most {
            self.wait(waiter)?;
        }
        Ok(())
    }

    pub(super) fn writes_in_flight(&self) -> usize {
        self.writes
    }

    /// Processes the available completions, without waiting.
    pub(super) fn reap(&mut self, waiter: &Waiter<'_>) -> Result<(), RdmaError> {
        let mut completions = Vec::with_capacity(BATCH);
        loop {
            let count = waiter.connection.poll(Queue::Send, &mut completions, BATCH)?;
            completions.drain(..).for_each(|completion| self.complete(completion, waiter));
            if let Some((operation, status, address)) = self.failure {
                return Err(failed(waiter.connection, operation, status, address));
            }
            if count < BATCH {
                return Ok(());
            }
        }
    }

    fn complete(&mut self, completion: Completion, waiter: &Waiter<'_>) {
        // Requests complete in order, so all earlier ones are complete too.
        while self.outstanding.front().is_some_and(|first| first.id <= completion.id) {
            let Some(Outstanding { id, bytes, what }) = self.outstanding.pop_front() else { return };
            waiter.in_flight.fetch_sub(bytes, Ordering::Relaxed);
            let (operation, address) = match what {
                What::Message { slot } => {
                    self.free.push(slot);
                    ("a send", None)
                }
                What::Write { address } => {
                    self.writes -= 1;
                    ("a write", Some(address))
                }
            };
            if id == completion.id && !completion.status.is_success() && self.failure.is_none() {
                self.failure = Some((operation, completion.status, address));
            }
        }
    }

    fn post(
        &mut self,
        requests: &[SendRequest],
        waiter: &Waiter<'_>,
        what: impl Fn(usize) -> What,
    ) -> Result<(), RdmaError> {
        let posted = waiter.connection.post_send(requests);
        let count = match &posted {
            Ok(()) => requests.len(),
            Err(RdmaError::QueueFull { posted, .. }) => *posted,
            Err(_) => 0,
        };
        for (at, request) in requests[..count].iter().enumerate() {
            let bytes = u64::from(request.from.len);
            waiter.in_flight.fetch_add(bytes, Ordering::Relaxed);
            let what = what(at);
            self.writes += usize::from(matches!(what, What::Write { .. }));
            self.outstanding.push_back(Outstanding { id: request.id, bytes, what });
        }
        self.next += count as u64;
        posted
    }

    /// Waits until at least one request is complete.
    fn wait(&mut self, waiter: &Waiter<'_>) -> Result<(), RdmaError> {
        let peer = || waiter.connection.peer().to_string();
        let deadline = waiter.limit.and_then(|limit| Instant::now().checked_add(limit));
        if waiter.closed.is_cancelled() {
            return Err(RdmaError::Cancelled { address: peer() });
        }
        match (waiter.connection.wait(Queue::Send, deadline, waiter.closed)?, waiter.limit) {
            (Wake::Completion, _) => self.reap(waiter),
            (Wake::Cancelled, _) => Err(RdmaError::Cancelled { address: peer() }),
            (Wake::TimedOut, Some(after)) => {
                Err(RdmaError::TimedOut { what: "waiting for completions from", address: peer(), after })
            }
            (Wake::Ended | Wake::TimedOut, _) => {
                Err(RdmaError::Ended { peer: peer(), event: waiter.connection.end() })
            }
        }
    }
}
