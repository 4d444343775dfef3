//! Separates the delay by this migration's own queue from delays that this migration cannot change.
//!
//! A network whose delay varies (jitter), a busy processor that acknowledges late, and other senders' queues
//! look like the own queue. A trial separates them: much less is sent for a moment. The own queue drains then.
//! A delay that stays is *noise*, and no reason to send less.

use std::time::{Duration, Instant};

/// A delay that lasts this long is tested by a trial.
const LASTING: Duration = Duration::from_millis(250);
/// A delay counts as lasting if at least this share of the looks has seen it.
const MOST_LOOKS: f64 = 0.7;
/// Length of a trial. A queue of 20 ms drains in this time if a fifth less is sent than the network carries.
const TRIAL: Duration = Duration::from_millis(120);
/// Multiple of the delay's variation that is added to [`TRIAL`], so that the delivery is measured precisely
/// enough.
const TRIAL_OF_NOISE: u32 = 20;
/// The network carries less than the sent rate if it delivers less than this share of the rate.
const SHORT: f64 = 0.95;
/// A lower capacity is accepted only after this time, because a busy processor, or TCP after a loss, delivers
/// less for a while.
const SHORT_LASTING: Duration = Duration::from_secs(1);
/// Factor from the mean of the noise to the allowed delay.
const MARGIN: f64 = 1.5;
/// Share of the difference by which the noise shrinks at each look that sees less.
const FORGETTING: f64 = 1.0 / 4096.0;

/// The result of a trial, or of the period before it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Verdict {
    /// The network carries less than is sent: this many bytes per second.
    Short(f64),
    /// The queue was this migration's, and has drained.
    Queue,
    /// The delay stayed in spite of the trial. It is allowed from now on.
    Noise,
}

/// Decides from a sequence of looks whether a delay is a queue.
#[derive(Default)]
pub(super) struct Watch {
    noise: Duration,
    period: Option<Period>,
    /// The period before the trial that is in progress.
    before: Option<Period>,
}

/// Measurements over consecutive looks.
#[derive(Clone, Copy)]
struct Period {
    since: Instant,
    looks: u32,
    queued_looks: u32,
    /// Number of looks in the second half of the period.
    late_looks: u32,
    late_excess: Duration,
    windows: u32,
    delivered: f64,
    sent: f64,
}

impl Period {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            looks: 0,
            queued_looks: 0,
            late_looks: 0,
            late_excess: Duration::ZERO,
            windows: 0,
            delivered: 0.0,
            sent: 0.0,
        }
    }

    fn delivered(&self) -> f64 {
        self.delivered / f64::from(self.windows.max(1))
    }

    fn is_short(&self) -> bool {
        self.windows > 0 && self.delivered < self.sent * SHORT
    }

    fn is_lasting(&self) -> bool {
        f64::from(self.queued_looks) >= f64::from(self.looks) * MOST_LOOKS
    }
}

impl Watch {
    /// The part of `excess` over the shortest round trip that is more than noise.
    pub(super) fn over(&self, excess: Duration) -> Option<Duration> {
        excess.checked_sub(self.noise).filter(|over| !over.is_zero())
    }

    /// The delay that is not a queue.
    pub(super) fn noise(&self) -> Duration {
        self.noise
    }

    /// Whether a trial is in progress, in which much less must be sent.
    pub(super) fn is_trying(&self) -> bool {
        self.before.is_some()
    }

    /// Starts a new period, because more than the estimate is sent from now on. Earlier looks are forgotten.
    pub(super) fn restart(&mut self) {
        self.period = None;
    }

    /// Records the end of a window with `delivered` and `sent` bytes per second.
    pub(super) fn window(&mut self, delivered: f64, sent: f64) {
        if let Some(period) = &mut self.period {
            period.windows += 1;
            period.delivered += delivered;
            period.sent += sent;
        }
    }

    /// Records a look at a channel, with `excess` over its shortest round trip.
    pub(super) fn look(&mut self, now: Instant, excess: Duration) -> Option<Verdict> {
        let over = self.over(excess);
        if excess < self.noise {
            self.noise -= (self.noise - excess).mul_f64(FORGETTING);
        }
        let is_trying = self.is_trying();
        let lasts = if is_trying { TRIAL + self.trial_of_noise() } else { LASTING };
        let period = self.period.get_or_insert_with(|| Period::new(now));
        let passed = now.saturating_duration_since(period.since);
        period.looks += 1;
        period.queued_looks += u32::from(over.is_some());
        if passed >= lasts / 2 {
            period.late_looks += 1;
            period.late_excess += excess;
        }
        if passed < lasts {
            return None;
        }
        let ended = *period;
        match self.before {
            None => self.lasted(now, ended),
            Some(_) => self.tried(now, ended),
        }
    }

    fn trial_of_noise(&self) -> Duration {
        let excess = |period: &Period| period.late_excess / period.late_looks.max(1);
        self.before.as_ref().map_or(Duration::ZERO, excess) * TRIAL_OF_NOISE / 2
    }

    /// Evaluates a period without a trial.
    fn lasted(&mut self, now: Instant, ended: Period) -> Option<Verdict> {
        if !ended.is_lasting() {
            self.period = Some(Period::new(now));
            return None;
        }
        if ended.is_short() {
            if now.saturating_duration_since(ended.since) < SHORT_LASTING {
                return None;
            }
            self.period = Some(Period::new(now));
            return Some(Verdict::Short(ended.delivered()));
        }
        (self.before, self.period) = (Some(ended), Some(Period::new(now)));
        None
    }

    fn tried(&mut self, now: Instant, trial: Period) -> Option<Verdict> {
        (self.before, self.period) = (None, Some(Period::new(now)));
        if trial.is_short() {
            // More was delivered before the trial, so the trial shows nothing.
            return None;
        }
        let left = trial.late_excess / trial.late_looks.max(1);
        if self.over(left).is_none() {
            return Some(Verdict::Queue);
        }
        self.noise = left.mul_f64(MARGIN);
        Some(Verdict::Noise)
    }
}
