//! Each clause of the page order (`order/mod.rs`) is necessary: an engine that violates it produces memory that the
//! guest's checker refuses. Under the same settings, the correct engine never does.
//!
//! The engine itself is always correct. An object between it and the guest's log ([`dirty`]), or between it and the
//! destination ([`wire`]), acts as an engine without the clause would.
//!
//! The guests report writes like KVM with manual protection (bits stay set until re-armed). They write pages at
//! random, and so rarely that a second write seldom hides a lost one. The links are slow, so that the forbidden order
//! has time to happen.
#![allow(clippy::print_stdout, reason = "says how often a violation was noticed")]

mod dirty;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use sterna::error::{BadPage, Misbehaviour};
use sterna::{
    Address, Arrival, Capabilities, Incoming, Migration, MigrationError, Outcome, Parameters, SourceVm,
    TargetVm,
};
use sterna_guests::model::Acts;
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_guests::{Fill, Pattern};

use crate::common::*;
use crate::delay;
use dirty::{Faulty, Log};
use wire::Wire;

/// Most migrations with a violation, until one must be detected. The first usually is.
const MOST_TRIES: u32 = 30;

/// Least number of migrations without a violation. If there were more with one, as many as those.
const SOUND: u32 = 4;

/// A clause of the page order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clause {
    OncePerRound,
    RearmBeforeRead,
    RearmOnlySynced,
    WholeSliceFirst,
    SyncAfterLastPage,
    DropOnlyUnsent,
}

impl Clause {
    /// The object that violates the clause.
    fn violation(self) -> (Log, Wire) {
        match self {
            Self::OncePerRound => (Log::Sound, Wire::PagesTwice),
            Self::RearmBeforeRead => (Log::RearmedAfterReading, Wire::Sound),
            Self::RearmOnlySynced => (Log::RearmedUnsynced, Wire::Sound),
            Self::WholeSliceFirst => (Log::RearmedInPart, Wire::Sound),
            Self::SyncAfterLastPage => (Log::Sound, Wire::SyncTooEarly),
            Self::DropOnlyUnsent => (Log::ReportsDropped, Wire::Sound),
        }
    }
}

/// Conditions under which a clause matters.
struct Circumstances {
    guest: ProcessConfig,
    params: Parameters,
    /// Delays of the main channel and of the lanes. Empty: no network between the sides.
    delays: Vec<Duration>,
    /// Time for which the downtime limit is 0, so that there are many rounds.
    rounds_for: Duration,
}

fn circumstances(clause: Clause) -> Circumstances {
    let ms = Duration::from_millis;
    let (mut params, _) = multifd(2);
    let mut guest = ProcessConfig {
        blocks: vec![("ram.low".into(), 24 << 20), ("ram.high".into(), 8 << 20)],
        tracking: Tracking::Software,
        pattern: Pattern::Random,
        fill: Fill::Random(7),
        acts: Acts::MIXED,
        workers: 2,
        rate: 10_000,
        ..ProcessConfig::default()
    };
    let mut delays = Vec::new();
    let mut rounds_for = Duration::ZERO;
    match clause {
        // Few pages that are often written: rounds are short, and a later round can overtake an earlier one.
        Clause::OncePerRound => {
            guest.blocks = vec![("ram".into(), 8 << 20)];
            guest.rate = 5_000;
            params.multifd_channels = 3;
            delays = vec![ms(0), ms(0), ms(40), ms(80)];
            rounds_for = ms(400);
        }
        // Packets after the last SYNC arrive while the guest runs. Many rounds, so that a late packet meets the same
        // page in a packet of the next round.
        Clause::SyncAfterLastPage => {
            delays = vec![ms(0), ms(40), ms(40)];
            rounds_for = ms(800);
        }
        // Pages that were written without the sender's notice and dropped from the last sync are never sent. Many
        // rounds, so that pages are reported again after they were sent.
        Clause::DropOnlyUnsent => {
            params.max_bandwidth_bytes = 100 << 20;
            rounds_for = ms(800);
        }
        // Time between reading a page and re-arming it, or between sync and re-arming.
        Clause::RearmBeforeRead | Clause::WholeSliceFirst => params.max_bandwidth_bytes = 100 << 20,
        Clause::RearmOnlySynced => {
            guest.rate = 5_000;
            params.max_bandwidth_bytes = 60 << 20;
            rounds_for = ms(1200);
        }
    }
    Circumstances { guest, params, delays, rounds_for }
}

/// Result of a migration.
#[derive(Debug)]
enum Came {
    /// The memory of the arrived guest is consistent.
    Consistent,
    /// The checker refused the memory.
    Corrupt(String),
    /// The engine detected the violation, and the source's guest continues to run.
    Refused(MigrationError),
}

