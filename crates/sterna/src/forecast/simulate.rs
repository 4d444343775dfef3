//! A migration in virtual time: the engine's own precopy policy ([`crate::precopy`]), against a modelled guest.
//!
//! The model answers what the policy asks for. Lanes send a round at a constant bandwidth. A sync takes its time while
//! they go on, and finds pages that the round had sent and the guest wrote again afterwards, and pages that the round had not
//! to send and the guest wrote since the sync before. When the policy requests the switchover, the migration ends; when
//! rounds no longer shrink, it never will.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::class::{Class, Order, PAGE_BYTES};
use super::inputs::Inputs;
use crate::params::{Capabilities, NonConvergence, Parameters};
use crate::precopy::{
    Backlog, Begun, Counts, DowntimeEstimate, Input, MARGIN, Output, Policy, RoundProgress, Settings,
    Snapshot, StreamsRemaining, SyncResult,
};
use crate::stats::LaneTimes;

/// One round as it is expected.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PlannedRound {
    /// From 1.
    pub number: u64,
    /// Seconds since the migration's start.
    pub began: f64,
    /// Seconds that it lasts.
    pub took: f64,
    /// Bytes that it sends.
    pub bytes: f64,
    /// Bytes found dirty at its end.
    pub dirtied_bytes: f64,
    /// Whether the guest stands still: the last one, if it comes to that.
    pub stopped: bool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Whether the guest got to stop.
    pub convergent: bool,
    /// Rounds while the guest ran.
    pub rounds: u64,
    /// Seconds in all; up to the recognition that it does not end, if it does not.
    pub total_time: f64,
    /// Seconds of downtime; of the shortest that was reached, if it does not end.
    pub downtime: f64,
    /// Bytes sent in all.
    pub bytes: f64,
    /// The shortest downtime that was possible after any round, with the engine's margin, seconds.
    pub least_downtime: f64,
    /// The first [`CURVE`] rounds, and the last.
    pub curve: Vec<PlannedRound>,
}

/// What lies in sockets and goes out before the last pages: about a packet of each channel, and what is on its way.
pub(crate) const QUEUED_BYTES: f64 = (2 << 20) as f64;
/// Rounds kept in a curve.
pub const CURVE: usize = 300;
/// No migration of sense has more rounds, or asks the policy more often.
const CAP: u64 = 20_000;
const STEPS: u32 = 200_000;
/// No round of sense takes longer, seconds: thirty years.
const LONGEST_ROUND: f64 = 1e9;
/// The least part of what remains of a round that goes by from one input to the next.
const LEAST_STEP: f64 = 0.02;
/// A round that shrinks by less than this part does not shrink.
const STANDSTILL: f64 = 1e-6;
/// So many of them in a row are a standstill.
const PATIENCE: u32 = 3;
/// The same where the policy is to find it out.
const PATIENCE_OF_POLICY: u32 = 64;

/// Where a guest that walks through its memory is when the first round begins. One that is just ahead of the round
/// dirties nothing that has been sent; one just behind it dirties everything again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// Ahead of the round.
    Ahead,
    /// Anywhere, on average.
    Anywhere,
    /// Behind it.
    Behind,
}

/// How the truth differs from the inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Luck {
    /// Times the bandwidth.
    pub bandwidth: f64,
    /// Times the dirty rate.
    pub dirtying: f64,
    /// Where walks are.
    pub walk: Walk,
}

impl Luck {
    /// The inputs are right.
    pub const EXPECTED: Self = Self { bandwidth: 1.0, dirtying: 1.0, walk: Walk::Anywhere };

    /// All better than expected, by the part `off`.
    pub fn better(off: f64) -> Self {
        Self { bandwidth: 1.0 + off, dirtying: 1.0 - off, walk: Walk::Ahead }
    }

    /// All worse.
    pub fn worse(off: f64) -> Self {
        Self { bandwidth: 1.0 - off, dirtying: 1.0 + off, walk: Walk::Behind }
    }
}

/// Simulates a migration. If [`Inputs::switchover_bandwidth_bytes`] exceeds the bandwidth that the engine estimates with,
/// the downtime is shorter than estimated.
pub fn run(inputs: &Inputs, luck: Luck) -> Run {
    match play(inputs, luck, NonConvergence::KeepGoing, Until::Ended) {
        End::Requested(model) => model.stop(),
        End::StandsStill(mut model) => {
            model.run.downtime = model.run.least_downtime;
            model.run
        }
    }
}

/// A guest's pages at the moment in which it goes on at the destination without all of them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Switch {
    /// Seconds since the migration's start.
    pub(super) at: f64,
    /// How the guest writes, and how many pages of each class the destination lacks.
    pub(super) missing: Vec<(Class, f64)>,
    /// Pages that it lacks and that nobody writes.
    pub(super) unwritten_pages: f64,
    /// Bytes per second of pages that nobody waits for.
    pub(super) rate: f64,
    /// Bytes per second that the link carries.
    pub(super) link_rate: f64,
}

/// Simulates precopy until postcopy starts.
pub(super) fn switch(inputs: &Inputs, luck: Luck, until: Until) -> Switch {
    match play(inputs, luck, until.policy(), until) {
        End::Requested(model) | End::StandsStill(model) => model.switch(),
    }
}

/// When postcopy starts, in seconds since the migration's start; none if precopy ends before.
pub(super) fn switch_at(inputs: &Inputs, until: Until) -> Option<f64> {
    match play(inputs, Luck::EXPECTED, until.policy(), until) {
        End::Requested(_) => None,
        End::StandsStill(model) => Some(model.switch().at),
    }
}

/// What of precopy is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until {
    /// All of it, until the policy requests the switchover or gives up.
    Ended,
    /// So many rounds.
    Rounds(u32),
    /// So long since pages began to move.
    Seconds(f64),
}

