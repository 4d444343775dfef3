//! The simulated world: time, clocks, the queue of future items, both sides, and the arbiter.

use super::coverage::Coverage;
use super::planted::Planted;
use super::schedule::{Blow, Effect, Fault, Phase, Place, SECOND, Schedule};
use super::state::{Facts, Guest, Item, Lineage, Link, PrimarySide, Side, StandbySide};
use crate::replica::{Answer, Protection, Ruling, primary, standby};
use crate::sim::{Micros, Rng};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The operator ends a protection that is still running at this time.
const LIFE: Micros = 2 * SECOND;
/// All faults have ended long before this time, so both sides must have ended too.
const HORIZON: Micros = 200 * SECOND;
const MOST_EVENTS: u32 = 40_000;
/// Simulated time after the end of both sides, in which nothing may change.
const AFTERMATH: Micros = SECOND;

/// The result of one generation.
pub(super) struct End {
    pub(super) violation: Option<String>,
    pub(super) trace: Vec<String>,
    pub(super) survivor: Option<Lineage>,
}

pub(super) struct World<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) phase: &'a Phase,
    pub(super) protection: Protection,
    pub(super) rng: Rng,
    pub(super) now: Micros,
    queue: BinaryHeap<Reverse<(Micros, u64)>>,
    items: Vec<Option<Item>>,
    pub(super) primary: PrimarySide,
    pub(super) standby: StandbySide,
    /// The link to the primary, then the link to the standby.
    pub(super) links: [Link; 2],
    pub(super) arbiter: Option<Side>,
    pub(super) blocked_until: [Micros; 2],
    pub(super) facts: Facts,
    pub(super) violation: Option<String>,
    pub(super) coverage: &'a mut Coverage,
    trace: Option<Vec<String>>,
    is_placed: Vec<bool>,
    settled_at: Option<Micros>,
}

impl<'a> World<'a> {
    pub(super) fn new(
        schedule: &'a Schedule,
        phase: &'a Phase,
        generation: u64,
        lineage: Lineage,
        coverage: &'a mut Coverage,
        traced: bool,
    ) -> Self {
        let protection = Protection { id: *b"simulated-guest!", generation };
        Self {
            schedule,
            phase,
            protection,
            rng: Rng::new(schedule.seed.wrapping_mul(31).wrapping_add(generation)),
            now: 0,
            queue: BinaryHeap::new(),
            items: Vec::new(),
            primary: PrimarySide::new(protection, phase, lineage),
            standby: StandbySide::new(protection, phase),
            links: [Link::default(), Link::default()],
            arbiter: None,
            blocked_until: [0; 2],
            facts: Facts { heard: lineage.heard, said_by_primary: lineage.heard, ..Facts::default() },
            violation: None,
            coverage,
            trace: traced.then(Vec::new),
            is_placed: vec![false; phase.faults.len()],
            settled_at: None,
        }
    }

    pub(super) fn run(mut self) -> End {
        self.entered(Place::Primary(primary::State::Seeding));
        self.entered(Place::Standby(standby::State::Seeding));
        self.arm(Side::Primary);
        let seeding = 50_000 + self.rng.below(400_000);
        self.push(seeding, Item::Takes);
        self.push(1_000, Item::GuestSteps(Side::Primary));
        self.push(LIFE, Item::EndOfLife);
        let mut events = 0;
        while let Some(Reverse((at, index))) = self.queue.pop() {
            let Some(item) = self.items[index as usize].take() else { continue };
            if at > HORIZON || events > MOST_EVENTS || self.violation.is_some() {
                break;
            }
            self.now = at;
            if let Some(thaw) = self.frozen(item) {
                // A connection keeps its order. Other items that are due when a process wakes have
                // no order.
                let is_ordered = matches!(item, Item::Arrives(..) | Item::Broken(_));
                let late = if is_ordered { 0 } else { self.rng.below(1_000) };
                self.push(thaw - at + late, item);
                continue;
            }
            events += 1;
            self.happens(item);
            self.check_step();
            if self.settled_at.is_none() && self.is_settled() {
                self.settled_at = Some(self.now);
            }
            if self.settled_at.is_some_and(|at| self.now > at + AFTERMATH) && self.is_settled() {
                break;
            }
        }
        if self.violation.is_none() {
            self.check_end();
        }
        self.coverage.events += u64::from(events);
        let survivor = self.survivor();
        End { violation: self.violation, trace: self.trace.unwrap_or_default(), survivor }
    }

