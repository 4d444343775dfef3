//! A guest of this process that a standby protects: checkpoints while it writes, and what the last one is worth.

mod copied;
mod delta;
mod in_flight;
mod led;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::ram::Custody;
use sterna::replica::machines::{Ruling, primary, standby};
use sterna::replica::{
    ByteGate, CheckpointCopy, CheckpointMode, Claims, ContactRules, EpochGate, GateStatistics, Guardians,
    MaySay, NoOutput, Primary, PrimaryOptions, ProtectError, Protection, Secret, Standby, StandbyOptions,
    Terms, VmSurvivor,
};
use sterna::{Address, Capabilities, Compression, Parameters, RunState, SourceVm, TargetVm, Vm};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};

use crate::common::*;
use crate::support::proxy::{Line, Proxy, Verdict, Way as Direction};

pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A lease that no busy host lets run out.
pub const TERMS: Terms = Terms {
    heartbeat: Duration::from_millis(20),
    lease: Duration::from_secs(60),
    drift_per_mille: 10,
    margin: Duration::from_millis(100),
    claim_interval: Duration::from_millis(50),
};

/// Gives the claim to who asks first.
#[derive(Default)]
pub struct Arbiter(pub Mutex<Option<&'static str>>, Mutex<Favour>);

/// A side that is favoured gets the claim if it asks; the other side waits for that a while. It may not ask: it may hold nothing.
#[derive(Default)]
struct Favour {
    side: Option<&'static str>,
    since: Option<Instant>,
}

impl Arbiter {
    fn of(self: &Arc<Self>, side: &'static str) -> Arc<dyn Claims> {
        let this = Arc::clone(self);
        Arc::new(move || {
            let mut favour = this.1.lock();
            if favour.side.is_some_and(|favoured| favoured != side) && this.0.lock().is_none() {
                let since = *favour.since.get_or_insert_with(Instant::now);
                if since.elapsed() < Duration::from_millis(500) {
                    return Err("not decided".to_owned());
                }
            }
            let owner = *this.0.lock().get_or_insert(side);
            Ok(if owner == side { Ruling::Won } else { Ruling::Lost })
        })
    }
}

pub struct Pair {
    pub guest: Arc<ProcessGuest>,
    /// Where it goes on.
    pub there: Arc<ProcessGuest>,
    pub primary: Primary,
    pub standby: Standby,
    pub arbiter: Arc<Arbiter>,
    proxy: Proxy,
    /// By the survivor: from which byte on, and what.
    said_again: Arc<Mutex<(u64, Vec<u8>)>>,
    /// After so many pieces every connection ends.
    pub cut: Arc<AtomicI64>,
    /// What the standby says by the contact's connection comes later than all else.
    words_are_late: Arc<AtomicBool>,
    /// Nothing of the guest's state goes on to the standby.
    holds_back: Arc<AtomicBool>,
}

pub fn protect(config: ProcessConfig, way: &Way, terms: Terms, gate: Arc<dyn EpochGate>) -> Pair {
    try_protect((config.clone(), config), way, terms, gate).expect("protected")
}

/// With what each side has.
fn try_protect(
    (ours, theirs): (ProcessConfig, ProcessConfig),
    way: &Way,
    terms: Terms,
    gate: Arc<dyn EpochGate>,
) -> Result<Pair, ProtectError> {
    let (guest, _) = pair(&ours);
    let there = ProcessGuest::waiting(theirs).expect("destination");
    let vms: (Arc<dyn SourceVm>, Arc<dyn TargetVm>) = (Arc::clone(&guest) as _, Arc::clone(&there) as _);
    join((guest, there), vms, way, terms, gate)
}

/// With the VMs that these guests are in.
pub fn join(
    (guest, there): (Arc<ProcessGuest>, Arc<ProcessGuest>),
    (vm, vm_there): (Arc<dyn SourceVm>, Arc<dyn TargetVm>),
    way: &Way,
    terms: Terms,
    gate: Arc<dyn EpochGate>,
) -> Result<Pair, ProtectError> {
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let (params, capabilities) = way.settings();
    let (arbiter, secret) = (Arc::<Arbiter>::default(), || Secret::from_bytes([3; 32]));
    let said_again = Arc::new(Mutex::new((0, Vec::new())));
    let survivor = VmSurvivor::new(vm_there).expect("the place is free");
    let survivor = Arc::new(survivor.saying_again({
        let said_again = Arc::clone(&said_again);
        move |position, bytes| *said_again.lock() = (position, bytes.to_vec())
    }));
    let rules = ContactRules {
        secret: secret(),
        is_required: true,
        claims: {
            let arbiter = Arc::clone(&arbiter);
            Arc::new(move |_| arbiter.of("standby"))
        },
        fence: Arc::new(|_| panic!("a guest of this process stops by itself")),
    };
    let options = StandbyOptions { insecure: true, ..StandbyOptions::default() };
    let standby =
        Standby::protect(&at, &options, params.clone(), capabilities, Arc::new(()), survivor, Some(rules));
    let standby = standby.expect("listening");
    let options = PrimaryOptions {
        checkpoint_delay: way.delay,
        checkpoint_mode: way.mode,
        checkpoints_in_flight: way.in_flight,
        checkpoint_copy: way.copy,
        terms,
        buffer_bytes: way.buffer_bytes,
        ..PrimaryOptions::default()
    };
    let guardians = Guardians {
        protection: Protection { id: [7; 16], generation: 1 },
        secret: secret(),
        claims: arbiter.of("primary"),
        gate,
    };
    let cut = Arc::<AtomicI64>::new(AtomicI64::new(i64::MAX));
    let pieces = Arc::clone(&cut);
    let words_are_late = Arc::<AtomicBool>::default();
    let are_late = Arc::clone(&words_are_late);
    let holds_back = Arc::<AtomicBool>::default();
    let is_held_back = Arc::clone(&holds_back);
    let filter = move |line, direction, _, _: &mut Vec<u8>| {
        let is_state = line != Line::Other && direction == Direction::Forward;
        if is_state && is_held_back.load(Ordering::SeqCst) {
            return Verdict::Later;
        }
        if (line, direction) == (Line::Other, Direction::Back) && are_late.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(300));
        }
        match pieces.fetch_sub(1, Ordering::SeqCst) {
            ..=0 => Verdict::Cut,
            _ => Verdict::Pass,
        }
    };
    let proxy = Proxy::new(&standby.address(), Box::new(filter));
    if let Some(pieces) = way.cut_after {
        cut.store(pieces, Ordering::SeqCst);
    }
    let at = proxy.address();
    let primary = Primary::protect(vm, &at, &options, guardians, params, capabilities, Arc::new(()))?;
    Ok(Pair { guest, there, primary, standby, arbiter, proxy, said_again, cut, words_are_late, holds_back })
}

