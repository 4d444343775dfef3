//! The rounds of precopy: the current round, later dirty pages, and the statistics.

#[cfg(feature = "standby")]
mod checkpoints;

use std::sync::Arc;
#[cfg(feature = "reconnect")]
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

use crate::error::MigrationError;
use crate::events::Event;
use crate::order::{RoundPages, SliceSize};
use crate::outgoing::measure::LiveStatistics;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::precopy::{Backlog, Counts, RoundProgress, Snapshot, StreamsRemaining, SyncResult, TRIED_PAGES};
#[cfg(feature = "reconnect")]
use crate::reconnect::Missing;
use crate::stats::{Round, SyncParts};
use crate::threads::call;
use crate::vm::RunState;

/// The current round and the pages of the next one.
pub(in crate::outgoing) struct Rounds {
    shared: Arc<Shared>,
    /// The round that was published last, and the previous one.
    round: Arc<RoundPages>,
    before: Option<Arc<RoundPages>>,
    /// The round is a checkpoint: lanes read staged copies, or the guest is paused.
    is_checkpoint: bool,
    /// Pages that a sync found dirty and that are in no round yet.
    next: DirtyBitmaps,
    /// Such pages that were re-armed since. A later write to one of them also sets its bit in `next`.
    #[cfg_attr(not(feature = "standby"), allow(dead_code, reason = "only checkpoints re-arm ahead"))]
    rearmed: Option<DirtyBitmaps>,
    open: OpenRound,
    /// The last round whose statistics are complete.
    closed: u64,
    /// The rounds before the policy began for this session: the number of its first round, less 1.
    before_policy: u64,
    /// The begin of the last sync, as time since the migration's start.
    synced: Duration,
    /// When the syncs began that found the pages of the previous and the last round.
    found: [Duration; 2],
}

/// Measures the current round.
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

    /// The statistics of `round`, which ended at `now`, without its dirtied pages.
    fn until(&self, now: Duration, counts: Counts, round: &RoundPages, statistics: &LiveStatistics) -> Round {
        let took = now.saturating_sub(self.began);
        let mut lanes = statistics.lanes_between(self.counts, counts);
        // A wait is counted when it ends. It may have begun before the round, as in an operator's pre-switchover
        // pause.
        lanes.idle = lanes.idle.min(took.saturating_sub(lanes.busy() + lanes.throttled));
        Round {
            number: round.number(),
            began: self.began,
            took,
            pages: round.pages(),
            bytes: counts.bytes() - self.counts.bytes(),
            lanes,
            sync: self.sync,
            sync_parts: self.sync_parts,
            stopped: self.stopped,
            ..Round::default()
        }
    }
}

impl Rounds {
    /// The first round over `pages`. With `takes_hints`, it leaves out pages that the guest does not use.
    pub(in crate::outgoing) fn first(
        shared: &Shared,
        pages: DirtyBitmaps,
        look_for_absent: bool,
        takes_hints: bool,
    ) -> Arc<RoundPages> {
        let ram = &shared.guest.ram;
        let slices = SliceSize::for_ram(ram.total_bytes() / PAGE_SIZE as u64);
        let round = RoundPages::new(1, ram, slices, pages, look_for_absent);
        Arc::new(if takes_hints { round.taking_hints(ram) } else { round })
    }

    /// Publishes the first round.
    pub(in crate::outgoing) fn begin(shared: &Arc<Shared>, round: Arc<RoundPages>) -> Self {
        let (counts, mut statistics) = (shared.measures.counters.now(), shared.measures.statistics.lock());
        statistics.begin_pages(counts);
        let now = statistics.clock();
        let open = OpenRound::new(now, counts, false);
        drop(statistics);
        let rounds = Self {
            shared: Arc::clone(shared),
            round,
            before: None,
            is_checkpoint: false,
            next: DirtyBitmaps::new(&shared.guest.ram),
            rearmed: None,
            open,
            closed: 0,
            before_policy: 0,
            synced: now,
            found: [now; 2],
        };
        rounds.enter_round();
        rounds
    }

    /// The round that was published last.
    pub(in crate::outgoing) fn round(&self) -> &Arc<RoundPages> {
        &self.round
    }

    /// The policy's round with this number, which is one of the last two.
    pub(in crate::outgoing) fn round_of_policy(
        &self,
        number: u64,
    ) -> Result<Arc<RoundPages>, MigrationError> {
        let number = self.before_policy + number;
        let rounds = [Some(&self.round), self.before.as_ref()];
        let round = rounds.into_iter().flatten().find(|round| round.number() == number).cloned();
        round.ok_or_else(|| MigrationError::Internal(format!("round {number} is not there")))
    }

