//! The counters of the lanes.

use serde::{Deserialize, Serialize};
use sterna_wire::PAGE_SIZE;

use crate::lane_times::LaneTimes;

/// Totals since the migration began, at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Bytes sent on the main channel.
    pub main_bytes: u64,
    /// Bytes sent on the multifd channels, or written to the file.
    pub multifd_bytes: u64,
    /// Pages sent as zero pages.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages that were never populated. They are included in the zero pages.
    pub absent_pages: u64,
    /// Bytes of device streams. They are included in the bytes of the channels.
    pub chunk_bytes: u64,
    /// Times by kind of work, summed over all lanes.
    pub times: LaneTimes,
}

impl Counts {
    /// Bytes sent on all channels.
    pub fn bytes(&self) -> u64 {
        self.main_bytes.saturating_add(self.multifd_bytes)
    }

    /// Pages sent, with content or as zero pages.
    pub fn pages(&self) -> u64 {
        self.zero_pages.saturating_add(self.normal_pages)
    }

    /// Bytes of pages with content and of device streams. Zero pages do not allow an estimate of the bandwidth.
    pub fn content_bytes(&self) -> u64 {
        self.normal_pages.saturating_mul(PAGE_SIZE as u64).saturating_add(self.chunk_bytes)
    }
}
