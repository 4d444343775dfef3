//! Counts the faults that wait, so that the background fill pauses meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of faults that were read and are not answered.
#[derive(Debug, Clone, Default)]
pub(crate) struct FaultLoad(Arc<AtomicUsize>);

/// One fault that waits, until it is dropped.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<AtomicUsize>);

impl FaultLoad {
    pub(crate) fn one(&self) -> Waiting {
        self.0.fetch_add(1, Ordering::AcqRel);
        Waiting(Arc::clone(&self.0))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
