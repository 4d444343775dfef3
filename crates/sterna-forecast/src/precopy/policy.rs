//! The state machine of the precopy policy.

use std::time::Duration;

use sterna_wire::PAGE_SIZE;

use super::convergence::{Convergence, JUDGE_INTERVAL, Step, Trend};
use super::costs::Costs;
use super::counts::Counts;
use super::downtime::DowntimeEstimate;
use super::input::{
    Backlog, Begun, Input, Output, RoundProgress, Snapshot, Standstill, StreamsRemaining, SyncResult,
};
use super::meter::{Meter, WINDOW};
use super::pace::{HALF_LIFE, LONGEST, Pace};
use super::settings::Settings;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;
/// How long to wait for lanes before any measurement.
const UNMEASURED: Duration = Duration::from_millis(20);
/// How much earlier than its duration requires a sync begins. A thread must wake, and a round be made.
const HEAD_START: Duration = Duration::from_micros(500);
/// How long a round waits for devices if only their state exceeds the limit.
const STREAM_PATIENCE: Duration = Duration::from_millis(20);
/// Pages that the engine sends to measure the network without other pages: 4 MiB.
pub const TRIED_PAGES: u64 = 1024;
/// Minimum time with few pages after which the network is measured again.
const TRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait for acknowledgements before the next sync (specs/stream.md §8).
const ACK_PATIENCE: Duration = Duration::from_millis(100);
/// Minimum time between two syncs from which a dirty rate is computed. Shorter times are inaccurate.
const RATE_WINDOW: Duration = Duration::from_millis(5);

/// Decides the steps of precopy. It performs nothing, and answers every [`Input`] with [`Output`]s.
#[derive(Debug, Clone)]
pub struct Policy {
    settings: Settings,
    costs: Costs,
    meter: Meter,
    convergence: Convergence,
    state: PolicyState,
    outputs: Vec<Output>,
    snapshot: Snapshot,
    /// The round that was published last.
    round_number: u64,
    last_sync: Duration,
    /// Time when the last sync ended, and its result.
    last_synced: Option<(Duration, SyncResult)>,
    rate: DirtyRate,
    verdict: Verdict,
    expected: Duration,
    estimate: Option<DowntimeEstimate>,
    streams_need: Duration,
    /// Begin of the interval after which the network may be measured again, and the bytes of content until then.
    interval: (Duration, u64),
    /// The last round measures the network.
    is_trying: bool,
    /// At the last judgement device state would have fitted the limit over a faster network.
    waits_for_network: bool,
    /// At the last judgement only device state that moves in the downtime exceeded the limit.
    is_slowing_useless: bool,
    /// Time of the last judgement of convergence, and the counters at that time.
    judged: (Duration, Counts),
    /// Number of pages found dirty since the last judgement.
    dirtied_pages: u64,
    /// The present dirty limit, in bytes per second.
    dirty_limit: Option<u64>,
    is_warned: bool,
    /// The migration did not converge, so the downtime limit is not applied any more.
    is_limit_lifted: bool,
}

/// The event that the policy waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyState {
    /// A round was published, and no snapshot of it has arrived yet.
    Entering,
    /// Lanes must come near the end of the round.
    Sending,
    /// The sync must end. `dry`: lanes send nothing meanwhile.
    Syncing { dry: bool },
    /// The remaining device state must shrink, at most until `until`.
    Streams { until: Duration, dry: bool },
    /// Lanes must run dry. `fits`: the remaining pages fitted at the last sync.
    Drying { fits: bool },
    /// The requested switchover must happen or be refused.
    Requested,
    /// The destination must acknowledge, at most until `until`.
    Acknowledgements { until: Duration },
    /// The migration is over.
    Ended,
}

/// Whether the remaining pages fit the downtime limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Fits,
    /// The pages fit, but the remaining device state does not.
    WaitsForStreams,
    TooLong,
}

