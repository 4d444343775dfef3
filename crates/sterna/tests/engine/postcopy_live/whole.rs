//! A guest that has all its pages when its connection ends before the end of the stream: it no longer needs its
//! source.

use std::time::Duration;

use sterna::{Arrival, Capabilities, Outcome, Parameters, RunState, Status};

use sterna_proto::destination::Refusal;

use super::capabilities;
use super::recovery::{Split, trickle};
use crate::common;
use crate::support::{eventually, until_status};

/// The guest's last page is in place, and the source's bytes after it did not arrive. Pages arrive only over lanes
/// and the preempt channel.
fn whole(params: &Parameters) -> Option<Split> {
    let on = Capabilities { multifd: true, ..capabilities(true)? };
    let params = Parameters { multifd_channels: 2, ..params.clone() };
    let split = Split::begin(params.clone(), params, on);
    split.cable.hold_main();
    assert!(split.left() > 0, "the end is still to come");
    split.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    eventually("the last page", || split.left() == 0);
    assert_eq!(split.incoming.status(), Status::PostcopyActive, "the end has not come");
    Some(split)
}

/// Asserts that the destination has completed, without an error from the broken connection.
fn completes(split: &Split) {
    eventually("the arrival", || split.incoming.arrival().is_some());
    let arrival = split.incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
    assert_eq!(split.incoming.status(), Status::Completed);
    let statistics = split.incoming.statistics();
    assert!(statistics.error.is_none(), "{statistics:?}");
    assert_eq!(statistics.postcopy.unwrap().missing_pages, 0);
    assert_eq!(split.told(1).last(), Some(&Status::Completed));
    assert!(!split.warned(1, "only the source has"), "none is");
    let error = split.incoming.cancel().unwrap_err();
    assert!(matches!(error, Refusal::AbandonAfterCommit { .. }), "{error}");
    assert!(split.incoming.recover_at(&"tcp:127.0.0.1:0".parse().unwrap()).is_err(), "nothing is missing");
}

/// Asserts that the source's next connection is answered, so that the source gives up its guest.
fn source_completes(split: &Split) {
    eventually("the source's end", || split.migration.outcome().is_some());
    let outcome = split.migration.wait();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(!split.migration.may_guest_run(), "it has left for good");
    common::assert_arrived(&outcome, &split.incoming.wait(), &split.target);
}

#[test]
fn guest_that_has_every_page_completes_without_its_source() {
    let Some(split) = whole(&trickle()) else { return };
    split.cable.set_down(true);
    completes(&split);
    common::assert_lives_on(&split.target);
    // The source does not know this yet, so it keeps its state.
    until_status(&split.migration, Status::PostcopyPaused);
    split.cable.set_down(false);
    source_completes(&split);
}

#[test]
fn source_that_comes_back_to_a_whole_guest_hears_that_it_is() {
    let Some(split) = whole(&Parameters { reconnect_window: Duration::from_secs(600), ..trickle() }) else {
        return;
    };
    split.cable.set_down(true);
    completes(&split);
    let attempts = || split.told(0).iter().filter(|status| **status == Status::PostcopyRecover).count();
    eventually("attempts", || attempts() >= 2);
    split.cable.set_down(false);
    source_completes(&split);
}

#[test]
fn source_that_dials_while_the_old_connection_is_still_read_hears_it_too() {
    // The destination does not notice the loss. The source's next connection informs it.
    let Some(split) = whole(&Parameters { reconnect_window: Duration::from_secs(600), ..trickle() }) else {
        return;
    };
    split.cable.cut_for_source();
    completes(&split);
    source_completes(&split);
}

#[test]
fn whole_guest_whose_operator_ends_the_connection_completes() {
    for at_the_source in [true, false] {
        let Some(split) = whole(&trickle()) else { return };
        if at_the_source {
            split.migration.pause().unwrap();
        } else {
            split.incoming.pause().unwrap();
        }
        completes(&split);
        source_completes(&split);
    }
}
