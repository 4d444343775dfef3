//! Records the pages of the current round that a destination has received.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use sterna_ram::{DirtyBitmaps, GuestRam};
use sterna_wire::extension::{Holds, encode_held};

/// Pages that were completely received since the last round of a session ended.
///
/// The session is the last one of which something was received. If a later session was lost before that, the
/// source may not know about it and still use the earlier one. A source that has begun a later session sends
/// all its pages again, whatever was received in earlier sessions.
pub(crate) struct HeldPages {
    pages: DirtyBitmaps,
    rounds: AtomicU64,
    session: AtomicU32,
    /// A session that has begun and of which nothing was received. 0: none.
    next: AtomicU32,
    turning: Mutex<()>,
}

impl HeldPages {
    /// Starts without a received page.
    pub(crate) fn new(ram: &GuestRam) -> Self {
        Self {
            pages: DirtyBitmaps::new(ram),
            rounds: AtomicU64::new(0),
            session: AtomicU32::new(0),
            next: AtomicU32::new(0),
            turning: Mutex::default(),
        }
    }

    /// Records pages whose bytes are all in their places.
    pub(crate) fn came(&self, block: usize, first: u64, count: u64) {
        self.turn();
        self.pages.block(block).set_range(first, count);
    }

    /// Records the end of a round. No page may arrive during the call.
    pub(crate) fn round_ended(&self) {
        self.turn();
        self.pages.clear_all();
        self.rounds.fetch_add(1, Ordering::Release);
    }

    /// Begins another session. Its first page or round end discards the record of the previous session. No page
    /// may arrive during the call.
    pub(crate) fn begin_session(&self, session: u32) {
        self.next.store(session, Ordering::Release);
    }

    /// Called for every page and round end. The first one of a session resets the record and counts rounds from
    /// 0.
    fn turn(&self) {
        if self.next.load(Ordering::Acquire) == 0 {
            return;
        }
        // Several lanes may call this at the same time. The first one resets the record before the others
        // continue.
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

    /// Reports the session, the number of its ended rounds, and the received pages in their wire format. No
    /// page may arrive during the call.
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

/// Number of pages of each block.
#[cfg(feature = "reconnect")]
pub(crate) fn block_pages(ram: &GuestRam) -> Vec<u64> {
    ram.blocks().iter().map(|block| block.pages()).collect()
}
