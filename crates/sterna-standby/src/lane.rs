//! The destination of a standby's lane: RAM during the seeding, the journal afterwards.

use std::sync::Arc;

use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna::internals::PageSink;
use sterna_ram::{PAGE_SIZE, RamSlice};

use super::store::Pages;

/// Delivers the pages of one lane of a standby.
pub(super) struct StandbyLane {
    pages: Arc<Pages>,
    index: usize,
}

impl StandbyLane {
    pub(super) fn new(pages: Arc<Pages>, index: usize) -> Self {
        Self { pages, index }
    }
}

impl PageSink for StandbyLane {
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        if self.pages.gate.enter()? {
            return self.pages.journal.prepare(self.index, run);
        }
        self.pages.seed.prepare(run)
    }

    fn commit(&self, run: PageRun) -> Result<(), MigrationError> {
        if self.pages.gate.is_past_seeding() {
            return self.pages.journal.commit(self.index, run);
        }
        self.pages.seed.commit(run)
    }

    fn zero(&self, run: PageRun) -> Result<(), MigrationError> {
        if self.pages.gate.enter()? {
            return self.pages.journal.zero(self.index, run);
        }
        self.pages.seed.zero(run)
    }

    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError> {
        if !self.pages.gate.is_past_seeding() {
            return self.pages.seed.current(run, to);
        }
        // RAM has every page since the seeding (zero pages included), with the changes of earlier checkpoints.
        self.pages.ram.block(run.block).read(run.first * PAGE_SIZE as u64, to)?;
        for (page, to) in (run.first..run.end()).zip(to.chunks_exact_mut(PAGE_SIZE)) {
            self.pages.journal.current(self.index, run.block, page, to)?;
        }
        Ok(())
    }

    fn differences(&self) -> Result<Option<u64>, MigrationError> {
        let may_come = self.pages.gate.enter()? && self.pages.takes_differences;
        Ok(may_come.then(|| self.pages.gate.checkpoint()))
    }

    fn settle(&self) -> Result<(), MigrationError> {
        if self.pages.gate.is_past_seeding() {
            self.pages.journal.settle(self.index);
        }
        Ok(())
    }
}
