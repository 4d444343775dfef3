//! Connections that end or stall at any byte: every wait ends, one side has the guest, and no thread or descriptor is
//! left behind.

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use crate::support;
use crate::support::proxy::{Filter, Line, Proxy, Verdict, Way, at_answer_byte, at_byte, at_pattern};
use crate::support::{TestVm, assert_next_works, assert_reset, case, eventually, vm, vms};
use sterna::error::Awaited;
use sterna::{
    Arrival, Capabilities, Incoming, Migration, MigrationError, Outcome, Parameters, Status, WaitLimits,
};
use sterna_proto::destination::State;

fn settings(channels: u8) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(channels.max(1));
    capabilities.multifd = channels > 0;
    params.limits = support::short_limits();
    (params, capabilities)
}

/// Migrates through a proxy that disturbs once. Later questions use undisturbed connections. Returns whether the
/// guest was handed over.
fn survives(channels: u8, filter: Filter) -> bool {
    let (source, target) = vms();
    let (params, capabilities) = settings(channels);
    let incoming = vm::listen(&target, &params, capabilities);
    let proxy = Proxy::new(&incoming.address(), filter);
    let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::new(()));
    let went = settle(&source, &target, &migration, &incoming);
    drop(proxy);
    went
}

fn settle(source: &Arc<TestVm>, target: &Arc<TestVm>, migration: &Migration, incoming: &Incoming) -> bool {
    eventually("the source's end", || migration.outcome().is_some());
    let outcome = migration.wait();
    if matches!(outcome, Outcome::Completed) {
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
        common::assert_lives_on(&target.guest);
        assert_eq!(*source.resumes.lock().unwrap(), 0);
        return true;
    }
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    assert!(!matches!(error, MigrationError::Internal(_)), "{error}");
    // A destination that no complete channel has reached still waits for one.
    if incoming.status() == Status::Setup {
        std::thread::sleep(support::short_limits().setup);
        let _ = incoming.cancel();
    }
    eventually("the destination's end", || incoming.status().is_terminal());
    let Arrival::Failed(why) = incoming.wait() else { panic!("both have it") };
    assert!(!matches!(why, MigrationError::Internal(_)), "{why}");
    common::assert_lives_on(&source.guest);
    assert_reset(target);
    assert_eq!(*target.starts.lock().unwrap(), 0);
    assert_next_works(source, target);
    false
}

#[test]
fn main_channel_cut_at_any_byte_leaves_the_guest_at_the_source() {
    for at in [1, 4, 8, 9, 12, 20, 33, 60, 140, 160, 300, 700, 5_000, 100_000, 1_000_000] {
        let filter = at_byte(Line::Main, Way::Forward, at, Verdict::Cut);
        assert!(!case(&format!("main cut at {at}"), || survives(0, filter)), "{at}: cut, and yet completed");
    }
}

#[test]
fn multifd_channel_cut_at_any_byte_leaves_the_guest_at_the_source() {
    for at in [1, 24, 63, 64, 65, 64 + 1343, 64 + 1344, 64 + 1350, 64 + 2 * 1344, 5_000, 200_000] {
        for lane in [0, 1] {
            let filter = at_byte(Line::Lane(lane), Way::Forward, at, Verdict::Cut);
            case(&format!("lane {lane} cut at {at}"), || survives(2, filter));
        }
    }
}

#[test]
fn return_path_cut_at_any_byte_leaves_one_guest() {
    // PONGs of 1, extension, features, fence, compatibility and prepare; then SHUT.
    for at in 1..=56 {
        let filter = at_answer_byte(at, Verdict::Cut);
        let went = case(&format!("return path cut at {at}"), || survives(1, filter));
        if at < 48 {
            assert!(!went, "cut at byte {at}, before the commit, and yet completed");
        }
        if at >= 48 + 7 {
            assert!(went, "cut at byte {at}, after the guest was started");
        }
    }
}

