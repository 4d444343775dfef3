//! One limit for the bytes that all sessions of a process send, shared fairly.
//!
//! Each session has a [`Share`]. A carrier asks its share before it sends pages, and reports what it sent. The share
//! that has sent least goes first (start-time fair queueing), so that sessions with work get equal rates, and what one of
//! them does not use goes to the others. Sessions whose guest is stopped precede all others. Return paths, page requests
//! and acknowledgements are counted, but never wait.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How far a session may be ahead of the one that has sent least, in bytes: one batch of frames.
const QUANTUM: u64 = 256 << 10;
/// How much may be sent without a pause after a silence: bytes in this time, and at least so many.
const BURST: Duration = Duration::from_millis(5);
const LEAST_BURST: u64 = 64 << 10;
/// Longest time until a share asks again, so that a change of the limit is followed soon.
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// A share that has not asked again for so long after its wait has no work.
const PATIENCE: Duration = Duration::from_millis(20);

/// A limit in bytes per second that sessions share. Clones are the same limit.
#[derive(Debug, Clone, Default)]
pub struct Limit(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Bytes per second; 0: no limit.
    rate: u64,
    /// Bytes that may be sent now; negative after more were sent.
    balance: f64,
    filled_at: Option<Instant>,
    shares: BTreeMap<u64, Hunger>,
    next: u64,
    /// What the share that was served last had sent: a share that begins starts here.
    now_served: u64,
}

/// A session's state at the limit.
#[derive(Debug, Default)]
struct Hunger {
    /// Bytes, as if the session had always had work.
    served: u64,
    /// It has work that waits, until this time.
    until: Option<Instant>,
    is_first: bool,
}

impl Limit {
    /// A limit in bytes per second; 0: no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        let limit = Self::default();
        limit.set(bytes_per_second);
        limit
    }

    /// Changes the limit, in bytes per second; 0: no limit. Sessions that run follow within 50 ms.
    pub fn set(&self, bytes_per_second: u64) {
        let mut state = self.0.lock();
        state.fill(Instant::now());
        state.rate = bytes_per_second;
        state.balance = state.balance.min(state.burst());
    }

    /// The limit in bytes per second; 0: no limit.
    pub fn bytes_per_second(&self) -> u64 {
        self.0.lock().rate
    }

    /// A share for one more session.
    pub fn share(&self) -> Share {
        let mut state = self.0.lock();
        state.next += 1;
        let id = state.next;
        state.shares.insert(id, Hunger::default());
        Share { limit: self.clone(), id }
    }
}

/// The place of one session at a [`Limit`]. Dropping it gives the place up.
#[derive(Debug)]
pub struct Share {
    limit: Limit,
    id: u64,
}

impl Share {
    /// Whether this session may send pages at `now`. Otherwise, how long it waits before it asks again.
    ///
    /// # Errors
    /// The time to wait, at most 50 ms.
    pub fn ask(&self, now: Instant) -> Result<(), Duration> {
        let mut state = self.limit.0.lock();
        state.fill(now);
        if state.rate == 0 {
            return Ok(());
        }
        let wait = state.wait_of(self.id, now);
        let floor = state.now_served;
        if let Some(own) = state.shares.get_mut(&self.id) {
            if own.until.is_none_or(|until| until < now) {
                own.served = own.served.max(floor);
            }
            own.until = Some(now + wait.unwrap_or_default() + PATIENCE);
        }
        match wait {
            None => Ok(()),
            Some(wait) => Err(wait),
        }
    }

    /// This session has sent so many bytes.
    pub fn sent(&self, bytes: u64) {
        let mut state = self.limit.0.lock();
        if state.rate == 0 {
            return;
        }
        state.balance -= bytes as f64;
        // What a switchover sends is not held against its session afterwards.
        if let Some(own) = state.shares.get_mut(&self.id).filter(|own| !own.is_first) {
            let before = own.served;
            own.served += bytes;
            state.now_served = state.now_served.max(before);
        }
    }

    /// This session has nothing to send now.
    pub fn rest(&self) {
        if let Some(own) = self.limit.0.lock().shares.get_mut(&self.id) {
            own.until = None;
        }
    }

    /// Whether this session precedes others, because its guest is stopped.
    pub fn set_first(&self, is_first: bool) {
        if let Some(own) = self.limit.0.lock().shares.get_mut(&self.id) {
            own.is_first = is_first;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.limit.0.lock().shares.remove(&self.id);
    }
}

impl State {
    fn fill(&mut self, now: Instant) {
        let since =
            self.filled_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.balance = (self.balance + self.rate as f64 * since.as_secs_f64()).min(self.burst());
    }

    fn burst(&self) -> f64 {
        (self.rate as f64 * BURST.as_secs_f64()).max(LEAST_BURST as f64)
    }

    /// How long this share has to wait; `None`: it may send.
    fn wait_of(&self, id: u64, now: Instant) -> Option<Duration> {
        let own = self.shares.get(&id)?;
        let served = match own.until {
            Some(until) if until >= now => own.served,
            _ => own.served.max(self.now_served),
        };
        let before = |other: &&Hunger| {
            let is_hungry = other.until.is_some_and(|until| until >= now);
            let precedes = match (other.is_first, own.is_first) {
                (true, false) => true,
                (false, true) => false,
                _ => other.served + QUANTUM <= served,
            };
            is_hungry && precedes
        };
        let ahead = self.shares.iter().filter(|(other, _)| **other != id).map(|(_, other)| other);
        let ahead = ahead.filter(before).count() as f64;
        let missing = (-self.balance).max(0.0) + ahead * QUANTUM as f64;
        if missing == 0.0 && self.balance >= 0.0 {
            return None;
        }
        let wait =
            Duration::from_secs_f64((missing / self.rate as f64).clamp(0.000_05, LONGEST_WAIT.as_secs_f64()));
        Some(wait)
    }
}
