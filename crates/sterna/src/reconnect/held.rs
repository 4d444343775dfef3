//! What a destination holds of the round that it reads.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use sterna_ram::{DirtyBitmaps, GuestRam};
use sterna_wire::extension::{Holds, encode_held};

/// Pages that have come whole since the last round of a session ended.
///
/// That is the last session of which anything has come. Of one that was lost before, the source may know nothing: it is still where it
/// was. And a source that has begun it sends all of its pages again, whatever is held of older ones.
pub(crate) struct HeldPages {
    pages: DirtyBitmaps,
    rounds: AtomicU64,
    session: AtomicU32,
    /// A session that has begun, and of which nothing has come; 0 for none.
    next: AtomicU32,
    turning: Mutex<()>,
}

impl HeldPages {
    /// Nothing has come yet.
    pub(crate) fn new(ram: &GuestRam) -> Self {
        Self {
            pages: DirtyBitmaps::new(ram),
            rounds: AtomicU64::new(0),
            session: AtomicU32::new(0),
            next: AtomicU32::new(0),
            turning: Mutex::default(),
        }
    }

    /// These pages have come, and all of their bytes are in their places.
    pub(crate) fn came(&self, block: usize, first: u64, count: u64) {
        self.turn();
        self.pages.block(block).set_range(first, count);
    }

    /// The round has ended. No page comes meanwhile.
    pub(crate) fn round_ended(&self) {
        self.turn();
        self.pages.clear_all();
        self.rounds.fetch_add(1, Ordering::Release);
    }

    /// Another session begins: with the first that comes of it, what is held of the one before counts no more. No page comes meanwhile.
    pub(crate) fn begin_session(&self, session: u32) {
        self.next.store(session, Ordering::Release);
    }

    /// Something has come: if it is the first of its session, rounds are counted from 0.
    fn turn(&self) {
        if self.next.load(Ordering::Acquire) == 0 {
            return;
        }
        // Lanes come here together, and the first one turns before any goes on.
        let _one = self.turning.lock();
        let next = self.next.load(Ordering::Acquire);
        if next == 0 {
            return;
        }
        self.pages.clear_all();
        self.rounds.store(0, Ordering::Release);
        self.session.store(next, Ordering::Release);
        self.next.store(0, Ordering::Release);
    }

    /// The session, its rounds that have ended, and the pages as they go over the wire. No page comes meanwhile.
    pub(crate) fn report(&self) -> Holds {
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
        Holds {
            session: self.session.load(Ordering::Acquire),
            rounds: self.rounds.load(Ordering::Acquire),
            pages: bytes,
        }
    }
}

/// How many pages each block has.
pub(crate) fn block_pages(ram: &GuestRam) -> Vec<u64> {
    ram.blocks().iter().map(|block| block.pages()).collect()
}