fn once(clause: Clause, violated: bool, trusting: bool) -> Came {
    let Circumstances { guest, mut params, delays, rounds_for } = circumstances(clause);
    let (source, target) = pair(&guest);
    let capabilities = Capabilities { multifd: true, ..Capabilities::default() };
    if !rounds_for.is_zero() {
        params.downtime_limit = Duration::ZERO;
    }
    let incoming = receive(&target, &params, capabilities, trusting);
    let (log, wire) = if violated { clause.violation() } else { (Log::Sound, Wire::Sound) };
    let mut to = incoming.address();
    if !delays.is_empty() {
        to = delay::network(&to, delays, wire.carriers());
    }
    let vm: Arc<dyn SourceVm> = Faulty::new(&source, log);
    let migration = Migration::start(vm, &to, params, capabilities, Arc::new(())).expect("started");
    if !rounds_for.is_zero() {
        std::thread::sleep(rounds_for);
        migration.set_live(|params| params.downtime_limit = Duration::from_secs(1)).expect("a live setting");
    }
    match (migration.wait(), incoming.wait()) {
        (Outcome::Completed, Arrival::Completed(_)) => {
            target.pause().expect("pausing");
            let verdict = target.check().expect("checking");
            if verdict.is_consistent() { Came::Consistent } else { Came::Corrupt(verdict.to_string()) }
        }
        (Outcome::Failed { .. }, Arrival::Failed(error @ MigrationError::PeerMisbehaved(_))) => {
            assert_lives_on(&source);
            Came::Refused(error)
        }
        // A packet that arrives after its round has ended prevents the destination's answer, until the source gives
        // up.
        (Outcome::Failed { .. }, Arrival::Failed(error)) if violated => {
            assert_lives_on(&source);
            Came::Refused(error)
        }
        (outcome, arrival) => panic!("{clause:?}, violated: {violated}: {outcome:?}, {arrival:?}"),
    }
}

fn receive(
    target: &Arc<ProcessGuest>,
    params: &Parameters,
    capabilities: Capabilities,
    trusting: bool,
) -> Incoming {
    if !trusting {
        return listen(target, params, capabilities);
    }
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    Incoming::listen_trusting(vm, &address, params.clone(), capabilities, Arc::new(())).expect("listening")
}

fn violation_is_noticed_and_the_sound_engine_passes(clause: Clause) {
    let tries = (1..=MOST_TRIES).find_map(|tries| match once(clause, true, true) {
        Came::Corrupt(why) => Some((tries, why)),
        _ => None,
    });
    let Some((tries, why)) = tries else {
        panic!("{clause:?} was violated in {MOST_TRIES} migrations and nobody noticed");
    };
    println!("{clause:?} violated: noticed in migration {tries}; {}", first_lines(&why));
    for _ in 0..tries.max(SOUND) {
        let came = once(clause, false, false);
        assert!(matches!(came, Came::Consistent), "{clause:?} held: {came:?}");
    }
}

fn first_lines(text: &str) -> String {
    text.lines().take(2).collect::<Vec<_>>().join("\n")
}

#[test]
fn page_twice_in_a_round_corrupts_memory() {
    violation_is_noticed_and_the_sound_engine_passes(Clause::OncePerRound);
}

#[test]
fn rearming_after_reading_corrupts_memory() {
    violation_is_noticed_and_the_sound_engine_passes(Clause::RearmBeforeRead);
}

#[test]
fn rearming_what_was_not_synced_corrupts_memory() {
    violation_is_noticed_and_the_sound_engine_passes(Clause::RearmOnlySynced);
}

#[test]
fn reading_before_the_whole_slice_is_rearmed_corrupts_memory() {
    violation_is_noticed_and_the_sound_engine_passes(Clause::WholeSliceFirst);
}

#[test]
fn sync_before_the_last_pages_corrupts_memory() {
    violation_is_noticed_and_the_sound_engine_passes(Clause::SyncAfterLastPage);
}

#[test]
fn dropping_reports_of_pages_that_were_sent_corrupts_memory() {
    violation_is_noticed_and_the_sound_engine_passes(Clause::DropOnlyUnsent);
}

/// Sterna's destination prevents this.
#[test]
fn page_twice_in_a_round_is_refused_by_our_destination() {
    let Came::Refused(why) = once(Clause::OncePerRound, true, false) else {
        panic!("pages came twice between two flushes and were taken");
    };
    let twice = |why: &MigrationError| {
        matches!(why, MigrationError::PeerMisbehaved(Misbehaviour::Page(BadPage::TwiceInRound { .. })))
    };
    assert!(twice(&why), "{why}");
}
