//! Hints of the guest, from the beginning of the first round to the end of the migration.

use std::sync::Arc;

use sterna_transport::Address;

use crate::free_page_hints::{FreePageHints, FreePages};
use crate::order::RoundPages;
use crate::outgoing::shared::Shared;
use crate::threads::{call, caught};
use crate::vm::RunState;

/// What the guest was asked.
pub(super) struct Hints {
    shared: Arc<Shared>,
    /// Where hints go, while they count.
    free: Option<FreePages>,
    /// The guest does not have its pages back.
    has_begun: bool,
}

impl Hints {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, free: None, has_begun: false }
    }

    /// Who asks the guest, if hints are of use.
    pub(super) fn of(shared: &Shared) -> Option<&dyn FreePageHints> {
        // Over RDMA memory is registered ahead of the lanes, whether they need it or not.
        let is_rdma = matches!(shared.to, Address::Rdma { .. });
        // In postcopy every page that is not sent would have to follow.
        let is_of_use =
            !is_rdma && !shared.capabilities.postcopy_ram && shared.vm.run_state() == RunState::Running;
        if is_of_use { call("SourceVm::free_page_hints", || shared.vm.free_page_hints()) } else { None }
    }

    /// Asks the guest which pages it does not use.
    pub(super) fn ask(&mut self, round: &Arc<RoundPages>) {
        let shared = Arc::clone(&self.shared);
        let Some(hints) = Self::of(&shared) else { return };
        let round = Arc::clone(round);
        let free = FreePages::new(move |block, first, count| round.hint(block, first, count));
        self.free = Some(free.clone());
        self.has_begun = true;
        call("FreePageHints::begin", || hints.begin(free));
    }

    /// Whether the guest was asked and has not named everything.
    pub(super) fn is_awaited(&self) -> bool {
        self.free.as_ref().is_some_and(|free| !free.is_complete())
    }

    /// Hints do not count from now on.
    pub(super) fn stop(&mut self) {
        if let Some(free) = self.free.take() {
            free.close();
            self.tell("FreePageHints::stop", |hints| hints.stop());
        }
    }

    /// The guest may have its pages back.
    pub(super) fn end(&mut self) {
        self.stop();
        if std::mem::take(&mut self.has_begun) {
            self.tell("FreePageHints::end", |hints| hints.end());
        }
    }

    /// A panic changes nothing: hints do not count any more, whatever the guest was told.
    fn tell(&self, name: &'static str, act: impl FnOnce(&dyn FreePageHints)) {
        let told = caught(name, || self.shared.vm.free_page_hints().map(act));
        if let Err(error) = told {
            tracing::warn!(%error, "the guest is not told about its hints");
        }
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.end();
    }
}
