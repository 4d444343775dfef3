//! A seeded world for the policy: a guest that writes, lanes, a destination and an operator, all in virtual time.

use std::collections::VecDeque;
use std::time::Duration;

use crate::lane_times::LaneTimes;
use crate::precopy::{
    Answer, Backlog, Begun, Counts, Input, Output, Policy, RoundProgress, Settings, Snapshot,
    StreamsRemaining, SyncResult, WINDOW,
};

const PAGE_BYTES: f64 = 4096.0;
const ROUND_TRIP: f64 = 0.001;
/// Maximum number of outputs without an input between them.
const MOST_OUTPUTS: usize = 8;
/// Maximum number of inputs. A world that needs more counts as endless.
const MOST_INPUTS: usize = 4000;

/// The tested policy: the real one, or one with a planted bug.
pub(super) trait Decides {
    fn handle(&mut self, input: Input) -> Vec<Output>;
    fn wake_at(&self) -> Duration;
}

impl Decides for Policy {
    fn handle(&mut self, input: Input) -> Vec<Output> {
        Policy::handle(self, input)
    }
    fn wake_at(&self) -> Duration {
        Policy::wake_at(self)
    }
}

/// A property that a run has broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// An output that the protocol does not allow in this state.
    Protocol(&'static str),
    /// Lanes are idle, or devices wait, and the policy requests nothing.
    Starves,
    /// The downtime was longer than the limit, in microseconds.
    LimitExceeded { limit: u64, downtime: u64 },
    /// The migration could have ended, and did not.
    NeverEnds,
    /// The guest is still throttled after the end.
    StaysSlow,
}

/// A simulated migration. All amounts are in pages, seconds, and pages per second.
#[derive(Debug, Clone)]
pub(super) struct World {
    dice: fastrand::Rng,
    ram: f64,
    /// Number of pages that the guest writes in random order. `writes`: its write rate.
    hot: f64,
    writes: f64,
    bandwidth: f64,
    sync: f64,
    fixed: f64,
    /// Maximum delay of a thread's wake-up.
    lateness: f64,
    lag: f64,
    /// Pages of device state that only the switchover can move.
    streams: f64,
    /// Number of syncs until devices are queried.
    streams_unknown: u32,
    /// Number of switchovers that are refused.
    refusals: u32,
    settings: Settings,
    /// Whether additional, unexpected inputs occur.
    is_noisy: bool,
    /// Time when the operator cancels, if the migration has not ended before.
    cancelled_at: f64,

    now: f64,
    throttle: u8,
    dirty_limit: Option<u64>,
    sent: f64,
    round: f64,
    left: f64,
    round_number: u64,
    /// Pages found dirty by the last sync that are in no round. `dirty`: pages written by now.
    found: f64,
    dirty: f64,
    syncs: u32,
    is_first_round: bool,
    idle_since: Option<f64>,
    /// Number of late wake-ups so far, from which the policy can learn.
    wakes: u32,
}

/// Number of wake-ups after which the policy knows how late threads are.
const LEARNED: u32 = 4;

impl World {
    /// A random world from `seed`.
    pub(super) fn new(seed: u64) -> Self {
        let mut dice = fastrand::Rng::with_seed(seed);
        let mut between = |least: f64, most: f64| least * (most / least).powf(dice.f64());
        let ram = between(1e3, 1e6);
        let bandwidth = between(1e4, 1e6);
        let hot = ram * between(1e-3, 1.0);
        let writes = bandwidth * between(1e-3, 4.0);
        let (sync, fixed) = (between(1e-5, 0.02), between(1e-4, 0.02));
        let limit = between(0.02, 1.0);
        let mut maybe = |chance: f64, most: f64| if dice.f64() < chance { dice.f64() * most } else { 0.0 };
        let (lateness, lag) = (maybe(0.3, 0.03), maybe(0.3, 0.1));
        let streams = maybe(0.3, 0.3 * limit) * bandwidth;
        let auto_converge = dice.f64() < 0.3;
        let settings = Settings {
            max_bandwidth_bytes: 0,
            downtime_limit: Duration::from_secs_f64(limit),
            vcpu_dirty_limit_bytes: (bandwidth * 0.2 * PAGE_BYTES) as u64,
            auto_converge,
            dirty_limit: !auto_converge && dice.f64() < 0.2,
            ..Settings::default()
        };
        Self {
            settings,
            streams_unknown: dice.u32(0..3),
            refusals: if dice.f64() < 0.2 { dice.u32(1..4) } else { 0 },
            is_noisy: dice.f64() < 0.3,
            cancelled_at: 3.0 * ram / bandwidth + 5.0,
            ram,
            hot,
            writes,
            bandwidth,
            sync,
            fixed,
            lateness,
            lag,
            streams,
            now: 0.0,
            throttle: 0,
            dirty_limit: None,
            sent: 0.0,
            round: ram,
            left: ram,
            round_number: 1,
            found: 0.0,
            dirty: 0.0,
            syncs: 0,
            is_first_round: true,
            idle_since: None,
            wakes: 0,
            dice,
        }
    }