/// How checkpoints travel.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub lanes: u8,
    pub compression: Compression,
    pub zero_pages: sterna::ZeroPageDetection,
    pub delay: Duration,
    pub mode: CheckpointMode,
    pub in_flight: u8,
    pub copy: CheckpointCopy,
    pub buffer_bytes: u64,
    pub bandwidth_bytes: u64,
    pub downtime_limit: Duration,
    /// Checkpoints bring differences.
    pub delta: bool,
    /// Every connection ends after so many pieces.
    pub cut_after: Option<i64>,
}

pub const PLAIN: Way = Way {
    lanes: 0,
    compression: Compression::None,
    zero_pages: sterna::ZeroPageDetection::Multifd,
    delay: Duration::from_millis(5),
    mode: CheckpointMode::Interval,
    in_flight: 1,
    copy: CheckpointCopy::Auto,
    buffer_bytes: 64 << 20,
    bandwidth_bytes: 0,
    // On a busy host the seeding would not converge within the default.
    downtime_limit: PATIENCE,
    delta: false,
    cut_after: None,
};

impl Way {
    fn settings(&self) -> (Parameters, Capabilities) {
        let (params, capabilities) =
            if self.lanes == 0 { (parameters(), Capabilities::default()) } else { multifd(self.lanes) };
        let params = Parameters {
            multifd_compression: self.compression,
            zero_page_detection: self.zero_pages,
            max_bandwidth_bytes: self.bandwidth_bytes,
            downtime_limit: self.downtime_limit,
            ..params
        };
        (params, Capabilities { xbzrle: self.delta, ..capabilities })
    }
}

