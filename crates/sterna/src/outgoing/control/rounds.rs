//! The rounds of precopy: the pass that is sent, what syncs have found since, and their figures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

use crate::error::MigrationError;
use crate::events::Event;
use crate::order::{Pass, SliceSize};
use crate::outgoing::shared::{Shared, lock};
use crate::outgoing::streams::DeviceStreams;
use crate::precopy::{Backlog, Counts, Look, PassLook, StreamsLeft, Synced};
use crate::stats::{Round, SyncParts};
use crate::threads::call;
use crate::vm::RunState;

/// With so many pages a network is tried that carried none with content so far: 4 MiB.
const TRIED_PAGES: u64 = 1024;

/// Where the rounds stand.
pub(super) struct Rounds {
    shared: Arc<Shared>,
    /// The pass that was published last, and the one before.
    pass: Arc<Pass>,
    before: Option<Arc<Pass>>,
    /// Found dirty, and in no pass yet.
    next: DirtyBitmaps,
    round: Open,
}

/// The round that runs.
struct Open {
    began: Duration,
    counts: Counts,
    sync: Duration,
    sync_parts: SyncParts,
    stopped: bool,
}

impl Open {
    fn new(began: Duration, counts: Counts, stopped: bool) -> Self {
        Self { began, counts, sync: Duration::ZERO, sync_parts: SyncParts::default(), stopped }
    }
}

impl Rounds {
    /// Publishes the first pass, over all RAM, or over `pages` of it.
    pub fn begin(shared: &Arc<Shared>, pages: DirtyBitmaps, look_for_absent: bool) -> Self {
        let ram = &shared.ram;
        let slices = SliceSize::for_ram(ram.total_bytes() / PAGE_SIZE as u64);
        let pass = Pass::new(1, ram, slices, pages, look_for_absent);
        let (counts, mut figures) = (shared.counters.now(), lock(&shared.figures));
        figures.begin_pages(counts);
        let round = Open::new(figures.clock(), counts, false);
        drop(figures);
        let rounds = Self {
            shared: Arc::clone(shared),
            pass: Arc::new(pass),
            before: None,
            next: DirtyBitmaps::new(ram),
            round,
        };
        rounds.enter_pass();
        rounds
    }

    /// The pass that was published last.
    pub fn pass(&self) -> &Arc<Pass> {
        &self.pass
    }

    /// The pass of that number, if it is one of the last two.
    pub fn pass_numbered(&self, number: u64) -> Option<Arc<Pass>> {
        let passes = [Some(&self.pass), self.before.as_ref()];
        passes.into_iter().flatten().find(|pass| pass.number() == number).cloned()
    }

    /// How things stand.
    pub fn look(&self) -> Look {
        Look {
            now: lock(&self.shared.figures).clock(),
            late: None,
            counts: self.shared.counters.now(),
            pass: PassLook {
                pages: self.pass.pages(),
                left: self.pass.left(),
                is_rearmed: self.pass.is_rearmed(),
                is_searched: self.pass.is_searched(),
            },
        }
    }

    /// Looks for pages that were written; what it finds belongs to the next pass. Pages that the running pass still
    /// has to send do not: it reads them later than now (clause 6).
    pub fn sync(&mut self, streams: Option<&DeviceStreams>) -> Result<Synced, MigrationError> {
        let shared = &self.shared;
        let began = Instant::now();
        let found = call("DirtySource::harvest", || shared.vm.dirty_source().harvest(&mut self.next))?;
        let dropped = self.pass.drop_unsent(&mut self.next);
        let took = began.elapsed();
        self.round.sync += took;
        self.round.sync_parts += found.times;
        let next_pages = self.next.count();
        lock(&shared.figures).pending_bytes = next_pages * PAGE_SIZE as u64;
        let backlog = Backlog {
            unsent_bytes: shared.unsent_bytes(),
            streams: streams.map_or(Some(StreamsLeft::default()), DeviceStreams::left),
            guest_runs: shared.vm.run_state() == RunState::Running,
        };
        let dirtied_pages = found.newly_dirty.saturating_sub(dropped);
        Ok(Synced { took, dirtied_pages, next_pages, backlog })
    }

    /// Makes the next pass of what syncs have found, and lets lanes begin it.
    pub fn publish(&mut self, tries_network: bool) {
        let ram = &self.shared.ram;
        let bits = std::mem::replace(&mut self.next, DirtyBitmaps::new(ram));
        if tries_network {
            // Devices' state may be large: what the network carries is tried with pages that nobody would send.
            let block = bits.block(0);
            block.set_range(0, TRIED_PAGES.min(block.pages()));
            self.shared.origin.leave_out(&bits);
        }
        let number = self.pass.number() + 1;
        let slices = self.pass.next_slices().at_most(ram.total_bytes() / PAGE_SIZE as u64);
        let pass = Pass::new(number, ram, slices, bits, false);
        let pass = Arc::new(if tries_network { pass.sending_zeros() } else { pass });
        self.before = Some(std::mem::replace(&mut self.pass, pass));
        self.enter_pass();
    }

    /// Whether the guest is stopped.
    pub fn is_last(&self) -> bool {
        self.round.stopped
    }

    /// Every lane is through with `pass`, and its flush is written.
    pub fn close(&mut self, pass: &Pass) {
        let counts = self.shared.counters.now();
        let mut figures = lock(&self.shared.figures);
        figures.observe(counts);
        let (now, open) = (figures.clock(), &self.round);
        // What its sync found is the next pass already, or waits for more.
        let is_followed = self.pass.number() > pass.number();
        let found = if is_followed { self.pass.pages() } else { self.next.count() };
        let took = now - open.began;
        let mut lanes = figures.lanes_between(open.counts, counts);
        // A wait is counted when it is over: it may have begun before the round, as an operator's in pre-switchover.
        lanes.idle = lanes.idle.min(took.saturating_sub(lanes.busy() + lanes.throttled));
        figures.push_round(Round {
            number: pass.number(),
            began: open.began,
            took,
            pages: pass.pages(),
            bytes: counts.bytes() - open.counts.bytes(),
            lanes,
            sync: open.sync,
            sync_parts: open.sync_parts,
            dirtied_pages: found,
            stopped: open.stopped,
        });
        let stopped = figures.at_stop.is_some();
        self.round = Open::new(now, counts, stopped);
    }

    /// Marks the round that begins now as one with the guest stopped.
    pub fn open_last(&mut self) {
        let (counts, began) = (self.shared.counters.now(), lock(&self.shared.figures).clock());
        self.round = Open::new(began, counts, true);
    }

    /// Lets the lanes begin the pass that was made last.
    fn enter_pass(&self) {
        let mut figures = lock(&self.shared.figures);
        figures.rounds_begun = self.pass.number();
        figures.pending_bytes = 0;
        figures.pass = Some(Arc::clone(&self.pass));
        drop(figures);
        self.shared.lanes.queue.publish(Arc::clone(&self.pass));
    }

    /// Tells the observer of the pass that was published last.
    pub fn tell(&self) {
        self.shared.tell(&Event::Pass(self.pass.number()));
    }
}
