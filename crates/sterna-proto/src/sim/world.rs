//! The simulated world: time, the queue of future items, both sides, the network between them, and
//! the faults.

use super::coverage::Coverage;
use super::dials::{DialEnd, Dials};
use super::qemu_state::{QemuDestination, QemuSource};
use super::rng::Rng;
use super::schedule::{Blow, Effect, Fault, Micros, Pairing, Place, Schedule};
use crate::destination::{self, Destination};
use crate::source::{self, Decision, Source};
use crate::{Limits, MigrationId, Status};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

pub(super) const ID: MigrationId = MigrationId(*b"simulated-guest!");
pub(super) const SECOND: Micros = 1_000_000;
/// All faults have ended long before this time, so both sides must have ended too.
const HORIZON: Micros = 300 * SECOND;
const MOST_EVENTS: u32 = 20_000;

/// The side that has acquired a hook (a disk, a lock). Exclusive, as a disk lock is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Nobody,
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

/// Messages of the main channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    // From source to destination.
    Connected,
    OpenReturnPath,
    Hello,
    Configuration,
    HandoverId,
    Reconnects,
    Compatibility,
    Ram,
    DeviceAsks,
    Final,
    Prepare,
    Run,
    Page(u8),
    AskBitmap,
    Resume,
    Eof,
    // From destination to source.
    HelloPong {
        sterna: bool,
    },
    WantsConfiguration,
    Configured,
    CompatibilityPong,
    ReconnectsPong,
    Ack,
    PreparePong,
    Started,
    /// Pages that a blocked thread requests, as bits.
    Wants(u8),
    Shut(u32),
    /// The set of placed pages, as bits.
    Bitmap(u8),
    ResumeAck,
    Garbage,
}

/// Future events of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    SourceDoes(Work),
    DestinationDoes(Work),
    /// A message reaches this side, if the link still has this generation.
    Arrives(Side, Message, u32),
    /// The peer's orderly close reaches this side.
    Closed(Side, u32),
    /// This side notices that the connection of this session is broken.
    Broken(Side, u32),
    QuestionArrives,
    /// In postcopy: the source's dial of this session reaches the destination.
    RecoveryDial(u32),
    /// The destination checks again whether it can accept this session.
    Waits(u32),
    /// The source learns that the destination has accepted the session.
    Connected(u32),
    NotConnected(u32),
    Answer(Option<Status>),
    /// The source's dial of this number reaches the destination's address.
    Dial(u32),
    /// The source learns the result of this dial.
    DialEnds(u32, DialEnd),
    Strikes(Blow),
    Operator(Command),
}

/// Kinds of local work, for the item that reports the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Connect,
    WantSwitchover,
    DeviceAsks,
    /// Sends the final state, in this session.
    Final(u32),
    EofByte,
    RunByte,
    EofDone,
    Pages,
    Closed,
    TakesOver,
    Load,
    Do(Effect),
    QemuStops,
    QemuReleases,
    QemuEof,
    QemuResumes,
    QemuStarts,
    QemuPongs,
    QemuRuns,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Continue,
    Retry,
    Decide,
    Cont,
    Abandon,
    Resume,
}

/// One direction of the connection: ordered, delayed, and cut permanently.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) cut: bool,
    pub(super) generation: u32,
    pub(super) last_arrival: Micros,
}

/// State that source and destination have in common.
#[derive(Debug)]
pub(super) struct Process<M, Q> {
    pub(super) machine: Option<M>,
    pub(super) qemu: Q,
    pub(super) alive: bool,
    /// The process's channels are open.
    pub(super) open: bool,
    /// The process's guest runs.
    pub(super) running: bool,
    pub(super) retries: u8,
}

/// Facts about the run that the checks compare with the machines.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// The destination has made its VM from the source's configuration.
    pub(super) has_vm: bool,
    /// The destination answered the PREPARE ping.
    pub(super) prepared: bool,
    /// The first byte of EOF was handed to the network.
    pub(super) eof_out: bool,
    /// The first byte of RUN was handed to the network.
    pub(super) run_out: bool,
    /// Whether all pages were sent, and whether all are in place.
    pub(super) pages_out: bool,
    pub(super) pages_complete: bool,
    /// Pages in place at the destination, and pages not to be sent again, as bits.
    pub(super) placed: u8,
    pub(super) sent: u8,
    /// A page that arrived could not be placed, and no side noticed.
    pub(super) page_lost: bool,
    /// The destination ends the connection with a SHUT. The source has received it and waits for
    /// its operator.
    pub(super) last_word: bool,
    pub(super) told_to_wait: bool,
    /// The last session that the source has begun, and the newest that has reached the destination.
    pub(super) session: u32,
    pub(super) newest: u32,
    /// The destination has run the guest, or taken it over.
    pub(super) taken_over: bool,
    /// Devices of the destination have written the shared memory.
    pub(super) written: bool,
    /// The destination sent SHUT 1 or *never*.
    pub(super) never: bool,
    /// The destination sent SHUT 0 or *committed*.
    pub(super) committed: bool,
    pub(super) decided: Option<Decision>,
    /// The operator has decided in a paused postcopy that the source releases its pages.
    pub(super) pages_given_up: bool,
    pub(super) source_outcome: Option<source::Outcome>,
    pub(super) destination_outcome: Option<destination::Outcome>,
    pub(super) tracking: bool,
    pub(super) final_arrived: bool,
    pub(super) loaded: bool,
    pub(super) memory_used: bool,
    pub(super) give_back_failed: bool,
    pub(super) double_run: bool,
    pub(super) restarted: bool,
    pub(super) abandoned: bool,
}

