//! How it goes with one destination.

use std::time::{Duration, Instant};

/// How far a destination is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// It is connected to, or compares the machine with its own. It has nothing of the guest.
    Connecting,
    /// The devices are on their way; it starts the guest by itself when they are loaded. A connection that breaks now
    /// ends it.
    Loading,
    /// The guest may run there, and its missing pages are here.
    Active,
    /// The connection broke. The guest waits at the first page that is missing, until somebody connects again.
    Paused,
    /// It has every page and needs this side no more.
    Completed,
    /// It is not served any more.
    Failed,
}

/// What was done for one destination.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServeStatistics {
    /// How far it is.
    pub stage: Stage,
    /// Pages of guest RAM.
    pub total_pages: u64,
    /// Pages that it lacks, as far as this side knows.
    pub missing_pages: u64,
    /// Pages that went out with their content, recoveries included.
    pub content_pages: u64,
    /// Pages that went out as zero.
    pub zero_pages: u64,
    /// Messages that asked for pages.
    pub requests: u64,
    /// Pages that went out because they were asked for.
    pub requested_pages: u64,
    /// Bytes that were written to its channels.
    pub written_bytes: u64,
    /// Times that it was served again after a broken connection.
    pub recoveries: u64,
    /// From the first connection until it had loaded the devices and could start the guest.
    pub until_guest: Option<Duration>,
    /// From the first connection to the end.
    pub total: Option<Duration>,
    /// The furthest stage that it has reached, breaks aside.
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

    /// Whether nothing more happens.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Completed | Stage::Failed)
    }
}
