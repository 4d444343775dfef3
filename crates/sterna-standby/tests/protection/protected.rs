//! A guest of this process that a standby protects: checkpoints while it writes, and takeovers from the last one.

mod copied;
mod delta;
mod hooked;
mod in_flight;
mod led;
mod link;
mod outlasted;
mod sides;
mod slow;
mod summary;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::ram::Custody;
use sterna::{Address, Capabilities, Compression, Parameters, RunState, SourceVm, TargetVm, Vm};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_standby::machines::{primary, standby};
use sterna_standby::{
    ByteGate, CheckpointCopy, CheckpointMode, EpochGate, GateStatistics, MaySay, NoOutput, Primary,
    PrimaryOptions, Standby, Terms, VmSurvivor,
};

use crate::common::*;
use crate::support::TestVm;
pub use sides::*;

#[test]
fn guest_that_writes_is_handed_over_whole_with_its_last_checkpoint() {
    let ways = [
        PLAIN,
        Way { lanes: 1, ..PLAIN },
        Way { lanes: 4, zero_pages: sterna::ZeroPageDetection::Legacy, ..PLAIN },
        Way { lanes: 2, compression: Compression::Zstd, ..PLAIN },
        Way { lanes: 2, compression: Compression::Zlib, ..PLAIN },
        Way { lanes: 8, compression: Compression::Zstd, ..PLAIN },
        // The buffer is too small, so the guest is paused until a checkpoint is sent.
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
        // A reader that counts bytes misses none, whether they left before the last checkpoint or not.
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

/// Sets an interval that no test reaches, and waits until no checkpoint is in progress.
fn wait_for_no_checkpoint(primary: &Primary) {
    let before = primary.statistics().taken;
    primary.set_checkpoint_delay(Duration::from_secs(600)).expect("long enough");
    // The new interval requests one checkpoint; another one may be in progress.
    wait_for("the requested checkpoint", || primary.statistics().taken > before);
    wait_for("the end of checkpoints", || {
        let before = primary.statistics();
        std::thread::sleep(Duration::from_millis(500));
        let after = primary.statistics();
        before.taken == after.taken && after.held == after.taken
    });
}

#[test]
fn primary_that_loses_the_claim_stands_and_the_standbys_guest_is_whole() {
    for (lanes, delta) in [(0, false), (2, false), (0, true), (2, true)] {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate =
            Arc::new(ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap());
        let terms = Terms { lease: Duration::from_secs(3), ..TERMS };
        // The interval afterwards is long, so the output in it never belongs to a held checkpoint.
        let pair = protect(writer(), &Way { lanes, delta, ..PLAIN }, terms, gate.clone());
        pair.wait_for_held(20);
        wait_for_no_checkpoint(&pair.primary);
        gate.put(b"never held");
        *pair.arbiter.0.lock() = Some("standby");

        pair.link.knobs.cut.store(0, Ordering::SeqCst);

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
    // Operators pause and resume the guest between checkpoints.
    for _ in 0..20 {
        // Like the monitor: an operator's call does not undo a checkpoint's pause, nor the other way round.
        let operator = |act: &dyn Fn() -> Result<(), sterna::VmError>| {
            pair.guest.ram().while_free(act).expect("it is free").expect("done");
        };
        operator(&|| pair.guest.pause());
        assert_eq!(pair.guest.run_state(), RunState::Paused);
        operator(&|| pair.guest.cont());
    }
    // The standby closes all connections when it sends its last message.
    pair.link.knobs.words_are_late.store(true, Ordering::SeqCst);

    let ended = pair.primary.unprotect();
    assert_eq!(ended, Ok(()), "{:?}", pair.primary.state());

    assert_eq!(pair.primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    assert_lives_on(&pair.guest);
    // The standby releases its place after it has announced that.
    wait_for("the end at the standby", || pair.there.ram().custody() == Custody::NoGuest);
    drop(pair.standby);
    let config = writer();
    let (target, params) = (ProcessGuest::waiting(config).expect("destination"), parameters());
    let (_, outcome, arrival) = migrate(&pair.guest, &target, &params, Capabilities::default());
    assert_arrived(&outcome, &arrival, &target);
    drop(pair.link);
}

#[test]
fn guest_that_writes_faster_than_the_link_carries_is_protected_all_the_same() {
    // 16 MiB that change within 0.4 s, over 32 MiB/s.
    let (guest, way) =
        (writer(), Way { bandwidth_bytes: 32 << 20, downtime_limit: Duration::from_millis(20), ..PLAIN });
    let pair = protect(guest, &way, TERMS, Arc::new(NoOutput));

    pair.wait_for_held(1);

    pair.primary.unprotect().expect("protected");
    assert_eq!(pair.primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    assert_lives_on(&pair.guest);
}

/// Signals that it is about to be closed, and waits until the test has received that.
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
fn guest_that_cannot_go_on_after_the_seeding_is_protected_by_nobody_and_goes_on_then() {
    let (guest, _) = pair(&writer());
    let there = ProcessGuest::waiting(writer()).expect("destination");
    let vm = TestVm::new(Arc::clone(&guest));
    vm.fail_resumes.store(1, Ordering::SeqCst);
    let vms = (Arc::clone(&vm) as Arc<dyn SourceVm>, Arc::clone(&there) as Arc<dyn TargetVm>);
    let pair = join((guest, there), vms, &PLAIN, TERMS, Arc::new(NoOutput)).expect("protected");

    wait_for("the end", || pair.primary.state().outcome.is_some());

    assert_eq!(pair.primary.wait(), primary::Outcome::Failed(primary::Cause::LocalFailure));
    wait_for("the migration's end", || pair.primary.migration().outcome().is_some());
    assert_eq!(vm.fail_resumes.load(Ordering::SeqCst), 0, "it was tried");
    assert_lives_on(&pair.guest);
}

#[test]
fn first_checkpoint_follows_the_seeding_at_once_in_every_mode() {
    // No checkpoint is due for ten minutes.
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
    wait_for_no_checkpoint(&pair.primary);
    let before = pair.primary.statistics().taken;

    for word in 1..=3 {
        gate.put(b"word ");
        wait_for("a word", || said.lock().len() == 5 * word);
    }

    let statistics = pair.primary.statistics();
    assert_eq!(statistics.taken - before, 3, "one for each: {statistics:?}");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(pair.primary.statistics().taken, statistics.taken, "nothing was said any more");
}

#[test]
fn guest_stands_for_no_more_than_the_share_that_is_set() {
    let pair = protect(writer(), &PLAIN, TERMS, Arc::new(NoOutput));
    pair.wait_for_held(3);

    pair.primary.set_checkpoint_mode(CheckpointMode::Load(1));

    let statistics = pair.primary.statistics();
    assert!(statistics.pause_p50 > Duration::ZERO, "{statistics:?}");
    // The mean of the pauses, in which the last ones count most, is never below the shortest.
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
        // Writes that are tracked by userfaultfd cannot be blocked at the same time.
        let config =
            ProcessConfig { tracking: [Tracking::Software, Tracking::Automatic][turn % 3 / 2], ..writer() };
        let Ok(pair) = try_protect((config.clone(), config), &way, terms, Arc::new(NoOutput)) else {
            // No standby was greeted.
            continue;
        };
        // The arbiter gives the claim to the side that asks first, or favours the standby.
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
            // The failure happened during the seeding.
            primary::Outcome::Failed(_) => {
                assert_lives_on(&pair.guest);
                assert_ne!(pair.there.run_state(), RunState::Running);
                ends[2] += 1;
            }
            other => panic!("{way:?}: {other:?}"),
        }
    }
    // The kinds of ends, and their numbers, depend on the host's speed.
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

        // It may be discarded before the end of the seeding reports the reason.
        wait_for(says, || format!("{:?}", pair.standby.state()).contains(says));
        assert_lives_on(&pair.guest);
    }
}