pub(super) struct World<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) rng: Rng,
    pub(super) now: Micros,
    seq: u64,
    queue: BinaryHeap<Reverse<(Micros, u64, Entry)>>,
    pub(super) forward: Link,
    pub(super) back: Link,
    pub(super) source: Process<Source, QemuSource>,
    pub(super) destination: Process<Destination, QemuDestination>,
    pub(super) hooks: [Owner; 2],
    pub(super) facts: Facts,
    pub(super) asks_blocked_until: Micros,
    pub(super) dials: Dials,
    struck: u64,
    failures: [u8; Effect::ALL.len()],
    pub(super) coverage: &'a mut Coverage,
    trace: Option<Vec<String>>,
    pub(super) violation: Option<String>,
}

/// An item in the queue. Its order is irrelevant, because `seq` is unique.
#[derive(Debug, PartialEq, Eq)]
struct Entry(Item);

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

/// Short limits, so that slow networks and effects exceed them.
pub(super) fn limits() -> Limits {
    let s = Duration::from_secs;
    Limits {
        setup: s(5),
        stop: s(3),
        switchover: s(5),
        prepare: s(5),
        commit: s(2),
        acknowledge: s(4),
        ask: s(2),
        ask_interval: s(1),
        reacquire: s(60),
        reacquire_interval: s(1),
        reconnect: s(20),
        reconnect_interval: s(1),
        load: s(5),
        prepared: s(8),
    }
}

impl<'a> World<'a> {
    pub(super) fn new(schedule: &'a Schedule, coverage: &'a mut Coverage, trace: bool) -> Self {
        let from_qemu = matches!(schedule.pairing, Pairing::FromQemu { .. });
        let to_qemu = matches!(schedule.pairing, Pairing::ToQemu { .. });
        let return_path = !matches!(schedule.pairing, Pairing::ToQemu { return_path: false });
        let managed = matches!(schedule.pairing, Pairing::FromQemu { managed: true, .. });
        let source_config = source::Config {
            return_path,
            compatibility: schedule.compatibility,
            pause_before_switchover: schedule.pause,
            switchover_ack: schedule.ack,
            // Not part of a handover: `replica::sim` simulates the states after a seeding.
            protects: false,
            postcopy: schedule.postcopy,
            limits: Limits {
                reconnect: Duration::from_secs(if schedule.reconnects { 10 } else { 0 }),
                ..limits()
            },
        };
        let destination_config =
            destination::Config { autostart: schedule.autostart, managed, limits: limits() };
        let source = Source::new(source_config, Duration::ZERO);
        let destination = Destination::new(destination_config, Duration::ZERO);
        let mut failures = [0; Effect::ALL.len()];
        for fault in &schedule.faults {
            if let Fault::Fail { effect, times } = *fault {
                let left = &mut failures[effect as usize];
                *left = times.max(*left);
            }
        }
        Self {
            schedule,
            rng: Rng::new(schedule.seed),
            now: 0,
            seq: 0,
            queue: BinaryHeap::with_capacity(32),
            forward: Link::default(),
            back: Link::default(),
            source: Process::new((!from_qemu).then_some(source), schedule.was_running),
            destination: Process::new((!to_qemu).then_some(destination), false),
            hooks: [Owner::Source; 2],
            facts: Facts::default(),
            asks_blocked_until: 0,
            dials: Dials::default(),
            struck: 0,
            failures,
            coverage,
            trace: trace.then(Vec::new),
            violation: None,
        }
    }

    /// Runs until the queue is empty. Returns the violated invariant and, if requested, the trace.
    pub(super) fn run(mut self) -> (Option<String>, Vec<String>) {
        self.entered(Place::Source(source::State::Setup));
        self.entered(Place::Destination(destination::State::Setup));
        let at = self.local_delay();
        self.push(at, Item::SourceDoes(Work::Connect));
        let mut events = 0;
        while self.violation.is_none() && self.next() {
            events += 1;
            if events > MOST_EVENTS {
                self.violate("liveness: the machines do not settle");
            }
            self.check_step();
        }
        self.coverage.events += u64::from(events);
        self.coverage.schedules += 1;
        if self.violation.is_none() {
            self.check_end();
        }
        (self.violation, self.trace.unwrap_or_default())
    }

