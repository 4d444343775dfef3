//! Simulates a migration in virtual time: the engine's own precopy policy ([`crate::precopy`]) with a modelled guest.
//!
//! The model produces the policy's inputs. Lanes send a round at a constant bandwidth. A sync takes its time while
//! lanes continue to send. It finds the pages of the round that were written after they were sent, and all other
//! pages that were written since the previous sync. The migration ends when the policy requests the switchover. If
//! rounds no longer shrink, it never ends.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::class::{Class, Order, PAGE_BYTES};
use super::inputs::Inputs;
use crate::lane_times::LaneTimes;
use crate::precopy::{
    Backlog, Begun, Counts, DowntimeEstimate, Input, MARGIN, Output, Policy, RoundProgress, Settings,
    Snapshot, StreamsRemaining, SyncResult,
};

/// An expected round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PlannedRound {
    /// Number of the round, from 1.
    pub number: u64,
    /// Start of the round, in seconds since the migration's start.
    pub began: f64,
    /// Duration of the round, in seconds.
    pub took: f64,
    /// Bytes that the round sends.
    pub bytes: f64,
    /// Bytes found dirty at the end of the round.
    pub dirtied_bytes: f64,
    /// Whether the guest is stopped during the round. Only possible for the last round.
    pub stopped: bool,
}

/// The result of a simulated migration.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Whether the guest was stopped for the switchover.
    pub convergent: bool,
    /// Number of rounds while the guest ran.
    pub rounds: u64,
    /// Total time in seconds. If the migration does not end: the time until this was detected.
    pub total_time: f64,
    /// Downtime in seconds. If the migration does not end: the shortest possible one.
    pub downtime: f64,
    /// Total of the bytes sent.
    pub bytes: f64,
    /// The shortest downtime that was possible after any round, with the engine's margin, in seconds.
    pub least_downtime: f64,
    /// The first [`CURVE`] rounds, and the last one.
    pub curve: Vec<PlannedRound>,
}

/// Bytes in sockets that are sent before the last pages. They are about one packet per channel, and the data on the
/// link.
pub(crate) const QUEUED_BYTES: f64 = (2 << 20) as f64;
/// Maximum number of rounds in a curve.
pub const CURVE: usize = 300;
/// Maximum number of rounds, and of calls of the policy (`STEPS`). No realistic migration needs more.
const CAP: u64 = 20_000;
const STEPS: u32 = 200_000;
/// Maximum duration of a round in seconds: thirty years. No realistic round takes longer.
const LONGEST_ROUND: f64 = 1e9;
/// Minimum step from one input to the next, relative to the remaining time of the round.
const LEAST_STEP: f64 = 0.02;
/// Minimum relative decrease for a round to count as shrinking.
const STANDSTILL: f64 = 1e-6;
/// Number of consecutive rounds that do not shrink, after which the simulation stops.
const PATIENCE: u32 = 3;
/// The same number if the policy itself must detect that the migration does not converge.
const PATIENCE_OF_POLICY: u32 = 64;

/// Position of a sequential writer at the start of the first round. A writer just ahead of the round dirties no page
/// that was sent. A writer just behind it dirties every page again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// The writer is ahead of the round.
    Ahead,
    /// The mean over all positions.
    Anywhere,
    /// The writer is behind the round.
    Behind,
}

/// The difference between the simulated migration and the inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Luck {
    /// Factor of the bandwidth.
    pub bandwidth: f64,
    /// Factor of the dirty rate.
    pub dirtying: f64,
    /// Position of sequential writers.
    pub walk: Walk,
}

impl Luck {
    /// The inputs are exact.
    pub const EXPECTED: Self = Self { bandwidth: 1.0, dirtying: 1.0, walk: Walk::Anywhere };

    /// All values are better than expected, by the part `off`.
    pub fn better(off: f64) -> Self {
        Self { bandwidth: 1.0 + off, dirtying: 1.0 - off, walk: Walk::Ahead }
    }

    /// All values are worse than expected, by the part `off`.
    pub fn worse(off: f64) -> Self {
        Self { bandwidth: 1.0 - off, dirtying: 1.0 + off, walk: Walk::Behind }
    }
}