impl Until {
    /// Where an operator has said how long, precopy goes on for so long even if it stands still.
    fn policy(self) -> NonConvergence {
        match self {
            Self::Ended => NonConvergence::Postcopy,
            Self::Rounds(_) | Self::Seconds(_) => NonConvergence::KeepGoing,
        }
    }
}

/// How precopy ends.
enum End<'a> {
    /// The policy requests the switchover.
    Requested(Model<'a>),
    /// It never will, it gives up, or nobody wants to know more.
    StandsStill(Model<'a>),
}

fn play(inputs: &Inputs, luck: Luck, non_convergence: NonConvergence, until: Until) -> End<'_> {
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
        settings: settings(inputs, non_convergence),
        channels: 1,
        round_trip: Duration::ZERO,
        fixed_downtime: inputs.fixed.downtime(),
    };
    let patience = match until {
        Until::Rounds(_) | Until::Seconds(_) => u32::MAX,
        // Whoever waits for the policy to give up waits longer.
        Until::Ended if non_convergence == NonConvergence::Postcopy => PATIENCE_OF_POLICY,
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
            // The model's guest is never throttled.
            Some(Output::Throttle(_) | Output::LimitDirtyRate(_) | Output::Warn(_)) => continue,
        };
        outputs.extend(policy.handle(input));
    }
    End::StandsStill(model)
}

/// The engine's settings: `max-bandwidth` is already part of the modelled bandwidth, and nothing throttles the guest.
fn settings(inputs: &Inputs, non_convergence: NonConvergence) -> Settings {
    let params = Parameters {
        max_bandwidth_bytes: 0,
        avail_switchover_bandwidth_bytes: inputs.avail_switchover_bandwidth_bytes.unwrap_or(0),
        downtime_limit: inputs.downtime_limit,
        non_convergence,
        ..Parameters::default()
    };
    Settings::new(&params, &Capabilities::default())
}

/// A guest and the lanes that send its pages; times in seconds since pages began to move.
struct Model<'a> {
    inputs: &'a Inputs,
    walk: Walk,
    classes: Vec<Class>,
    rate: f64,
    switchover_rate: f64,
    estimated_rate: f64,
    now: f64,
    /// No later moment is looked at.
    end: f64,
    /// Bytes of all rounds before the last that was published.
    sent_before: f64,
    round: SentRound,
    /// When the round before was through.
    before_ended: f64,
    /// Pages of each class that are dirty and in no round yet, as of the last sync.
    next: Vec<f64>,
    /// Rounds in a row that did not shrink.
    standing: u32,
    run: Run,
}

/// A round that is sent.
struct SentRound {
    bytes: f64,
    /// Pages of each class; the first round has all of RAM, wherever a class lies in it.
    sent: Option<Vec<f64>>,
    /// When the sync read that found it, and when its first and last pages go out.
    synced: f64,
    began: f64,
    ends: f64,
    /// When it was published.
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
            // What an operator states is not measured, and so no luck changes it.
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
                // The first round looks for pages that were never populated.
                is_searched: is_through || self.round.sent.is_some(),
            },
        }
    }

    /// Which part of the round is sent.
    fn part_sent(&self) -> f64 {
        let SentRound { began, ends, .. } = self.round;
        if self.now >= ends { 1.0 } else { ((self.now - began) / (ends - began)).clamp(0.0, 1.0) }
    }

    /// Time passes until then, or until lanes are through and the policy is woken for that.
    fn advance_until(&mut self, until: f64) {
        // Where lanes are so slow that nothing is measured for long, inputs are skipped.
        let until = until.max(self.now + (self.round.ends - self.now) * LEAST_STEP);
        let woken = if self.now < self.round.ends { until.min(self.round.ends) } else { until };
        self.now = self.now.max(woken.min(self.end));
    }

    /// When lanes are through with a round.
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

    /// Pages of each class that a sync reports now, less those that the round still reads.
    fn dirty_now(&self) -> Vec<f64> {
        let SentRound { sent, synced, began, ends, .. } = &self.round;
        let part = self.part_sent();
        // Since the first page was sent, and since the last one that is sent by now.
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

    /// The downtime, if the guest were stopped now.
    fn downtime(&self) -> DowntimeEstimate {
        let unsent = self.round.bytes * (1.0 - self.part_sent());
        DowntimeEstimate {
            fixed: self.inputs.fixed.downtime().as_secs_f64(),
            sync: self.inputs.sync.as_secs_f64(),
            remaining: (self.next_bytes() + unsent + QUEUED_BYTES) / self.estimated_rate,
            margin: MARGIN,
        }
    }

    /// The next round is published: lanes begin it when they are through with this one.
    fn publish(&mut self) {
        let bytes = self.next_bytes();
        // The first round is of another kind: only from the second one on do they have to shrink.
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

    /// The guest goes on at the destination: what is dirty, and what the round has not sent, is missing there.
    fn switch(mut self) -> Switch {
        let before = self.next.iter().sum::<f64>();
        // The last sync, which finds what was written since the one before.
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
                // The first round has all of RAM.
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

    /// The guest stops, and what remains is sent.
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

/// How long lanes send a round.
fn sending(bytes: f64, rate: f64) -> f64 {
    (bytes / rate).min(LONGEST_ROUND)
}

/// Any time that a forecast comes to, however long.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, 1e15)).unwrap_or_default()
}

/// Pages of `class` that are dirty after a first round that lasted `round` seconds, `sending` of them spent on
/// sending.
fn first_round(class: &Class, walk: Walk, sending: f64, round: f64) -> f64 {
    match (class.order, walk) {
        // It stays ahead of the round, as long as it does not come round to what was sent before.
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
