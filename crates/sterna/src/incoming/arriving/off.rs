//! A destination without postcopy, because the feature `postcopy` is off: no page is missing when the guest starts.

use std::sync::Arc;

use crate::error::MigrationError;
use crate::order::PageRun;
use crate::stats::IncomingPostcopy;

#[derive(Default)]
pub(super) struct Postcopy;

/// Missing pages, which there cannot be.
pub(super) enum ArrivingPages {}

impl Postcopy {
    pub(super) fn arriving(&self) -> Option<&Arc<ArrivingPages>> {
        None
    }

    pub(super) fn end_is_read(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    pub(super) fn set_paused(&self, _: bool) {}

    pub(super) fn shut_preempt(&self) {}

    pub(super) fn let_go(&self) {}

    pub(super) fn begin_again(&self) {}

    pub(super) fn join(&self) {}

    pub(super) fn statistics(&self) -> Option<IncomingPostcopy> {
        None
    }
}

impl ArrivingPages {
    pub(super) fn left(&self) -> u64 {
        match *self {}
    }

    pub(super) fn on_lane(&self, _: PageRun, _: Option<&[u8]>) -> Result<(), MigrationError> {
        match *self {}
    }

    pub(super) fn end(&self) {
        match *self {}
    }
}
