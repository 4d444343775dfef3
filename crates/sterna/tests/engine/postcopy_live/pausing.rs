//! A postcopy that an operator pauses, and one that cannot continue.

use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use sterna::ram::PAGE_SIZE;
use sterna::{MigrationError, Parameters, Status, Vm};
use sterna_guests::process::ProcessConfig;
use sterna_proto::destination;
use sterna_proto::source::Refusal;
use sterna_wire::extension;

use super::recovery::{Split, guest, trickle};
use super::{Pair, capabilities, config, slow};
use crate::support::{eventually, until_status};

/// Longer than a source waits between two of its own attempts.
const TWO_ATTEMPTS: Duration = Duration::from_millis(700);

/// A source that reconnects by itself, for longer than any test takes.
fn persistent() -> Parameters {
    Parameters { reconnect_window: Duration::from_secs(600), ..trickle() }
}

fn attempts(split: &Split) -> usize {
    split.told(0).iter().filter(|status| **status == Status::PostcopyRecover).count()
}

#[test]
fn either_side_pauses_it_and_nobody_connects_again_before_an_operator_says_so() {
    for preempt in [false, true] {
        for at_the_source in [true, false] {
            let Some(on) = capabilities(preempt) else { return };
            let split = Split::begin(persistent(), persistent(), on);
            if at_the_source {
                split.migration.pause().unwrap();
            } else {
                split.incoming.pause().unwrap();
            }
            split.paused();
            // The source does not announce the pause: the destination sees a connection that ends.
            let told: &[usize] = if at_the_source { &[0] } else { &[0, 1] };
            for side in told {
                eventually("the reason", || split.warned(*side, "an operator"));
            }
            std::thread::sleep(TWO_ATTEMPTS);
            assert_eq!(attempts(&split), 0, "nobody has asked for it");
            let error = split.migration.pause().unwrap_err();
            let Refusal::NotPostcopyActive { state } = error else { panic!("{error}") };
            assert_eq!(state.qemu_status(), "postcopy-paused");
            assert!(split.incoming.pause().is_err());
            split.resume();
            split.arrives();
        }
    }
}

#[test]
fn pause_ends_attempts_of_the_source_and_an_attempt_of_an_operator() {
    let Some(on) = capabilities(true) else { return };
    let split = Split::begin(persistent(), persistent(), on);
    split.cable.set_down(true);
    split.paused();
    eventually("attempts", || attempts(&split) >= 2);
    // The source may be in an attempt, or between two.
    split.migration.pause().unwrap();
    until_status(&split.migration, Status::PostcopyPaused);
    let before = attempts(&split);
    std::thread::sleep(TWO_ATTEMPTS);
    assert_eq!(attempts(&split), before);

    // The source would wait for a peer that does not answer.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:127.0.0.1:{}", silent.local_addr().unwrap().port()).parse().unwrap();
    split.migration.resume(&to).unwrap();
    let _connection = silent.accept().unwrap();
    split.migration.pause().unwrap();
    until_status(&split.migration, Status::PostcopyPaused);
    split.cable.set_down(false);
    split.resume();
    split.arrives();
}

#[test]
fn pause_is_refused_where_no_pages_follow_a_guest() {
    let Some(on) = capabilities(false) else { return };
    let pair = Pair::begin(&config(), &slow(), on);
    assert!(matches!(pair.migration.pause(), Err(Refusal::NotPostcopyActive { .. })));
    assert!(matches!(pair.incoming.pause(), Err(destination::Refusal::NotPostcopyActive { .. })));
    let pair = pair.switch().arrives();
    assert!(pair.migration.pause().is_err() && pair.incoming.pause().is_err());
}

/// Each attempt would fail at this page, so the second one is the last.
#[test]
fn page_that_can_never_be_placed_ends_the_attempts_with_the_reason() {
    for preempt in [false, true] {
        let Some(on) = capabilities(preempt) else { return };
        let guest = ProcessConfig { working_set_pages: Some(64), ..guest() };
        let split = Split::of(&guest, persistent(), persistent(), on);
        // The test fills this page without the engine's knowledge. It is sent last, and no writer needs it.
        let ram = split.target.ram();
        let block = ram.block(1);
        let (shared, page) = (block.shared_file().unwrap(), block.len_bytes() - PAGE_SIZE as u64);
        let place = shared.offset + page;
        shared.file.write_all_at(&[0xee; PAGE_SIZE], place).unwrap();
        split.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();

        eventually("the last attempt", || split.warned(0, "for the second time"));
        split.paused();
        eventually("the destination's word", || split.warned(1, "does not connect again by itself"));
        let named = format!("page {page:#x} of block \"ram.high\"");
        assert!(split.warned(1, &named), "{named}");
        let error = split.migration.statistics().error.unwrap();
        assert_eq!(error, MigrationError::DestinationFailed(extension::SHUT_PAGE_FAILED).to_string());
        let before = attempts(&split);
        std::thread::sleep(TWO_ATTEMPTS);
        assert_eq!((attempts(&split), split.migration.status()), (before, Status::PostcopyPaused));

        // An operator who has removed the cause resumes the guest.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&*shared.file, hole, place, PAGE_SIZE as u64).unwrap();
        split.resume();
        split.arrives();
    }
}
