//! Rounds of checkpoints.

use std::sync::Arc;

use sterna_ram::DirtyBitmaps;

use super::Rounds;
use crate::error::MigrationError;
use crate::order::RoundPages;

impl Rounds {
    /// Re-arms the pages that syncs found while the guest runs.
    ///
    /// The pause is shorter then.
    ///
    /// Gives all pages that were re-armed in this way.
    pub(in crate::outgoing) fn rearm_ahead(&mut self) -> Result<&DirtyBitmaps, MigrationError> {
        let (shared, slices) = (&self.shared, self.slices());
        let found = std::mem::replace(&mut self.next, DirtyBitmaps::new(&shared.guest.ram));
        // The pages are recorded before they are re-armed, so that none is lost if re-arming fails.
        let rearmed = self.rearmed.get_or_insert_with(|| DirtyBitmaps::new(&shared.guest.ram));
        rearmed.or_from(&found);
        RoundPages::new(0, &shared.guest.ram, slices, DirtyBitmaps::new(&shared.guest.ram), false)
            .rearmed_with(&found, &shared.guest.ram, shared.guest.vm.dirty_source())?;
        Ok(rearmed)
    }

    /// Adds the pages that were re-armed ahead to `next` again. The pause re-arms them once more, because they
    /// are not copied.
    pub(in crate::outgoing) fn forget_ahead(&mut self) {
        if let Some(rearmed) = self.rearmed.take() {
            self.next.or_from(&rearmed);
        }
    }

    /// The pages that syncs found since [`Rounds::rearm_ahead`].
    pub(in crate::outgoing) fn found_since(&self) -> &DirtyBitmaps {
        &self.next
    }

    /// Makes the round of a checkpoint from all pages that syncs found. The second result: pages that were
    /// re-armed now.
    ///
    /// All pages are re-armed. Pages that were not re-armed [before](Rounds::rearm_ahead) are re-armed while the
    /// guest is paused (clause 7). The caller gives the round to the lanes later, when the checkpoint is sent.
    pub(in crate::outgoing) fn make_checkpoint(
        &mut self,
    ) -> Result<(Arc<RoundPages>, DirtyBitmaps), MigrationError> {
        let shared = &self.shared;
        let found = std::mem::replace(&mut self.next, DirtyBitmaps::new(&shared.guest.ram));
        let mut bits = self.rearmed.take().unwrap_or_else(|| DirtyBitmaps::new(&shared.guest.ram));
        bits.or_from(&found);
        let round = RoundPages::new(self.round.number() + 1, &shared.guest.ram, self.slices(), bits, false)
            .rearmed_with(&found, &shared.guest.ram, shared.guest.vm.dirty_source())?;
        self.round = Arc::new(round);
        self.before = None;
        self.found = [self.found[1], self.synced];
        self.is_checkpoint = true;
        Ok((Arc::clone(&self.round), found))
    }
}
