//! Cuts while the guest stands: it runs on at the source, and the switchover is tried again.

use super::*;
use crate::common::{multifd, parameters};
use crate::support::small;

/// PING *prepare*.
const PREPARE: &[u8] = &[0x53, 0x54, 0x4e, 0x03];

/// Cuts all connections where *prepare* or its answer passes, once: behind it, or before its last byte.
fn at_prepare(way: Way, including: bool) -> Filter {
    let (mut last, mut done) = (Vec::new(), false);
    Box::new(move |line, going, _, piece| {
        if done || line != Line::Main || going != way {
            return Verdict::Pass;
        }
        let known = last.len();
        last.extend_from_slice(piece);
        let Some(at) = last.windows(PREPARE.len()).position(|window| window == PREPARE) else {
            last.drain(..last.len().saturating_sub(PREPARE.len() - 1));
            return Verdict::Pass;
        };
        done = true;
        let end = at + PREPARE.len() - usize::from(!including);
        piece.truncate(end.saturating_sub(known));
        Verdict::Cut
    })
}

fn survives(settings: (Parameters, Capabilities), filter: Filter) {
    // Small: filters look at all that passes.
    let bench = Bench::new(&small(), settings, filter);
    assert_eq!(bench.arrives(), 1);
    let again = bench.migration.statistics().reconnections.remove(0);
    let stood = again.stood.expect("the guest stood");
    assert!(stood < Duration::from_secs(5), "{again:?}");
    let resumed = |event: &&Event| matches!(event, Event::Resumed);
    assert_eq!(bench.told.events().iter().filter(resumed).count(), 1, "at the source, once");
    assert_eq!(*bench.source.resumes.lock().unwrap(), 1);
    assert_eq!(*bench.target.starts.lock().unwrap(), 1);
    // What was measured of the switchover that failed is not counted.
    let steps = bench.migration.statistics().switchover;
    let stops = steps.iter().filter(|(step, _)| *step == sterna::SwitchoverStep::Stop).count();
    assert_eq!(stops, 1, "{steps:?}");
}

#[test]
fn guest_survives_a_cut_before_the_destination_is_asked_to_prepare() {
    for settings in [multifd(2), (parameters(), Capabilities::default())] {
        let filter = at_prepare(Way::Forward, false);
        survives(surviving(settings), filter);
    }
}

#[test]
fn guest_survives_a_cut_while_the_destination_prepares() {
    let filter = at_prepare(Way::Forward, true);
    survives(surviving(multifd(2)), filter);
}

#[test]
fn guest_survives_the_loss_of_the_answer_to_prepare() {
    for settings in [multifd(2), (parameters(), Capabilities::default())] {
        let filter = at_prepare(Way::Back, false);
        survives(surviving(settings), filter);
    }
}
