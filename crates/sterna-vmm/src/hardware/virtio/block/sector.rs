//! In what a disk counts.

/// Bytes.
pub(super) const SECTOR: u64 = 512;
/// Sectors of one discard, at most: 1 GiB.
pub(super) const MOST_DISCARDED: u32 = 1 << 21;