/// Measures how fast the guest dirties pages.
#[derive(Debug, Clone, Copy, Default)]
struct DirtyRate {
    since: Duration,
    pages: u64,
    per_second: u64,
}

impl Policy {
    /// A policy for a migration whose first round is published.
    pub fn new(begun: Begun, snapshot: Snapshot) -> Self {
        let mut meter = Meter::new(HALF_LIFE, begun.channels);
        meter.restart(snapshot.now, snapshot.counts);
        Self {
            settings: begun.settings,
            costs: Costs::new(begun.fixed_downtime, begun.round_trip),
            meter,
            convergence: Convergence::default(),
            state: PolicyState::Sending,
            outputs: Vec::new(),
            snapshot,
            round_number: 1,
            last_sync: Duration::ZERO,
            last_synced: None,
            rate: DirtyRate { since: snapshot.now, ..DirtyRate::default() },
            verdict: Verdict::TooLong,
            expected: Duration::ZERO,
            estimate: None,
            streams_need: Duration::ZERO,
            interval: (snapshot.now, snapshot.counts.content_bytes()),
            is_trying: false,
            waits_for_network: false,
            is_slowing_useless: false,
            judged: (snapshot.now, snapshot.counts),
            dirtied_pages: 0,
            dirty_limit: None,
            is_warned: false,
            is_limit_lifted: false,
        }
    }

    /// Processes an event, and returns the next steps in their order. Only the last output can require an input as its
    /// answer. An input that does not match the state changes no decision.
    pub fn handle(&mut self, input: Input) -> Vec<Output> {
        match input {
            Input::Began(begun, snapshot) => {
                // The first sync after a lost connection reports the pages written since the last sync before the
                // loss.
                let rate = DirtyRate { per_second: 0, ..self.rate };
                *self = Self { rate, ..Self::new(begun, snapshot) };
            }
            Input::Observed(snapshot) => self.observed(snapshot),
            Input::Synced(synced, snapshot) => self.synced(synced, snapshot),
            Input::Flushed(snapshot) => self.flushed(snapshot),
            Input::NotAcknowledged(snapshot) => {
                self.observe(snapshot);
                if self.state == PolicyState::Requested {
                    self.state = PolicyState::Acknowledgements { until: snapshot.now + ACK_PATIENCE };
                }
            }
            Input::Answered(answer) => {
                let bandwidth = self.pace().bandwidth_bytes();
                self.costs.answered(answer, bandwidth);
            }
            Input::Set(settings) => self.settings = settings,
            Input::Ended => self.end(),
        }
        std::mem::take(&mut self.outputs)
    }

    /// The downtime if the switchover began now.
    pub fn expected_downtime(&self) -> Duration {
        self.expected
    }

    /// The parts of the expected downtime, as of the last sync that was judged.
    pub fn estimate(&self) -> Option<DowntimeEstimate> {
        self.estimate
    }

    /// Number of pages that the guest dirties per second.
    pub fn dirty_pages_per_second(&self) -> u64 {
        self.rate.per_second
    }

    /// The present throttle, in percent of the time that vCPUs sleep.
    pub fn throttle_percent(&self) -> u8 {
        self.convergence.throttle_percent()
    }

    /// Whether dirty rates are limited.
    pub fn is_dirty_limited(&self) -> bool {
        self.dirty_limit.is_some()
    }

    fn observed(&mut self, snapshot: Snapshot) {
        if let Some(late) = snapshot.late {
            self.costs.woke(late);
        }
        self.observe(snapshot);
        if self.state == PolicyState::Entering {
            self.state = PolicyState::Sending;
        }
        match self.state {
            PolicyState::Sending if self.is_nearly_sent() => {
                self.outputs.push(Output::Sync);
                self.state = PolicyState::Syncing { dry: false };
            }
            PolicyState::Streams { until, dry } if snapshot.now >= until => self.publish(dry),
            PolicyState::Acknowledgements { until } if snapshot.now >= until => self.publish(true),
            _ => {}
        }
    }

