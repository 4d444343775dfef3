//! Discards pages before missing pages are registered, to shorten the downtime.

use crate::{DirtyBitmaps, GuestRam, PageBitmap, absent};

use super::addresses::checked;
use super::error::MissingPagesError;

/// Pages that were discarded before [`MissingPages::register`](super::MissingPages::register).
///
/// Less work then remains while the guest is paused. Until the memory is registered, an access to such a page
/// fills it with zeros. The kernel also fills it when it collapses small pages into a huge page. The size of a
/// memory file reveals whether that happened. For memory without such a file, the pages must be discarded
/// again.
#[derive(Debug)]
pub struct TakenAhead {
    ram: GuestRam,
    taken: DirtyBitmaps,
    /// One entry per block.
    holds: Vec<Holds>,
}

/// The state of a block's memory after the last discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// No page of the block was discarded yet.
    Anything,
    Bytes(u64),
    Unknown,
}

impl TakenAhead {
    /// Makes an empty record for `ram`. It discards nothing.
    pub fn new(ram: &GuestRam) -> Self {
        let holds = vec![Holds::Anything; ram.blocks().len()];
        Self { ram: ram.clone(), taken: DirtyBitmaps::new(ram), holds }
    }

    /// Discards pages, whatever they contain. The range must consist of whole pages of the backing.
    ///
    /// # Errors
    /// [`MissingPagesError::Discard`], [`MissingPagesError::Outside`].
    pub fn take_away(&mut self, block: usize, first: u64, count: u64) -> Result<(), MissingPagesError> {
        checked(&self.ram, block, first, count)?;
        let before = self.holds[block];
        let is_as_before = matches!(before, Holds::Anything) || before == self.now(block);
        if let Err(error) = self.ram.block(block).discard_pages(first, count) {
            // The kernel may have discarded some of the pages.
            self.holds[block] = Holds::Unknown;
            return Err(error.into());
        }
        self.holds[block] = if is_as_before { self.now(block) } else { Holds::Unknown };
        self.taken.block(block).set_range(first, count);
        Ok(())
    }

    /// Returns the pages of a block that are still missing; `None` if that is unknown.
    ///
    /// Call it after the memory is registered, because pages are no longer filled by an access then.
    pub fn still_away(&self, block: usize) -> Option<&PageBitmap> {
        let then = self.holds[block];
        (matches!(then, Holds::Bytes(_)) && then == self.now(block)).then(|| self.taken.block(block))
    }

    fn now(&self, block: usize) -> Holds {
        match absent::whole_file_bytes(self.ram.block(block)) {
            Ok(Some(bytes)) => Holds::Bytes(bytes),
            Ok(None) | Err(_) => Holds::Unknown,
        }
    }
}
