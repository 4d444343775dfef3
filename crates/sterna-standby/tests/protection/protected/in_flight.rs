//! More than one checkpoint in flight.

use sterna::ram::PAGE_SIZE;
use sterna_guests::model::Pattern;

use super::led::{Led, bytes_of, noise};
use super::*;

/// A guest whose pages fit the buffer many times.
fn small_writer() -> ProcessConfig {
    ProcessConfig { rate: 2_000, ..writer() }
}

impl Pair {
    /// Number of checkpoints that were taken and are not known to be held.
    fn on_their_way(&self) -> u64 {
        let statistics = self.primary.statistics();
        statistics.taken.saturating_sub(statistics.held)
    }
}

#[test]
fn guest_is_checkpointed_while_the_link_is_silent_until_so_many_are_on_their_way() {
    for (lanes, in_flight) in [(0, 1), (0, 2), (0, 4), (2, 3), (2, 4)] {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate = ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes));
        let gate = Arc::new(gate.expect("a thread"));
        let way = Way { lanes, in_flight, ..PLAIN };
        let pair = protect(small_writer(), &way, TERMS, gate.clone());
        pair.wait_for_held(5);

        pair.link.hold_back(true);

        // A single checkpoint waits until there is room for it.
        let least = if in_flight == 1 { 0 } else { u64::from(in_flight) };
        wait_for("checkpoints on their way", || pair.on_their_way() >= least);
        let mut words = Vec::new();
        for word in 0..10 {
            gate.put(&[word]);
            words.push(word);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(pair.guest.wait_progress(10, PATIENCE), "{way:?}: the guest goes on");
        // The last answer may arrive after the next checkpoint was taken. Without the limit, this condition would
        // never become true.
        wait_for("no more than that", || pair.on_their_way() <= u64::from(in_flight));
        // No standby holds a checkpoint with this output.
        gate.put(b"!");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!said.lock().contains(&b'!'), "{way:?}");
        pair.link.hold_back(false);

        words.push(b'!');
        wait_for("every word, in order", || *said.lock() == words);
        pair.primary.hand_over().expect("protected");
        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", pair.primary.state());
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
        assert_lives_on(&pair.there);
    }
}

