//! Guest RAM that a page server of this process still fills, while the guest runs (lazy restore).
//!
//! A page that is not in memory yet has content, so nothing may take it for absent. Reading it through the block's own mapping
//! waits until the server has placed it. The server is the judge of what is still owed; this module asks it.

use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

/// A server that fills the pages of one block. Pages are those of [`PAGE_SIZE`](crate::PAGE_SIZE).
pub trait Filling: Debug + Send + Sync {
    /// Calls `owed` for the parts of `[first, first + count)` whose pages may have content and not be in memory, in ascending
    /// order.
    ///
    /// A page that is no longer reported was placed before, or reads as zero.
    fn owed(&self, first: u64, count: u64, owed: &mut dyn FnMut(u64, u64));

    /// The pages read as zero from now on. The memory is given back after the call, so none of them may be placed later
    /// with content.
    fn given_back(&self, first: u64, count: u64);

    /// Places all missing pages without a pause, until the result is dropped. Several results may exist together.
    fn hurry(&self) -> Box<dyn Hurry>;
}

/// A server that places all missing pages without a pause. Dropping the value restores the speed from before.
pub trait Hurry: Debug + Send + Sync {
    /// Why the server could not place a page, if that happened since this value was created.
    fn obstacle(&self) -> Option<Arc<dyn Error + Send + Sync>>;
}

/// The server of a mapping, if its memory is not complete.
#[derive(Debug, Default)]
pub(crate) struct Filled {
    is_active: AtomicBool,
    server: RwLock<Option<Arc<dyn Filling>>>,
}

impl Filled {
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    pub(crate) fn begin(&self, server: Arc<dyn Filling>) {
        *self.server.write() = Some(server);
        self.is_active.store(true, Ordering::Release);
    }

    pub(crate) fn end(&self) {
        self.is_active.store(false, Ordering::Release);
        *self.server.write() = None;
    }

    fn server(&self) -> Option<Arc<dyn Filling>> {
        if self.is_active() { self.server.read().clone() } else { None }
    }

    /// The runs that are still owed, in ascending order.
    ///
    /// Ask before the kernel is asked which pages are in memory: a page may be placed in between.
    pub(crate) fn owed(&self, first: u64, count: u64) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        if let Some(server) = self.server() {
            server.owed(first, count, &mut |first, count| runs.push((first, count)));
        }
        runs
    }

    pub(crate) fn given_back(&self, first: u64, count: u64) {
        if let Some(server) = self.server() {
            server.given_back(first, count);
        }
    }

    pub(crate) fn hurry(&self) -> Option<Box<dyn Hurry>> {
        self.server().map(|server| server.hurry())
    }
}

/// Calls `hole` for the parts of a run that are in none of `owed`, which are in ascending order.
pub(crate) fn without_owed(owed: &[(u64, u64)], (first, count): (u64, u64), hole: &mut dyn FnMut(u64, u64)) {
    let end = first + count;
    let mut next = first;
    let from = owed.partition_point(|(owed, pages)| owed + pages <= first);
    for (start, pages) in owed[from..].iter().take_while(|(start, _)| *start < end) {
        if *start > next {
            hole(next, start - next);
        }
        next = next.max(start + pages);
    }
    if next < end {
        hole(next, end - next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owed_pages_are_cut_out_of_a_hole() {
        let owed = [(0, 2), (4, 1), (8, 4), (20, 1)];
        let cut = |first, count| {
            let mut left = Vec::new();
            without_owed(&owed, (first, count), &mut |first, count| left.push((first, count)));
            left
        };

        assert_eq!(cut(0, 16), [(2, 2), (5, 3), (12, 4)]);
        assert_eq!(cut(9, 2), []);
        assert_eq!(cut(1, 4), [(2, 2)]);
        assert_eq!(cut(12, 8), [(12, 8)]);
        assert_eq!(cut(30, 2), [(30, 2)]);
    }
}