    fn synced(&mut self, synced: SyncResult, snapshot: Snapshot) {
        self.observe(snapshot);
        self.last_sync = synced.took;
        self.last_synced = Some((snapshot.now, synced));
        self.rate.pages = self.rate.pages.saturating_add(synced.dirtied_pages);
        // A rate over the short time between two close syncs would be inaccurate.
        let since = snapshot.now.saturating_sub(self.rate.since);
        if since >= RATE_WINDOW {
            self.dirtied_pages = self.dirtied_pages.saturating_add(self.rate.pages);
            let per_second = (self.rate.pages as f64 / since.as_secs_f64()) as u64;
            self.rate = DirtyRate { since: snapshot.now, pages: 0, per_second };
        }
        let PolicyState::Syncing { dry } = self.state else { return };
        let remaining = if dry { 0 } else { snapshot.round.remaining };
        self.verdict = self.judge_remaining(synced.next_pages.saturating_add(remaining), synced.backlog);
        match (dry, self.verdict) {
            (false, Verdict::Fits) => self.run_dry(self.round_number, true),
            (true, Verdict::Fits) => self.request_switchover(),
            (_, Verdict::WaitsForStreams) => {
                self.state = PolicyState::Streams { until: snapshot.now + STREAM_PATIENCE, dry };
            }
            (_, Verdict::TooLong) => self.publish(dry),
        }
    }

    fn flushed(&mut self, snapshot: Snapshot) {
        self.observe(snapshot);
        match self.state {
            PolicyState::Drying { fits: true } => self.confirm(),
            PolicyState::Drying { fits: false } => self.enter_round(),
            _ => {}
        }
    }

    /// Called when the remaining pages fitted at the last sync, and lanes have run dry since. Another sync would give
    /// the guest more time to write. It is requested only if the guest has probably written more than fits meanwhile.
    fn confirm(&mut self) {
        let Some((at, synced)) = self.last_synced else { return };
        let meanwhile = self.snapshot.now.saturating_sub(at).as_secs_f64();
        let written = self.rate.per_second as f64 * meanwhile;
        if self.judge_remaining(synced.next_pages.saturating_add(written as u64), synced.backlog)
            == Verdict::Fits
        {
            self.request_switchover();
        } else {
            self.outputs.push(Output::Sync);
            self.state = PolicyState::Syncing { dry: true };
        }
    }

    fn request_switchover(&mut self) {
        self.outputs.push(Output::RequestSwitchover);
        self.state = PolicyState::Requested;
    }

    /// Publishes the next round. Unless lanes are dry, the previous round must be flushed first.
    fn publish(&mut self, dry: bool) {
        let tries_network = self.tries_network();
        self.outputs.push(Output::Publish { tries_network });
        self.round_number += 1;
        if dry { self.enter_round() } else { self.run_dry(self.round_number - 1, false) }
    }

    /// Whether the next round measures the network with pages that would not be sent otherwise.
    ///
    /// That is so before any measurement. It is also so if device state waits only for the network, and few pages were
    /// sent for some time: the last measurement may be from a slow moment. Tries take at most half of the bandwidth.
    fn tries_network(&mut self) -> bool {
        let (now, content) = (self.snapshot.now, self.snapshot.counts.content_bytes());
        let (since, before) = self.interval;
        let passed = now.saturating_sub(since);
        let least = self.lanes_need(TRIED_PAGES).unwrap_or_default().max(TRY_INTERVAL);
        let was_trying = std::mem::replace(&mut self.is_trying, false);
        let is_over = passed >= least;
        if was_trying || is_over {
            self.interval = (now, content);
        }
        if self.verdict != Verdict::WaitsForStreams {
            return false;
        }
        let is_little = content.saturating_sub(before) < TRIED_PAGES * PAGE_BYTES;
        let is_old = is_over && !was_trying && is_little && self.waits_for_network;
        if is_old {
            self.meter.fade(passed);
        }
        self.is_trying = is_old || !self.pace().is_tried();
        self.is_trying
    }