    /// The last two rounds, oldest first: lanes may work on both.
    pub(in crate::outgoing) fn latest(&self) -> Vec<Arc<RoundPages>> {
        [self.before.as_ref(), Some(&self.round)].into_iter().flatten().cloned().collect()
    }

    /// The pages that the destination lacks after lanes have stopped sending.
    ///
    /// These are pages that syncs found, and pages that the last rounds did not send.
    #[cfg(feature = "postcopy")]
    pub(in crate::outgoing) fn unsent(&self) -> DirtyBitmaps {
        let mut unsent = DirtyBitmaps::new(&self.shared.guest.ram);
        unsent.or_from(&self.next);
        for round in self.latest() {
            unsent.or_from(round.unsent());
        }
        unsent
    }

    /// The present state, for the policy.
    pub(in crate::outgoing) fn snapshot(&self) -> Snapshot {
        // Over RDMA the lane takes pages earlier than it sends them.
        let taken = self.shared.measures.rdma.queued_bytes().div_ceil(PAGE_SIZE as u64);
        let pages = self.round.pages();
        Snapshot {
            now: self.shared.measures.statistics.lock().clock(),
            late: None,
            counts: self.shared.measures.counters.now(),
            round: RoundProgress {
                pages,
                remaining: self.round.remaining_pages().saturating_add(taken).min(pages),
                is_rearmed: self.round.is_rearmed() && taken == 0,
                is_searched: self.round.is_searched(),
            },
        }
    }

    /// Syncs. The pages that it finds are sent in the next round.
    ///
    /// Pages that the current round still has to send are left out: that round reads them later than now (clause
    /// 6).
    pub(in crate::outgoing) fn sync(
        &mut self,
        streams: Option<&DeviceStreams>,
    ) -> Result<SyncResult, MigrationError> {
        let shared = &self.shared;
        let began = Instant::now();
        let found = call("DirtySource::sync", || shared.guest.vm.dirty_source().sync(&mut self.next))?;
        // The unsent pages of a checkpoint have older content than the writes that this sync found.
        let dropped = if self.is_checkpoint { 0 } else { self.round.drop_unsent(&mut self.next) };
        let took = began.elapsed();
        self.open.sync += took;
        self.open.sync_parts += found.times;
        let next_pages = self.next.count();
        let mut statistics = shared.measures.statistics.lock();
        statistics.next_round_bytes = next_pages * PAGE_SIZE as u64;
        self.synced = statistics.since_start(began);
        drop(statistics);
        let backlog = Backlog {
            unsent_bytes: shared.unsent_bytes(),
            streams: streams.map_or(Some(StreamsRemaining::default()), DeviceStreams::remaining),
            guest_runs: call("SourceVm::run_state", || shared.guest.vm.run_state()) == RunState::Running,
        };
        let dirtied_pages = found.newly_dirty.saturating_sub(dropped);
        Ok(SyncResult { took, dirtied_pages, next_pages, backlog })
    }

    /// Makes the next round from the pages that syncs found, and publishes it.
    pub(in crate::outgoing) fn publish(&mut self, tries_network: bool) {
        let ram = &self.shared.guest.ram;
        let bits = std::mem::replace(&mut self.next, DirtyBitmaps::new(ram));
        if tries_network {
            // Device state may be large. Pages that would not be sent otherwise measure the network's bandwidth.
            let block = bits.block(0);
            block.set_range(0, TRIED_PAGES.min(block.pages()));
            self.shared.guest.source.leave_out(&bits);
        }
        let number = self.round.number() + 1;
        let round = RoundPages::new(number, ram, self.slices(), bits, false);
        let round = Arc::new(if tries_network { round.sending_zeros() } else { round });
        self.before = Some(std::mem::replace(&mut self.round, round));
        self.found = [self.found[1], self.synced];
        self.enter_round();
    }

    /// Removes pages that the guest does not use from `missing`.
    ///
    /// Unused pages are known only until the second round is made.
    #[cfg(feature = "reconnect")]
    pub(in crate::outgoing) fn leave_out_unused(&self, missing: &Missing) {
        if let (None, Some(unused)) = (&self.before, self.round.unused()) {
            missing.leave_out(unused);
        }
    }

