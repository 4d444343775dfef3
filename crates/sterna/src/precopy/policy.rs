//! The state machine.

use std::time::Duration;

use sterna_ram::PAGE_SIZE;

use super::convergence::{Convergence, LOOK_EVERY, Step, Trend};
use super::costs::Costs;
use super::counts::Counts;
use super::input::{Backlog, Begun, Input, Look, Output, PassLook, Standstill, StreamsLeft, Synced};
use super::meter::{Meter, WINDOW};
use super::pace::{HALF_LIFE, LONGEST, Pace};
use super::pause::Pause;
use super::settings::Settings;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;
/// How long to wait for lanes of which nothing was measured yet.
const UNMEASURED: Duration = Duration::from_millis(20);
/// A sync begins so much earlier than it would have to by its own time: a thread must wake, a pass be made.
const HEAD_START: Duration = Duration::from_micros(500);
/// How long a round waits for devices, when nothing but their state keeps the rest from fitting.
const STREAM_PATIENCE: Duration = Duration::from_millis(20);
/// How long to wait for acknowledgements before the next look at the dirty bits (specs/stream.md §8).
const ACK_PATIENCE: Duration = Duration::from_millis(100);
/// Syncs closer together than this say nothing about the rate.
const RATE_WINDOW: Duration = Duration::from_millis(5);

/// Decides how precopy goes on: does nothing itself, and answers every [`Input`] with what is to be done.
#[derive(Debug, Clone)]
pub(crate) struct Policy {
    settings: Settings,
    costs: Costs,
    meter: Meter,
    convergence: Convergence,
    state: State,
    outputs: Vec<Output>,
    look: Look,
    /// The pass that was published last.
    pass_number: u64,
    last_sync: Duration,
    /// What the last sync found, and when it ended.
    last_synced: Option<(Duration, Synced)>,
    rate: DirtyRate,
    verdict: Verdict,
    expected: Duration,
    streams_need: Duration,
    /// The last look at whether the end comes nearer: when, and what had been done.
    judged: (Duration, Counts),
    /// Pages found dirty since.
    dirtied_pages: u64,
    /// The dirty limit in force, bytes per second.
    dirty_limit: Option<u64>,
    is_warned: bool,
}

/// What it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A pass was published, and nobody has looked at it yet.
    Entering,
    /// Lanes are to come near the end of the pass.
    Sending,
    /// A sync; `dry`: nothing is being sent.
    Syncing { dry: bool },
    /// Devices are to come nearer.
    Streams { until: Duration, dry: bool },
    /// Lanes are to run dry; `fits`: the rest fitted.
    Drying { fits: bool },
    /// The switchover was requested.
    Requested,
    /// Acknowledgements are missing.
    Acknowledgements { until: Duration },
    /// All is over.
    Ended,
}

/// Whether the rest fits the downtime limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Fits,
    /// It would, but for what devices have left to be read.
    WaitsForStreams,
    TooLong,
}

/// How fast the guest dirties pages.
#[derive(Debug, Clone, Copy, Default)]
struct DirtyRate {
    since: Duration,
    pages: u64,
    per_second: u64,
}

impl Policy {
    /// For a migration whose first pass is published.
    pub fn new(begun: Begun, look: Look) -> Self {
        let mut meter = Meter::new(HALF_LIFE, begun.channels);
        meter.restart(look.now, look.counts);
        Self {
            settings: begun.settings,
            costs: Costs::new(begun.fixed_pause, begun.round_trip),
            meter,
            convergence: Convergence::default(),
            state: State::Sending,
            outputs: Vec::new(),
            look,
            pass_number: 1,
            last_sync: Duration::ZERO,
            last_synced: None,
            rate: DirtyRate { since: look.now, ..DirtyRate::default() },
            verdict: Verdict::TooLong,
            expected: Duration::ZERO,
            streams_need: Duration::ZERO,
            judged: (look.now, look.counts),
            dirtied_pages: 0,
            dirty_limit: None,
            is_warned: false,
        }
    }