    /// Handles the next item or deadline; returns false if none is left.
    fn next(&mut self) -> bool {
        let item_at = self.queue.peek().map_or(Micros::MAX, |Reverse(e)| e.0);
        let source_at = self.source_deadline();
        let destination_at = self.destination_deadline();
        let at = item_at.min(source_at).min(destination_at);
        if at > HORIZON {
            return false;
        }
        self.now = self.now.max(at);
        if item_at <= source_at && item_at <= destination_at {
            if let Some(Reverse((_, _, Entry(item)))) = self.queue.pop() {
                self.happens(item);
            }
        } else if source_at <= destination_at {
            self.source_event(source::Event::Tick);
            if self.source_deadline() <= self.now {
                self.violate("liveness: the source's tick at its deadline did nothing");
            }
        } else {
            self.destination_event(destination::Event::Tick);
            if self.destination_deadline() <= self.now {
                self.violate("liveness: the destination's tick at its deadline did nothing");
            }
        }
        true
    }

    fn source_deadline(&self) -> Micros {
        let machine = self.source.machine.as_ref().filter(|_| self.source.alive);
        micros(machine.and_then(Source::deadline))
    }

    fn destination_deadline(&self) -> Micros {
        // The machine exists only after the source has connected.
        let machine = self.destination.machine.as_ref();
        let machine = machine.filter(|_| self.destination.alive);
        micros(machine.and_then(Destination::deadline))
    }

    fn happens(&mut self, item: Item) {
        self.note(|| format!("{item:?}"));
        match item {
            Item::SourceDoes(work) if self.source.alive => self.source_does(work),
            Item::DestinationDoes(work) if self.destination.alive => self.destination_does(work),
            Item::SourceDoes(_) | Item::DestinationDoes(_) => {}
            Item::Arrives(side, message, generation) => self.arrives(side, message, generation),
            Item::Broken(side, session) if session == self.dials.taken() => self.broken(side),
            Item::Broken(..) => {}
            Item::Closed(side, generation) => {
                if self.link_to(side).generation == generation {
                    self.broken(side);
                }
            }
            Item::QuestionArrives => self.question(),
            Item::RecoveryDial(session) => self.recovery_dialled(session),
            Item::Waits(session) => self.waits(session),
            Item::Connected(session) => self.connected(session),
            Item::NotConnected(session) => self.not_connected(session),
            Item::Answer(status) => self.answer(status),
            Item::Dial(number) => self.dialled(number),
            Item::DialEnds(number, end) => self.dial_ended(number, end),
            Item::Strikes(blow) => self.strikes(blow),
            Item::Operator(command) => self.operator(command),
        }
    }

    // Used by both sides.

    pub(super) fn push(&mut self, delay: Micros, item: Item) {
        self.seq += 1;
        self.queue.push(Reverse((self.now + delay, self.seq, Entry(item))));
    }

    /// Whether this attempt of an effect fails.
    pub(super) fn fails(&mut self, effect: Effect) -> bool {
        let left = &mut self.failures[effect as usize];
        match *left {
            0 => false,
            Fault::ALWAYS => true,
            _ => {
                *left -= 1;
                true
            }
        }
    }

    pub(super) fn plans_failure(&self, effect: Effect) -> bool {
        let fails = |f: &Fault| matches!(f, Fault::Fail { effect: e, .. } if *e == effect);
        self.schedule.faults.iter().any(fails)
    }

    pub(super) fn local_delay(&mut self) -> Micros {
        if self.schedule.slow_local && self.rng.percent(8) {
            return self.rng.below(6 * SECOND);
        }
        10 + self.rng.below(3_000)
    }

    pub(super) fn network_delay(&mut self) -> Micros {
        if self.schedule.slow_network && self.rng.percent(6) {
            return self.rng.below(12 * SECOND);
        }
        50 + self.rng.below(2_000)
    }

    /// Whether a side has acquired all hooks, as far as this world can tell.
    pub(super) fn holds_all(&self, owner: Owner) -> bool {
        !self.schedule.locks || self.hooks == [owner; 2]
    }

    /// Whether a lock of this side prevents the other from acquiring some hook.
    pub(super) fn locks_some(&self, owner: Owner) -> bool {
        self.schedule.locks && self.hooks.contains(&owner)
    }

    /// Records that a machine entered a state, and schedules the blows placed there.
    pub(super) fn entered(&mut self, place: Place) {
        self.coverage.visit(place);
        let faults = &self.schedule.faults;
        for (index, fault) in faults.iter().enumerate() {
            let Fault::At { place: at, delay, blow } = *fault else {
                continue;
            };
            if at == place && self.struck & (1 << index) == 0 {
                self.struck |= 1 << index;
                self.push(delay, Item::Strikes(blow));
            }
        }
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>12} us  {}", self.now, line()));
        }
    }

    pub(super) fn violate(&mut self, what: &str) {
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert_with(|| what.to_owned());
    }
}

impl<M, Q: Default> Process<M, Q> {
    fn new(machine: Option<M>, running: bool) -> Self {
        Self { machine, qemu: Q::default(), alive: true, open: true, running, retries: 0 }
    }

    pub(super) fn dies(&mut self) {
        self.alive = false;
        self.open = false;
        self.running = false;
    }
}

fn micros(time: Option<Duration>) -> Micros {
    time.map_or(Micros::MAX, |time| time.as_micros() as Micros)
}

/// The simulated time in the type that the machines use.
pub(super) fn time(now: Micros) -> Duration {
    Duration::from_micros(now)
}