#[test]
fn cut_around_the_commit_leaves_one_guest() {
    let prepare: &[u8] = &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 3];
    let switchover: &[u8] = &[8, 0, 11, 0, 0];
    for (pattern, including, goes) in [
        (switchover, false, Some(false)),
        (switchover, true, Some(false)),
        (prepare, false, Some(false)),
        (prepare, true, Some(false)),
        // The description follows EOF. So EOF has arrived with it, or with a part of it.
        (b"{\"configuration\"", true, Some(true)),
        (b"vmsd_name", false, Some(true)),
    ] {
        for verdict in [Verdict::Cut, Verdict::Hold] {
            let filter = at_pattern(Line::Main, Way::Forward, pattern, including, verdict);
            let name = format!("{verdict:?} at {:?}", String::from_utf8_lossy(pattern));
            let went = case(&name, || survives(2, filter));
            assert!(goes.is_none_or(|goes| goes == went), "{name}: {went}");
        }
    }
}

#[test]
fn cut_at_random_bytes_leaves_one_guest() {
    let mut random = sterna_testing::random("cut_at_random_bytes_leaves_one_guest");
    for _ in 0..25 {
        let line = match random.u64(..3) {
            0 => Line::Main,
            lane => Line::Lane(lane as u8 - 1),
        };
        let way = if line == Line::Main && random.u64(..3) == 0 { Way::Back } else { Way::Forward };
        let bytes = if way == Way::Back { 56 } else { 1 << (4 + random.u64(..18)) };
        let at = 1 + random.u64(..bytes);
        let verdict = if random.u64(..4) == 0 { Verdict::Hold } else { Verdict::Cut };
        let filter = match way {
            Way::Back => at_answer_byte(at, verdict),
            Way::Forward => at_byte(line, way, at, verdict),
        };
        case(&format!("{verdict:?} {line:?} {way:?} at {at}"), || survives(2, filter));
    }
}

#[test]
fn peer_that_stands_still_at_any_byte_is_given_up() {
    let stalls = [
        (Line::Main, Way::Forward, vec![1, 5, 30, 100, 300]),
        (Line::Main, Way::Back, vec![1, 8, 24, 32, 40, 47]),
        (Line::Lane(1), Way::Forward, vec![1, 64, 70, 64 + 1344, 100_000]),
    ];
    for (line, way, places) in stalls {
        for at in places {
            let filter = match way {
                Way::Back => at_answer_byte(at, Verdict::Hold),
                Way::Forward => at_byte(line, way, at, Verdict::Hold),
            };
            case(&format!("{line:?} {way:?} stands at {at}"), || survives(2, filter));
        }
    }
    for at in [5_000, 500_000] {
        let filter = at_byte(Line::Main, Way::Forward, at, Verdict::Hold);
        assert!(!case("main stands", || survives(0, filter)));
    }
}

#[test]
fn acknowledgement_that_stands_still_is_asked_for() {
    for at in [48, 51, 55] {
        let filter = at_answer_byte(at, Verdict::Hold);
        assert!(case(&format!("SHUT stands at {at}"), || survives(2, filter)));
    }
}

#[test]
fn address_where_nobody_listens_fails_and_the_guest_runs_on() {
    case("refused", || {
        let (source, target) = vms();
        let (params, capabilities) = settings(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let to = incoming.address();
        drop(incoming);
        let migration = vm::start(&source, &to, &params, capabilities, Arc::new(()));
        let outcome = migration.wait();
        let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
        assert!(error.to_string().contains(&to.to_string()), "{error}");
        common::assert_lives_on(&source.guest);
        assert_next_works(&source, &target);
    });
}

#[test]
fn destination_prepared_and_forgotten_gives_the_guest_up() {
    case("prepared", || {
        let (source, target) = vms();
        let (mut params, capabilities) = settings(1);
        // Only the limit of the prepared state can end this wait.
        params.limits = WaitLimits { stall: Duration::from_secs(120), ..support::short_limits() };
        let incoming = vm::listen(&target, &params, capabilities);
        let prepare: &[u8] = &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 3];
        let proxy = Proxy::new(
            &incoming.address(),
            at_pattern(Line::Main, Way::Forward, prepare, true, Verdict::Hold),
        );
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::new(()));
        eventually("the destination's end", || incoming.status().is_terminal());
        let Arrival::Failed(why) = incoming.wait() else { panic!("nobody committed") };
        let MigrationError::Limit { what, .. } = &why else { panic!("{why}") };
        assert_eq!(*what, Awaited::Destination(State::Prepared));
        assert_reset(&target);
        // EOF was lost: the destination answers *never* to the source's question.
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}