/// Simulates a migration. If [`Inputs::switchover_bandwidth_bytes`] exceeds the bandwidth of the engine's estimate,
/// the downtime is shorter than estimated.
pub fn run(inputs: &Inputs, luck: Luck) -> Run {
    match play(inputs, luck, false, Until::Ended) {
        End::Requested(model) => model.stop(),
        End::StandsStill(mut model) => {
            model.run.downtime = model.run.least_downtime;
            model.run
        }
    }
}

/// A guest's pages at the switch to postcopy, when it starts at the destination.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Switch {
    /// Time of the switch, in seconds since the migration's start.
    pub(super) at: f64,
    /// The classes, each with the number of pages that the destination lacks.
    pub(super) missing: Vec<(Class, f64)>,
    /// Number of missing pages that the guest never writes.
    pub(super) unwritten_pages: f64,
    /// Rate of background pages, in bytes per second.
    pub(super) rate: f64,
    /// Bandwidth of the link, in bytes per second.
    pub(super) link_rate: f64,
}

/// Simulates precopy until postcopy starts.
pub(super) fn switch(inputs: &Inputs, luck: Luck, until: Until) -> Switch {
    match play(inputs, luck, until.fails(), until) {
        End::Requested(model) | End::StandsStill(model) => model.switch(),
    }
}

/// Start of postcopy, in seconds since the migration's start. None if precopy ends before.
pub(super) fn switch_at(inputs: &Inputs, until: Until) -> Option<f64> {
    match play(inputs, Luck::EXPECTED, until.fails(), until) {
        End::Requested(_) => None,
        End::StandsStill(model) => Some(model.switch().at),
    }
}

/// The part of precopy that is simulated.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until {
    /// All of it, until the policy requests the switchover or gives up.
    Ended,
    /// This number of rounds.
    Rounds(u32),
    /// This number of seconds since pages began to move.
    Seconds(f64),
}

impl Until {
    /// Whether the policy ends precopy if the guest does not converge. False if an operator has set the end of
    /// precopy.
    fn fails(self) -> bool {
        matches!(self, Self::Ended)
    }
}

/// The end of precopy.
enum End<'a> {
    /// The policy requests the switchover.
    Requested(Model<'a>),
    /// The policy never requests it, or gives up, or the requested part of precopy is over.
    StandsStill(Model<'a>),
}

fn play(inputs: &Inputs, luck: Luck, fails: bool, until: Until) -> End<'_> {
    let mut model = Model::new(inputs, luck);
    if let Until::Seconds(end) = until {
        model.end = end;
    }
    let is_enough = |model: &Model<'_>| match until {
        Until::Ended => false,
        Until::Rounds(rounds) => model.run.rounds >= rounds.into(),
        Until::Seconds(end) => model.now >= end,
    };
    let begun = Begun {
        settings: settings(inputs, fails),
        channels: 1,
        round_trip: Duration::ZERO,
        fixed_downtime: inputs.fixed.downtime(),
    };
    let patience = match until {
        Until::Rounds(_) | Until::Seconds(_) => u32::MAX,
        // The policy needs more rounds until it gives up.
        Until::Ended if fails => PATIENCE_OF_POLICY,
        Until::Ended => PATIENCE,
    };
    let mut policy = Policy::new(begun, model.snapshot());
    let mut outputs = VecDeque::new();
    for _ in 0..STEPS {
        if model.run.rounds >= CAP || model.standing >= patience || is_enough(&model) {
            break;
        }
        let input = match outputs.pop_front() {
            None => {
                model.advance_until(policy.wake_at().as_secs_f64());
                Input::Observed(model.snapshot())
            }
            Some(Output::Sync) => Input::Synced(model.sync(), model.snapshot()),
            Some(Output::RunDry { number }) => {
                model.advance_until(model.end_of(number));
                Input::Flushed(model.snapshot())
            }
            Some(Output::Publish { .. }) => {
                model.publish();
                continue;
            }
            Some(Output::RequestSwitchover) => return End::Requested(model),
            Some(Output::GiveUp(_)) => break,
            // The model's guest is never throttled, so these outputs have no effect.
            Some(Output::Throttle(_) | Output::LimitDirtyRate(_) | Output::Warn(_)) => continue,
        };
        outputs.extend(policy.handle(input));
    }
    End::StandsStill(model)
}

