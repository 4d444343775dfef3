//! How long the primary may run the guest without a word of its standby.

use std::collections::VecDeque;
use std::time::Duration;

/// Heartbeats whose echo may still come. Older ones no longer extend a lease
/// that matters.
const REMEMBERED: usize = 64;

/// Counted from when a heartbeat was *sent*: its echo proves that the standby
/// has answered since, and the standby's patience began then or later.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    length: Duration,
    interval: Duration,
    sent: VecDeque<(u64, Duration)>,
    last_number: u64,
    next: Duration,
    /// None before anything was answered.
    end: Option<Duration>,
}

impl Lease {
    pub(super) fn new(length: Duration, interval: Duration, now: Duration) -> Self {
        Self { length, interval, sent: VecDeque::new(), last_number: 0, next: now, end: None }
    }

    /// When the next heartbeat is due.
    pub(super) fn next_heartbeat(&self) -> Duration {
        self.next
    }

    /// When it ends; none before it began.
    pub(super) fn end(&self) -> Option<Duration> {
        self.end
    }

    /// Whether it is over. One that has not begun is not.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.end.is_some_and(|end| now >= end)
    }

    /// The standby may have something to take over from now on: the lease
    /// begins, if no heartbeat has begun it before.
    pub(super) fn begin(&mut self, now: Duration) {
        self.extend_to(now.saturating_add(self.length));
    }

    /// Gives the number of the heartbeat that is due, if one is. It is sent
    /// after this, so it counts as sent now.
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

    /// Whether a heartbeat with this number was sent; 0 stands for none.
    pub(super) fn was_sent(&self, number: u64) -> bool {
        number <= self.last_number
    }

    /// This heartbeat was echoed, and all before it.
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
