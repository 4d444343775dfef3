//! What a destination holds of the round that it reads.

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_ram::{DirtyBitmaps, GuestRam};
use sterna_wire::extension::encode_held;

/// Pages that have come whole since the last round of this session ended.
pub(crate) struct HeldPages {
    pages: DirtyBitmaps,
    rounds: AtomicU64,
}

impl HeldPages {
    /// Nothing has come yet.
    pub(crate) fn new(ram: &GuestRam) -> Self {
        Self { pages: DirtyBitmaps::new(ram), rounds: AtomicU64::new(0) }
    }

    /// These pages have come, and all of their bytes are in their places.
    pub(crate) fn came(&self, block: usize, first: u64, count: u64) {
        self.pages.block(block).set_range(first, count);
    }

    /// The round has ended. No page comes meanwhile.
    pub(crate) fn round_ended(&self) {
        self.pages.clear_all();
        self.rounds.fetch_add(1, Ordering::Release);
    }

    /// Another session begins: its rounds are counted from 0. No page comes meanwhile.
    pub(crate) fn begin_session(&self) {
        self.pages.clear_all();
        self.rounds.store(0, Ordering::Release);
    }

    /// Rounds that have ended, and the pages as they go over the wire. No page comes meanwhile.
    pub(crate) fn report(&self) -> (u64, Vec<u8>) {
        let mut bytes = Vec::new();
        for block in self.pages.blocks() {
            let mut from = 0;
            let runs = std::iter::from_fn(|| {
                let run = block.next_run(from, block.pages(), u64::MAX)?;
                from = run.end();
                Some((run.first, run.count))
            });
            encode_held(block.pages(), runs, &mut bytes);
        }
        (self.rounds.load(Ordering::Acquire), bytes)
    }
}

/// How many pages each block has.
pub(crate) fn block_pages(ram: &GuestRam) -> Vec<u64> {
    ram.blocks().iter().map(|block| block.pages()).collect()
}