/// The engine's settings: `max-bandwidth` is already part of the modelled bandwidth, and nothing throttles the guest.
fn settings(inputs: &Inputs, fails: bool) -> Settings {
    Settings {
        max_bandwidth_bytes: 0,
        avail_switchover_bandwidth_bytes: inputs.avail_switchover_bandwidth_bytes.unwrap_or(0),
        downtime_limit: inputs.downtime_limit,
        fails,
        ..Settings::default()
    }
}

/// A guest and the lanes that send its pages. Times are in seconds since pages began to move.
struct Model<'a> {
    inputs: &'a Inputs,
    walk: Walk,
    classes: Vec<Class>,
    rate: f64,
    switchover_rate: f64,
    estimated_rate: f64,
    now: f64,
    /// The end of the simulated time.
    end: f64,
    /// Bytes of all rounds before the one published last.
    sent_before: f64,
    round: SentRound,
    /// Time when lanes finished the previous round.
    before_ended: f64,
    /// Dirty pages of each class that are in no round yet, as of the last sync.
    next: Vec<f64>,
    /// Number of consecutive rounds that did not shrink.
    standing: u32,
    run: Run,
}

/// A round that lanes send.
struct SentRound {
    bytes: f64,
    /// Pages of each class. None for the first round, which contains all of RAM.
    sent: Option<Vec<f64>>,
    /// Time when the sync that found the pages read them. `began` and `ends`: time of the first and the last page.
    synced: f64,
    began: f64,
    ends: f64,
    /// Time when the round was published.
    published: f64,
}

impl<'a> Model<'a> {
    fn new(inputs: &'a Inputs, luck: Luck) -> Self {
        let Luck { bandwidth, dirtying, walk } = luck;
        let rate = (inputs.bandwidth_bytes as f64 * bandwidth).max(1.0);
        let switchover_rate =
            inputs.switchover_bandwidth_bytes.map_or(rate, |bytes| (bytes as f64 * bandwidth).max(1.0));
        let classes: Vec<Class> =
            inputs.dirty.classes(inputs.ram_bytes).iter().map(|class| class.scaled(dirtying)).collect();
        let bytes = inputs.first_round_bytes.min(inputs.ram_bytes) as f64;
        let run = Run {
            convergent: false,
            rounds: 0,
            total_time: inputs.fixed.setup.as_secs_f64(),
            downtime: f64::INFINITY,
            bytes: 0.0,
            least_downtime: f64::INFINITY,
            curve: Vec::new(),
        };
        Self {
            walk,
            rate,
            switchover_rate,
            // An operator's value is not measured, so `luck` does not change it.
            estimated_rate: inputs
                .avail_switchover_bandwidth_bytes
                .map_or(rate, |bytes| (bytes as f64).max(1.0)),
            now: 0.0,
            end: f64::INFINITY,
            sent_before: 0.0,
            round: SentRound {
                bytes,
                sent: None,
                synced: 0.0,
                began: 0.0,
                ends: sending(bytes, rate),
                published: 0.0,
            },
            before_ended: 0.0,
            next: vec![0.0; classes.len()],
            standing: 0,
            run,
            classes,
            inputs,
        }
    }

    fn snapshot(&self) -> Snapshot {
        let is_through = self.now >= self.round.ends;
        let bytes = self.sent_before + self.round.bytes * self.part_sent();
        let pages = (bytes / PAGE_BYTES) as u64;
        let moving = duration(pages as f64 * PAGE_BYTES / self.rate);
        let remaining = if is_through { 0.0 } else { self.round.bytes * (1.0 - self.part_sent()) };
        Snapshot {
            now: duration(self.now),
            late: None,
            counts: Counts {
                multifd_bytes: pages.saturating_mul(PAGE_BYTES as u64),
                normal_pages: pages,
                times: LaneTimes { moving, ..LaneTimes::default() },
                ..Counts::default()
            },
            round: RoundProgress {
                pages: (self.round.bytes / PAGE_BYTES) as u64,
                remaining: (remaining / PAGE_BYTES) as u64,
                is_rearmed: is_through,
                // The first round searches for pages that were never populated.
                is_searched: is_through || self.round.sent.is_some(),
            },
        }
    }

