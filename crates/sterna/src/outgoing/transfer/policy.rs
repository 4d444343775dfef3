//! What the precopy policy is told, and what it slows down.

use std::time::{Duration, Instant};

use super::Transfer;
use crate::precopy::{self, Begun, FIXED_DOWNTIME, Input, Output, Settings};

/// The interval at which the effect of dirty limits is copied to the statistics.
const LIMIT_INTERVAL: Duration = Duration::from_millis(250);

impl Transfer {
    /// What the policy knows when it begins.
    pub(in crate::outgoing) fn begun(&self) -> Begun {
        Begun {
            settings: self.settings(),
            channels: self.shared.session.lanes.count() as u32,
            round_trip: self.round_trip.took,
            // *Prepare* and the start cost a round trip each.
            fixed_downtime: self.round_trip.took * 2 + FIXED_DOWNTIME,
        }
    }

    pub(in crate::outgoing) fn tell_policy(&mut self, input: Input) -> Vec<Output> {
        let mut policy = self.shared.measures.policy.lock();
        let Some(policy) = policy.as_mut() else { return Vec::new() };
        let outputs = policy.handle(input);
        let policy = policy.policy();
        if let (Input::Synced(..) | Input::Flushed(_), Some(estimate)) = (input, policy.estimate()) {
            tracing::debug!(?estimate, "the remaining pages");
        }
        let mut statistics = self.shared.measures.statistics.lock();
        statistics.expected_downtime = policy.expected_downtime();
        statistics.dirty_pages_per_second = policy.dirty_pages_per_second();
        statistics.cpu_throttle_percent = policy.throttle_percent();
        statistics.is_dirty_limited = policy.is_dirty_limited();
        let is_limited = statistics.is_dirty_limited;
        drop(statistics);
        if is_limited && self.pacing.limits_noted.elapsed() >= LIMIT_INTERVAL {
            self.pacing.limits_noted = Instant::now();
            self.pacing.slowdown.note_times();
        }
        outputs
    }

    pub(in crate::outgoing) fn settings(&self) -> Settings {
        let mut params = self.shared.params();
        self.course.adjust(&mut params);
        precopy::settings(&params, &self.shared.capabilities)
    }

    /// Removes every throttle, at each end of the migration; idempotent.
    pub(in crate::outgoing) fn unthrottle(&mut self) {
        let outputs = self.tell_policy(Input::Ended);
        self.shared.measures.statistics.lock().dirty_limit_times = None;
        self.pacing.slowdown.take_back(&outputs);
    }
}
