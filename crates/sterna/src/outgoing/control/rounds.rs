//! The rounds of precopy: the round that is sent, what syncs have found since, and their statistics.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

use crate::error::MigrationError;
use crate::events::Event;
use crate::order::{RoundPages, SliceSize};
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::precopy::{Backlog, Counts, RoundProgress, Snapshot, StreamsRemaining, SyncResult};
use crate::reconnect::Missing;
use crate::stats::{Round, SyncParts};
use crate::threads::call;
use crate::vm::RunState;

/// How many pages are sent to measure a network that carried none with content so far: 4 MiB.
const TRIED_PAGES: u64 = 1024;

/// The running round, and what the next one will send.
pub(super) struct Rounds {
    shared: Arc<Shared>,
    /// The round that was published last, and the one before.
    round: Arc<RoundPages>,
    before: Option<Arc<RoundPages>>,
    /// Lanes read it from a copy, or while the guest stands.
    is_checkpoint: bool,
    /// Found dirty, and in no round yet.
    next: DirtyBitmaps,
    /// The same, re-armed since: what of them is written afterwards is in `next`, too.
    rearmed: Option<DirtyBitmaps>,
    open: OpenRound,
}

/// Measures the round that runs.
struct OpenRound {
    began: Duration,
    counts: Counts,
    sync: Duration,
    sync_parts: SyncParts,
    stopped: bool,
}

impl OpenRound {
    fn new(began: Duration, counts: Counts, stopped: bool) -> Self {
        Self { began, counts, sync: Duration::ZERO, sync_parts: SyncParts::default(), stopped }
    }
}

impl Rounds {
    /// The first round, over `pages`; with `takes_hints` without those that the guest does not use.
    pub(super) fn first(
        shared: &Shared,
        pages: DirtyBitmaps,
        look_for_absent: bool,
        takes_hints: bool,
    ) -> Arc<RoundPages> {
        let ram = &shared.ram;
        let slices = SliceSize::for_ram(ram.total_bytes() / PAGE_SIZE as u64);
        let round = RoundPages::new(1, ram, slices, pages, look_for_absent);
        Arc::new(if takes_hints { round.taking_hints(ram) } else { round })
    }

    /// Publishes the first round.
    pub(super) fn begin(shared: &Arc<Shared>, round: Arc<RoundPages>) -> Self {
        let (counts, mut statistics) = (shared.counters.now(), shared.statistics.lock());
        statistics.begin_pages(counts);
        let open = OpenRound::new(statistics.clock(), counts, false);
        drop(statistics);
        let rounds = Self {
            shared: Arc::clone(shared),
            round,
            before: None,
            is_checkpoint: false,
            next: DirtyBitmaps::new(&shared.ram),
            rearmed: None,
            open,
        };
        rounds.enter_round();
        rounds
    }

    /// The round that was published last.
    pub(super) fn round(&self) -> &Arc<RoundPages> {
        &self.round
    }

    /// The round of that number, if it is one of the last two.
    pub(super) fn round_numbered(&self, number: u64) -> Option<Arc<RoundPages>> {
        let rounds = [Some(&self.round), self.before.as_ref()];
        rounds.into_iter().flatten().find(|round| round.number() == number).cloned()
    }

    /// The last two rounds, oldest first: lanes may be in both.
    pub(super) fn latest(&self) -> Vec<Arc<RoundPages>> {
        [self.before.as_ref(), Some(&self.round)].into_iter().flatten().cloned().collect()
    }

    /// What the destination lacks once lanes send no page more: what syncs have found, and what rounds did not send.
    pub(super) fn unsent(&self) -> DirtyBitmaps {
        let mut unsent = DirtyBitmaps::new(&self.shared.ram);
        unsent.or_from(&self.next);
        for round in self.latest() {
            unsent.or_from(round.unsent());
        }
        unsent
    }

    /// The state at this instant, for the policy.
    pub(super) fn snapshot(&self) -> Snapshot {
        // Over RDMA the lane is ahead of what it has sent.
        let taken = self.shared.rdma.queued_bytes().div_ceil(PAGE_SIZE as u64);
        let pages = self.round.pages();
        Snapshot {
            now: self.shared.statistics.lock().clock(),
            late: None,
            counts: self.shared.counters.now(),
            round: RoundProgress {
                pages,
                remaining: self.round.remaining_pages().saturating_add(taken).min(pages),
                is_rearmed: self.round.is_rearmed() && taken == 0,
                is_searched: self.round.is_searched(),
            },
        }
    }

