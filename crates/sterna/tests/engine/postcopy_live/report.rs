//! Statistics of a postcopy, on both sides.

use std::time::Duration;

use sterna::ram::PAGE_SIZE;
use sterna::stats::{PostcopyChannel, PostcopyStatistics};
use sterna::{Capabilities, Parameters, Status};

use super::recovery::{Split, guest, trickle};
use super::{Pair, capabilities, config, slow};
use crate::support::{eventually, until_status};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages that threads may be processing.
const MOST_IN_HAND: u64 = 64 + 16;

fn of_source(pair: &Pair) -> PostcopyStatistics {
    pair.migration.statistics().postcopy.expect("the guest went on")
}

fn pages(channels: &[PostcopyChannel]) -> (u64, u64) {
    let sum = |of: fn(&PostcopyChannel) -> u64| channels.iter().map(of).sum();
    (sum(|channel| channel.background_pages), sum(|channel| channel.requested_pages))
}

#[test]
fn faults_over_time_and_their_latencies_are_told_by_both_sides() {
    let Some(on) = capabilities(true) else { return };
    let on = Capabilities { postcopy_blocktime: true, ..on };
    let pair = Pair::begin(&config(), &slow(), on).switch();
    assert!(pair.migration.statistics().postcopy.is_none_or(|early| early.missing_bytes > 0));
    let pair = pair.arrives();

    let (ours, theirs) = (pair.migration.statistics(), pair.incoming.statistics().postcopy.unwrap());
    let source = of_source(&pair);
    assert!(
        source.at < source.all_sent.unwrap() && source.all_sent.unwrap() <= ours.total_time,
        "{source:?}"
    );
    assert!(source.faults.began <= source.at, "devices are loaded before: {source:?}");
    assert_eq!(source.faults.counts.iter().sum::<u64>(), ours.postcopy_requests);
    assert!(source.faults.counts.len() <= 64, "{source:?}");
    let answers = &source.answers;
    assert!((1..=ours.postcopy_requests).contains(&answers.count), "{answers:?}");
    assert!(answers.p50 <= answers.p99 && answers.p99 <= answers.longest, "{answers:?}");
    assert_eq!(answers.buckets.iter().map(|(count, _)| count).sum::<u64>(), answers.count);
    assert_eq!((source.recoveries, source.pauses.len(), source.paused.clone()), (0, 0, None));

    assert_eq!(theirs.faults.counts.iter().sum::<u64>(), theirs.requests);
    assert!(theirs.started.unwrap() <= theirs.complete.unwrap(), "{theirs:?}");
    let times = theirs.times.expect("it was measured");
    assert!(times.latencies.count > 0, "{times:?}");
    assert_eq!(times.latencies.count, times.latency_buckets.iter().sum::<u64>());
}

#[test]
fn each_page_that_was_missing_is_told_of_the_channel_that_brought_it() {
    for preempt in [false, true] {
        let Some(on) = capabilities(preempt) else { return };
        let pair = Pair::begin(&config(), &slow(), on).switch().arrives();

        let (source, ours) = (of_source(&pair), pair.migration.statistics());
        let (background, requested) = pages(&source.channels);
        assert_eq!((background + requested) * PAGE, source.missing_bytes, "{source:?}");
        assert!(background > 0 && requested > 0, "{source:?}");
        let names: Vec<_> = source.channels.iter().map(|channel| channel.name.as_str()).collect();
        assert_eq!(names, if preempt { vec!["main", "preempt"] } else { vec!["main"] });
        if preempt {
            assert_eq!((source.channels[0].requested_pages, source.channels[1].background_pages), (0, 0));
        }
        assert!(source.channels.iter().all(|channel| channel.sent_bytes > 0));
        // Requests are answered before the guest runs, too, because devices need pages while they are loaded.
        let sent: u64 = source.channels.iter().map(|channel| channel.sent_bytes).sum();
        assert!(sent <= ours.postcopy_bytes + ours.downtime_bytes, "{sent}: {ours:?}");
    }
}

