//! Pages that are taken away while nobody would wait for them yet.

use crate::{DirtyBitmaps, GuestRam, PageBitmap, absent};

use super::{MissingPagesError, checked};

/// Pages that are taken away ahead of [`MissingPages::register`](super::MissingPages::register): less is left to do while a guest stands.
///
/// Until the memory is registered, whoever touches such a page, and the kernel where it makes huge pages of small ones, puts zeros in its
/// place. A file of memory tells by its size whether that has happened. Where nothing tells, pages are to be taken away once more.
#[derive(Debug)]
pub struct TakenAhead {
    ram: GuestRam,
    taken: DirtyBitmaps,
    /// For each block.
    holds: Vec<Holds>,
}

/// What a block's memory held when the last page was taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// No page was taken away yet.
    Anything,
    Bytes(u64),
    Unknown,
}

impl TakenAhead {
    /// No pages yet.
    pub fn new(ram: &GuestRam) -> Self {
        let holds = vec![Holds::Anything; ram.blocks().len()];
        Self { ram: ram.clone(), taken: DirtyBitmaps::new(ram), holds }
    }

    /// Takes pages away, whatever they hold. Whole pages of the memory below.
    ///
    /// # Errors
    /// [`MissingPagesError::Discard`], [`MissingPagesError::Outside`].
    pub fn take_away(&mut self, block: usize, first: u64, count: u64) -> Result<(), MissingPagesError> {
        checked(&self.ram, block, first, count)?;
        let before = self.holds[block];
        let is_as_before = matches!(before, Holds::Anything) || before == self.now(block);
        self.ram.block(block).discard_pages(first, count)?;
        self.holds[block] = if is_as_before { self.now(block) } else { Holds::Unknown };
        self.taken.block(block).set_range(first, count);
        Ok(())
    }

    /// Pages of a block that are certainly away. To be asked when the memory is registered: from then on none comes by itself.
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
