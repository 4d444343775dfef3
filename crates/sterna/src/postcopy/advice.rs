//! The page sizes that POSTCOPY_ADVISE announces (specs/postcopy.md §2).

use sterna_ram::GuestRam;

/// The page sizes of all blocks in bytes, ORed together.
pub(crate) fn page_sizes(ram: &GuestRam) -> u64 {
    ram.blocks().iter().fold(0, |sizes, block| sizes | block.page_bytes())
}
