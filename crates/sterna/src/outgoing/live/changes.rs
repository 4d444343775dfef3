//! Which pages the guest has changed since earlier live saves, from the VM's dirty source.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::{Custody, DirtyBitmaps, GuestRam, TrackingClaim};

use crate::error::MigrationError;
use crate::start_error::StartError;
use crate::threads::{call, tried};
use crate::vm::SourceVm;

/// Records the guest's writes between live saves, so that a save can contain only the pages that changed since an earlier one.
///
/// The log owns the VM's dirty source: migrations and measurements are refused ([`StartError::Tracked`]) until it is
/// [ended](Self::end) or dropped. It knows the changes since the newest save and since the save on which the newest is based.
pub struct ChangeLog {
    vm: Arc<dyn SourceVm>,
    ram: GuestRam,
    state: Mutex<LogState>,
    /// The right to the dirty source; none after the end.
    tracking: Mutex<Option<TrackingClaim>>,
}

#[derive(Default)]
struct LogState {
    /// Number of the newest save that was begun.
    newest: u64,
    /// The pages that were changed since a save's moment, with the number of the save.
    since: Vec<(u64, DirtyBitmaps)>,
    /// The dirty source could not be read, so that changes may be missing.
    is_broken: bool,
}

impl ChangeLog {
    /// Begins to record the writes of the guest of `vm`.
    ///
    /// # Errors
    /// [`StartError::Guest`]: the guest is not here. [`StartError::Tracked`]: a migration or a measurement tracks its
    /// writes. [`StartError::System`]: the dirty source does not start.
    pub fn begin(vm: Arc<dyn SourceVm>) -> Result<Arc<Self>, StartError> {
        let ram = vm.ram();
        let custody = ram.custody();
        if !Custody::may_leave(custody) {
            return Err(StartError::Guest(custody));
        }
        let tracking = ram.claim_tracking().ok_or(StartError::Tracked)?;
        let log = Self { vm, ram, state: Mutex::default(), tracking: Mutex::new(Some(tracking)) };
        tried("the dirty log's start", || log.start()).map_err(StartError::system)?;
        Ok(Arc::new(log))
    }

    /// Whether a save may contain only the changes since the save with this number.
    pub fn knows(&self, number: u64) -> bool {
        let state = self.state.lock();
        !state.is_broken && state.since.iter().any(|(since, _)| *since == number)
    }

    /// Ends the log: the dirty source is free for a migration. A later save is based on no earlier one.
    pub fn end(&self) {
        let Some(tracking) = self.tracking.lock().take() else { return };
        self.state.lock().is_broken = true;
        let stopped = tried("the dirty log's end", || {
            call("DirtySource::stop", || self.vm.dirty_source().stop()).map_err(MigrationError::from)
        });
        if let Err(error) = stopped {
            tracing::warn!(%error, "the dirty log does not stop");
        }
        drop(tracking);
    }

    /// Whether the log records no more.
    pub fn has_ended(&self) -> bool {
        self.tracking.lock().is_none()
    }

    fn start(&self) -> Result<(), MigrationError> {
        let source = self.vm.dirty_source();
        call("DirtySource::start", || source.start())?;
        if source.initially_set() {
            let all = DirtyBitmaps::new(&self.ram);
            all.set_all();
            self.rearm(&all)?;
        }
        Ok(())
    }

    /// Whether this is the log of that memory.
    pub(super) fn is_of(&self, ram: &GuestRam) -> bool {
        self.ram.same_as(ram)
    }

    /// Reads the dirty source, and returns the pages that were written since it was last read.
    ///
    /// The pages are re-armed: a write after this call is reported by the next one.
    pub(super) fn read(&self) -> Result<DirtyBitmaps, MigrationError> {
        let mut found = DirtyBitmaps::new(&self.ram);
        let read = tried("the dirty log", || {
            call("DirtySource::sync", || self.vm.dirty_source().sync(&mut found))?;
            self.rearm(&found)
        });
        let mut state = self.state.lock();
        state.is_broken |= read.is_err();
        for (_, since) in &mut state.since {
            since.or_from(&found);
        }
        read.map(|()| found)
    }

    /// A copy of the pages that were changed since a save; all pages for `None`.
    pub(super) fn changed_since(&self, number: Option<u64>) -> Option<DirtyBitmaps> {
        let mut pages = DirtyBitmaps::new(&self.ram);
        let Some(number) = number else {
            pages.set_all();
            return Some(pages);
        };
        let state = self.state.lock();
        let (_, since) = state.since.iter().find(|(since, _)| *since == number)?;
        pages.or_from(since);
        (!state.is_broken).then_some(pages)
    }

    /// The moment of a save: the changes since it begin now. Returns its number. The guest is paused, and the source was read.
    pub(super) fn mark(&self, base: Option<u64>) -> u64 {
        let mut state = self.state.lock();
        state.newest += 1;
        let newest = state.newest;
        state.since.retain(|(number, _)| Some(*number) == base);
        state.since.push((newest, DirtyBitmaps::new(&self.ram)));
        newest
    }

    /// The save with this number failed, so that no save is based on it.
    pub(super) fn forget(&self, number: u64) {
        self.state.lock().since.retain(|(since, _)| *since != number);
    }

    fn rearm(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        let source = self.vm.dirty_source();
        for (index, bits) in pages.blocks().iter().enumerate() {
            if bits.count() > 0 {
                call("DirtySource::rearm", || source.rearm(index, 0, bits.pages(), bits))?;
            }
        }
        Ok(())
    }
}

impl Drop for ChangeLog {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for ChangeLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        let since: Vec<_> = state.since.iter().map(|(number, pages)| (number, pages.count())).collect();
        f.debug_struct("ChangeLog")
            .field("newest", &state.newest)
            .field("since", &since)
            .finish_non_exhaustive()
    }
}