#[test]
fn each_lane_is_told_with_what_it_brought() {
    let Some(on) = capabilities(true) else { return };
    let on = Capabilities { multifd: true, ..on };
    let pair = Pair::begin(&guest(), &Parameters { multifd_channels: 3, ..slow() }, on).switch().arrives();

    let source = of_source(&pair);
    let (background, requested) = pages(&source.channels);
    let sent = (background + requested) * PAGE;
    // A page that a lane was processing is sent again if it is requested.
    assert!(sent >= source.missing_bytes && background * PAGE <= source.missing_bytes, "{source:?}");
    let lanes: Vec<_> =
        source.channels.iter().filter(|channel| channel.name.starts_with("multifd ")).collect();
    assert!(!lanes.is_empty() && lanes.len() <= 3, "{source:?}");
    assert!(lanes.iter().all(|lane| lane.requested_pages == 0 && lane.sent_bytes > 0), "{source:?}");
    let others = source.channels.iter().filter(|channel| !channel.name.starts_with("multifd "));
    assert!(others.clone().all(|channel| channel.background_pages == 0), "{source:?}");
}

#[test]
fn each_pause_is_told_with_what_broke_it_and_what_was_sent_again() {
    let Some(on) = capabilities(true) else { return };
    let split = Split::begin(trickle(), slow(), on);
    let postcopy = || split.migration.statistics().postcopy.expect("the guest went on");
    for count in 1..=2 {
        eventually("pages", || postcopy().channels.iter().any(|channel| channel.sent_bytes > 0));
        split.cable.set_down(true);
        until_status(&split.migration, Status::PostcopyPaused);
        // The pause is recorded immediately after the status.
        eventually("the pause", || postcopy().paused.is_some());
        let paused = postcopy();
        let now = paused.paused.expect("it is paused");
        assert!(!now.why.is_empty() && now.at >= paused.at, "{now:?}");
        assert_eq!((paused.recoveries, paused.all_sent), (count - 1, None));
        eventually("time", || postcopy().paused.is_some_and(|later| later.took > now.took));
        split.cable.set_down(false);
        split.migration.resume(&split.cable.at).unwrap();
        eventually("the recovery", || postcopy().recoveries == count);
    }
    split.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    let split = split.arrives();

    let report = split.migration.statistics().postcopy.unwrap();
    assert_eq!((report.recoveries, report.pauses.len(), report.paused.clone()), (2, 2, None));
    assert_eq!(report.paused_time, report.pauses.iter().map(|pause| pause.took).sum::<Duration>());
    let [first, second] = &report.pauses[..] else { panic!() };
    assert!(first.at + first.took <= second.at, "{report:?}");
    // Every page was missing once. Pages that were lost in transit were sent once more. Pages that were about to be
    // written when the connection broke (at most one chunk and one request) were not sent.
    let (background, requested) = pages(&report.channels);
    let again: u64 = report.pauses.iter().map(|pause| pause.resent_bytes).sum();
    let (sent, all) = ((background + requested) * PAGE, report.missing_bytes + again);
    assert!(sent <= all && all - sent <= 2 * MOST_IN_HAND * PAGE, "{sent} of {all}: {report:?}");
}

#[test]
fn precopy_tells_nothing_of_postcopy() {
    let Some(on) = capabilities(true) else { return };
    let config = sterna_guests::process::ProcessConfig { rate: 100, working_set_pages: Some(8), ..config() };
    let pair = Pair::begin(&config, &crate::common::parameters(), on).arrives();
    let statistics = pair.migration.statistics();
    assert_eq!(statistics.postcopy, None);
    // The member is left out of the JSON, and not null.
    let json = serde_json::to_value(&statistics).unwrap();
    assert_eq!(json.get("postcopy"), None);
}