    fn happens(&mut self, item: Item) {
        if !matches!(item, Item::GuestSteps(_) | Item::Performs(_)) {
            self.note(|| format!("{item:?}"));
        }
        match item {
            Item::Tick(Side::Primary) => self.primary_ticks(),
            Item::Tick(Side::Standby) => self.standby_ticks(),
            Item::Performs(Side::Primary) => self.primary_performs(),
            Item::Performs(Side::Standby) => self.standby_performs(),
            Item::GuestSteps(side) => self.guest_steps(side),
            Item::Takes => self.primary_takes(),
            Item::Staged => self.primary_staged(),
            Item::Arrives(side, message, generation) => self.arrives(side, message, generation),
            Item::Broken(side) => self.broken(side),
            Item::ClaimArrives(side) => self.claim_arrives(side),
            Item::ClaimAnswered(side, ruling) => self.claim_answered(side, ruling),
            Item::Effect(effect, is_done) => self.effect_ends(effect, is_done),
            Item::Stray(protection, times) => self.stray(protection, times),
            Item::Retries => self.operator_retries(),
            Item::Strikes(blow) => self.strikes(blow),
            Item::EndOfLife => self.primary_feeds(primary::Event::Unprotect),
        }
    }

    /// The time at which the item's process wakes, if it is frozen.
    fn frozen(&self, item: Item) -> Option<Micros> {
        let side = match item {
            Item::Tick(side) | Item::Performs(side) | Item::Arrives(side, ..) | Item::Broken(side) => side,
            Item::ClaimAnswered(side, _) => side,
            // QEMU's guest runs in another process than its guard.
            Item::GuestSteps(Side::Primary) | Item::Staged | Item::Takes if self.phase.is_qemu => {
                return None;
            }
            Item::GuestSteps(side) => side,
            Item::Takes | Item::Staged | Item::Stray(..) | Item::EndOfLife => Side::Primary,
            Item::Effect(..) | Item::Retries => Side::Standby,
            Item::ClaimArrives(_) | Item::Strikes(_) => return None,
        };
        let until = match side {
            Side::Primary => self.primary.frozen_until,
            Side::Standby => self.standby.frozen_until,
        };
        (until > self.now).then_some(until)
    }

