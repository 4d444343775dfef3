//! Policies with a planted bug, each around the real policy.

use std::time::Duration;

use super::world::Decides;
use crate::precopy::{
    Backlog, Begun, Input, Output, Policy, Settings, Snapshot, StreamsRemaining, SyncResult,
};

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    /// The throttle is not removed at the end.
    KeepsThrottle,
    /// Device state and data in sockets are ignored.
    ForgetsBacklog,
    /// The downtime limit is doubled.
    StretchesLimit,
    /// Late wake-ups of threads are ignored.
    DeafToLateness,
    /// The lag of the destination is ignored.
    DeafToLag,
    /// The guest is stopped while lanes still send.
    SkipsRunningDry,
    /// Nothing happens when lanes have finished a round.
    SleepsOn,
    /// A refused switchover is never requested again.
    SulksWhenRefused,
    /// The remaining pages never fit.
    NeverFits,
    /// Rounds are announced and not published.
    LosesRounds,
}

pub(super) const BUGS: [Bug; 10] = [
    Bug::KeepsThrottle,
    Bug::ForgetsBacklog,
    Bug::StretchesLimit,
    Bug::DeafToLateness,
    Bug::DeafToLag,
    Bug::SkipsRunningDry,
    Bug::SleepsOn,
    Bug::SulksWhenRefused,
    Bug::NeverFits,
    Bug::LosesRounds,
];

/// A policy with a bug.
pub(super) struct Planted {
    policy: Policy,
    bug: Bug,
    has_ended: bool,
}

impl Planted {
    pub(super) fn new(bug: Bug, begun: Begun, snapshot: Snapshot) -> Self {
        let settings = Self::misread(bug, begun.settings);
        Self { policy: Policy::new(Begun { settings, ..begun }, snapshot), bug, has_ended: false }
    }

    fn misread(bug: Bug, settings: Settings) -> Settings {
        let downtime_limit = match bug {
            Bug::StretchesLimit => settings.downtime_limit * 2,
            Bug::NeverFits => settings.downtime_limit / 1000,
            _ => settings.downtime_limit,
        };
        Settings { downtime_limit, ..settings }
    }

    /// The input as the buggy policy sees it. `None`: the policy does not see it.
    fn mishear(&self, input: Input) -> Option<Input> {
        Some(match (self.bug, input) {
            (Bug::StretchesLimit | Bug::NeverFits, Input::Set(settings)) => {
                Input::Set(Self::misread(self.bug, settings))
            }
            (Bug::ForgetsBacklog, Input::Synced(synced, snapshot)) => {
                let streams = synced.backlog.streams.map(|_| StreamsRemaining::default());
                let backlog = Backlog { unsent_bytes: 0, streams, ..synced.backlog };
                Input::Synced(SyncResult { backlog, ..synced }, snapshot)
            }
            (Bug::DeafToLateness, Input::Observed(snapshot)) => {
                Input::Observed(Snapshot { late: None, ..snapshot })
            }
            (Bug::DeafToLag, Input::Answered(_)) | (Bug::SulksWhenRefused, Input::NotAcknowledged(_)) => {
                return None;
            }
            (Bug::SleepsOn, Input::Observed(snapshot)) if snapshot.round.is_rearmed => return None,
            (_, input) => input,
        })
    }
}

impl Decides for Planted {
    fn handle(&mut self, input: Input) -> Vec<Output> {
        self.has_ended |= input == Input::Ended;
        let Some(input) = self.mishear(input) else { return Vec::new() };
        let outputs = self.policy.handle(input).into_iter();
        outputs
            .filter_map(|output| match (self.bug, output) {
                (Bug::KeepsThrottle, Output::Throttle(_) | Output::LimitDirtyRate(_)) if self.has_ended => {
                    None
                }
                (Bug::LosesRounds, Output::Publish { .. }) => None,
                (Bug::SkipsRunningDry, Output::RunDry { .. }) => Some(Output::RequestSwitchover),
                (_, output) => Some(output),
            })
            .collect()
    }

    fn wake_at(&self) -> Duration {
        self.policy.wake_at()
    }
}
