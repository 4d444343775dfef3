//! Measures a session over time: rates, rounds, and the downtime in its stream.

use std::collections::VecDeque;
use std::time::Duration;

use super::main_flow::MainFlow;
use crate::phase::Phase;

/// The time over which the rate is measured.
const WINDOW: Duration = Duration::from_secs(1);
const PAGE: u64 = 4096;

/// What was measured so far. It outlives the main channel.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Times and sums of bytes, of the last [`WINDOW`].
    passed: VecDeque<(Duration, u64)>,
    pub(super) ram_bytes: Option<u64>,
    pub(super) remaining_bytes: Option<u64>,
    pub(super) round: u32,
    /// When the round began, how long the one before took, and the dirty rate that follows.
    round_began: Duration,
    last_round_took: Option<Duration>,
    pub(super) dirty_rate: Option<u64>,
    /// Sections of RAM that are over, and when the last one ended.
    parts: u64,
    part_at: Duration,
    stopped_at: Option<Duration>,
    pub(super) downtime: Option<Duration>,
    pub(super) reconnections: u64,
}

impl Meter {
    /// Looks at the main channel after bytes of it have passed.
    pub(super) fn look(&mut self, now: Duration, main: &MainFlow) {
        let (Some(progress), Some(phase)) = (main.progress(), main.phase()) else { return };
        if self.stopped_at.is_none() || progress.total_bytes().is_some() {
            self.ram_bytes = progress.total_bytes().or(self.ram_bytes);
            self.remaining_bytes = progress.remaining_bytes();
        }
        if progress.round() > self.round {
            self.next_round(now, progress.round(), progress.last_round_pages());
        }
        if self.parts != progress.parts() {
            (self.parts, self.part_at) = (progress.parts(), now);
        }
        let is_stopped = phase.is_switchover() || *phase == Phase::Postcopy;
        if is_stopped && self.stopped_at.is_none() && self.ram_bytes.is_some() {
            // The source stops its guest, then sends this command. Without it the last section of RAM shows the stop
            // only when it is over.
            let is_stated = *phase == Phase::Switchover;
            self.stopped_at = Some(if is_stated || self.parts == 0 { now } else { self.part_at });
        }
        if main.has_arrived() {
            self.arrived(now);
        }
    }

    /// The sum of the bytes that passed.
    pub(super) fn note(&mut self, now: Duration, passed: u64) {
        self.passed.push_back((now, passed));
        while self.passed.get(1).is_some_and(|(at, _)| *at + WINDOW <= now) {
            self.passed.pop_front();
        }
    }

    /// Bytes per second over the last second.
    pub(super) fn rate(&self, now: Duration, passed: u64) -> u64 {
        let Some((since, before)) = self.passed.front() else { return 0 };
        let took = now.saturating_sub(*since);
        if took.is_zero() {
            return 0;
        }
        (u128::from(passed.saturating_sub(*before)) * 1_000_000_000 / took.as_nanos()) as u64
    }

    /// The downtime, and whether it is complete.
    pub(super) fn downtime(&self, now: Duration) -> (Option<Duration>, bool) {
        match (self.downtime, self.stopped_at) {
            (Some(downtime), _) => (Some(downtime), true),
            (None, since) => (since.map(|since| now.saturating_sub(since)), false),
        }
    }

    fn next_round(&mut self, now: Duration, round: u32, pages: u64) {
        let took = now.saturating_sub(self.round_began);
        // The pages of a round are those that the guest wrote during the round before.
        if let Some(before) = self.last_round_took
            && !before.is_zero()
            && pages > 0
        {
            self.dirty_rate = Some((u128::from(pages * PAGE) * 1_000_000_000 / before.as_nanos()) as u64);
        }
        self.last_round_took = (self.round > 0).then_some(took);
        (self.round, self.round_began) = (round, now);
    }

    fn arrived(&mut self, now: Duration) {
        if let (Some(since), None) = (self.stopped_at, self.downtime) {
            self.downtime = Some(now.saturating_sub(since));
        }
    }
}
