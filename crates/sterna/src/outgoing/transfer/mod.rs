//! The transfer of a guest: what is open and under way, and the steps that every mode performs on it.
//!
//! The control thread owns it. Precopy, the switchover, postcopy, a reconnection and checkpoints work on it one
//! after the other.

pub(super) mod first_round;
mod hints;
mod lanes;
mod policy;
mod rounds;
mod sending;
mod slowdown;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::Channel;

use super::carrier::interface::Carrier;
use super::course::choice;
use super::course::interface::Course;
use super::main_channel::MainChannel;
use super::memory_sums::Sums;
use super::return_path;
use super::shared::Shared;
use super::streams::DeviceStreams;
use super::waits::Waits;
use super::workers::Workers;
use crate::error::MigrationError;
use crate::events::{Event, SwitchoverStep};
use crate::threads::ThreadRole;

pub(super) use hints::Hints;
pub(super) use rounds::Rounds;
pub(super) use slowdown::{Slowdown, why_not};

/// The guest on its way.
pub(super) struct Transfer {
    pub shared: Arc<Shared>,
    pub course: Box<dyn Course>,
    /// The carrier of the guest, while it is open.
    pub carrier: Option<Box<dyn Carrier>>,
    pub workers: Workers,
    pub waits: Waits,
    pub rounds: Option<Rounds>,
    pub pacing: Pacing,
    /// Device streams, after they have begun.
    pub streams: Option<DeviceStreams>,
    pub round_trip: RoundTrip,
    pub guest: GuestState,
}

/// Slowing down the guest in precopy, and the state for that.
pub(super) struct Pacing {
    pub slowdown: Slowdown,
    pub hints: Hints,
    /// The round for which the policy was woken after its last slice.
    pub rearmed_seen: u64,
    /// The time at which the effect of dirty limits was last noted.
    pub limits_noted: Instant,
}

/// The time that the peer took to answer the first question.
#[derive(Default)]
pub(super) struct RoundTrip {
    pub sent: Option<Instant>,
    pub took: Duration,
}

/// Changes to the guest that this migration made.
pub(super) struct GuestState {
    /// `Some` while the guest is being stopped: whether it ran before.
    pub stopping: Option<bool>,
    /// Whether the guest ran before it was stopped for the switchover.
    pub ran_before: bool,
    /// Memory at the last sync, if changes after it are to be found.
    pub memory_after_sync: Option<Sums>,
    /// The error because of which it could not be resumed afterwards.
    pub not_resumed: Option<MigrationError>,
    /// The beginning of the present step of the switchover.
    pub step_began: Instant,
}

impl Transfer {
    /// A transfer of which nothing is open.
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        Self {
            course: choice::course_of(&shared),
            carrier: None,
            workers: Workers::new(Arc::clone(&shared)),
            waits: Waits::new(Arc::clone(&shared)),
            rounds: None,
            pacing: Pacing {
                slowdown: Slowdown::new(Arc::clone(&shared)),
                hints: Hints::new(Arc::clone(&shared)),
                rearmed_seen: 0,
                limits_noted: now,
            },
            streams: None,
            round_trip: RoundTrip::default(),
            guest: GuestState {
                stopping: None,
                ran_before: false,
                not_resumed: None,
                step_began: now,
                memory_after_sync: None,
            },
            shared,
        }
    }

    /// The carrier, which is open after all channels are connected.
    pub(super) fn carrier(&mut self) -> Result<&mut dyn Carrier, MigrationError> {
        match &mut self.carrier {
            Some(carrier) => Ok(carrier.as_mut()),
            None => Err(not_open()),
        }
    }

    /// The carrier's main channel.
    pub(super) fn main(&self) -> Result<Arc<MainChannel>, MigrationError> {
        self.carrier.as_ref().map(|carrier| Arc::clone(carrier.main())).ok_or_else(not_open)
    }

    /// All open channels of the carrier.
    pub(super) fn channels(&self) -> Vec<Arc<Channel>> {
        let Some(carrier) = &self.carrier else { return Vec::new() };
        carrier.multifd().iter().chain(&carrier.main().channel).cloned().collect()
    }

    /// The rounds, which exist after pages have begun to move.
    pub(super) fn rounds(&mut self) -> Result<&mut Rounds, MigrationError> {
        self.rounds.as_mut().ok_or_else(no_rounds)
    }

    /// Starts the thread that reads the return path, if the main channel has one.
    pub(super) fn read_return_path(&mut self) -> Result<(), MigrationError> {
        let (channel, cause) = (self.main()?.channel.clone(), self.carrier()?.cause());
        let (Some(channel), shared) = (channel, Arc::clone(&self.shared)) else { return Ok(()) };
        self.workers
            .spawn(ThreadRole::ReturnPath, move || return_path::read(&shared, &channel, cause.as_ref()))
    }

    /// The guest's run state before the switchover, under QEMU's name (specs/stream.md §1.10).
    pub(super) fn run_state_before(&self) -> &'static str {
        if self.guest.ran_before { "running" } else { "paused" }
    }

    /// Records the end of the downtime: the destination acknowledges when the guest runs.
    pub(super) fn note_start(&mut self) {
        let statistics = self.shared.measures.statistics.lock();
        let end =
            statistics.stopped_at.zip(statistics.downtime).map(|(stopped, downtime)| stopped + downtime);
        drop(statistics);
        if let Some(end) = end {
            self.step_until(SwitchoverStep::Start, end);
        }
    }

    /// Records that a step of the switchover ended now.
    pub(super) fn step(&mut self, step: SwitchoverStep) {
        self.step_until(step, Instant::now());
    }

    fn step_until(&mut self, step: SwitchoverStep, now: Instant) {
        let took = now.saturating_duration_since(self.guest.step_began);
        self.guest.step_began = now;
        self.shared.measures.statistics.lock().switchover.push((step, took));
        self.shared.tell(&Event::SwitchoverStep { step, took });
    }
}

pub(super) fn not_open() -> MigrationError {
    MigrationError::Internal("the main channel is not open".to_owned())
}

pub(super) fn no_rounds() -> MigrationError {
    MigrationError::Internal("no round has begun".to_owned())
}
