//! A dirty source that can be replaced when the guest's memory changes.

use std::sync::Arc;

use super::bitmaps::DirtyBitmaps;
use super::source::DirtySource;
use super::sync_report::SyncReport;
use crate::bitmap::PageBitmap;
use crate::error::{DirtyError, RamError};
use crate::guest::GuestRam;
use parking_lot::RwLock;

const NAME: &str = "replaceable";

/// The dirty source of a VM whose memory is plugged and unplugged.
///
/// Each source is over one [`GuestRam`], so the RAM of [`GuestRam::with_blocks`] needs a new source. The VM
/// keeps one `Replaceable` and [replaces](Replaceable::replace) the source in it.
pub struct Replaceable(RwLock<ReplaceableState>);

struct ReplaceableState {
    source: Arc<dyn DirtySource>,
    is_running: bool,
}

impl Replaceable {
    /// Makes a `Replaceable` with `source`, which must not be started.
    pub fn new(source: Arc<dyn DirtySource>) -> Self {
        Self(RwLock::new(ReplaceableState { source, is_running: false }))
    }

    /// Replaces the source with another one, which must not be started.
    ///
    /// # Errors
    /// [`DirtyError::Running`] while writes are tracked; nothing has changed then.
    pub fn replace(&self, source: Arc<dyn DirtySource>) -> Result<(), DirtyError> {
        let mut state = self.0.write();
        if state.is_running {
            return Err(DirtyError::Running { origin: NAME, what: "the dirty source" });
        }
        state.source = source;
        Ok(())
    }
}

impl DirtySource for Replaceable {
    fn start(&self) -> Result<(), DirtyError> {
        let mut state = self.0.write();
        state.source.start()?;
        state.is_running = true;
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut state = self.0.write();
        state.is_running = false;
        state.source.stop()
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.0.read().source.sync(into)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.0.read().source.rearm(block, first, count, synced)
    }

    fn initially_set(&self) -> bool {
        self.0.read().source.initially_set()
    }

    fn mark_absent(
        &self,
        ram: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        self.0.read().source.mark_absent(ram, block, first, count, absent)
    }

    fn name(&self) -> &'static str {
        self.0.read().source.name()
    }
}

impl std::fmt::Debug for Replaceable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Replaceable").field(&self.0.read().source.name()).finish()
    }
}
