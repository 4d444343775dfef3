//! A lane: takes runs of pages from a round and passes them to its writer.
//!
//! All lanes take from the round's shared cursor. A lane also detects zero pages.

mod changes;
pub(super) mod limiter;
mod main;
mod multifd;
pub(super) mod state;

use std::sync::Arc;

use sterna_ram::{DirtySource, GuestRam};

use super::guest_source::PageReader;
use super::measure::{Counters, ScanClock};
use super::streams::{Chunk, Streams};
use crate::error::MigrationError;
use crate::order::{LaneCursor, Next, PageRun, RoundPages};
use crate::pages::PageWriter;
use crate::params::ZeroPageDetection;
use state::Lanes;

pub(super) use changes::SharedDeltas;
pub(super) use main::MainLane;
pub(super) use multifd::{MultifdLane, MultifdShared};

/// The pages that a lane takes at a time: those of one packet.
const TAKE_PAGES: u64 = sterna_wire::limits::PACKET_PAGES as u64;

/// The reader and the writer of one lane.
pub(super) struct LaneEnds {
    pub writer: Box<dyn PageWriter>,
    pub reader: Arc<dyn PageReader>,
}

/// The work of one lane.
pub(super) struct Lane<'a> {
    pub index: usize,
    pub lanes: &'a Lanes,
    pub ram: &'a GuestRam,
    pub dirty: &'a dyn DirtySource,
    pub reader: &'a dyn PageReader,
    pub detection: ZeroPageDetection,
    /// A round must not begin before the flush of the last one.
    ///
    /// The reason is that zero pages are sent on the main channel.
    pub after_flush: bool,
    pub counters: &'a Counters,
    /// The device streams, if lanes send them.
    pub streams: Option<&'a Streams>,
    /// Called when the control thread may have to act.
    pub nudge: &'a (dyn Fn() + Sync),
}

impl Lane<'_> {
    /// Works until there are no more rounds.
    pub(super) fn run(&self, writer: &mut dyn PageWriter) -> Result<(), MigrationError> {
        writer.barrier()?;
        self.finish(0);
        let mut last = 0;
        let chunk = || self.streams?.outbox.take(self.index);
        let next = |last| self.lanes.queue.next(last, self.after_flush, chunk);
        // A wait before the first round does not count as idle time.
        while let Some(next) = if last == 0 { next(0) } else { self.counters.idle(|| next(last)) } {
            match next {
                Next::Round(round) => {
                    self.send(&round, writer)?;
                    last = round.number();
                    self.finish(last);
                }
                Next::Other(chunk) => self.send_chunk(chunk, writer)?,
            }
        }
        Ok(())
    }

    fn send_chunk(&self, chunk: Chunk, writer: &mut dyn PageWriter) -> Result<(), MigrationError> {
        writer.device_packet(&chunk.packet)?;
        self.counters.chunk(chunk.packet.len() as u64);
        // Only the last chunk wakes the waiting thread.
        if self.streams.is_some_and(|streams| streams.outbox.done(chunk)) {
            (self.nudge)();
        }
        Ok(())
    }

    fn send(&self, round: &Arc<RoundPages>, writer: &mut dyn PageWriter) -> Result<(), MigrationError> {
        let mut cursor = LaneCursor::default();
        let mut told = false;
        let mut clock = ScanClock::new(self.counters);
        while let Some(taken) = round.take(&mut cursor, TAKE_PAGES, self.ram, self.dirty)? {
            self.count(&mut cursor);
            clock.pages(taken.run.count);
            if taken.absent {
                self.counters.absent(taken.run.count);
                writer.absent_run(taken.run)?;
            } else {
                self.send_pages(taken.run, !round.sends_zeros(), writer)?;
            }
            // A chunk follows each packet of pages, so that neither delays the other.
            if let Some(chunk) = self.streams.and_then(|streams| streams.outbox.take(self.index)) {
                self.send_chunk(chunk, writer)?;
            }
            if !told && round.is_rearmed() {
                told = true;
                (self.nudge)();
            }
        }
        self.count(&mut cursor);
        (self.nudge)();
        writer.barrier()
    }

    /// Sends pages, at most one packet's worth.
    pub(super) fn send_pages(
        &self,
        run: PageRun,
        tell_apart: bool,
        writer: &mut dyn PageWriter,
    ) -> Result<(), MigrationError> {
        let mut rest = Some(run);
        while let Some(run) = rest {
            let (run, others) = run.split(self.reader.together(run));
            self.send_run(run, tell_apart, writer)?;
            rest = others;
        }
        Ok(())
    }

    /// Counts the time that the lane spent on re-arming.
    fn count(&self, cursor: &mut LaneCursor) {
        self.counters.rearming(cursor.take_rearming());
        self.counters.free(cursor.take_free_pages());
    }

    /// Splits a run at the borders of zero pages, if zero pages are detected.
    fn send_run(
        &self,
        run: PageRun,
        tell_apart: bool,
        writer: &mut dyn PageWriter,
    ) -> Result<(), MigrationError> {
        if self.detection == ZeroPageDetection::None || !tell_apart {
            return writer.write_run(run);
        }
        let mut zero = [0; TAKE_PAGES.div_ceil(64) as usize];
        if self.reader.content(run)?.zero_page_bits(&mut zero)? == 0 {
            return writer.write_run(run);
        }
        let is_zero = |page: u64| zero[(page / 64) as usize] >> (page % 64) & 1 == 1;
        let mut first = 0;
        while first < run.count {
            let same = (first + 1..run.count).find(|&page| is_zero(page) != is_zero(first));
            let end = same.unwrap_or(run.count);
            let part = PageRun { block: run.block, first: run.first + first, count: end - first };
            if is_zero(first) {
                writer.zero_run(part)?;
            } else {
                writer.write_run(part)?;
            }
            first = end;
        }
        Ok(())
    }

    fn finish(&self, round: u64) {
        self.lanes.finish(self.index, round);
        (self.nudge)();
    }
}
