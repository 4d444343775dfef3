//! What comes before the guest is asked for hints, and how long lanes wait for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Control;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::order::RoundPages;

/// Lanes wait so long, for slices to be re-armed and for the guest's hints.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(2);

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

    /// Waits until the guest has named everything; until `until` at most.
    pub(super) fn await_hints(&mut self, until: Instant) -> Result<(), Break> {
        while self.hints.is_awaited() && Instant::now() < until {
            self.waits.at_most(LOOK_EVERY, || None::<()>)?;
        }
        Ok(())
    }
}
