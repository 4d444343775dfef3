//! Measures the pace of lanes in windows.

use std::time::Duration;

use super::counts::Counts;
use super::pace::Pace;

/// The pace is measured over windows of this length.
pub(crate) const WINDOW: Duration = Duration::from_millis(100);

/// A pace, and the window that is not closed yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meter {
    pace: Pace,
    since: Duration,
    before: Counts,
    channels: u32,
}

impl Meter {
    /// Of nothing so far; older windows count half after `half_life`.
    pub(crate) fn new(half_life: Duration, channels: u32) -> Self {
        Self { pace: Pace::fading(half_life), since: Duration::ZERO, before: Counts::default(), channels }
    }

    /// Pages begin to move: what was written and waited before says nothing of them.
    pub(crate) fn restart(&mut self, now: Duration, counts: Counts) {
        (self.since, self.before) = (now, counts);
    }

    /// The pace up to now.
    pub(crate) fn pace(&self, now: Duration, counts: Counts) -> Pace {
        self.pace.and(self.before, counts, now.saturating_sub(self.since), self.channels)
    }

    /// Closes the window if it is long enough; gives its counts and its length then.
    pub(crate) fn observe(&mut self, now: Duration, counts: Counts) -> Option<(Counts, Duration)> {
        let passed = now.saturating_sub(self.since);
        (passed >= WINDOW).then(|| {
            let before = self.before;
            self.close(now, counts);
            (before, passed)
        })
    }

    /// Closes the window, however short it is.
    pub(crate) fn close(&mut self, now: Duration, counts: Counts) {
        if counts.bytes() > self.before.bytes() {
            self.pace = self.pace(now, counts);
        }
        self.restart(now, counts);
    }
}
