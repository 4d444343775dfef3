//! Used rings: written by the back end, and not in its log.
//!
//! A back end logs them if SET_VRING_ADDR says so, but a ring that runs would have to be stopped to say it
//! (`specs/vhost-user.md §2`). They are a few pages, so each harvest takes those that may have been written.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_ram::dirty::DirtyBitmaps;

/// Pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pages {
    pub(super) block: usize,
    pub(super) first: u64,
    pub(super) count: u64,
}

/// The used rings of one device.
#[derive(Debug, Default)]
pub(super) struct UsedRings(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    rings: Vec<UsedRing>,
    /// Somebody harvests.
    is_logged: bool,
    /// Written since the last harvest, and no rings any more.
    left: Vec<Pages>,
}

#[derive(Debug, Clone, Copy, Default)]
struct UsedRing {
    pages: Pages,
    is_served: bool,
    /// It was served after the last harvest began.
    is_due: bool,
}

impl UsedRings {
    /// Harvests begin or end.
    pub(super) fn set_logged(&self, is_logged: bool) {
        let mut state = self.lock();
        state.is_logged = is_logged;
        state.left.clear();
    }

    /// There are so many rings now, and none was ever served.
    pub(super) fn reset(&self, rings: usize) {
        let mut state = self.lock();
        let before = std::mem::replace(&mut state.rings, vec![UsedRing::default(); rings]);
        if state.is_logged {
            state.left.extend(before.iter().filter(|ring| ring.is_due).map(|ring| ring.pages));
        }
    }

    /// To be called before the back end may write it.
    pub(super) fn served(&self, index: usize, pages: Pages) {
        self.lock().rings[index] = UsedRing { pages, is_served: true, is_due: true };
    }

    /// To be called when the back end writes it no more.
    pub(super) fn stopped(&self, index: usize) {
        self.lock().rings[index].is_served = false;
    }

    /// Gives the number of pages that were clean in `into`.
    pub(super) fn harvest(&self, into: &mut DirtyBitmaps) -> u64 {
        let mut state = self.lock();
        let State { rings, left, .. } = &mut *state;
        let due = rings.iter_mut().filter(|ring| ring.is_due).map(|ring| {
            ring.is_due = ring.is_served;
            ring.pages
        });
        due.chain(left.drain(..))
            .map(|pages| into.block(pages.block).set_range(pages.first, pages.count))
            .sum()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use sterna_ram::{Backing, GuestRam, RamBlock};

    use super::*;

    #[test]
    fn ring_is_in_every_harvest_while_it_is_served_and_in_one_after_it() {
        let block = RamBlock::new("ram", 16 << 12, Backing::Memfd).expect("a block");
        let ram = GuestRam::new(vec![block]).expect("RAM");
        let rings = UsedRings::default();
        rings.reset(2);
        let harvest = || {
            let mut dirty = DirtyBitmaps::new(&ram);
            let newly_dirty = rings.harvest(&mut dirty);
            assert_eq!(newly_dirty, dirty.count());
            dirty.block(0).count_range(3, 2)
        };

        assert_eq!(harvest(), 0, "never served");
        rings.served(1, Pages { block: 0, first: 3, count: 2 });
        assert_eq!([harvest(), harvest()], [2, 2]);
        rings.stopped(1);
        assert_eq!([harvest(), harvest()], [2, 0], "written before the stop, then no more");
    }

    #[test]
    fn ring_that_was_given_up_is_in_one_more_harvest_if_there_are_any() {
        let block = RamBlock::new("ram", 16 << 12, Backing::Memfd).expect("a block");
        let ram = GuestRam::new(vec![block]).expect("RAM");
        for (is_logged, wanted) in [(true, 1), (false, 0)] {
            let rings = UsedRings::default();
            rings.set_logged(is_logged);
            rings.reset(1);
            rings.served(0, Pages { block: 0, first: 5, count: 1 });
            rings.stopped(0);
            rings.reset(1);
            let mut dirty = DirtyBitmaps::new(&ram);

            assert_eq!([rings.harvest(&mut dirty), u64::from(dirty.block(0).get(5))], [wanted; 2]);
            assert_eq!(rings.harvest(&mut DirtyBitmaps::new(&ram)), 0);
        }
    }
}
