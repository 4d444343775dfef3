//! The primary's lease: how long it may run the guest without an answer of its standby.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of heartbeats whose echo still extends the lease. The echo of an older one would extend
/// no lease that is still valid.
const REMEMBERED: usize = 64;

/// A lease that counts from the time at which a heartbeat was *sent*.
///
/// The echo proves that the standby answered after that time. Therefore the standby's patience
/// began then or later.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    length: Duration,
    interval: Duration,
    sent: VecDeque<(u64, Duration)>,
    last_number: u64,
    next: Duration,
    /// End of the lease; `None` until it has begun.
    end: Option<Duration>,
}

impl Lease {
    pub(super) fn new(length: Duration, interval: Duration, now: Duration) -> Self {
        Self { length, interval, sent: VecDeque::new(), last_number: 0, next: now, end: None }
    }

    /// The time at which the next heartbeat is due.
    pub(super) fn next_heartbeat(&self) -> Duration {
        self.next
    }

    /// The end of the lease; `None` until it has begun.
    pub(super) fn end(&self) -> Option<Duration> {
        self.end
    }

    /// Whether the lease is over. A lease that has not begun is not over.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.end.is_some_and(|end| now >= end)
    }

    /// Begins the lease, unless a heartbeat has begun it before.
    ///
    /// Called when the standby may have a checkpoint to take over from.
    pub(super) fn begin(&mut self, now: Duration) {
        self.extend_to(now.saturating_add(self.length));
    }

    /// Returns the number of the heartbeat that is due, or `None`.
    ///
    /// The caller sends the heartbeat afterwards, so `now` is not later than its sending.
    pub(super) fn beat(&mut self, now: Duration) -> Option<u64> {
        if now < self.next {
            return None;
        }
        self.last_number += 1;
        self.next = now.saturating_add(self.interval);
        if self.sent.len() == REMEMBERED {
            self.sent.pop_front();
        }
        self.sent.push_back((self.last_number, now));
        Some(self.last_number)
    }

    /// Whether a heartbeat with this number was sent. 0 means no heartbeat and is always accepted.
    pub(super) fn was_sent(&self, number: u64) -> bool {
        number <= self.last_number
    }

    /// Extends the lease: this heartbeat and all earlier ones were echoed.
    pub(super) fn echoed(&mut self, number: u64) {
        let sent = self.sent.iter().find(|(sent, _)| *sent == number).map(|(_, at)| *at);
        self.sent.retain(|(sent, _)| *sent > number);
        if let Some(at) = sent {
            self.extend_to(at.saturating_add(self.length));
        }
    }

    fn extend_to(&mut self, end: Duration) {
        self.end = Some(self.end.map_or(end, |before| before.max(end)));
    }
}