    /// Runs the policy that `make` creates until the migration has ended. The error is the broken property.
    pub(super) fn run<D: Decides>(mut self, make: impl FnOnce(Begun, Snapshot) -> D) -> Result<(), Broken> {
        let begun = Begun {
            settings: self.settings,
            channels: 1,
            round_trip: seconds(ROUND_TRIP),
            fixed_downtime: seconds(self.fixed),
        };
        let mut policy = make(begun, self.snapshot(None));
        let has_ended = self.follow(&mut policy)?;
        for output in policy.handle(Input::Ended) {
            self.slow_down(output);
        }
        if self.throttle > 0 || self.dirty_limit.is_some() {
            return Err(Broken::StaysSlow);
        }
        if !has_ended && self.must_end() { Err(Broken::NeverEnds) } else { Ok(()) }
    }

    /// Performs the policy's outputs. True: the guest was stopped.
    fn follow(&mut self, policy: &mut impl Decides) -> Result<bool, Broken> {
        let mut outputs = VecDeque::new();
        let mut unasked = 0;
        for _ in 0..MOST_INPUTS {
            if self.is_noisy && self.dice.f64() < 0.1 {
                outputs.extend(policy.handle(self.odd_input()));
                unasked = 0;
            }
            unasked += 1;
            let input = match outputs.pop_front() {
                None if self.now > self.cancelled_at => return Ok(false),
                None => {
                    unasked = 0;
                    self.sleep(policy.wake_at())?
                }
                Some(Output::Sync) => self.sync(),
                Some(Output::Publish { .. }) => {
                    self.publish()?;
                    continue;
                }
                Some(Output::RunDry { number }) => {
                    if number > self.round_number || number + 1 < self.round_number {
                        return Err(Broken::Protocol("a round is to run dry that is not there"));
                    }
                    // In this world, the previous round has run dry when the next one is published.
                    if number == self.round_number {
                        self.pass_time(self.left / self.bandwidth);
                    }
                    let answer = Answer { took: seconds(ROUND_TRIP + self.lag), unsent_bytes: 0 };
                    outputs.extend(policy.handle(Input::Answered(answer)));
                    Input::Flushed(self.snapshot(None))
                }
                Some(Output::RequestSwitchover) if self.left > 0.0 => {
                    return Err(Broken::Protocol("the switchover is requested while lanes send"));
                }
                Some(Output::RequestSwitchover) if self.refusals > 0 => {
                    self.refusals -= 1;
                    Input::NotAcknowledged(self.snapshot(None))
                }
                Some(Output::RequestSwitchover) => return self.stop().map(|()| true),
                Some(output) => {
                    self.slow_down(output);
                    continue;
                }
            };
            if unasked > MOST_OUTPUTS {
                return Err(Broken::Protocol("outputs without end"));
            }
            outputs.extend(policy.handle(input));
        }
        Ok(false)
    }

    fn snapshot(&self, late: Option<f64>) -> Snapshot {
        let pages = self.sent as u64;
        Snapshot {
            now: seconds(self.now),
            late: late.map(seconds),
            counts: Counts {
                multifd_bytes: pages * PAGE_BYTES as u64,
                normal_pages: pages,
                times: LaneTimes { moving: seconds(pages as f64 / self.bandwidth), ..LaneTimes::default() },
                ..Counts::default()
            },
            round: RoundProgress {
                pages: self.round as u64,
                remaining: self.left.ceil() as u64,
                is_rearmed: self.left <= 0.0,
                is_searched: !self.is_first_round || self.left <= 0.0,
            },
        }
    }

    /// Sleeps like the engine's control thread. It sleeps at most one window, and is woken when lanes have finished.
    fn sleep(&mut self, until: Duration) -> Result<Input, Broken> {
        let asked = (until.as_secs_f64() - self.now).clamp(0.0, WINDOW.as_secs_f64());
        let through = self.left / self.bandwidth;
        if self.left > 0.0 && through <= asked {
            self.pass_time(through);
            return Ok(Input::Observed(self.snapshot(None)));
        }
        let late = self.wakes_late();
        self.wakes += 1;
        self.pass_time(asked + late);
        if self.left > 0.0 {
            self.idle_since = None;
        } else {
            let since = *self.idle_since.get_or_insert(self.now);
            // The policy waits 100 ms for acknowledgements, and less for devices.
            if self.now - since > 0.5 {
                return Err(Broken::Starves);
            }
        }
        Ok(Input::Observed(self.snapshot(Some(late))))
    }

