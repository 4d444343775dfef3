//! Decides whether the migration converges, and how to slow the guest down if it does not.
//!
//! Pure: the inputs are the dirtied and sent bytes, the output is the next step. It judges at intervals
//! ([`JUDGE_INTERVAL`]). Throttling follows QEMU's rule. The guest is throttled, or throttled more, if in two
//! intervals the dirtied bytes exceed [`Settings::throttle_trigger_threshold`] percent of the sent bytes. The same
//! happens if [`STUCK`] consecutive intervals did not shorten the expected downtime. If the throttle cannot increase
//! then, the migration does not converge.

use std::time::Duration;

use super::settings::Settings;

/// Minimum time between two judgements.
pub(crate) const JUDGE_INTERVAL: Duration = Duration::from_millis(250);
/// Number of judgements without progress after which the guest counts as not converging.
const STUCK: u32 = 6;
/// Progress means that the expected downtime is at most this factor of the shortest so far.
const PROGRESS: f64 = 0.9;
/// Number of judgements over the threshold after which the guest is throttled.
const TRIGGER: u32 = 2;

/// Measurements since the last judgement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trend {
    /// Bytes that the guest dirtied since the last judgement.
    pub dirtied_bytes: u64,
    /// Bytes that were sent since the last judgement.
    pub sent_bytes: u64,
    /// The downtime if the switchover began now.
    pub expected: Duration,
    /// Whether the remaining pages fit the limit, with the margin. Then only acknowledgements are missing.
    pub fits: bool,
    /// Whether only device state that moves in the downtime exceeds the limit. Throttling the guest does not help
    /// then.
    pub is_slowing_useless: bool,
}

/// The result of a judgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// No change.
    GoOn,
    /// Throttle the vCPUs: each sleeps for this percentage of the time.
    Throttle(u8),
    /// Limit the dirty rate of each vCPU.
    LimitDirtyRate,
    /// The migration does not converge. Repeated at every judgement while this is true.
    NotConverging,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Convergence {
    over_threshold: u32,
    throttle: u8,
    is_limited: bool,
    shortest: Option<Duration>,
    without_progress: u32,
}

impl Convergence {
    /// The present throttle, in percent of the time that vCPUs sleep.
    pub(super) fn throttle_percent(&self) -> u8 {
        self.throttle
    }

    /// Whether dirty rates are limited now.
    pub(super) fn is_limited(&self) -> bool {
        self.is_limited
    }

    /// Applies a maximum throttle that the operator may have lowered. Returns the throttle to set if it changes.
    pub(super) fn lower_to(&mut self, most: u8) -> Option<u8> {
        let is_over = self.throttle > most.max(1);
        is_over.then(|| {
            self.throttle = most.max(1);
            self.throttle
        })
    }

    /// Judges the measurements since the last judgement, at least [`JUDGE_INTERVAL`] ago.
    pub(super) fn judge(&mut self, trend: Trend, settings: &Settings) -> Step {
        if trend.fits {
            self.without_progress = 0;
            return Step::GoOn;
        }
        let allowed = trend.sent_bytes as f64 * f64::from(settings.throttle_trigger_threshold) / 100.0;
        if trend.dirtied_bytes as f64 > allowed {
            self.over_threshold += 1;
        } else {
            self.over_threshold = 0;
        }
        let is_stuck = self.is_stuck(trend.expected);
        if !trend.is_slowing_useless && (self.over_threshold >= TRIGGER || is_stuck) {
            self.over_threshold = 0;
            if let Some(step) = self.slow_down(trend, settings) {
                // The throttled guest behaves differently, so earlier values are not comparable.
                self.shortest = None;
                self.without_progress = 0;
                return step;
            }
        }
        if is_stuck { Step::NotConverging } else { Step::GoOn }
    }

    fn slow_down(&mut self, trend: Trend, settings: &Settings) -> Option<Step> {
        if settings.dirty_limit && !self.is_limited {
            self.is_limited = true;
            return Some(Step::LimitDirtyRate);
        }
        if !settings.auto_converge || self.throttle >= settings.max_cpu_throttle {
            return None;
        }
        let next = match self.throttle {
            0 => settings.cpu_throttle_initial,
            now => now.saturating_add(increment(now, trend, settings)),
        };
        self.throttle = next.clamp(1, settings.max_cpu_throttle.clamp(1, 99));
        Some(Step::Throttle(self.throttle))
    }

    fn is_stuck(&mut self, expected: Duration) -> bool {
        if self.shortest.is_none_or(|least| expected < least.mul_f64(PROGRESS)) {
            self.shortest = Some(expected);
            self.without_progress = 0;
        } else {
            self.without_progress += 1;
        }
        self.without_progress >= STUCK
    }
}

