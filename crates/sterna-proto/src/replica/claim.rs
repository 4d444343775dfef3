//! One side's claim of a generation: asked for until the arbiter has ruled.

use crate::limits::after;
use std::time::Duration;

/// Where the claim stands before a ruling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Claim {
    /// Nobody asked.
    #[default]
    Idle,
    /// The arbiter is being asked.
    Asking,
    /// It was out of reach; asked again at this time. It may have ruled, and
    /// only its answer was lost.
    Waiting {
        /// When.
        until: Option<Duration>,
    },
}

impl Claim {
    /// When to ask again.
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

    /// The question brought no answer.
    pub(super) fn out_of_reach(&mut self, now: Duration, interval: Duration) {
        if *self == Self::Asking {
            *self = Self::Waiting { until: after(now, interval) };
        }
    }
}