/// A guest that writes all the time, with pages of every kind.
pub fn writer() -> ProcessConfig {
    let blocks = vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 4 << 20)];
    ProcessConfig { blocks, fill: Fill::Half(7), workers: 4, ..config() }
}

impl Pair {
    pub fn wait_for_held(&self, number: u64) {
        let begin = Instant::now();
        while self.primary.statistics().held < number {
            let (state, statistics) = (self.primary.state(), self.primary.statistics());
            assert_eq!(state.outcome, None, "{state:?}");
            assert!(
                begin.elapsed() < PATIENCE,
                "checkpoint {number} did not come: {state:?}, {statistics:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// How it ended at the standby.
    pub fn ended_there(&self) -> standby::Outcome {
        self.standby.contact().expect("a contact").wait(PATIENCE).expect("an end")
    }
}

#[test]
fn guest_that_writes_is_handed_over_whole_with_its_last_checkpoint() {
    let ways = [
        PLAIN,
        Way { lanes: 1, ..PLAIN },
        Way { lanes: 4, zero_pages: sterna::ZeroPageDetection::Legacy, ..PLAIN },
        Way { lanes: 2, compression: Compression::Zstd, ..PLAIN },
        Way { lanes: 2, compression: Compression::Zlib, ..PLAIN },
        Way { lanes: 8, compression: Compression::Zstd, ..PLAIN },
        // Nothing is staged: the guest stands until all is sent.
        Way { buffer_bytes: 4096, ..PLAIN },
        Way { lanes: 2, buffer_bytes: 4096, ..PLAIN },
        Way { delta: true, ..PLAIN },
        Way { delta: true, zero_pages: sterna::ZeroPageDetection::None, ..PLAIN },
        Way { delta: true, buffer_bytes: 4096, ..PLAIN },
        Way { delay: Duration::from_millis(1), in_flight: 4, ..PLAIN },
        Way { delay: Duration::from_millis(1), in_flight: 2, lanes: 2, ..PLAIN },
        Way { in_flight: 4, lanes: 2, compression: Compression::Zlib, ..PLAIN },
        Way { in_flight: 3, delta: true, ..PLAIN },
        Way { delta: true, lanes: 3, ..PLAIN },
        Way { delta: true, lanes: 2, buffer_bytes: 4096, ..PLAIN },
        Way { in_flight: 3, delta: true, lanes: 2, compression: Compression::Zlib, ..PLAIN },
    ];
    for way in ways {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate =
            Arc::new(ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap());
        let pair = protect(writer(), &way, TERMS, gate.clone());
        pair.wait_for_held(20);
        assert!(pair.guest.wait_progress(10, PATIENCE), "{way:?}: the guest goes on");
        let statistics = pair.primary.statistics();
        assert_eq!(statistics.unbuffered > 0, way.buffer_bytes == 4096, "{way:?}: {statistics:?}");
        gate.put(b"last words");

        pair.primary.hand_over().expect("protected");

        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", pair.primary.state());
        let last = pair.ended_there();
        assert!(matches!(last, standby::Outcome::Running(_)), "{way:?}: {last:?}");
        assert!(gate.wait_until_empty(PATIENCE));
        assert_eq!(*said.lock(), b"last words");
        // Whoever counts bytes misses none, whether they left before the last checkpoint or not.
        let (position, again) = pair.said_again.lock().clone();
        assert!(
            position as usize + again.len() == 10 && b"last words".ends_with(&again),
            "{position}, {again:?}"
        );
        let (ours, theirs) = (pair.guest.progress(), pair.there.progress());
        assert!(theirs.total_steps() >= ours.total_steps(), "no step is lost: {theirs:?} after {ours:?}");
        assert_lives_on(&pair.there);
        assert_eq!(pair.guest.ram().custody(), Custody::Gone);
        assert!(!pair.primary.migration().may_guest_run());
    }
}

#[test]
fn primary_that_loses_the_claim_stands_and_the_standbys_guest_is_whole() {
    for (lanes, delta) in [(0, false), (2, false), (0, true), (2, true)] {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate =
            Arc::new(ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap());
        let terms = Terms { lease: Duration::from_secs(3), ..TERMS };
        // The interval after these is long: what is said in it is never held.
        let pair = protect(writer(), &Way { lanes, delta, ..PLAIN }, terms, gate.clone());
        pair.wait_for_held(20);
        pair.primary.set_checkpoint_delay(Duration::from_secs(600)).expect("long enough");
        wait_for("the end of checkpoints", || {
            let before = pair.primary.statistics().taken;
            std::thread::sleep(Duration::from_millis(100));
            pair.primary.statistics().taken == before && pair.primary.statistics().held == before
        });
        gate.put(b"never held");
        *pair.arbiter.0.lock() = Some("standby");

        pair.cut.store(0, Ordering::SeqCst);

        assert_eq!(pair.primary.wait(), primary::Outcome::Lost);
        assert_eq!(pair.guest.run_state(), RunState::Paused);
        assert_eq!(pair.guest.ram().custody(), Custody::Gone);
        assert!(said.lock().is_empty(), "nothing leaves that the survivor does not know");
        let ended = pair.ended_there();
        assert!(matches!(ended, standby::Outcome::Running(number) if number >= 20), "{ended:?}");
        assert_eq!(pair.there.ram().custody(), Custody::Arrived);
        assert_lives_on(&pair.there);
    }
}

#[test]
fn protection_that_ends_leaves_the_guest_here_and_it_can_be_protected_again() {
    let pair = protect(writer(), &PLAIN, TERMS, Arc::new(NoOutput));
    pair.wait_for_held(3);
    assert!(pair.primary.migration().cancel().is_err(), "the standby has to be asked");
    // Operators stop it and let it run between checkpoints.
    for _ in 0..20 {
        // As the monitor does: a checkpoint's pause is not undone, and does not undo this.
        let operator = |act: &dyn Fn() -> Result<(), sterna::VmError>| {
            pair.guest.ram().while_free(act).expect("it is free").expect("done");
        };
        operator(&|| pair.guest.pause());
        assert_eq!(pair.guest.run_state(), RunState::Paused);
        operator(&|| pair.guest.cont());
    }
    // The standby closes all connections when it says its last word.
    pair.words_are_late.store(true, Ordering::SeqCst);

    let ended = pair.primary.unprotect();
    assert_eq!(ended, Ok(()), "{:?}", pair.primary.state());

    assert_eq!(pair.primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    assert_lives_on(&pair.guest);
    // The standby lets go of its place after it has said that it will.
    wait_for("the end at the standby", || pair.there.ram().custody() == Custody::NoGuest);
    drop(pair.standby);
    let config = writer();
    let (target, params) = (ProcessGuest::waiting(config).expect("destination"), parameters());
    let (_, outcome, arrival) = migrate(&pair.guest, &target, &params, Capabilities::default());
    assert_arrived(&outcome, &arrival, &target);
    drop(pair.proxy);
}

#[test]
fn guest_that_writes_faster_than_the_link_carries_is_protected_all_the_same() {
    // 16 MiB that change within 0.4 s, and 32 MiB/s.
    let (guest, way) =
        (writer(), Way { bandwidth_bytes: 32 << 20, downtime_limit: Duration::from_millis(20), ..PLAIN });
    let pair = protect(guest, &way, TERMS, Arc::new(NoOutput));

    pair.wait_for_held(1);

    pair.primary.unprotect().expect("protected");
    assert_eq!(pair.primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    assert_lives_on(&pair.guest);
}

/// Says that it is about to be closed, and waits until that is heard.
struct AskingGate {
    gate: ByteGate,
    closes: Mutex<(Sender<()>, Receiver<()>)>,
}

impl EpochGate for AskingGate {
    fn close(&self, may_say: MaySay) {
        let closes = self.closes.lock();
        closes.0.send(()).expect("it is awaited");
        closes.1.recv_timeout(PATIENCE).expect("an answer");
        self.gate.close(may_say);
    }

    fn end_epoch(&self, epoch: u64) {
        self.gate.end_epoch(epoch);
    }

    fn release(&self, epoch: u64) {
        self.gate.release(epoch);
    }

    fn open(&self) {
        self.gate.open();
    }

    fn drop_output(&self) {
        self.gate.drop_output();
    }

    fn unsaid(&self) -> (u64, Vec<u8>) {
        self.gate.unsaid()
    }

    fn statistics(&self) -> GateStatistics {
        self.gate.statistics()
    }
}

#[test]
fn protection_that_is_cancelled_in_its_first_checkpoint_leaves_the_gate_open() {
    let (closes, is_closing) = channel();
    let (go_on, answer) = channel();
    let said = Arc::new(Mutex::new(Vec::new()));
    let says = Arc::clone(&said);
    let gate = ByteGate::new(1 << 20, move |bytes| says.lock().extend_from_slice(bytes)).unwrap();
    let gate = Arc::new(AskingGate { gate, closes: Mutex::new((closes, answer)) });
    let pair = protect(writer(), &PLAIN, TERMS, gate.clone());
    is_closing.recv_timeout(PATIENCE).expect("a first checkpoint");
    gate.gate.put(b"before it ");
    assert!(gate.gate.wait_until_empty(PATIENCE));
    assert_eq!(*said.lock(), b"before it ", "the standby holds nothing yet that could survive");

    pair.primary.unprotect().expect("nothing is held");

    wait_for("the end", || pair.primary.state().outcome.is_some());
    go_on.send(()).expect("it waits");
    gate.gate.put(b"words of a guest that nobody protects");
    assert!(gate.gate.wait_until_empty(PATIENCE));
    assert!(matches!(pair.primary.wait(), primary::Outcome::Failed(_)));
    assert_lives_on(&pair.guest);
}

#[test]
fn first_checkpoint_follows_the_seeding_at_once_in_every_mode() {
    // None is due for ten minutes.
    let delay = 10 * PATIENCE;
    for mode in [CheckpointMode::Interval, CheckpointMode::Output(delay), CheckpointMode::Load(1)] {
        for (lanes, in_flight) in [(0, 1), (2, 3)] {
            let way = Way { lanes, in_flight, delay, mode, ..PLAIN };
            let pair = protect(writer(), &way, TERMS, Arc::new(NoOutput));
            pair.wait_for_held(1);
            assert_eq!(pair.primary.statistics().taken, 1, "{way:?}: the next one has its interval");
        }
    }
}

#[test]
fn output_brings_checkpoints_forward_and_silence_none() {
    let (said, gate) = {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        (said, Arc::new(ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap()))
    };
    let pair = protect(writer(), &PLAIN, TERMS, gate.clone());
    pair.wait_for_held(1);
    pair.primary.set_checkpoint_mode(CheckpointMode::Output(Duration::from_millis(2)));
    pair.primary.set_checkpoint_delay(Duration::from_secs(600)).expect("long enough");
    // One is asked for by the new interval; one may be under way.
    let quiet = || {
        let before = pair.primary.statistics();
        std::thread::sleep(Duration::from_millis(200));
        let after = pair.primary.statistics();
        (before.taken == after.taken && after.held == after.taken).then_some(after.taken)
    };
    wait_for("the end of checkpoints", || quiet().is_some());
    let before = pair.primary.statistics().taken;

    for word in 1..=3 {
        gate.put(b"word ");
        wait_for("a word", || said.lock().len() == 5 * word);
    }

    let statistics = pair.primary.statistics();
    assert_eq!(statistics.taken - before, 3, "one for each: {statistics:?}");
    assert_eq!(quiet(), Some(statistics.taken), "nothing was said any more");
}

#[test]
fn guest_stands_for_no_more_than_the_share_that_is_set() {
    let pair = protect(writer(), &PLAIN, TERMS, Arc::new(NoOutput));
    pair.wait_for_held(3);

    pair.primary.set_checkpoint_mode(CheckpointMode::Load(1));

    let statistics = pair.primary.statistics();
    assert!(statistics.pause_p50 > Duration::ZERO, "{statistics:?}");
    // The pauses' mean, of which the last ones count most, is never shorter than the shortest.
    wait_for("a longer interval", || {
        let statistics = pair.primary.statistics();
        statistics.interval > PLAIN.delay && statistics.interval <= statistics.pause_most * 100
    });
    let held = pair.primary.statistics().held;
    pair.wait_for_held(held + 2);
}

#[test]
fn nothing_of_a_protection_that_has_ended_is_kept() {
    for hands_over in [false, true] {
        let gate: Arc<dyn EpochGate> = Arc::new(ByteGate::new(1 << 20, |_| {}).unwrap());
        let kept = Arc::downgrade(&gate);
        let pair = protect(writer(), &PLAIN, TERMS, gate);
        pair.wait_for_held(3);
        if hands_over { pair.primary.hand_over() } else { pair.primary.unprotect() }.expect("protected");
        pair.primary.wait();
        let guest = Arc::downgrade(&pair.guest);

        drop(pair);

        wait_for("the end of the last thread", || kept.strong_count() == 0);
        wait_for("the end of the guest", || guest.strong_count() == 0);
    }
}

#[test]
#[allow(clippy::print_stderr, reason = "says what has happened")]
fn connection_that_breaks_anywhere_leaves_the_guest_on_exactly_one_side() {
    let mut random =
        sterna_testing::random("connection_that_breaks_anywhere_leaves_the_guest_on_exactly_one_side");
    let terms = Terms { lease: Duration::from_millis(600), ..TERMS };
    let mut ends = [0; 3];
    for turn in 0..24 {
        let way = Way {
            lanes: [0, 2][turn % 2],
            delta: turn / 3 % 2 == 0,
            copy: CheckpointCopy::CopyOnWrite,
            in_flight: [1, 1, 3][turn % 3],
            cut_after: Some(random.i64(1..[200, 3000][turn / 2 % 2])),
            ..PLAIN
        };
        // Writes that userfaultfd tracks cannot be held.
        let config =
            ProcessConfig { tracking: [Tracking::Software, Tracking::Automatic][turn % 3 / 2], ..writer() };
        let Ok(pair) = try_protect((config.clone(), config), &way, terms, Arc::new(NoOutput)) else {
            // Nobody was greeted.
            continue;
        };
        // The arbiter gives the claim to whoever asks first, or favours the standby.
        if turn % 3 == 0 {
            pair.arbiter.1.lock().side = Some("standby");
        }
        let here = pair.primary.wait();
        match here {
            primary::Outcome::Alone(_) => {
                assert!(matches!(pair.ended_there(), standby::Outcome::Discarded(_)), "{way:?}");
                assert_lives_on(&pair.guest);
                ends[0] += 1;
            }
            primary::Outcome::Lost => {
                let ended = pair.ended_there();
                assert!(matches!(ended, standby::Outcome::Running(_)), "{way:?}, turn {turn}: {ended:?}");
                assert_eq!(pair.guest.run_state(), RunState::Paused);
                assert_lives_on(&pair.there);
                ends[1] += 1;
            }
            // In the seeding.
            primary::Outcome::Failed(_) => {
                assert_lives_on(&pair.guest);
                assert_ne!(pair.there.run_state(), RunState::Running);
                ends[2] += 1;
            }
            other => panic!("{way:?}: {other:?}"),
        }
    }
    // Which ends come, and how often, hangs on the host's speed.
    eprintln!("alone, lost, failed: {ends:?}");
}

#[test]
fn standby_of_another_shape_is_refused_and_the_guest_runs_on() {
    let other = |change: fn(&mut ProcessConfig)| {
        let mut config = writer();
        change(&mut config);
        config
    };
    let memory = other(|config| config.blocks[1].1 += 1 << 20);
    let names = other(|config| config.blocks[0].0 = "ram.other".into());
    for (theirs, says) in [(memory, "ram.high"), (names, "ram.low")] {
        let pair = try_protect((writer(), theirs), &PLAIN, TERMS, Arc::new(NoOutput)).expect("greeted");

        assert!(matches!(pair.primary.wait(), primary::Outcome::Failed(_)));

        // It may be discarded before the seeding's end says why.
        wait_for(says, || format!("{:?}", pair.standby.state()).contains(says));
        assert_lives_on(&pair.guest);
    }
}
