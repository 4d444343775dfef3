//! What lanes have done so far.

use serde::{Deserialize, Serialize};
use sterna_ram::PAGE_SIZE;

use crate::stats::LaneTimes;

/// Totals since the migration began, at one instant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counts {
    /// Bytes on the main channel.
    pub main_bytes: u64,
    /// Bytes on the multifd channels, or into the file.
    pub multifd_bytes: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages found never populated; among the zero pages as well.
    pub absent_pages: u64,
    /// Bytes of devices' streams; among the bytes as well.
    pub chunk_bytes: u64,
    /// Summed over all lanes.
    pub times: LaneTimes,
}

impl Counts {
    /// On all channels.
    pub(crate) fn bytes(&self) -> u64 {
        self.main_bytes.saturating_add(self.multifd_bytes)
    }

    /// Pages sent, zero or not.
    pub(crate) fn pages(&self) -> u64 {
        self.zero_pages.saturating_add(self.normal_pages)
    }

    /// Bytes that say how fast others will go: not those of zero pages.
    pub(crate) fn content_bytes(&self) -> u64 {
        self.normal_pages.saturating_mul(PAGE_SIZE as u64).saturating_add(self.chunk_bytes)
    }
}