    pub(super) fn push(&mut self, delay: Micros, item: Item) {
        let index = self.items.len() as u64;
        self.items.push(Some(item));
        self.queue.push(Reverse((self.now + delay, index)));
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>12.6} {}", now as f64 / 1e6, line()));
        }
    }

    pub(super) fn violate(&mut self, what: &str) {
        if self.violation.is_none() {
            self.note(|| format!("VIOLATED: {what}"));
            self.violation = Some(what.to_owned());
        }
    }

    pub(super) fn is_planted(&self, bug: Planted) -> bool {
        self.schedule.planted == Some(bug)
    }

    /// The time on a side's own clock.
    pub(super) fn local(&self, side: Side) -> Duration {
        let rate = self.phase.rates[side as usize];
        Duration::from_micros((self.now as i64 + self.now as i64 * rate / 1_000_000) as u64)
    }

    /// Schedules a tick at the side's next deadline.
    pub(super) fn arm(&mut self, side: Side) {
        let (deadline, armed) = match side {
            Side::Primary => (self.primary.machine.deadline(), self.primary.tick_at),
            Side::Standby => (self.standby.machine.deadline(), self.standby.tick_at),
        };
        let Some(deadline) = deadline else { return };
        let rate = self.phase.rates[side as usize];
        let real = (deadline.as_micros() as i64 * 1_000_000 / (1_000_000 + rate)) as Micros + 2;
        let at = real.max(self.now + 1);
        if armed.is_some_and(|armed| armed <= at) {
            return;
        }
        // A busy host wakes a thread late. The margin covers this delay.
        let late = if self.phase.is_loaded { self.rng.below(100_000) } else { self.rng.below(1_000) };
        match side {
            Side::Primary => self.primary.tick_at = Some(at),
            Side::Standby => self.standby.tick_at = Some(at),
        }
        self.push(at - self.now + late, Item::Tick(side));
    }

    /// Records that a machine entered a state, and schedules the faults placed there.
    pub(super) fn entered(&mut self, place: Place) {
        self.note(|| format!("  {place:?}"));
        self.coverage.visit(place);
        let phase = self.phase;
        for (index, fault) in phase.faults.iter().enumerate() {
            if let Fault::At { place: at, delay, blow } = *fault
                && at == place
                && !std::mem::replace(&mut self.is_placed[index], true)
            {
                self.push(delay, Item::Strikes(blow));
            }
        }
    }

    /// Draws the duration of local work.
    pub(super) fn work(&mut self, usual: Micros) -> Micros {
        let most = if self.phase.is_loaded && self.rng.percent(20) { usual * 20 } else { usual };
        1 + self.rng.below(most)
    }

    pub(super) fn asks_arbiter(&mut self, side: Side) {
        let delay = if self.rng.percent(10) { self.rng.below(3 * SECOND) } else { self.rng.below(50_000) };
        self.push(delay, Item::ClaimArrives(side));
    }

    /// Whether the side reaches the arbiter now.
    fn is_arbiter_in_reach(&self, side: Side) -> bool {
        !self.phase.is_without_arbiter[side as usize] && self.now >= self.blocked_until[side as usize]
    }

    /// The result of a side's check before a planned takeover.
    pub(super) fn finds_arbiter(&self, side: Side) -> bool {
        self.is_arbiter_in_reach(side) || self.is_planted(Planted::HandsOverUnasked)
    }

    /// Handles a claim at the arbiter. The claim takes effect even if its answer is lost.
    fn claim_arrives(&mut self, side: Side) {
        if !self.is_arbiter_in_reach(side) {
            return self.push(SECOND / 2, Item::ClaimAnswered(side, None));
        }
        let owner = *self.arbiter.get_or_insert(side);
        let ruling = if owner == side { Ruling::Won } else { Ruling::Lost };
        let answer = (!self.rng.percent(10)).then_some(ruling);
        let delay = if self.rng.percent(10) { self.rng.below(3 * SECOND) } else { self.rng.below(50_000) };
        self.push(delay, Item::ClaimAnswered(side, answer));
    }

    fn claim_answered(&mut self, side: Side, ruling: Option<Ruling>) {
        match side {
            Side::Primary => {
                self.primary_feeds(ruling.map_or(primary::Event::ArbiterOutOfReach, primary::Event::Ruled))
            }
            Side::Standby => {
                self.standby_feeds(ruling.map_or(standby::Event::ArbiterOutOfReach, standby::Event::Ruled))
            }
        }
    }

    /// Delivers answers of another protection to the primary.
    fn stray(&mut self, protection: Protection, times: u8) {
        let is_old = protection.generation != self.protection.generation;
        let planted = if is_old { Planted::OldGenerationCounts } else { Planted::OtherSessionCounts };
        let answer = Answer {
            protection: if self.is_planted(planted) { self.protection } else { protection },
            held: if is_old { self.primary.captured } else { self.primary.machine.held() },
            heartbeat: self.primary.last_beat,
        };
        self.primary_feeds(primary::Event::Answered(answer));
        if times > 0 {
            self.push(100_000, Item::Stray(protection, times - 1));
        }
    }

    fn strikes(&mut self, blow: Blow) {
        self.facts.blows += 1;
        if self.primary.is_alive {
            self.coverage.strike(Place::Primary(self.primary.machine.state()), blow);
        }
        if self.standby.is_alive {
            self.coverage.strike(Place::Standby(self.standby.machine.state()), blow);
        }
        let ours = self.protection;
        match blow {
            Blow::CutForward => self.cut(&[Side::Standby]),
            Blow::CutBack => self.cut(&[Side::Primary]),
            Blow::CutBoth => self.cut(&[Side::Primary, Side::Standby]),
            Blow::Reset => self.reset(),
            Blow::CrashPrimary => self.crash_primary(),
            Blow::CrashStandby => self.crash_standby(),
            // A process that is already frozen is left alone, because its waiting items would lose
            // their order.
            Blow::FreezePrimary(time) if self.primary.frozen_until <= self.now => {
                self.primary.frozen_until = self.now + time;
            }
            Blow::FreezeStandby(time) if self.standby.frozen_until <= self.now => {
                self.standby.frozen_until = self.now + time;
            }
            Blow::BlockPrimary => self.block(Side::Primary),
            Blow::BlockStandby => self.block(Side::Standby),
            Blow::GarbageToPrimary if self.primary.is_open => {
                self.primary_feeds(primary::Event::PeerMisbehaved);
            }
            Blow::GarbageToStandby if self.standby.is_open => {
                self.standby_feeds(standby::Event::PeerMisbehaved);
            }
            Blow::LocalPrimary => self.primary_feeds(primary::Event::LocalFailure),
            Blow::LocalStandby => self.standby_feeds(standby::Event::LocalFailure),
            Blow::OldAnswers => {
                self.push(0, Item::Stray(Protection { generation: ours.generation - 1, ..ours }, 30));
            }
            Blow::OtherAnswers => {
                self.push(0, Item::Stray(Protection { id: *b"another-session!", ..ours }, 40));
            }
            // In other states the guest would be lost whatever the machines do, or the standby has
            // it already.
            Blow::GuestEnds if self.is_protected() => {
                self.primary.guest = Guest::default();
                self.primary.guest_has_ended = true;
                self.primary_feeds(primary::Event::GuestGone);
            }
            Blow::Unprotect => self.primary_feeds(primary::Event::Unprotect),
            Blow::HandOver => {
                let is_arbiter_in_reach = self.finds_arbiter(Side::Primary);
                self.primary_feeds(primary::Event::HandOver { is_arbiter_in_reach });
            }
            Blow::TakeOver { is_planned } => {
                let is_arbiter_in_reach = self.finds_arbiter(Side::Standby);
                self.standby_feeds(standby::Event::TakeOver { is_planned, is_arbiter_in_reach });
            }
            _ => {}
        }
    }

    fn block(&mut self, side: Side) {
        let until = self.now + self.rng.below(20 * SECOND);
        let blocked = &mut self.blocked_until[side as usize];
        *blocked = until.max(*blocked);
    }

    /// Whether this attempt of an effect fails.
    pub(super) fn fails(&mut self, effect: Effect) -> bool {
        let planned = self.phase.faults.iter().find_map(|fault| match fault {
            Fault::Fail { effect: which, times } if *which == effect => Some(*times),
            _ => None,
        });
        let failed = &mut self.facts.failed[effect as usize];
        let fails = planned.is_some_and(|times| *failed < times);
        *failed += u8::from(fails);
        fails
    }
}

impl World<'_> {
    /// Whether the standby could take over now.
    ///
    /// That is so if the primary's machine is in contact and no deadline has passed that it has not
    /// handled yet.
    fn is_protected(&self) -> bool {
        let machine = &self.primary.machine;
        let is_in_time = machine.deadline().is_none_or(|deadline| self.local(Side::Primary) < deadline);
        is_in_time && matches!(machine.state(), primary::State::Protected | primary::State::HandingOver)
    }
}