    fn run_dry(&mut self, number: u64, fits: bool) {
        self.outputs.push(Output::RunDry { number });
        self.state = PolicyState::Drying { fits };
    }

    fn enter_round(&mut self) {
        self.converge();
        self.state = PolicyState::Entering;
    }

    fn observe(&mut self, snapshot: Snapshot) {
        self.snapshot = snapshot;
        self.meter.observe(snapshot.now, snapshot.counts);
    }

    fn pace(&self) -> Pace {
        self.meter.pace(self.snapshot.now, self.snapshot.counts)
    }

    /// Time of the next [`Input::Observed`] if no other input precedes it. An earlier one is allowed, and improves the
    /// decisions if it updates the measured pace ([`WINDOW`](super::WINDOW)).
    pub fn wake_at(&self) -> Duration {
        let now = self.snapshot.now;
        match self.state {
            PolicyState::Entering => now,
            PolicyState::Sending => {
                let wait = self
                    .lanes_need(self.snapshot.round.remaining)
                    .map_or(UNMEASURED, |left| left.saturating_sub(self.head()).max(HEAD_START));
                now + wait
            }
            PolicyState::Streams { until, .. } | PolicyState::Acknowledgements { until } => until,
            // In the other states, the engine's answer to the last output is the next input.
            _ => now + WINDOW,
        }
    }

    /// How long before lanes finish the round a sync has to begin.
    fn head(&self) -> Duration {
        self.last_sync * 2 + HEAD_START
    }

    /// Whether half of the round is sent, and lanes need at most twice a sync, and a little more, for the rest. A
    /// sync in the first half would find few pages, because unsent pages are excluded.
    fn is_nearly_sent(&self) -> bool {
        let RoundProgress { pages, remaining, is_rearmed, is_searched } = self.snapshot.round;
        let is_near = || self.lanes_need(remaining).is_some_and(|left| left <= self.head());
        is_rearmed || (is_searched && remaining.saturating_mul(2) <= pages && is_near())
    }

    /// Whether the remaining pages can be moved within the downtime limit.
    fn judge_remaining(&mut self, pages: u64, backlog: Backlog) -> Verdict {
        if !backlog.guest_runs {
            return Verdict::Fits;
        }
        let Some(StreamsRemaining { bytes, slowest, moves_in_downtime }) = backlog.streams else {
            return Verdict::WaitsForStreams;
        };
        if pages == 0 && bytes == 0 {
            return Verdict::Fits;
        }
        // Data in sockets is sent before the last pages.
        let pages = pages.saturating_add(backlog.unsent_bytes.div_ceil(PAGE_BYTES));
        let stream_pages = bytes.div_ceil(PAGE_BYTES);
        let (Some(sending), Some(all)) =
            (self.switchover_needs(pages), self.switchover_needs(pages.saturating_add(stream_pages)))
        else {
            return Verdict::TooLong;
        };
        self.streams_need = self.switchover_needs(stream_pages).unwrap_or_default().max(slowest);
        // Devices are read and loaded in parallel, and in parallel with the pages.
        let remaining = all.max(slowest);
        let estimate = DowntimeEstimate {
            fixed: self.costs.of_downtime(),
            sync: self.last_sync.as_secs_f64(),
            remaining: remaining.as_secs_f64(),
            margin: self.pace().margin(self.settings.max_bandwidth_bytes),
        };
        self.expected = Duration::try_from_secs_f64(estimate.expected()).unwrap_or(Duration::MAX);
        self.estimate = Some(estimate);
        let limit = self.settings.downtime_limit.as_secs_f64();
        (self.is_slowing_useless, self.waits_for_network) = (false, false);
        let fits = |remaining: Duration| {
            DowntimeEstimate { remaining: remaining.as_secs_f64(), ..estimate }.fits(limit)
        };
        if estimate.fits(limit) || self.is_limit_lifted {
            Verdict::Fits
        } else if fits(sending) {
            self.is_slowing_useless = moves_in_downtime;
            let measures = self.settings.avail_switchover_bandwidth_bytes == 0;
            self.waits_for_network = measures && fits(sending.max(slowest));
            Verdict::WaitsForStreams
        } else {
            Verdict::TooLong
        }
    }

