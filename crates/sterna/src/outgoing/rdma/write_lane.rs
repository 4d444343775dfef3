//! The single lane over RDMA: posts WRITEs while it takes further pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::PAGE_SIZE;
use sterna_wire::rdma::BlockRange;

use super::super::lanes::limiter::Limiter;
use super::super::main_channel::MainChannel;
use super::super::measure::Counters;
use super::gather::{Gather, Ranges, SHORT_ZEROS};
use super::source::WRITES;
use super::work::{State, Work};
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageWriter;

/// The number of WRITEs that one call posts. One of them is signalled.
const BATCH: usize = 64;
/// Fewer bytes are not posted while WRITEs are in flight and more pages may follow.
const FEW_BYTES: u64 = BATCH as u64 * PAGE_SIZE as u64;
/// The most bytes in flight. A command waits for the WRITEs that were posted before it.
const IN_FLIGHT_BYTES: u64 = 8 << 20;
/// The same limit if windows are given back.
///
/// Each window then needs two commands: a request and a release.
const IN_FLIGHT_BELOW_LIMIT: u64 = 2 << 20;
/// The most bytes taken ahead of the WRITEs: in the first round, and later.
///
/// The first value is the distance by which memory is registered ahead. The second keeps the link busy while a
/// window is registered.
const AHEAD_BYTES: [u64; 2] = [2 << 30, 256 << 20];
/// The same limit with `max-bandwidth`, in bursts of 100 ms.
///
/// The guest may write pages again that were taken long before they are read.
const AHEAD_BURSTS: u64 = 20;
/// The most zero ranges that wait.
const WAITING_ZEROS: usize = 16384;
/// The longest phase, so that the destination regularly receives a message of the source.
const SLICE: Duration = Duration::from_secs(1);

/// Sends pages with WRITEs into the destination's memory.
pub(in crate::outgoing) struct RdmaLane {
    work: Arc<Work>,
    main: Arc<MainChannel>,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
    gather: Gather,
    ranges: Ranges,
    write_bytes: u64,
    most_in_flight: u64,
    /// The number of barriers so far.
    rounds: u64,
    /// The time at which the open phase began.
    phase: Option<Instant>,
    /// Bytes that were taken and not posted. The next field: bytes that are posted and not complete.
    queued: u64,
    in_flight: u64,
    writes_in_flight: usize,
    /// `Some` while bytes are in flight: the time up to which that was counted.
    moving_since: Option<Instant>,
}

/// The condition on which the lane stops posting.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// More pages may be taken.
    Room,
    /// All pages that were taken are at the destination.
    Done,
}

impl RdmaLane {
    pub(in crate::outgoing) fn new(
        work: Arc<Work>,
        main: Arc<MainChannel>,
        (counters, limiter): (Arc<Counters>, Arc<Limiter>),
    ) -> Self {
        let rdma = &work.rdma;
        let short_zeros = if rdma.is_sterna() { 0 } else { SHORT_ZEROS };
        let write_bytes = rdma.longest_write();
        // The answer about the destination's blocks has arrived. It contains whether the destination pins memory.
        let most_in_flight = if rdma.gives_back() { IN_FLIGHT_BELOW_LIMIT } else { IN_FLIGHT_BYTES };
        Self {
            gather: Gather::new(short_zeros),
            work,
            main,
            counters,
            limiter,
            ranges: Ranges::default(),
            write_bytes,
            most_in_flight,
            rounds: 0,
            phase: None,
            queued: 0,
            in_flight: 0,
            writes_in_flight: 0,
            moving_since: None,
        }
    }

    /// Adds the gathered ranges to the work, and posts until `until` is reached.
    fn take(&mut self, until: Until) -> Result<(), MigrationError> {
        if self.phase.is_none() && !(self.ranges.data.is_empty() && self.ranges.zeros.is_empty()) {
            self.open_phase()?;
        }
        self.queued += self.work.add(&mut self.ranges)?;
        self.work.rdma.counts.lane(self.in_flight, self.queued);
        self.go_on(until)
    }

    /// Posts WRITEs until the state `until` is reached.
    fn go_on(&mut self, until: Until) -> Result<(), MigrationError> {
        loop {
            let completed = self.work.rdma.stream.completed_writes().map_err(self.work.rdma.failed())?;
            self.completed(completed)?;
            self.renew_phase()?;
            // Single pages are posted together, as long as the adapter has WRITEs in flight.
            let is_few = self.queued < FEW_BYTES && self.writes_in_flight > 0;
            let has_posted = (until == Until::Done || !is_few) && self.post()?;
            let work = Arc::clone(&self.work);
            if work.rdma.channel.is_shut_down() {
                return Err(work.rdma.cancelled());
            }
            let state = work.state()?;
            if self.is_reached(until, &state) {
                return Ok(());
            }
            if has_posted {
                continue;
            }
            if self.writes_in_flight > 0 {
                drop(state);
                self.wait_for_writes(self.writes_in_flight - 1)?;
            } else {
                self.counters.idle(|| work.wait(state));
            }
        }
    }

    fn is_reached(&self, until: Until, state: &State) -> bool {
        match until {
            Until::Room => {
                let ahead = AHEAD_BYTES[usize::from(self.rounds > 1)];
                let ahead = self.limiter.burst().map_or(ahead, |burst| ahead.min(burst * AHEAD_BURSTS));
                self.queued <= ahead && state.waiting_zeros() <= WAITING_ZEROS
            }
            Until::Done => self.in_flight == 0 && state.is_done(),
        }
    }