    /// Takes in what happened, and says what to do now, in this order. An output that is answered by an input is the last
    /// one. An input that does not belong to the moment changes no decision.
    pub fn handle(&mut self, input: Input) -> Vec<Output> {
        match input {
            Input::Began(begun, look) => *self = Self::new(begun, look),
            Input::Looked(look) => self.looked(look),
            Input::Synced(synced, look) => self.synced(synced, look),
            Input::Flushed(look) => self.flushed(look),
            Input::NotAcknowledged(look) => {
                self.observe(look);
                if self.state == State::Requested {
                    self.state = State::Acknowledgements { until: look.now + ACK_PATIENCE };
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

    /// The pause if the switchover came now.
    pub fn expected_downtime(&self) -> Duration {
        self.expected
    }

    /// Pages that the guest dirties per second.
    pub fn dirty_pages_per_second(&self) -> u64 {
        self.rate.per_second
    }

    /// The share of the time, percent, that vCPUs sleep.
    pub fn throttle_percent(&self) -> u8 {
        self.convergence.throttle_percent()
    }

    /// Whether dirty rates are held down.
    pub fn is_dirty_limited(&self) -> bool {
        self.dirty_limit.is_some()
    }

    fn looked(&mut self, look: Look) {
        if let Some(late) = look.late {
            self.costs.woke(late);
        }
        self.observe(look);
        if self.state == State::Entering {
            self.state = State::Sending;
        }
        match self.state {
            State::Sending if self.is_nearly_sent() => {
                self.outputs.push(Output::Sync);
                self.state = State::Syncing { dry: false };
            }
            State::Streams { until, dry } if look.now >= until => self.publish(dry),
            State::Acknowledgements { until } if look.now >= until => self.publish(true),
            _ => {}
        }
    }

    fn synced(&mut self, synced: Synced, look: Look) {
        self.observe(look);
        self.last_sync = synced.took;
        self.last_synced = Some((look.now, synced));
        self.rate.pages = self.rate.pages.saturating_add(synced.dirtied_pages);
        // Of a second sync shortly after the first its own rate would say little.
        let since = look.now.saturating_sub(self.rate.since);
        if since >= RATE_WINDOW {
            self.dirtied_pages = self.dirtied_pages.saturating_add(self.rate.pages);
            let per_second = (self.rate.pages as f64 / since.as_secs_f64()) as u64;
            self.rate = DirtyRate { since: look.now, pages: 0, per_second };
        }
        let State::Syncing { dry } = self.state else { return };
        let left = if dry { 0 } else { look.pass.left };
        self.verdict = self.judge_rest(synced.next_pages.saturating_add(left), synced.backlog);
        match (dry, self.verdict) {
            (false, Verdict::Fits) => self.run_dry(self.pass_number, true),
            (true, Verdict::Fits) => self.request_switchover(),
            (_, Verdict::WaitsForStreams) => {
                self.state = State::Streams { until: look.now + STREAM_PATIENCE, dry };
            }
            (_, Verdict::TooLong) => self.publish(dry),
        }
    }

    fn flushed(&mut self, look: Look) {
        self.observe(look);
        match self.state {
            State::Drying { fits: true } => self.confirm(),
            State::Drying { fits: false } => self.enter_pass(),
            _ => {}
        }
    }

    /// The rest fitted at the last sync, and lanes have run dry since. Another sync would only give the guest more time to
    /// write: it is asked for where what the guest is expected to have written meanwhile no longer fits.
    fn confirm(&mut self) {
        let Some((at, synced)) = self.last_synced else { return };
        let meanwhile = self.look.now.saturating_sub(at).as_secs_f64();
        let written = self.rate.per_second as f64 * meanwhile;
        if self.judge_rest(synced.next_pages.saturating_add(written as u64), synced.backlog) == Verdict::Fits
        {
            self.request_switchover();
        } else {
            self.outputs.push(Output::Sync);
            self.state = State::Syncing { dry: true };
        }
    }

    fn request_switchover(&mut self) {
        self.outputs.push(Output::RequestSwitchover);
        self.state = State::Requested;
    }

    /// The next pass begins. Unless lanes are dry, the one before must be flushed first.
    fn publish(&mut self, dry: bool) {
        let tries_network = self.verdict == Verdict::WaitsForStreams && !self.pace().is_tried();
        self.outputs.push(Output::Publish { tries_network });
        self.pass_number += 1;
        if dry { self.enter_pass() } else { self.run_dry(self.pass_number - 1, false) }
    }

    fn run_dry(&mut self, number: u64, fits: bool) {
        self.outputs.push(Output::RunDry { number });
        self.state = State::Drying { fits };
    }

    fn enter_pass(&mut self) {
        self.converge();
        self.state = State::Entering;
    }

    fn observe(&mut self, look: Look) {
        self.look = look;
        self.meter.observe(look.now, look.counts);
    }

    fn pace(&self) -> Pace {
        self.meter.pace(self.look.now, self.look.counts)
    }

    /// When to say [`Input::Looked`], if nothing happens before. Sooner is as well: where it knows better how fast lanes
    /// are, it decides better ([`WINDOW`](super::WINDOW)).
    pub fn wake_at(&self) -> Duration {
        let now = self.look.now;
        match self.state {
            State::Entering => now,
            State::Sending => {
                let wait = self
                    .lanes_need(self.look.pass.left)
                    .map_or(UNMEASURED, |left| left.saturating_sub(self.head()).max(HEAD_START));
                now + wait
            }
            State::Streams { until, .. } | State::Acknowledgements { until } => until,
            // Whoever performs an output answers it.
            _ => now + WINDOW,
        }
    }

    /// How long before the lanes are through a sync has to begin.
    fn head(&self) -> Duration {
        self.last_sync * 2 + HEAD_START
    }

    /// Whether half of the pass is sent and lanes need no longer for its rest than twice a sync, and a little. A sync
    /// sooner than in the second half would find little: what is unsent is dropped from it.
    fn is_nearly_sent(&self) -> bool {
        let PassLook { pages, left, is_rearmed, is_searched } = self.look.pass;
        let is_near = || self.lanes_need(left).is_some_and(|left| left <= self.head());
        is_rearmed || (is_searched && left.saturating_mul(2) <= pages && is_near())
    }

    /// Whether what is dirty can be moved within the downtime limit.
    fn judge_rest(&mut self, pages: u64, backlog: Backlog) -> Verdict {
        if !backlog.guest_runs {
            return Verdict::Fits;
        }
        let Some(StreamsLeft { bytes, slowest }) = backlog.streams else { return Verdict::WaitsForStreams };
        if pages == 0 && bytes == 0 {
            return Verdict::Fits;
        }
        // What sockets hold goes out before the last pages do.
        let pages = pages.saturating_add(backlog.unsent_bytes.div_ceil(PAGE_BYTES));
        let stream_pages = bytes.div_ceil(PAGE_BYTES);
        let (Some(sending), Some(all)) =
            (self.pause_needs(pages), self.pause_needs(pages.saturating_add(stream_pages)))
        else {
            return Verdict::TooLong;
        };
        self.streams_need = self.pause_needs(stream_pages).unwrap_or_default().max(slowest);
        // Devices are read and loaded beside each other, and beside the pages.
        let rest = all.max(slowest);
        let pause = Pause {
            fixed: self.costs.of_a_pause(),
            look: self.last_sync.as_secs_f64(),
            rest: rest.as_secs_f64(),
            margin: self.pace().margin(self.settings.max_bandwidth_bytes),
        };
        self.expected = Duration::try_from_secs_f64(pause.expected()).unwrap_or(Duration::MAX);
        let limit = self.settings.downtime_limit.as_secs_f64();
        tracing::debug!(pages, ?pause, limit, "the rest");
        if pause.fits(limit) {
            Verdict::Fits
        } else if (Pause { rest: sending.as_secs_f64(), ..pause }).fits(limit) {
            Verdict::WaitsForStreams
        } else {
            Verdict::TooLong
        }
    }

    /// How long `pages` pages will take with the guest stopped; `None` before anything was measured.
    fn pause_needs(&self, pages: u64) -> Option<Duration> {
        match self.settings.avail_switchover_bandwidth_bytes {
            // `max-bandwidth` does not limit the switchover, but nobody has seen what the network carries without it.
            0 => self.lanes_need(pages),
            stated => {
                let seconds = pages as f64 * PAGE_BYTES as f64 / stated as f64;
                Some(Duration::from_secs_f64(seconds.min(LONGEST)))
            }
        }
    }

    /// How long `pages` pages take as lanes go; `None` before anything was measured.
    fn lanes_need(&self, pages: u64) -> Option<Duration> {
        self.pace().time_for(pages, self.settings.max_bandwidth_bytes)
    }

    /// After a round: whether the end comes nearer.
    fn converge(&mut self) {
        let (now, counts) = (self.look.now, self.look.counts);
        let (since, before) = self.judged;
        if now.saturating_sub(since) < LOOK_EVERY {
            return;
        }
        // The operator may have changed either.
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
        };
        (self.judged, self.dirtied_pages) = ((now, counts), 0);
        match self.convergence.look(trend, &self.settings) {
            Step::GoOn => {}
            Step::Throttle(percent) => self.outputs.push(Output::Throttle(percent)),
            Step::LimitDirtyRate => self.limit_dirty_rate(),
            Step::NotConverging if self.settings.fails => {
                self.outputs.push(Output::GiveUp(self.standstill()));
            }
            Step::NotConverging => {
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

    /// Lets the guest run as fast as it did.
    fn end(&mut self) {
        if self.convergence.throttle_percent() > 0 {
            self.outputs.push(Output::Throttle(0));
        }
        if self.dirty_limit.take().is_some() {
            self.outputs.push(Output::LimitDirtyRate(None));
        }
        self.convergence = Convergence::default();
        self.state = State::Ended;
    }
}
