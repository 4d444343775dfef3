//! Free page hints of the guest, from the first round to the migration's end.

use std::sync::Arc;

use crate::free_page_hints::{FreePageHints, FreePages};
use crate::order::RoundPages;
use crate::outgoing::shared::Shared;
use crate::threads::{call, caught};
use crate::vm::RunState;

/// A request for free page hints, and its state.
pub(in crate::outgoing) struct Hints {
    shared: Arc<Shared>,
    /// Receives the hints as long as they are used.
    free: Option<FreePages>,
    /// The guest was asked, and does not have its unused pages back yet.
    has_begun: bool,
}

impl Hints {
    pub(in crate::outgoing) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, free: None, has_begun: false }
    }

    /// The VM's interface for hints; `None` if hints are of no use for this migration.
    pub(in crate::outgoing) fn of(shared: &Shared) -> Option<&dyn FreePageHints> {
        let is_of_use = shared.session.facts.gains_by_hints
            && call("SourceVm::run_state", || shared.guest.vm.run_state()) == RunState::Running;
        if is_of_use { call("SourceVm::free_page_hints", || shared.guest.vm.free_page_hints()) } else { None }
    }

    /// Asks the guest which pages it does not use.
    pub(in crate::outgoing) fn ask(&mut self, round: &Arc<RoundPages>) {
        let shared = Arc::clone(&self.shared);
        let Some(hints) = Self::of(&shared) else { return };
        let round = Arc::clone(round);
        let free = FreePages::new(move |block, first, count| round.hint(block, first, count));
        self.free = Some(free.clone());
        self.has_begun = true;
        call("FreePageHints::begin", || hints.begin(free));
    }

    /// Whether the guest was asked and has not reported all unused pages yet.
    pub(in crate::outgoing) fn is_awaited(&self) -> bool {
        self.free.as_ref().is_some_and(|free| !free.is_complete())
    }

    /// Ignores hints from now on.
    pub(in crate::outgoing) fn stop(&mut self) {
        if let Some(free) = self.free.take() {
            free.close();
            self.tell("FreePageHints::stop", |hints| hints.stop());
        }
    }

    /// Ends hints. The guest may use its reported pages again.
    pub(in crate::outgoing) fn end(&mut self) {
        self.stop();
        if std::mem::take(&mut self.has_begun) {
            self.tell("FreePageHints::end", |hints| hints.end());
        }
    }

    /// Calls the VM. A panic has no further effect, because hints are not used any more in either case.
    fn tell(&self, name: &'static str, act: impl FnOnce(&dyn FreePageHints)) {
        let told = caught(name, || self.shared.guest.vm.free_page_hints().map(act));
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