/// Median waiting time of output, over a link that needs about 30 ms per checkpoint.
fn typical_wait(in_flight: u8) -> Duration {
    let gate = Arc::new(ByteGate::new(1 << 20, |_| {}).expect("a thread"));
    let guest = ProcessConfig { pattern: Pattern::Random, working_set_pages: Some(150), ..small_writer() };
    let pair = protect(guest, &Way { in_flight, ..PLAIN }, TERMS, gate.clone());
    pair.wait_for_held(5);
    pair.link.knobs.bytes_per_second.store(20_000_000, Ordering::SeqCst);
    let say_for = |time: Duration| {
        let begin = Instant::now();
        while begin.elapsed() < time {
            gate.put(b"x");
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    // By then, earlier measurements of the link and of the delays are no longer used.
    say_for(Duration::from_secs(3));
    wait_for("checkpoints", || {
        say_for(Duration::from_millis(100));
        pair.primary.statistics().held > 15
    });
    pair.primary.statistics().output.delay_p50
}

#[test]
fn output_waits_no_longer_where_several_checkpoints_may_be_on_their_way() {
    // With a queue of three before it, output would wait three times as long.
    let is_fair = |one: Duration, four: Duration| four <= one * 3 / 2 + Duration::from_millis(5);
    let mut measured = Vec::new();
    // Other load on the host may disturb one of the two measurements, so they are repeated.
    for _ in 0..5 {
        measured.push((typical_wait(1), typical_wait(4)));
        if measured.last().is_some_and(|(one, four)| is_fair(*one, *four)) {
            return;
        }
    }
    panic!("with one and with four on their way: {measured:?}");
}

#[test]
fn page_that_is_written_again_while_its_checkpoint_waits_is_in_the_next_one() {
    // The guest writes the same pages repeatedly. Each page is in some checkpoints, but not in all.
    let config = ProcessConfig { pattern: Pattern::Random, working_set_pages: Some(150), ..small_writer() };
    for lanes in [0, 2] {
        // After the first checkpoint, only requested ones are taken. A later one would contain the pages that these
        // lack.
        let way = Way { lanes, in_flight: 4, delay: 10 * PATIENCE, ..PLAIN };
        // The standby waits for the end of the lease before it takes over.
        let terms = Terms { lease: Duration::from_secs(3), ..TERMS };
        let pair = protect(config.clone(), &way, terms, Arc::new(NoOutput));
        let take = |number: u64| {
            pair.primary.checkpoint_now();
            wait_for("a checkpoint", || pair.primary.statistics().taken == number);
            assert!(pair.guest.wait_progress(3, PATIENCE), "{way:?}: the guest goes on");
        };
        pair.wait_for_held(1);
        pair.link.hold_back(true);
        (2..=5).for_each(take);
        pair.link.hold_back(false);
        pair.wait_for_held(5);
        *pair.arbiter.0.lock() = Some("standby");

        pair.standby.contact().expect("a contact").take_over(false).expect("it follows");

        assert_eq!(pair.ended_there(), standby::Outcome::Running(5), "{way:?}");
        pair.there.pause().expect("it is free");
        let verdict = pair.there.check().expect("it stands");
        assert!(verdict.is_consistent(), "{way:?}: {verdict:?}");
        assert_eq!(pair.primary.wait(), primary::Outcome::Lost, "{way:?}");
    }
}

#[test]
fn number_of_checkpoints_on_their_way_changes_live() {
    let pair = protect(small_writer(), &PLAIN, TERMS, Arc::new(NoOutput));
    pair.wait_for_held(3);
    for in_flight in [0, 5] {
        assert!(pair.primary.set_checkpoints_in_flight(in_flight).is_err());
    }
    // The checkpoint that waits for room is taken first.
    pair.primary.set_checkpoints_in_flight(4).expect("a number");
    let held = pair.primary.statistics().held;
    pair.wait_for_held(held + 2);

    pair.link.hold_back(true);
    wait_for("checkpoints on their way", || pair.on_their_way() >= 4);

    pair.primary.set_checkpoints_in_flight(1).expect("a number");
    pair.link.hold_back(false);
    let held = pair.primary.statistics().held;
    pair.wait_for_held(held + 10);
}

#[test]
fn checkpoints_share_the_memory_for_copies() {
    let way = Way { in_flight: 4, buffer_bytes: 100 << 12, ..PLAIN };
    let mut led = Led::new(&way, 1);
    let write = |led: &Led, seed: u64| (0..60).for_each(|page| led.write(0, page, 0, &noise(seed)));
    // The last part of the seeding may have exceeded the buffer.
    let before = led.statistics();
    led.hold_back(true);
    write(&led, 1);
    led.take();
    let at_first = bytes_of(&led.here.ram, 0);
    write(&led, 2);

    led.primary.checkpoint_now();

    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(led.statistics().taken, before.taken + 1, "it waits for room");
    // The guest is not paused for lack of room either.
    assert_eq!(led.here.run_state(), RunState::Running);
    led.hold_back(false);
    wait_for("the next one", || led.statistics().held == before.held + 2);
    assert_eq!(led.statistics().unbuffered, before.unbuffered, "each was copied");
    assert!(at_first != bytes_of(&led.here.ram, 0));
    led.assert_same();
    led.hand_over();
}

#[test]
fn checkpoints_that_wait_bring_what_was_there_when_they_were_taken() {
    for (lanes, delta) in [(0, false), (0, true), (2, false), (2, true)] {
        let way = Way { lanes, delta, in_flight: 4, ..PLAIN };
        let mut led = Led::new(&way, 1 << 14);
        let mut random = fastrand::Rng::with_seed(16);
        for _ in 0..10 {
            led.hold_back(true);
            for _ in 0..4 {
                // One page changes each time, others sometimes.
                led.write(0, 7, random.usize(..4088), &random.u64(..).to_ne_bytes());
                for _ in 0..20 {
                    let (page, at) = (random.u64(..40), random.usize(..PAGE_SIZE - 8));
                    match random.u8(..4) {
                        0 => led.write(1, page, 0, &[0; PAGE_SIZE]),
                        1 => led.write(1, page, 0, &noise(random.u64(..))),
                        _ => led.write(1, page, at, &random.u64(..).to_ne_bytes()),
                    }
                }
                led.take();
            }
            led.hold_back(false);
            led.wait_until_held();
            led.assert_same();
        }
        assert_eq!(led.statistics().xbzrle.pages > 0, delta, "{way:?}");
        led.hand_over();
    }
}

#[test]
fn base_of_differences_is_forgotten_with_a_checkpoint_that_is_lost() {
    for lanes in [0, 2] {
        forgets_the_base(&Way { lanes, delta: true, in_flight: 4, ..PLAIN });
    }
}

fn forgets_the_base(way: &Way) {
    let mut led = Led::new(way, 1 << 14);
    for number in 1..4_u64 {
        led.write(0, 7, 100, &number.to_ne_bytes());
        led.checkpoint();
    }
    assert_eq!(led.statistics().xbzrle.pages, 2);
    led.hold_back(true);
    for number in 4..6_u64 {
        led.write(0, 7, 100, &number.to_ne_bytes());
        led.take();
    }
    *led.arbiter.0.lock() = Some("primary");

    led.cut();

    assert_eq!(led.primary.wait(), primary::Outcome::Alone(primary::Because::Claim));
    // Pages that the guest writes next must not be sent as differences from the lost standby's copy.
    let mut led = Led::protect(led.here, way, 1 << 14, 2);
    led.write(0, 7, 200, b"next");
    led.checkpoint();
    assert_eq!((led.statistics().xbzrle.pages, led.statistics().xbzrle.same), (0, 0));
    led.write(0, 7, 300, b"after that");
    led.checkpoint();
    assert_eq!(led.statistics().xbzrle.pages, 1);
    led.assert_same();
    led.hand_over();
}
