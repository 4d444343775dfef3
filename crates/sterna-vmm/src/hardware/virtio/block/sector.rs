//! How much of a disk a request may give up.

/// Sectors of one discard, at most: 1 GiB.
pub(super) const MOST_DISCARDED: u32 = 1 << 21;