    /// How many of these pages lanes have taken in the last two rounds.
    #[cfg(feature = "reconnect")]
    pub(in crate::outgoing) fn sent_among(&self, pages: &DirtyBitmaps) -> u64 {
        let mut unsent = DirtyBitmaps::new(&self.shared.guest.ram);
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

    /// Makes the first round of a new session from missing pages and dirty pages.
    ///
    /// Missing pages are those that the destination lacks. Dirty pages are those that syncs found.
    ///
    /// The round counts as begun immediately. If this session is lost before lanes get the round, its pages are
    /// still known to be missing at the destination.
    #[cfg(feature = "reconnect")]
    pub(in crate::outgoing) fn make_resumed(&mut self, missing: Missing) {
        let ram = &self.shared.guest.ram;
        let Missing { mut pages, looks_for_absent } = missing;
        pages.or_from(&std::mem::replace(&mut self.next, DirtyBitmaps::new(ram)));
        let round = RoundPages::new(self.round.number() + 1, ram, self.slices(), pages, looks_for_absent);
        (self.round, self.before) = (Arc::new(round), None);
        self.found = [self.found[1], self.synced];
        let (counts, now) =
            (self.shared.measures.counters.now(), self.shared.measures.statistics.lock().clock());
        self.open = OpenRound::new(now, counts, false);
        self.note_unconfirmed();
    }

    /// Publishes the round that [`Rounds::make_resumed`] made.
    #[cfg(feature = "reconnect")]
    pub(in crate::outgoing) fn publish_resumed(&mut self) {
        self.before_policy = self.round.number() - 1;
        self.give_to_lanes();
    }

    fn slices(&self) -> SliceSize {
        self.round.next_slices().at_most(self.shared.guest.ram.total_bytes() / PAGE_SIZE as u64)
    }

    /// Whether the open round is one with the guest stopped.
    pub(in crate::outgoing) fn is_last(&self) -> bool {
        self.open.stopped
    }

    /// Completes the statistics of `round`: every lane has finished it, and its flush is written.
    pub(in crate::outgoing) fn close(&mut self, round: &RoundPages) {
        let counts = self.shared.measures.counters.now();
        let mut statistics = self.shared.measures.statistics.lock();
        statistics.observe(counts);
        let now = statistics.clock();
        // The pages that its sync found are the next round already, or wait for further syncs.
        let is_followed = self.round.number() > round.number();
        let (dirtied_pages, [from, to]) = match is_followed {
            true => (self.round.pages(), self.found),
            false => (self.next.count(), [self.found[1], self.synced]),
        };
        if round.number() > self.closed {
            let sent = self.open.until(now, counts, round, &statistics);
            // The switch to postcopy ends a round early.
            statistics.push_round(match round.remaining_pages() {
                0 => Round { dirtied_pages, dirtied_time: to.saturating_sub(from), ..sent },
                _ => Round { unfinished: true, ..sent },
            });
            self.closed = round.number();
        }
        let stopped = statistics.at_stop.is_some();
        self.open = OpenRound::new(now, counts, stopped);
    }

    /// Records the sent part of rounds that will not be finished.
    ///
    /// Lanes send no more pages of them. The last of these rounds ended `ago`.
    pub(in crate::outgoing) fn leave_unfinished(&mut self, ago: Duration) {
        if self.is_checkpoint {
            return;
        }
        let counts = self.shared.measures.counters.now();
        let mut statistics = self.shared.measures.statistics.lock();
        let now = statistics.clock().saturating_sub(ago).max(self.open.began);
        for round in self.latest().iter().filter(|round| round.number() > self.closed) {
            let sent = self.open.until(now, counts, round, &statistics);
            statistics.push_round(Round { unfinished: true, ..sent });
            self.open = OpenRound::new(now, counts, self.open.stopped);
        }
        self.closed = self.round.number();
    }

    /// Marks the round that begins now as one with the guest stopped.
    pub(in crate::outgoing) fn open_last(&mut self) {
        let (counts, began) =
            (self.shared.measures.counters.now(), self.shared.measures.statistics.lock().clock());
        self.open = OpenRound::new(began, counts, true);
    }

    /// Gives the last round to the lanes.
    fn enter_round(&self) {
        self.note_unconfirmed();
        self.give_to_lanes();
    }

    /// Records that no page of the last round is confirmed by the destination yet.
    fn note_unconfirmed(&self) {
        self.shared.reconnection.begin_round(&self.round);
    }

    fn give_to_lanes(&self) {
        let mut statistics = self.shared.measures.statistics.lock();
        statistics.rounds_begun = self.round.number();
        statistics.next_round_bytes = 0;
        statistics.round = Some(Arc::clone(&self.round));
        drop(statistics);
        self.shared.session.lanes.queue.publish(Arc::clone(&self.round));
    }

    /// Emits the event of the round that was published last.
    pub(in crate::outgoing) fn tell(&self) {
        self.shared.tell(&Event::Round(self.round.number()));
    }
}
