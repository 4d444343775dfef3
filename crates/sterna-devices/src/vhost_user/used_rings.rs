//! The used rings of a device, which the back end writes without logging them.
//!
//! A back end logs used rings if SET_VRING_ADDR requests it, but a running ring would have to be stopped for
//! that request (`specs/vhost-user.md §2`). A stopped ring's used ring is final and has only a few pages. The
//! next sync therefore reports all of them.

use parking_lot::Mutex;
use sterna_ram::dirty::DirtyBitmaps;

/// A range of pages in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pages {
    pub(super) block: usize,
    pub(super) first: u64,
    pub(super) count: u64,
}

/// The used rings of one device that the next sync reports.
#[derive(Debug, Default)]
pub(super) struct UsedRings(Mutex<UsedRingsState>);

#[derive(Debug, Default)]
struct UsedRingsState {
    /// Whether syncs are taking place.
    is_logged: bool,
    /// Pages of rings that stopped after the last sync.
    stopped: Vec<Pages>,
}

impl UsedRings {
    /// Records that syncs begin or end.
    pub(super) fn set_logged(&self, is_logged: bool) {
        *self.0.lock() = UsedRingsState { is_logged, stopped: Vec::new() };
    }

    /// Records a stopped ring's pages. Must be called after the back end's last write to them.
    pub(super) fn stopped(&self, pages: Pages) {
        let mut state = self.0.lock();
        if state.is_logged {
            state.stopped.push(pages);
        }
    }

    /// Merges the pages into `into`. Returns the number of pages that were clean there.
    pub(super) fn sync(&self, into: &mut DirtyBitmaps) -> u64 {
        let stopped = std::mem::take(&mut self.0.lock().stopped);
        stopped.iter().map(|pages| into.block(pages.block).set_range(pages.first, pages.count)).sum()
    }
}

#[cfg(test)]
mod tests {
    use sterna_ram::{Backing, GuestRam, RamBlock};

    use super::*;

    #[test]
    fn ring_that_stopped_is_in_one_sync_if_there_are_any() {
        let block = RamBlock::new("ram", 16 << 12, Backing::Memfd).expect("a block");
        let ram = GuestRam::new(vec![block]).expect("RAM");
        for (is_logged, wanted) in [(true, 2), (false, 0)] {
            let rings = UsedRings::default();
            rings.set_logged(is_logged);
            rings.stopped(Pages { block: 0, first: 5, count: 2 });
            let mut dirty = DirtyBitmaps::new(&ram);

            assert_eq!([rings.sync(&mut dirty), dirty.block(0).count_range(5, 2)], [wanted; 2]);
            assert_eq!(rings.sync(&mut DirtyBitmaps::new(&ram)), 0);
        }
    }
}