/// The increment of the throttle, in percent. With `cpu-throttle-tailslow`, at most the step that lowers the dirty
/// rate to the threshold.
fn increment(now: u8, trend: Trend, settings: &Settings) -> u8 {
    let full = settings.cpu_throttle_increment;
    if !settings.cpu_throttle_tailslow || trend.dirtied_bytes == 0 {
        return full;
    }
    let allowed = trend.sent_bytes as f64 * f64::from(settings.throttle_trigger_threshold) / 100.0;
    // The guest runs (100 - now) percent of the time. At the threshold it would run `ideal` percent.
    let ideal = f64::from(100 - now) * allowed / trend.dirtied_bytes as f64;
    let wanted = (100.0 - ideal - f64::from(now)).ceil().clamp(1.0, 99.0);
    full.min(wanted as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Trend = Trend {
        dirtied_bytes: 900,
        sent_bytes: 1000,
        expected: Duration::from_secs(9),
        fits: false,
        is_slowing_useless: false,
    };

    fn settings(auto_converge: bool, dirty_limit: bool) -> Settings {
        Settings { auto_converge, dirty_limit, ..Settings::default() }
    }

    fn steps(trend: Trend, settings: &Settings, count: usize) -> Vec<Step> {
        let mut convergence = Convergence::default();
        (0..count).map(|_| convergence.judge(trend, settings)).collect()
    }

    #[test]
    fn auto_converge_steps_up_at_every_second_judgement_over_the_threshold() {
        let settings = Settings { max_cpu_throttle: 35, ..settings(true, false) };

        let steps = steps(BUSY, &settings, 6);

        let throttle = |percent| Step::Throttle(percent);
        let go_on = Step::GoOn;
        assert_eq!(steps, [go_on, throttle(20), go_on, throttle(30), go_on, throttle(35)]);
    }

    #[test]
    fn auto_converge_leaves_a_guest_alone_that_is_under_the_threshold_and_comes_nearer() {
        let mut convergence = Convergence::default();
        let mut calm = Trend { dirtied_bytes: 400, ..BUSY };

        for _ in 0..40 {
            calm.expected = calm.expected.mul_f64(0.88);
            let step = convergence.judge(calm, &settings(true, false));
            assert_eq!(step, Step::GoOn);
        }
    }

    #[test]
    fn guest_under_the_threshold_that_comes_no_nearer_is_slowed_down_as_far_as_it_goes_before_it_is_given_up()
    {
        let calm = Trend { dirtied_bytes: 400, ..BUSY };
        let settings = Settings { max_cpu_throttle: 35, ..settings(true, false) };

        let steps = steps(calm, &settings, 40);

        let said: Vec<Step> = steps.into_iter().filter(|step| *step != Step::GoOn).collect();
        let throttle = |percent| Step::Throttle(percent);
        assert_eq!(said[..4], [throttle(20), throttle(30), throttle(35), Step::NotConverging]);
    }

    #[test]
    fn tailslow_takes_no_larger_step_than_the_threshold_needs() {
        // The guest runs 80 % of the time and dirties 540, but 500 (half of 1000) are allowed. It should run 74 %, 6
        // less.
        let settings = Settings { cpu_throttle_tailslow: true, ..settings(true, false) };

        assert_eq!(increment(20, Trend { dirtied_bytes: 540, ..BUSY }, &settings), 6);
        assert_eq!(increment(20, Trend { dirtied_bytes: 5000, ..BUSY }, &settings), 10);
    }

    #[test]
    fn guest_whose_remaining_pages_fit_is_left_alone_whatever_it_writes() {
        let waiting = Trend { fits: true, ..BUSY };

        let steps = steps(waiting, &settings(true, false), 40);

        assert!(steps.iter().all(|step| *step == Step::GoOn), "{steps:?}");
    }

    #[test]
    fn guest_is_not_slowed_down_for_state_that_moves_in_the_downtime() {
        let streams = Trend { is_slowing_useless: true, ..BUSY };

        let steps = steps(streams, &settings(true, true), 40);

        assert!(steps.iter().all(|step| matches!(step, Step::GoOn | Step::NotConverging)), "{steps:?}");
        assert!(steps.contains(&Step::NotConverging), "{steps:?}");
    }

    #[test]
    fn lowered_maximum_reaches_a_guest_that_is_throttled() {
        let mut convergence = Convergence { throttle: 80, ..Convergence::default() };

        assert_eq!(convergence.lower_to(90), None);
        assert_eq!(convergence.lower_to(50), Some(50));
        assert_eq!(convergence.throttle_percent(), 50);
    }

    #[test]
    fn dirty_limit_is_set_once_and_then_the_guest_is_judged() {
        let steps = steps(BUSY, &settings(false, true), 12);

        assert_eq!(steps.iter().filter(|step| **step == Step::LimitDirtyRate).count(), 1);
        assert_eq!(steps.iter().filter(|step| **step == Step::NotConverging).count(), 4);
    }

    #[test]
    fn guest_whose_downtime_does_not_shrink_is_said_not_to_converge_for_as_long_as_that_is_so() {
        let mut convergence = Convergence::default();
        let mut judge = |trend| convergence.judge(trend, &settings(false, false));

        for _ in 0..STUCK {
            assert_eq!(judge(BUSY), Step::GoOn);
        }
        for _ in 0..20 {
            assert_eq!(judge(BUSY), Step::NotConverging);
        }
        assert_eq!(judge(Trend { expected: BUSY.expected / 2, ..BUSY }), Step::GoOn);
    }

    #[test]
    fn guest_whose_downtime_shrinks_is_never_said_not_to_converge() {
        let mut convergence = Convergence::default();
        let mut trend = BUSY;

        for _ in 0..40 {
            trend.expected = trend.expected.mul_f64(0.88);
            let step = convergence.judge(trend, &settings(false, false));
            assert_eq!(step, Step::GoOn);
        }
    }
}