    /// The part of the round that is sent, 0 to 1.
    fn part_sent(&self) -> f64 {
        let SentRound { began, ends, .. } = self.round;
        if self.now >= ends { 1.0 } else { ((self.now - began) / (ends - began)).clamp(0.0, 1.0) }
    }

    /// Advances the time to `until`, or to the end of the round. The policy is woken at the end of the round.
    fn advance_until(&mut self, until: f64) {
        // If lanes are very slow, inputs without new information are skipped.
        let until = until.max(self.now + (self.round.ends - self.now) * LEAST_STEP);
        let woken = if self.now < self.round.ends { until.min(self.round.ends) } else { until };
        self.now = self.now.max(woken.min(self.end));
    }

    /// Time when lanes finish round `number`.
    fn end_of(&self, number: u64) -> f64 {
        if number > self.run.rounds { self.round.ends } else { self.before_ended }
    }

    fn sync(&mut self) -> SyncResult {
        self.now += self.inputs.sync.as_secs_f64();
        let next = self.dirty_now();
        let dirtied = next.iter().sum::<f64>() - self.next.iter().sum::<f64>();
        self.next = next;
        let estimate = self.downtime();
        self.run.least_downtime = self.run.least_downtime.min(estimate.longest());
        SyncResult {
            took: self.inputs.sync,
            dirtied_pages: dirtied.max(0.0) as u64,
            next_pages: (self.next_bytes() / PAGE_BYTES) as u64,
            backlog: Backlog {
                unsent_bytes: QUEUED_BYTES as u64,
                streams: Some(StreamsRemaining::default()),
                guest_runs: true,
            },
        }
    }

    /// Number of pages of each class that a sync reports now, without those that the round still reads.
    fn dirty_now(&self) -> Vec<f64> {
        let SentRound { sent, synced, began, ends, .. } = &self.round;
        let part = self.part_sent();
        // Seconds since the first page was sent, and since the last page that is sent by now.
        let (oldest, newest) = (self.now - began, self.now - ends.min(self.now));
        match sent {
            None => self
                .classes
                .iter()
                .map(|class| part * first_round(class, self.walk, oldest - newest, oldest))
                .collect(),
            Some(sent) => {
                let times = (self.now - synced, newest.max(0.0), oldest.max(0.0));
                let classes = self.classes.iter().zip(sent);
                classes.map(|(class, sent)| class.after_round(*sent, part, times)).collect()
            }
        }
    }

    /// Bytes that are dirty and in no round, as of the last sync.
    fn next_bytes(&self) -> f64 {
        let ram_pages = self.inputs.ram_bytes as f64 / PAGE_BYTES;
        self.next.iter().sum::<f64>().min(ram_pages) * PAGE_BYTES
    }

    /// The downtime if the guest were stopped now.
    fn downtime(&self) -> DowntimeEstimate {
        let unsent = self.round.bytes * (1.0 - self.part_sent());
        DowntimeEstimate {
            fixed: self.inputs.fixed.downtime().as_secs_f64(),
            sync: self.inputs.sync.as_secs_f64(),
            remaining: (self.next_bytes() + unsent + QUEUED_BYTES) / self.estimated_rate,
            margin: MARGIN,
        }
    }

    /// Publishes the next round. Lanes begin it when they have finished the present one.
    fn publish(&mut self) {
        let bytes = self.next_bytes();
        // The first round contains all of RAM, so only later rounds are compared with their predecessor.
        let stands = self.round.sent.is_some() && bytes >= self.round.bytes * (1.0 - STANDSTILL);
        self.standing = if stands { self.standing + 1 } else { 0 };
        self.close_round(bytes);
        let began = self.now.max(self.round.ends);
        let sent = std::mem::replace(&mut self.next, vec![0.0; self.classes.len()]);
        self.before_ended = self.round.ends;
        self.sent_before += self.round.bytes;
        self.round = SentRound {
            bytes,
            sent: Some(sent),
            synced: self.now,
            began,
            ends: began + sending(bytes, self.rate),
            published: self.now,
        };
    }

