//! The last sync of a paused guest, and the check that guest memory does not change after it.

use super::memory_sums::Sums;
use super::transfer::Transfer;
use crate::error::MigrationError;
use crate::params::MigrationMode;
use crate::threads::call;

impl Transfer {
    /// Lets the VM's devices write what they still have to write, and syncs. The guest is paused.
    pub(super) fn last_sync(&mut self) -> Result<(), MigrationError> {
        let shared = &self.shared;
        call("SourceVm::quiesce", || shared.guest.vm.quiesce())?;
        self.sync()?;
        let params = self.shared.params.lock();
        let is_checked = params.check_last_sync && params.mode == MigrationMode::Normal;
        drop(params);
        self.guest.memory_after_sync =
            if is_checked { Some(Sums::of(&self.shared.guest.ram)?) } else { None };
        Ok(())
    }

    /// Fails if guest memory changed since the last sync. Without the check it does nothing.
    pub(super) fn check_last_sync(&mut self) -> Result<(), MigrationError> {
        match self.guest.memory_after_sync.take() {
            Some(before) => before.compare(&self.shared.guest.ram),
            None => Ok(()),
        }
    }
}
