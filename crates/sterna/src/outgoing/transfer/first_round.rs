//! Work before the guest is asked for hints, and the limit of the lanes' waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Transfer;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::order::RoundPages;

/// The longest wait of lanes for re-armed slices and for the guest's hints.
pub(in crate::outgoing) const LONGEST_WAIT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(2);

impl Transfer {
    /// Prepares slices of the first round from number `slice` on. False: the time `until` was reached first.
    ///
    /// Every slice is re-armed before the guest is asked, so that every write after the question is reported.
    pub(in crate::outgoing) fn prepare_round(
        &mut self,
        round: &RoundPages,
        slice: &mut u64,
        until: Option<Instant>,
    ) -> Result<bool, Break> {
        let shared = Arc::clone(&self.shared);
        let dirty = shared.guest.vm.dirty_source();
        while round.prepare(*slice, &shared.guest.ram, dirty).map_err(MigrationError::from)? {
            *slice += 1;
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
            // An operator may cancel meanwhile.
            self.waits.at_most(Duration::ZERO, || None::<()>)?;
        }
        Ok(true)
    }

    /// Waits until the guest has reported all unused pages, or until `until`.
    pub(in crate::outgoing) fn await_hints(&mut self, until: Instant) -> Result<(), Break> {
        while self.pacing.hints.is_awaited() && Instant::now() < until {
            self.waits.at_most(LOOK_EVERY, || None::<()>)?;
        }
        Ok(())
    }
}
