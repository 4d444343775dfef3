//! Measures the pace of lanes in windows.

use std::time::Duration;

use super::counts::Counts;
use super::pace::Pace;

/// Minimum length of a window over which the pace is measured.
pub const WINDOW: Duration = Duration::from_millis(100);

/// The pace over closed windows, and the start of the open window.
#[derive(Debug, Clone, Copy)]
pub struct Meter {
    pace: Pace,
    since: Duration,
    before: Counts,
    channels: u32,
}

impl Meter {
    /// A meter without measurements. The weight of older windows halves with every `half_life`.
    pub fn new(half_life: Duration, channels: u32) -> Self {
        Self { pace: Pace::fading(half_life), since: Duration::ZERO, before: Counts::default(), channels }
    }

    /// Starts a new window, because pages begin to move. Earlier bytes and times do not represent the pace.
    pub fn restart(&mut self, now: Duration, counts: Counts) {
        (self.since, self.before) = (now, counts);
    }

    /// The pace up to now, including the open window.
    pub fn pace(&self, now: Duration, counts: Counts) -> Pace {
        self.pace.and(self.before, counts, now.saturating_sub(self.since), self.channels)
    }

    /// Closes the window if it is long enough. Returns its earlier counters and its length in this case.
    pub fn observe(&mut self, now: Duration, counts: Counts) -> Option<(Counts, Duration)> {
        let passed = now.saturating_sub(self.since);
        (passed >= WINDOW).then(|| {
            let before = self.before;
            self.close(now, counts);
            (before, passed)
        })
    }

    /// Lowers the weight of earlier windows, as if a window of the length `passed` had followed them.
    pub(crate) fn fade(&mut self, passed: Duration) {
        self.pace = self.pace.faded(passed);
    }

    /// Closes the window, even if it is short.
    pub fn close(&mut self, now: Duration, counts: Counts) {
        if counts.bytes() > self.before.bytes() {
            self.pace = self.pace(now, counts);
        }
        self.restart(now, counts);
    }
}
