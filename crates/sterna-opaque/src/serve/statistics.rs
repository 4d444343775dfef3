//! The progress of one destination.

use std::time::{Duration, Instant};

/// The stage that a destination has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// This side connects, or the destination compares the machine with its own. It has no part of the guest.
    Connecting,
    /// The devices are being sent. The destination starts the guest by itself when they are loaded. A
    /// connection that breaks now ends the destination.
    Loading,
    /// The guest may run at the destination, and this side has the missing pages.
    Active,
    /// The connection broke. A guest that touches a missing page is blocked until a new connection is made.
    Paused,
    /// The destination has every page and no longer needs this side.
    Completed,
    /// Serving has ended with an error.
    Failed,
}

/// Why a destination may be silent that should answer without delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Silence {
    /// The destination reads nothing. A QEMU does so while it waits for other channels (multifd, or the preempt
    /// channel of a QEMU 7.2). Another cause is a listener that is not a VM.
    ReadsNothing,
    /// The destination has the devices and does not load them. A QEMU does so while it waits for the preempt
    /// channel, or if it got one while its `postcopy-preempt` is off.
    LoadsNothing,
}

/// Counters and times of one destination.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServeStatistics {
    /// The stage that it has reached.
    pub stage: Stage,
    /// Pages of guest RAM.
    pub total_pages: u64,
    /// Pages that the destination lacks, as far as this side knows.
    pub missing_pages: u64,
    /// Pages that were sent with their content, including pages that were sent again after a lost connection.
    pub content_pages: u64,
    /// Pages that were sent as zero.
    pub zero_pages: u64,
    /// Messages that requested pages.
    pub requests: u64,
    /// Pages that were sent because they were requested.
    pub requested_pages: u64,
    /// Bytes that were written to the destination's channels.
    pub written_bytes: u64,
    /// Number of broken connections after which serving continued.
    pub recoveries: u64,
    /// Whether the destination has answered at all. A peer that has not may not be a VM.
    pub has_answered: bool,
    /// The possible cause of the destination's silence, while it is silent.
    pub silence: Option<Silence>,
    /// Time from the first connection until the devices were loaded and the guest could start.
    pub until_guest: Option<Duration>,
    /// Time from the first connection to the end.
    pub total: Option<Duration>,
    /// The furthest stage that was reached, ignoring broken connections.
    pub(super) furthest: Stage,
    pub(super) began: Instant,
}

impl ServeStatistics {
    pub(super) fn of(total_pages: u64) -> Self {
        Self {
            stage: Stage::Connecting,
            total_pages,
            missing_pages: total_pages,
            content_pages: 0,
            zero_pages: 0,
            requests: 0,
            requested_pages: 0,
            written_bytes: 0,
            recoveries: 0,
            has_answered: false,
            silence: None,
            until_guest: None,
            total: None,
            furthest: Stage::Connecting,
            began: Instant::now(),
        }
    }

    pub(super) fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        let now = self.began.elapsed();
        match stage {
            Stage::Loading if self.furthest == Stage::Connecting => self.furthest = stage,
            Stage::Active => {
                self.furthest = stage;
                self.until_guest.get_or_insert(now);
            }
            Stage::Paused => self.furthest = Stage::Active,
            Stage::Completed | Stage::Failed => self.total = Some(now),
            _ => {}
        }
    }

    /// Whether serving has ended.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Completed | Stage::Failed)
    }
}