    /// Syncs; what it finds belongs to the next round. Pages that the running round still has to send do not: it reads
    /// them later than now (clause 6).
    pub(super) fn sync(&mut self, streams: Option<&DeviceStreams>) -> Result<SyncResult, MigrationError> {
        let shared = &self.shared;
        let began = Instant::now();
        let found = call("DirtySource::sync", || shared.vm.dirty_source().sync(&mut self.next))?;
        // What a checkpoint still has to send is older than what was written since.
        let dropped = if self.is_checkpoint { 0 } else { self.round.drop_unsent(&mut self.next) };
        let took = began.elapsed();
        self.open.sync += took;
        self.open.sync_parts += found.times;
        let next_pages = self.next.count();
        shared.statistics.lock().next_round_bytes = next_pages * PAGE_SIZE as u64;
        let backlog = Backlog {
            unsent_bytes: shared.unsent_bytes(),
            streams: streams.map_or(Some(StreamsRemaining::default()), DeviceStreams::remaining),
            guest_runs: shared.vm.run_state() == RunState::Running,
        };
        let dirtied_pages = found.newly_dirty.saturating_sub(dropped);
        Ok(SyncResult { took, dirtied_pages, next_pages, backlog })
    }

    /// Makes the next round of what syncs have found, and lets lanes begin it.
    pub(super) fn publish(&mut self, tries_network: bool) {
        let ram = &self.shared.ram;
        let bits = std::mem::replace(&mut self.next, DirtyBitmaps::new(ram));
        if tries_network {
            // Devices' state may be large: what the network carries is tried with pages that would not be sent otherwise.
            let block = bits.block(0);
            block.set_range(0, TRIED_PAGES.min(block.pages()));
            self.shared.guest_source.leave_out(&bits);
        }
        let number = self.round.number() + 1;
        let round = RoundPages::new(number, ram, self.slices(), bits, false);
        let round = Arc::new(if tries_network { round.sending_zeros() } else { round });
        self.before = Some(std::mem::replace(&mut self.round, round));
        self.enter_round();
    }

    /// Of what a destination lacks, pages that the guest does not use need not be sent. Once another round was made, that is
    /// not known any more.
    pub(super) fn leave_out_unused(&self, missing: &Missing) {
        if let (None, Some(unused)) = (&self.before, self.round.unused()) {
            missing.leave_out(unused);
        }
    }

    /// How many of these pages lanes have taken before.
    pub(super) fn sent_among(&self, pages: &DirtyBitmaps) -> u64 {
        let mut unsent = DirtyBitmaps::new(&self.shared.ram);
        for round in [Some(&self.round), self.before.as_ref()].into_iter().flatten() {
            unsent.or_from(round.unsent());
        }
        let words = pages.blocks().iter().zip(unsent.blocks()).flat_map(|(pages, unsent)| {
            pages
                .words()
                .iter()
                .zip(unsent.words())
                .map(|(pages, unsent)| pages.load(Ordering::Relaxed) & !unsent.load(Ordering::Relaxed))
        });
        words.map(|word| u64::from(word.count_ones())).sum()
    }

    /// Makes the first round of a new session: what the destination lacks, and what syncs have found. It counts as begun at once:
    /// whatever happens before lanes get it, its pages are missing at the destination.
    pub(super) fn make_resumed(&mut self, missing: Missing) {
        let ram = &self.shared.ram;
        let Missing { mut pages, looks_for_absent } = missing;
        pages.or_from(&std::mem::replace(&mut self.next, DirtyBitmaps::new(ram)));
        let round = RoundPages::new(self.round.number() + 1, ram, self.slices(), pages, looks_for_absent);
        (self.round, self.before) = (Arc::new(round), None);
        let (counts, now) = (self.shared.counters.now(), self.shared.statistics.lock().clock());
        self.open = OpenRound::new(now, counts, false);
        self.note_unconfirmed();
    }

    /// Publishes the round that [`Rounds::make_resumed`] made.
    pub(super) fn publish_resumed(&self) {
        self.give_to_lanes();
    }

