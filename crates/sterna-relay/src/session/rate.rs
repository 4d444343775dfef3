//! The measured rate of a session, and how many bytes may be in flight (`specs/relay.md §8`).
//!
//! A VMM counts a byte as sent when the relay has taken it. The bytes between both relays' VMMs must therefore be few:
//! the rate times the shortest round trip, which a connection without a relay has in flight too, and 5 ms of the rate.
//!
//! Each group of bytes carries a [`Stamp`] of the moment in which it was taken. When it is delivered, the bytes of the
//! last 50 ms or of the last round trip give a rate; a shorter time would measure the bursts of a link. The estimate
//! is the largest rate of the last round trips. A rate that was measured while the VMM had nothing to send says little,
//! and counts only if it is larger.

use std::collections::VecDeque;
use std::time::Duration;

/// The least limit of bytes in flight.
const LEAST: u64 = 64 << 10;
/// The limit before anything was measured.
const FIRST: u64 = 1 << 20;
/// How much of the rate may wait in addition to the round trip.
const WAITING: Duration = Duration::from_millis(5);
/// The time over which a rate is measured, at least a round trip; and the least time at the start.
const AVERAGE: Duration = Duration::from_millis(50);
const LEAST_AVERAGE: Duration = Duration::from_millis(5);
/// The age at which a rate no longer counts, in shortest round trips and at least in time.
const MOST_ROUND_TRIPS: u32 = 10;
const LEAST_AGE: Duration = Duration::from_millis(300);
/// The age at which a round trip no longer counts.
const ROUND_TRIP_AGE: Duration = Duration::from_secs(10);
/// Measurements of the start that did not grow by a quarter, until the start is over.
const FLAT: u32 = 3;

/// The moment in which a group of bytes was taken.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    taken_at: Duration,
    is_limited_by_vmm: bool,
}

/// Estimates the rate at which the peer's VMMs take bytes.
#[derive(Debug)]
pub struct RateEstimator {
    delivered: u64,
    /// Times and the sums of delivered bytes then, of the last [`AVERAGE`] or round trip.
    history: VecDeque<(Duration, u64)>,
    /// Rates with their times; each is larger than those after it.
    rates: VecDeque<(Duration, u64)>,
    /// The shortest round trips: times and values; each is smaller than those after it.
    round_trips: VecDeque<(Duration, Duration)>,
    /// The rate of the last step of the start, steps without growth, and when the next step begins.
    start: Option<(u64, u32, Duration)>,
}

impl Default for RateEstimator {
    fn default() -> Self {
        Self::new()
    }
}

impl RateEstimator {
    /// An estimator that has measured nothing.
    pub fn new() -> Self {
        Self {
            delivered: 0,
            history: VecDeque::new(),
            rates: VecDeque::new(),
            round_trips: VecDeque::new(),
            start: Some((0, 0, Duration::ZERO)),
        }
    }

    /// The stamp for bytes that are taken now, while `in_flight` bytes were taken before and are not delivered.
    pub fn taken(&mut self, now: Duration, in_flight: u64) -> Stamp {
        if in_flight == 0 {
            // The pause before these bytes must not count.
            self.interrupted(now);
        }
        // Half of the limit: the VMM had time to fill the rest.
        Stamp { taken_at: now, is_limited_by_vmm: in_flight < self.limit() / 2 }
    }

    /// So many bytes were delivered since the last call. Precedes the calls of [`sample`](Self::sample).
    pub fn delivered(&mut self, now: Duration, bytes: u64) {
        self.delivered += bytes;
        self.history.push_back((now, self.delivered));
        let average = self.shortest().max(AVERAGE);
        // One entry that is older is kept: the average is never over a shorter time.
        while self.history.get(1).is_some_and(|(at, _)| *at + average <= now) {
            self.history.pop_front();
        }
    }

    /// The bytes of this stamp are delivered now.
    pub fn sample(&mut self, now: Duration, stamp: Stamp) {
        self.round_trip(now, now.saturating_sub(stamp.taken_at));
        let Some((since, before)) = self.history.front().copied() else { return };
        let took = now.saturating_sub(since);
        if took < LEAST_AVERAGE {
            return;
        }
        let rate = (u128::from(self.delivered - before) * 1_000_000_000 / took.as_nanos()) as u64;
        if !stamp.is_limited_by_vmm {
            let age = (self.shortest() * MOST_ROUND_TRIPS).max(LEAST_AGE);
            while self.rates.front().is_some_and(|(at, _)| *at + age < now) && self.rates.len() > 1 {
                self.rates.pop_front();
            }
        }
        if stamp.is_limited_by_vmm && rate <= self.bytes_per_second() {
            return;
        }
        while self.rates.back().is_some_and(|(_, known)| *known <= rate) {
            self.rates.pop_back();
        }
        self.rates.push_back((now, rate));
        self.step(now);
    }

    /// A round trip of this length ended now.
    pub fn round_trip(&mut self, now: Duration, took: Duration) {
        while self.round_trips.front().is_some_and(|(at, _)| *at + ROUND_TRIP_AGE < now) {
            self.round_trips.pop_front();
        }
        while self.round_trips.back().is_some_and(|(_, known)| *known >= took) {
            self.round_trips.pop_back();
        }
        self.round_trips.push_back((now, took));
    }

    /// The carriers were lost. What is delivered next says nothing about the time before.
    pub fn interrupted(&mut self, now: Duration) {
        self.history.clear();
        self.history.push_back((now, self.delivered));
    }

    /// The estimate in bytes per second; 0 before the first measurement.
    pub fn bytes_per_second(&self) -> u64 {
        self.rates.front().map_or(0, |(_, rate)| *rate)
    }

    /// Most bytes that may be in flight.
    pub fn limit(&self) -> u64 {
        let rate = self.bytes_per_second();
        if rate == 0 {
            return FIRST;
        }
        let time = self.shortest() + WAITING;
        let limit = (u128::from(rate) * time.as_nanos() / 1_000_000_000) as u64;
        // At the start the rate is still limited by this limit, therefore it doubles.
        let gain = if self.start.is_some() { 2 } else { 1 };
        (limit * gain).max(LEAST)
    }

    fn shortest(&self) -> Duration {
        self.round_trips.front().map_or(Duration::ZERO, |(_, took)| *took)
    }

    fn step(&mut self, now: Duration) {
        let Some((before, flat, next)) = self.start else { return };
        if now < next {
            return;
        }
        let rate = self.bytes_per_second();
        let flat = if rate > before + before / 4 { 0 } else { flat + 1 };
        let pause = self.shortest().max(Duration::from_millis(1));
        self.start = (flat < FLAT).then_some((rate.max(before), flat, now + pause));
    }
}
