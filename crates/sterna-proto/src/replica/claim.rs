//! One side's claim of a generation: the machine repeats the question until the arbiter has ruled.

use crate::limits::after;
use std::time::Duration;

/// The progress of the claim before a ruling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Claim {
    /// The claim has not been requested.
    #[default]
    Idle,
    /// The arbiter is being asked.
    Asking,
    /// The arbiter was out of reach; the machine asks again at this time. The arbiter may have
    /// ruled already, and only its answer was lost.
    Waiting {
        /// The time of the next question; `None` if the interval has no end.
        until: Option<Duration>,
    },
}

impl Claim {
    /// The time at which to ask again.
    pub(super) fn deadline(self) -> Option<Duration> {
        match self {
            Self::Waiting { until } => until,
            Self::Idle | Self::Asking => None,
        }
    }

    /// Whether it is time to ask again.
    pub(super) fn is_due(self, now: Duration) -> bool {
        self.deadline().is_some_and(|until| now >= until)
    }

    /// Records that a question ended without an answer.
    pub(super) fn out_of_reach(&mut self, now: Duration, interval: Duration) {
        if *self == Self::Asking {
            *self = Self::Waiting { until: after(now, interval) };
        }
    }
}
