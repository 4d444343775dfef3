//! A lane: takes runs of pages from the pass's shared cursor, looks for zero pages, hands them to its writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_ram::{GuestRam, PAGE_SIZE};

use crate::error::MigrationError;
use crate::order::{LaneCursor, PageRun, Pass, PassQueue};
use crate::pages::PageWriter;
use crate::params::ZeroPageDetection;
use crate::vm::SourceVm;

/// Pages that a lane takes at once: what fits a packet.
const TAKE_PAGES: u64 = sterna_wire::limits::PACKET_PAGES as u64;

/// What all lanes of a migration share, and what the control thread sees of them.
pub(super) struct Lanes {
    /// Hands passes to the lanes.
    pub queue: PassQueue,
    /// Per lane: 1 + the last pass whose barrier is written; 0: not even the opening one.
    finished: Vec<AtomicU64>,
}

impl Lanes {
    pub fn new(count: usize) -> Self {
        Self { queue: PassQueue::default(), finished: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Whether every lane has written its barrier behind pass `number`; 0 is the opening one.
    pub fn are_through(&self, number: u64) -> bool {
        self.finished.iter().all(|lane| lane.load(Ordering::Acquire) > number)
    }
}

/// One lane's work.
pub(super) struct Lane<'a> {
    pub index: usize,
    pub lanes: &'a Lanes,
    pub vm: &'a dyn SourceVm,
    pub detection: ZeroPageDetection,
    /// Zero pages travel on the main channel, so a pass must not begin before the last one's flush.
    pub behind_flush: bool,
    pub count_absent: &'a (dyn Fn(u64) + Sync),
    /// Called when the control thread may have to act.
    pub nudge: &'a (dyn Fn() + Sync),
}

impl Lane<'_> {
    /// Works until there are no more passes.
    pub fn run(&self, writer: &mut dyn PageWriter) -> Result<(), MigrationError> {
        writer.barrier()?;
        self.finish(0);
        let mut last = 0;
        while let Some(pass) = self.lanes.queue.next(last, self.behind_flush) {
            self.send(&pass, writer)?;
            last = pass.number();
            writer.barrier()?;
            self.finish(last);
        }
        Ok(())
    }

    fn send(&self, pass: &Arc<Pass>, writer: &mut dyn PageWriter) -> Result<(), MigrationError> {
        let (ram, dirty) = (self.vm.ram(), self.vm.dirty_source());
        let mut cursor = LaneCursor::default();
        let mut told = false;
        while let Some(taken) = pass.take(&mut cursor, TAKE_PAGES, ram, dirty)? {
            if taken.absent {
                (self.count_absent)(taken.run.count);
                writer.zero_run(taken.run)?;
            } else {
                self.send_run(taken.run, ram, writer)?;
            }
            if !told && pass.is_rearmed() {
                told = true;
                (self.nudge)();
            }
        }
        (self.nudge)();
        Ok(())
    }

    /// Splits a run where zero pages and others meet.
    fn send_run(
        &self,
        run: PageRun,
        ram: &GuestRam,
        writer: &mut dyn PageWriter,
    ) -> Result<(), MigrationError> {
        if self.detection == ZeroPageDetection::None {
            return writer.write_run(run);
        }
        let block = ram.block(run.block);
        let is_zero = |page: u64| -> Result<bool, MigrationError> {
            Ok(block.slice(page * PAGE_SIZE as u64, PAGE_SIZE)?.is_zero())
        };
        let mut first = run.first;
        let mut zero = is_zero(first)?;
        for page in first + 1..=run.end() {
            let next = if page < run.end() { Some(is_zero(page)?) } else { None };
            if next == Some(zero) {
                continue;
            }
            let part = PageRun { block: run.block, first, count: page - first };
            if zero {
                writer.zero_run(part)?;
            } else {
                writer.write_run(part)?;
            }
            first = page;
            zero = next.unwrap_or_default();
        }
        Ok(())
    }

    fn finish(&self, pass: u64) {
        self.lanes.finished[self.index].store(pass + 1, Ordering::Release);
        (self.nudge)();
    }
}