    /// Re-arms what syncs have found while the guest runs, so that less is left for its pause. Gives all pages of which that is so.
    pub(super) fn rearm_ahead(&mut self) -> Result<&DirtyBitmaps, MigrationError> {
        let (shared, slices) = (&self.shared, self.slices());
        let found = std::mem::replace(&mut self.next, DirtyBitmaps::new(&shared.ram));
        // Known before it is re-armed: none is lost if that fails.
        let rearmed = self.rearmed.get_or_insert_with(|| DirtyBitmaps::new(&shared.ram));
        rearmed.or_from(&found);
        RoundPages::new(0, &shared.ram, slices, DirtyBitmaps::new(&shared.ram), false).rearmed_with(
            &found,
            &shared.ram,
            shared.vm.dirty_source(),
        )?;
        Ok(rearmed)
    }

    /// They are re-armed once more in the pause, where nothing was copied ahead.
    pub(super) fn forget_ahead(&mut self) {
        if let Some(rearmed) = self.rearmed.take() {
            self.next.or_from(&rearmed);
        }
    }

    /// What syncs have found since then.
    pub(super) fn found_since(&self) -> &DirtyBitmaps {
        &self.next
    }

    /// The pages of a checkpoint: all that syncs have found. All are re-armed, those that were not [before](Rounds::rearm_ahead) while
    /// the guest stands (clause 7). Lanes get it when it is its turn. The second are the pages that were re-armed now.
    pub(super) fn make_checkpoint(&mut self) -> Result<(Arc<RoundPages>, DirtyBitmaps), MigrationError> {
        let shared = &self.shared;
        let found = std::mem::replace(&mut self.next, DirtyBitmaps::new(&shared.ram));
        let mut bits = self.rearmed.take().unwrap_or_else(|| DirtyBitmaps::new(&shared.ram));
        bits.or_from(&found);
        let round = RoundPages::new(self.round.number() + 1, &shared.ram, self.slices(), bits, false)
            .rearmed_with(&found, &shared.ram, shared.vm.dirty_source())?;
        self.round = Arc::new(round);
        self.before = None;
        self.is_checkpoint = true;
        Ok((Arc::clone(&self.round), found))
    }

    fn slices(&self) -> SliceSize {
        self.round.next_slices().at_most(self.shared.ram.total_bytes() / PAGE_SIZE as u64)
    }

    /// Whether the guest is stopped.
    pub(super) fn is_last(&self) -> bool {
        self.open.stopped
    }

    /// Every lane is through with `round`, and its flush is written.
    pub(super) fn close(&mut self, round: &RoundPages) {
        let counts = self.shared.counters.now();
        let mut statistics = self.shared.statistics.lock();
        statistics.observe(counts);
        let (now, open) = (statistics.clock(), &self.open);
        // What its sync found is the next round already, or waits for more.
        let is_followed = self.round.number() > round.number();
        let found = if is_followed { self.round.pages() } else { self.next.count() };
        let took = now - open.began;
        let mut lanes = statistics.lanes_between(open.counts, counts);
        // A wait is counted when it is over: it may have begun before the round, as an operator's in pre-switchover.
        lanes.idle = lanes.idle.min(took.saturating_sub(lanes.busy() + lanes.throttled));
        statistics.push_round(Round {
            number: round.number(),
            began: open.began,
            took,
            pages: round.pages(),
            bytes: counts.bytes() - open.counts.bytes(),
            lanes,
            sync: open.sync,
            sync_parts: open.sync_parts,
            dirtied_pages: found,
            stopped: open.stopped,
        });
        let stopped = statistics.at_stop.is_some();
        self.open = OpenRound::new(now, counts, stopped);
    }

    /// Marks the round that begins now as one with the guest stopped.
    pub(super) fn open_last(&mut self) {
        let (counts, began) = (self.shared.counters.now(), self.shared.statistics.lock().clock());
        self.open = OpenRound::new(began, counts, true);
    }

    /// Lets the lanes begin the round that was made last.
    fn enter_round(&self) {
        self.note_unconfirmed();
        self.give_to_lanes();
    }

    /// Of no page of the round that was made last it is known that it is held.
    fn note_unconfirmed(&self) {
        if let Some(unconfirmed) = self.shared.unconfirmed.get() {
            unconfirmed.begin_round(self.round.unsent(), self.round.looks_for_absent());
        }
    }

    fn give_to_lanes(&self) {
        let mut statistics = self.shared.statistics.lock();
        statistics.rounds_begun = self.round.number();
        statistics.next_round_bytes = 0;
        statistics.round = Some(Arc::clone(&self.round));
        drop(statistics);
        self.shared.lanes.queue.publish(Arc::clone(&self.round));
    }

    /// Tells the observer of the round that was published last.
    pub(super) fn tell(&self) {
        self.shared.tell(&Event::Round(self.round.number()));
    }
}