    /// Estimates the time for `pages` pages with the guest stopped. `None` before any measurement.
    fn switchover_needs(&self, pages: u64) -> Option<Duration> {
        match self.settings.avail_switchover_bandwidth_bytes {
            // `max-bandwidth` does not limit the switchover, but the network's bandwidth without it is unknown.
            0 => self.lanes_need(pages),
            stated => {
                let seconds = pages as f64 * PAGE_BYTES as f64 / stated as f64;
                Some(Duration::from_secs_f64(seconds.min(LONGEST)))
            }
        }
    }

    /// Estimates the time for `pages` pages at the present pace of lanes. `None` before any measurement.
    fn lanes_need(&self, pages: u64) -> Option<Duration> {
        self.pace().time_for(pages, self.settings.max_bandwidth_bytes)
    }

    /// Judges after a round whether the migration converges.
    fn converge(&mut self) {
        let (now, counts) = (self.snapshot.now, self.snapshot.counts);
        let (since, before) = self.judged;
        if now.saturating_sub(since) < JUDGE_INTERVAL {
            return;
        }
        // The operator may have changed both settings.
        if let Some(percent) = self.convergence.lower_to(self.settings.max_cpu_throttle) {
            self.outputs.push(Output::Throttle(percent));
        }
        if self.convergence.is_limited() {
            self.limit_dirty_rate();
        }
        let trend = Trend {
            dirtied_bytes: self.dirtied_pages.saturating_mul(PAGE_BYTES),
            sent_bytes: counts.pages().saturating_sub(before.pages()).saturating_mul(PAGE_BYTES),
            expected: self.expected,
            fits: self.verdict == Verdict::Fits,
            is_slowing_useless: self.is_slowing_useless,
        };
        (self.judged, self.dirtied_pages) = ((now, counts), 0);
        match self.convergence.judge(trend, &self.settings) {
            Step::GoOn => {}
            Step::Throttle(percent) => self.outputs.push(Output::Throttle(percent)),
            Step::LimitDirtyRate => self.limit_dirty_rate(),
            Step::NotConverging if self.settings.fails => {
                self.outputs.push(Output::GiveUp(self.standstill()));
            }
            Step::NotConverging => {
                self.is_limit_lifted = self.settings.exceeds_limit;
                if !std::mem::replace(&mut self.is_warned, true) {
                    self.outputs.push(Output::Warn(self.standstill()));
                }
            }
        }
    }

    fn limit_dirty_rate(&mut self) {
        let limit = Some(self.settings.vcpu_dirty_limit_bytes);
        if self.dirty_limit != limit {
            self.dirty_limit = limit;
            self.outputs.push(Output::LimitDirtyRate(limit));
        }
    }

    fn standstill(&self) -> Standstill {
        Standstill {
            dirtied_bytes: self.rate.per_second.saturating_mul(PAGE_BYTES),
            drained_bytes: self.pace().drain_bytes(),
            expected: self.expected,
            streams: self.streams_need,
        }
    }

    /// Removes the throttle and the dirty limit.
    fn end(&mut self) {
        if self.convergence.throttle_percent() > 0 {
            self.outputs.push(Output::Throttle(0));
        }
        if self.dirty_limit.take().is_some() {
            self.outputs.push(Output::LimitDirtyRate(None));
        }
        self.convergence = Convergence::default();
        self.state = PolicyState::Ended;
    }
}