    /// Posts while a range is ready and the limit of bytes in flight permits it.
    ///
    /// Gives whether anything was posted.
    fn post(&mut self) -> Result<bool, MigrationError> {
        let mut has_posted = false;
        while self.phase.is_some()
            && self.in_flight < self.most_in_flight
            && self.writes_in_flight + BATCH <= WRITES as usize
        {
            let burst = self.limiter.burst();
            if burst.is_some() && self.in_flight > 0 {
                // Only the time of a burst is measured, without the time in which the limit blocks the lane.
                break;
            }
            let most = burst.map_or(self.write_bytes, |burst| whole_pages(burst, self.write_bytes));
            let (writes, bytes) = self.work.next_writes(most, BATCH)?;
            if writes.is_empty() {
                break;
            }
            self.counters.throttled(self.limiter.take(bytes));
            self.look_at_clock();
            let rdma = &self.work.rdma;
            rdma.stream.write_memory(&writes, Some(rdma.stall)).map_err(rdma.failed())?;
            rdma.counts.posted(writes.len() as u64, bytes);
            self.moving_since.get_or_insert_with(Instant::now);
            self.queued -= bytes;
            self.in_flight += bytes;
            self.writes_in_flight += writes.len();
            rdma.counts.lane(self.in_flight, self.queued);
            has_posted = true;
        }
        Ok(has_posted)
    }

    fn wait_for_writes(&mut self, most: usize) -> Result<(), MigrationError> {
        let rdma = &self.work.rdma;
        let waited = self.counters.waiting(|| rdma.stream.wait_for_writes(most, Some(rdma.stall)));
        self.completed(waited.map_err(self.work.rdma.failed())?)
    }

    /// Records that `writes` WRITEs are complete.
    fn completed(&mut self, writes: usize) -> Result<(), MigrationError> {
        self.look_at_clock();
        if writes == 0 {
            return Ok(());
        }
        let bytes = self.work.written(writes)?;
        self.writes_in_flight -= writes;
        self.in_flight -= bytes;
        if self.writes_in_flight == 0 {
            self.moving_since = None;
        }
        self.work.rdma.counts.lane(self.in_flight, self.queued);
        self.counters.main(bytes);
        self.counters.pages(bytes / PAGE_SIZE as u64, 0);
        Ok(())
    }

    /// Counts the time with bytes in flight as time in which bytes move.
    fn look_at_clock(&mut self) {
        if let Some(since) = &mut self.moving_since {
            let now = Instant::now();
            self.counters.moved(now - *since);
            *since = now;
        }
    }

    /// Renews the phase if a thread wants to write, or after the longest time.
    fn renew_phase(&mut self) -> Result<(), MigrationError> {
        let Some(opened) = self.phase else { return Ok(()) };
        if !self.main.is_wanted() && opened.elapsed() < SLICE {
            return Ok(());
        }
        // WRITEs continue while a command is being carried out.
        if self.work.let_ask(false)? {
            return Ok(());
        }
        self.close_phase()?;
        self.open_phase()
    }

    fn open_phase(&mut self) -> Result<(), MigrationError> {
        self.counters.idle(|| self.work.rdma.begin_part(&self.main))?;
        self.phase = Some(Instant::now());
        self.work.let_ask(true).map(drop)
    }

    /// Closes the phase. No command is being carried out, and none will begin.
    fn close_phase(&mut self) -> Result<(), MigrationError> {
        self.wait_for_writes(0)?;
        let ended = self.counters.idle(|| self.work.rdma.end_part(&self.main));
        self.phase = None;
        ended
    }

    fn range(run: PageRun) -> BlockRange {
        let page = PAGE_SIZE as u64;
        BlockRange { block: run.block, start: run.first * page, length: run.count * page }
    }
}

impl PageWriter for RdmaLane {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.gather.data(Self::range(run), &mut self.ranges);
        self.take(Until::Room)
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.gather.zeros(Self::range(run), false, &mut self.ranges);
        self.take(Until::Room)
    }

    fn absent_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.gather.zeros(Self::range(run), true, &mut self.ranges);
        self.take(Until::Room)
    }

    /// Ends the phase. Then every WRITE is complete, and every command has been carried out.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.gather.flush(&mut self.ranges);
        self.work.send_all_zeros(true)?;
        self.take(Until::Done)?;
        self.work.send_all_zeros(false)?;
        self.rounds += 1;
        if self.phase.is_some() {
            self.work.let_ask(false)?;
            self.close_phase()?;
        }
        Ok(())
    }

    fn abort(&mut self) {
        self.work.rdma.channel.shutdown();
    }
}

impl Drop for RdmaLane {
    fn drop(&mut self) {
        self.work.end();
        if self.phase.is_some() {
            // Threads that wait to write get an error, because the channel is unusable now.
            let _ = self.main.end_phase(|_| Ok(()));
        }
    }
}

/// Rounds `bytes` down to whole pages: at least one page, at most `most`.
fn whole_pages(bytes: u64, most: u64) -> u64 {
    let page = PAGE_SIZE as u64;
    (bytes / page * page).clamp(page, most)
}
