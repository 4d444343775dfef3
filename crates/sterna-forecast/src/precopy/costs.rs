//! Measures the costs of a switchover besides sending the remaining pages.
//!
//! On a busy host, threads wake late, and a destination lags: its sockets contain pages that it has not read yet.
//! Both make the downtime longer than the remaining bytes suggest. So both are measured while the guest runs.
//! Lateness: the delay with which the policy's own thread wakes. Lag: the time until the destination answers a probe
//! that follows a round.

use std::time::Duration;

use super::input::Answer;

/// Number of threads that wake one after the other in a switchover. These are the stopping thread, the vCPUs, and the
/// lanes.
const WAKES: f64 = 3.0;

/// The measured costs of a switchover.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    fixed: Duration,
    round_trip: Duration,
    lateness: Usual,
    /// The lag at the last two answers, in seconds. Later rounds are smaller, and so is the destination's lag.
    lags: [f64; 2],
}

impl Costs {
    /// The costs before any measurement.
    pub(super) fn new(fixed: Duration, round_trip: Duration) -> Self {
        Self { fixed, round_trip, lateness: Usual::default(), lags: [0.0; 2] }
    }

    /// Records that a thread woke `late` after the requested time.
    pub(super) fn woke(&mut self, late: Duration) {
        self.lateness.add(late.as_secs_f64());
    }

    /// Records the answer to a probe. Data that was still on this host was sent at `bytes_per_second`.
    pub(super) fn answered(&mut self, answer: Answer, bytes_per_second: u64) {
        let sending =
            if bytes_per_second == 0 { 0.0 } else { answer.unsent_bytes as f64 / bytes_per_second as f64 };
        let answering = self.round_trip.as_secs_f64() + sending;
        self.lags = [(answer.took.as_secs_f64() - answering).max(0.0), self.lags[0]];
    }

    /// The part of the downtime besides the last sync and the remaining pages, in seconds.
    pub(super) fn of_downtime(&self) -> f64 {
        self.fixed.as_secs_f64() + WAKES * self.lateness.likely() + self.lags[0].max(self.lags[1])
    }
}

/// Mean and deviation of a value, by TCP's estimator for round trips (RFC 6298).
#[derive(Debug, Clone, Copy, Default)]
struct Usual {
    mean: f64,
    deviation: f64,
    is_known: bool,
}

impl Usual {
    fn add(&mut self, sample: f64) {
        if !std::mem::replace(&mut self.is_known, true) {
            (self.mean, self.deviation) = (sample, sample / 2.0);
            return;
        }
        self.deviation += ((sample - self.mean).abs() - self.deviation) / 4.0;
        self.mean += (sample - self.mean) / 8.0;
    }

    /// A value that is rarely exceeded.
    fn likely(&self) -> f64 {
        self.mean + 2.0 * self.deviation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn quiet_machine_costs_what_is_fixed_and_nothing_more() {
        let mut costs = Costs::new(4 * MS, MS);

        for _ in 0..50 {
            costs.woke(Duration::ZERO);
            costs.answered(Answer { took: MS, unsent_bytes: 0 }, 1 << 30);
        }

        assert_eq!(costs.of_downtime(), 0.004);
    }

    #[test]
    fn late_threads_and_a_destination_that_lags_make_the_downtime_longer_until_they_no_longer_do() {
        let mut costs = Costs::new(4 * MS, MS);
        for _ in 0..20 {
            costs.woke(8 * MS);
            costs.answered(Answer { took: 101 * MS, unsent_bytes: 0 }, 0);
        }

        let busy = costs.of_downtime();
        for _ in 0..60 {
            costs.woke(Duration::ZERO);
            costs.answered(Answer { took: MS, unsent_bytes: 0 }, 0);
        }

        // Three wakes of 8 ms each, and a lag of 100 ms.
        assert!((0.12..0.2).contains(&busy), "{busy}");
        assert!(costs.of_downtime() < 0.008, "{costs:?}");
    }

    #[test]
    fn bytes_that_were_still_here_are_no_lag_of_the_destination() {
        let mut costs = Costs::new(Duration::ZERO, Duration::ZERO);

        costs.answered(Answer { took: 100 * MS, unsent_bytes: 100 << 20 }, 1 << 30);

        assert!(costs.of_downtime() < 0.01, "{costs:?}");
    }
}
