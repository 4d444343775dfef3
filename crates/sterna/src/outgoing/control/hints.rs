//! Hints of the guest, from the beginning of the first round to the end of the migration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::Address;

use super::Control;
use crate::error::MigrationError;
use crate::free_page_hints::{FreePageHints, FreePages};
use crate::interruption::Break;
use crate::order::RoundPages;
use crate::outgoing::shared::Shared;
use crate::threads::{call, caught};
use crate::vm::RunState;

/// Lanes wait so long, for slices to be re-armed and for the guest's hints.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(2);

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
        let is_of_use = !is_rdma && shared.vm.run_state() == RunState::Running;
        if is_of_use { call("SourceVm::free_page_hints", || shared.vm.free_page_hints()) } else { None }
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

impl Control {
    /// Makes slices of the first round ready from number `slice` on: every one is re-armed before the guest is asked, so that every
    /// write from the question on is reported. False: `until` has come before.
    pub(super) fn prepare_round(
        &mut self,
        round: &RoundPages,
        slice: &mut u64,
        until: Option<Instant>,
    ) -> Result<bool, Break> {
        let shared = Arc::clone(&self.shared);
        let dirty = shared.vm.dirty_source();
        while round.prepare(*slice, &shared.ram, dirty).map_err(MigrationError::from)? {
            *slice += 1;
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
            // Somebody may cancel.
            self.waits.at_most(Duration::ZERO, || None::<()>)?;
        }
        Ok(true)
    }

    /// Asks the guest which pages it does not use.
    pub(super) fn ask_guest(&mut self, round: &Arc<RoundPages>) {
        let shared = Arc::clone(&self.shared);
        let Some(hints) = shared.vm.free_page_hints() else { return };
        let round = Arc::clone(round);
        let free = FreePages::new(move |block, first, count| round.hint(block, first, count));
        self.hints.free = Some(free.clone());
        self.hints.has_begun = true;
        call("FreePageHints::begin", || hints.begin(free));
    }

    /// Waits until the guest has named everything; until `until` at most.
    pub(super) fn await_hints(&mut self, until: Instant) -> Result<(), Break> {
        while self.hints.free.as_ref().is_some_and(|free| !free.is_complete()) && Instant::now() < until {
            self.waits.at_most(LOOK_EVERY, || None::<()>)?;
        }
        Ok(())
    }
}
