//! State of the RAM section between two records.

use std::collections::HashSet;

use crate::ram::BlockEntry;

/// State of the RAM section that outlives a record.
#[derive(Debug, Default)]
pub(super) struct RamState {
    /// Block of the last page, for CONTINUE. It belongs to the channel, not to one section.
    pub(super) last_block: Option<usize>,
    /// Entries of the block list that have been read so far.
    pub(super) listed: Vec<BlockEntry>,
    pub(super) names: HashSet<String>,
    /// Whether MULTIFD_FLUSH preceded the EOS of START.
    pub(super) flushed: bool,
    /// Whether HOOK preceded the EOS of START.
    pub(super) hooked: bool,
    /// Whether every EOS is also a flush.
    pub(super) legacy_flush: bool,
    /// Whether the flush of the current EOS has been reported.
    pub(super) eos_flushed: bool,
}
