//! Limits of discard requests, in sectors.

/// Highest number of sectors in one discard: 1 GiB.
pub(super) const MOST_DISCARDED: u32 = 1 << 21;
