//! A standby that needs seconds for a checkpoint: the guest continues, its output waits, and no takeover happens.

use sterna_guests::model::Pattern;
use sterna_standby::{JoinedGate, PacketGate};

use super::*;

/// It does not end on a busy host, and the standby is slow for longer.
const LEASE: Duration = Duration::from_secs(4);

/// Why a checkpoint takes seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slow {
    /// The link carries a few KB per second, or the standby reads no faster.
    Reads,
    /// The standby's answer that it holds a checkpoint is delayed by seconds.
    Answers,
}

impl Slow {
    fn set(self, pair: &Pair, is_slow: bool) {
        let knobs = &pair.link.knobs;
        match self {
            Self::Reads => knobs.bytes_per_second.store(if is_slow { 20_000 } else { 0 }, Ordering::SeqCst),
            Self::Answers => knobs.holds_answers.store(is_slow, Ordering::SeqCst),
        }
    }
}

/// Output that has left the gates of the console and of the network card.
struct Outputs {
    console: Arc<ByteGate>,
    lane: sterna_standby::PacketLane,
    said: Arc<Mutex<Vec<u8>>>,
    sent: Arc<Mutex<Vec<u8>>>,
    gate: Arc<JoinedGate>,
}

impl Outputs {
    /// A gate with room for five packets.
    fn new() -> Self {
        let [said, sent] = [0, 1].map(|_| Arc::new(Mutex::new(Vec::new())));
        let (says, sends) = (Arc::clone(&said), Arc::clone(&sent));
        let console = ByteGate::new(1 << 20, move |bytes| says.lock().extend_from_slice(bytes)).unwrap();
        let (console, cards) = (Arc::new(console), PacketGate::new(500).unwrap());
        let lane = cards.lane(move |packet| sends.lock().push(packet[0]), || {});
        let gate = Arc::new(JoinedGate::new(console.clone(), vec![Arc::new(cards)]));
        Self { console, lane, said, sent, gate }
    }
}

fn follows_a_slow_standby(slow: Slow, way: &Way) {
    let outputs = Outputs::new();
    // A few hundred pages per checkpoint, which need seconds at that rate.
    let guest =
        ProcessConfig { pattern: Pattern::Random, rate: 2_000, working_set_pages: Some(150), ..writer() };
    let terms = Terms { lease: LEASE, ..TERMS };
    let pair = protect(guest, way, terms, outputs.gate.clone());
    pair.wait_for_held(5);

    slow.set(&pair, true);
    // Checkpoints in flight when the link becomes slow may still become held.
    std::thread::sleep(Duration::from_millis(200));
    let (mut put, before) = (0, pair.primary.statistics());
    outputs.console.put(b"waits");
    let begin = Instant::now();
    let mut most_held = 0;
    while begin.elapsed() < LEASE + Duration::from_secs(1) {
        assert!(pair.guest.wait_progress(1, PATIENCE), "{slow:?} {way:?}: the guest goes on");
        if outputs.lane.has_room() {
            put += 1;
            outputs.lane.put(&[put; 100]);
        }
        let state = pair.primary.state();
        assert_eq!((state.state, state.outcome), (primary::State::Protected, None), "{slow:?} {way:?}");
        most_held = pair.primary.statistics().held - before.held;
        std::thread::sleep(Duration::from_millis(5));
    }
    // Each checkpoint releases at most the limit's bytes. At the limit, the card waits.
    let sent = outputs.sent.lock().len() as u64;
    assert!(sent <= 6 * (most_held + 2), "{slow:?} {way:?}: {sent} packets behind {most_held} checkpoints");
    if slow == Slow::Answers {
        assert_eq!(
            (most_held, sent, put),
            (0, 0, 5),
            "{way:?}: nothing is held that the standby did not confirm"
        );
        assert!(outputs.said.lock().is_empty() && !outputs.lane.has_room(), "{way:?}");
        assert!(pair.primary.statistics().output.waiting_bytes >= 505, "{way:?}");
    }
    let on_their_way = pair.primary.statistics();
    assert!(on_their_way.taken - on_their_way.held <= u64::from(way.in_flight), "{on_their_way:?}");
    assert_ne!(pair.there.run_state(), RunState::Running, "{way:?}: nobody takes over");

    slow.set(&pair, false);

    let now = pair.primary.statistics().held;
    pair.wait_for_held(now + 10);
    wait_for("room for packets", || outputs.lane.has_room());
    wait_for("every packet", || outputs.sent.lock().len() == usize::from(put));
    assert_eq!(*outputs.sent.lock(), (1..=put).collect::<Vec<_>>(), "{slow:?} {way:?}: in order, once");
    wait_for("the words", || *outputs.said.lock() == b"waits");
    pair.primary.hand_over().expect("protected");
    assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{:?}", pair.primary.state());
    assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
    assert_lives_on(&pair.there);
}

#[test]
fn guest_goes_on_and_keeps_its_standby_while_checkpoints_trickle() {
    follows_a_slow_standby(Slow::Reads, &PLAIN);
    follows_a_slow_standby(Slow::Reads, &Way { lanes: 2, in_flight: 3, ..PLAIN });
}

#[test]
fn guest_goes_on_and_keeps_its_standby_while_nothing_is_confirmed() {
    follows_a_slow_standby(Slow::Answers, &PLAIN);
    follows_a_slow_standby(Slow::Answers, &Way { lanes: 2, in_flight: 3, ..PLAIN });
}

#[test]
fn guest_that_stands_for_a_slow_standby_goes_on_when_it_is_fast_again() {
    // The buffer is too small, so the guest is paused until a checkpoint is sent.
    let pair = protect(
        writer(),
        &Way { buffer_bytes: 4096, ..PLAIN },
        Terms { lease: LEASE, ..TERMS },
        Arc::new(NoOutput),
    );
    pair.wait_for_held(3);
    // The standby has reported that it has room. Afterwards hardly any byte passes, and none in a pause.
    let knobs = &pair.link.knobs;
    knobs.bytes_per_second.store(1000, Ordering::SeqCst);
    loop {
        wait_for("the stop", || pair.guest.run_state() == RunState::Paused);
        knobs.holds_back.store(true, Ordering::SeqCst);
        // The last byte of a small checkpoint may have been in transit. The guest then resumes.
        std::thread::sleep(Duration::from_secs(1));
        if pair.guest.run_state() == RunState::Paused {
            break;
        }
        knobs.holds_back.store(false, Ordering::SeqCst);
    }
    std::thread::sleep(LEASE + Duration::from_secs(1));
    assert_eq!(pair.guest.run_state(), RunState::Paused);
    assert_eq!(pair.primary.state().outcome, None, "heartbeats have a connection of their own");
    assert_ne!(pair.there.run_state(), RunState::Running);

    knobs.bytes_per_second.store(0, Ordering::SeqCst);
    knobs.holds_back.store(false, Ordering::SeqCst);

    let held = pair.primary.statistics().held;
    pair.wait_for_held(held + 3);
    assert!(pair.guest.wait_progress(10, PATIENCE), "the guest goes on");
    pair.primary.unprotect().expect("protected");
    assert!(matches!(pair.primary.wait(), primary::Outcome::Alone(_)));
    assert_lives_on(&pair.guest);
}
