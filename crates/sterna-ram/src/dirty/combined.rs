//! Joins several dirty sources of one guest into one.
//!
//! For example, KVM's log reports the writes of vCPUs, and a vhost log reports the writes of devices.

use std::sync::Arc;

use super::bitmaps::DirtyBitmaps;
use super::source::DirtySource;
use super::sync_report::SyncReport;
use crate::bitmap::PageBitmap;
use crate::error::{DirtyError, RamError};
use crate::guest::GuestRam;
use parking_lot::Mutex;

const NAME: &str = "combined";

/// Dirty sources that together report every write to their common RAM.
///
/// A page is dirty if at least one source reports it. Re-arming re-arms the page in every source. This also
/// works if only some sources re-arm while syncing. Re-arming a page in a source that did not report it loses
/// no write. The read that follows sees every write that this source saw before.
pub struct Combined {
    sources: Vec<Arc<dyn DirtySource>>,
    started: Mutex<bool>,
}

impl Combined {
    /// Joins `sources`, which must be over the same RAM and not started.
    ///
    /// They are started, synced and stopped in this order.
    pub fn new(sources: Vec<Arc<dyn DirtySource>>) -> Self {
        Combined { sources, started: Mutex::new(false) }
    }
}

impl DirtySource for Combined {
    /// Starts all sources. If one fails, those started before are stopped.
    fn start(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock();
        if *started {
            return Ok(());
        }
        for (index, source) in self.sources.iter().enumerate() {
            if let Err(error) = source.start() {
                for source in self.sources[..index].iter().rev() {
                    // The caller gets the error of the start, which is the cause.
                    let _ = source.stop();
                }
                return Err(error);
            }
        }
        *started = true;
        Ok(())
    }

    /// Stops all sources, also after an error, and returns the first error.
    fn stop(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock();
        *started = false;
        self.sources.iter().map(|source| source.stop()).fold(Ok(()), Result::and)
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        if !*self.started.lock() {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        let mut sum = SyncReport::default();
        for source in &self.sources {
            sum += source.sync(into)?;
        }
        Ok(sum)
    }

    /// Re-arms in every source until one fails. After an error, the range is not re-armed everywhere.
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.sources.iter().try_for_each(|source| source.rearm(block, first, count, synced))
    }

    /// Whether one of the sources is initially set.
    ///
    /// The first round must then re-arm every page and read it afterwards, which is correct for the other
    /// sources, too.
    fn initially_set(&self) -> bool {
        self.sources.iter().any(|source| source.initially_set())
    }

    /// Asks the first source. The result does not depend on the writers that a source sees.
    fn mark_absent(
        &self,
        ram: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        match self.sources.first() {
            Some(source) => source.mark_absent(ram, block, first, count, absent),
            None => ram.block(block).mark_absent(first, count, absent),
        }
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl std::fmt::Debug for Combined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.sources.iter().map(|source| source.name())).finish()
    }
}