    /// Switches to postcopy: dirty pages and unsent pages of the round are missing at the destination.
    fn switch(mut self) -> Switch {
        let before = self.next.iter().sum::<f64>();
        // The last sync finds the pages that were written since the previous one.
        self.now += self.inputs.sync.as_secs_f64();
        let found = self.dirty_now();
        if found.iter().sum::<f64>() >= before {
            self.next = found;
        }
        let ram_pages = self.inputs.ram_bytes as f64 / PAGE_BYTES;
        let unsent = 1.0 - self.part_sent();
        let of_round = self.round.bytes * unsent / PAGE_BYTES;
        let mut unwritten_pages = of_round;
        let mut missing = Vec::new();
        for (index, class) in self.classes.iter().enumerate() {
            let in_round = match &self.round.sent {
                Some(sent) => sent[index] * unsent,
                // The first round contains all of RAM.
                None if ram_pages > 0.0 => of_round * (class.pages / ram_pages).min(1.0),
                None => 0.0,
            };
            unwritten_pages -= in_round;
            missing.push((*class, (self.next[index] + in_round).min(class.pages)));
        }
        let rate = match self.inputs.postcopy.limit_bytes {
            Some(limit) if limit > 0 => self.switchover_rate.min(limit as f64),
            _ => self.switchover_rate,
        };
        let at = self.inputs.fixed.setup.as_secs_f64() + self.now;
        Switch {
            at,
            missing,
            unwritten_pages: unwritten_pages.max(0.0),
            rate,
            link_rate: self.switchover_rate,
        }
    }

    fn close_round(&mut self, dirtied_bytes: f64) {
        let setup = self.inputs.fixed.setup.as_secs_f64();
        self.run.push(PlannedRound {
            number: self.run.rounds + 1,
            began: setup + self.round.published,
            took: self.now - self.round.published,
            bytes: self.round.bytes,
            dirtied_bytes,
            stopped: false,
        });
    }

    /// Stops the guest and sends the remaining pages.
    fn stop(mut self) -> Run {
        let bytes = self.next_bytes();
        self.close_round(bytes);
        let downtime =
            DowntimeEstimate { remaining: (bytes + QUEUED_BYTES) / self.switchover_rate, ..self.downtime() }
                .expected();
        self.run.stop(downtime, bytes);
        self.run
    }
}

/// Seconds in which lanes send a round.
fn sending(bytes: f64, rate: f64) -> f64 {
    (bytes / rate).min(LONGEST_ROUND)
}

/// Converts a forecast's seconds, limited to 10¹⁵.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, 1e15)).unwrap_or_default()
}

/// Number of pages of `class` that are dirty after a first round. `round`: its duration in seconds. `sending`: the
/// part of it in which pages were sent.
fn first_round(class: &Class, walk: Walk, sending: f64, round: f64) -> f64 {
    match (class.order, walk) {
        // The writer stays ahead of the round until it has walked through the whole class and reaches sent pages.
        (Order::Sequential, Walk::Ahead) => (class.written(sending) - class.pages).clamp(0.0, class.pages),
        (Order::Sequential, Walk::Behind) => class.distinct(round),
        _ => class.mean_distinct(round - sending, round),
    }
}

impl Run {
    fn push(&mut self, round: PlannedRound) {
        self.rounds += 1;
        self.total_time = round.began + round.took;
        self.bytes += round.bytes;
        if self.curve.len() < CURVE {
            self.curve.push(round);
        }
    }

    fn stop(&mut self, downtime: f64, bytes: f64) {
        self.curve.push(PlannedRound {
            number: self.rounds + 1,
            began: self.total_time,
            took: downtime,
            bytes,
            dirtied_bytes: 0.0,
            stopped: true,
        });
        self.convergent = true;
        self.downtime = downtime;
        self.total_time += downtime;
        self.bytes += bytes;
    }
}