    fn wakes_late(&mut self) -> f64 {
        self.dice.f64() * self.lateness
    }

    fn pass_time(&mut self, time: f64) {
        let sent = (time * self.bandwidth).min(self.left);
        let (before, runs) = (self.left, 1.0 - f64::from(self.throttle) / 100.0);
        self.left = if self.left - sent < 0.5 { 0.0 } else { self.left - sent };
        self.sent += before - self.left;
        // Pages that are still to be sent are read later, so writes to them do not count.
        let hot_left = if self.is_first_round { self.left * self.hot / self.ram } else { self.left };
        let limit = self.dirty_limit.map_or(f64::INFINITY, |bytes| bytes as f64 / PAGE_BYTES);
        let writes = (self.writes * runs).min(limit);
        let room = (self.hot - self.dirty - hot_left).max(0.0);
        self.dirty += room * -(-writes * time / self.hot).exp_m1();
        self.now += time;
    }

    fn sync(&mut self) -> Input {
        let took = self.sync * (1.0 + 0.05 * self.dice.f64());
        self.pass_time(took);
        let dirtied = self.dirty - self.found;
        self.found = self.dirty;
        self.syncs += 1;
        self.idle_since = None;
        let is_known = self.syncs > self.streams_unknown;
        let remaining = StreamsRemaining {
            bytes: (self.streams * PAGE_BYTES) as u64,
            slowest: seconds(self.streams / self.bandwidth),
            moves_in_downtime: false,
        };
        let synced = SyncResult {
            took: seconds(took),
            dirtied_pages: dirtied as u64,
            next_pages: self.found.ceil() as u64,
            backlog: Backlog { unsent_bytes: 0, streams: is_known.then_some(remaining), guest_runs: true },
        };
        Input::Synced(synced, self.snapshot(None))
    }

    fn publish(&mut self) -> Result<(), Broken> {
        if self.syncs == 0 {
            return Err(Broken::Protocol("a round is published before any sync"));
        }
        // Lanes enter the next round when they have finished the previous one. Here this happens immediately.
        self.pass_time(self.left / self.bandwidth);
        self.round = self.found.floor();
        (self.left, self.dirty) = (self.round, self.dirty - self.round);
        self.found = self.dirty.min(self.found - self.round);
        self.round_number += 1;
        self.is_first_round = false;
        self.idle_since = None;
        Ok(())
    }

    fn slow_down(&mut self, output: Output) {
        match output {
            Output::Throttle(percent) => self.throttle = percent,
            Output::LimitDirtyRate(bytes) => self.dirty_limit = bytes,
            _ => {}
        }
    }

    /// Stops the guest. Three threads wake late one after the other. During the first delay the guest still runs.
    fn stop(&mut self) -> Result<(), Broken> {
        let began = self.now;
        let late = self.wakes_late();
        self.pass_time(late);
        let others = self.wakes_late() + self.wakes_late();
        let moving = (self.dirty + self.streams) / self.bandwidth;
        let sync = self.sync * (1.0 + 0.05 * self.dice.f64());
        let downtime = self.now - began + others + sync + moving + self.fixed + self.lag;
        let limit = self.settings.downtime_limit.as_secs_f64();
        // The fixed costs alone may exceed the limit if they are most of it, because no round reduces them.
        let is_dear = self.fixed + self.lag + 3.0 * self.lateness > limit * 0.7;
        let is_new = self.lateness > 0.0 && self.wakes < LEARNED;
        if downtime > limit && !is_dear && !is_new {
            let micros = |seconds: f64| (seconds * 1e6) as u64;
            return Err(Broken::LimitExceeded { limit: micros(limit), downtime: micros(downtime) });
        }
        Ok(())
    }

    /// Whether even a careless policy would have ended the migration.
    fn must_end(&self) -> bool {
        let limit = self.settings.downtime_limit.as_secs_f64();
        let room = limit - self.fixed - self.lag - 4.0 * self.lateness - self.streams / self.bandwidth;
        // Pages written in a round that lasts as long as a sync, with waiting and wake-ups.
        let rest = (self.writes * (self.sync * 4.0 + 0.002 + 2.0 * self.lateness)).min(self.hot);
        self.writes < self.bandwidth * 0.5
            && (rest / self.bandwidth + self.sync) * 2.0 < room * 0.5
            && room > 0.5 * limit
    }

    fn odd_input(&mut self) -> Input {
        match self.dice.u32(0..4) {
            0 => Input::Observed(self.snapshot(None)),
            1 => Input::Set(self.settings),
            2 => Input::NotAcknowledged(self.snapshot(None)),
            _ => Input::Answered(Answer { took: seconds(ROUND_TRIP + self.lag), unsent_bytes: 0 }),
        }
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}
