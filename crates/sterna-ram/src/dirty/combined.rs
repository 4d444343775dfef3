//! Several sources over one guest's RAM, as one: KVM's log for what vCPUs write, a vhost log for what
//! devices write.

use std::sync::Arc;

use super::{DirtyBitmaps, DirtySource, SyncReport};
use crate::{DirtyError, GuestRam, PageBitmap, RamError};
use parking_lot::Mutex;

const NAME: &str = "combined";

/// Sources that together see every write to the RAM that each of them is over.
///
/// A page is dirty if one of them says so; re-arming arms it in each. That is right for sources that re-arm
/// while syncing beside those that do not: one of them reported the bit, and clearing it in
/// another before the page is read loses nothing, as a write that the other saw before is seen by the read.
pub struct Combined {
    sources: Vec<Arc<dyn DirtySource>>,
    started: Mutex<bool>,
}

impl Combined {
    /// All of `sources`, which must be over the same RAM. They are started, synced and stopped in this
    /// order, and none of them may be started already.
    pub fn new(sources: Vec<Arc<dyn DirtySource>>) -> Self {
        Combined { sources, started: Mutex::new(false) }
    }
}

impl DirtySource for Combined {
    /// Starts all or none.
    fn start(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock();
        if *started {
            return Ok(());
        }
        for (index, source) in self.sources.iter().enumerate() {
            if let Err(error) = source.start() {
                for source in self.sources[..index].iter().rev() {
                    // The error that matters is the first one.
                    let _ = source.stop();
                }
                return Err(error);
            }
        }
        *started = true;
        Ok(())
    }

    /// Stops all; goes on after an error and gives the first.
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

    /// Re-arms in all; gives the first error, after which the range is not armed everywhere.
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.sources.iter().try_for_each(|source| source.rearm(block, first, count, synced))
    }

    /// If one of them is: its pages must all be re-armed once, by a first round that reads every page after
    /// it was re-armed, and that is right for the others too.
    fn initially_set(&self) -> bool {
        self.sources.iter().any(|source| source.initially_set())
    }

    /// By the first source: what is known of a page before it is written does not depend on who watches.
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
