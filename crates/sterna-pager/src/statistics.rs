//! The progress of a guest.

use std::time::Duration;

use crate::error::GuestError;

/// How far a guest is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum GuestStage {
    /// The guest's VMM has handed its memory over, and pages are missing.
    Active,
    /// The guest needs nothing any more.
    Ended(GuestEnd),
}

/// Why a guest needs nothing any more.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum GuestEnd {
    /// All of its memory is there. It runs without the pager.
    Completed,
    /// Its VMM has ended.
    PeerEnded,
    /// It could not be served any more.
    GivenUp {
        /// The reason.
        why: GuestError,
        /// Whether its VMM was killed, or the guest of this process stopped. A VMM that could not be killed hangs.
        is_killed: bool,
    },
}

/// The figures of one guest.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GuestStatistics {
    /// The socket to which the guest's VMM connected; the name of a guest of this process.
    pub socket: String,
    /// Process id of the VMM; `None` if it is not visible in this process's pid namespace.
    pub pid: Option<i32>,
    /// How far the guest is.
    pub stage: GuestStage,
    /// Pages of the guest, of [`page_bytes`](Self::page_bytes) each.
    pub total_pages: u64,
    /// Pages that are neither there nor removed.
    pub missing_pages: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Faults that were answered.
    pub faults: u64,
    /// Pages with content that were placed.
    pub content_pages: u64,
    /// Pages that were placed as zeros.
    pub zero_pages: u64,
    /// Pages that the VMM has removed (balloon).
    pub removed_pages: u64,
    /// Time from the handshake to the end, or to now.
    pub time: Duration,
}

impl GuestStatistics {
    /// Whether the guest needs nothing any more.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, GuestStage::Ended(_))
    }

    /// Whether the guest needs the image: its VMM would hang without the pager.
    pub fn needs_image(&self) -> bool {
        !self.is_over()
    }
}
