//! A guest that writes its memory arrives complete, over every transport.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::*;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use sterna::{Capabilities, Compression, Outcome, Parameters, Status, Vm, WaitLimits, ZeroPageDetection};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};

fn arrives(config: &ProcessConfig, params: &Parameters, capabilities: Capabilities) {
    let (source, target) = pair(config);
    let (migration, outcome, arrival) = migrate(&source, &target, params, capabilities);
    assert_arrived(&outcome, &arrival, &target);
    assert_eq!(migration.status(), Status::Completed);
    assert!(!migration.may_guest_run());
}

#[test]
fn main_channel_alone_carries_a_writing_guest() {
    arrives(&config(), &parameters(), Capabilities::default());
}

#[test]
fn multifd_carries_a_writing_guest_with_any_number_of_channels() {
    for channels in [1, 2, 5, 16] {
        let (params, capabilities) = multifd(channels);
        arrives(&config(), &params, capabilities);
    }
}

#[test]
fn compression_carries_a_writing_guest() {
    for compression in [Compression::Zlib, Compression::Zstd] {
        let (mut params, capabilities) = multifd(2);
        params.multifd_compression = compression;
        // On a machine with few processors, a compressed stream may be slower than the guest.
        params.downtime_limit = std::time::Duration::from_secs(10);
        arrives(&config(), &params, capabilities);
    }
}

#[test]
fn zero_page_detection_in_every_form_carries_a_writing_guest() {
    for detection in [ZeroPageDetection::None, ZeroPageDetection::Legacy, ZeroPageDetection::Multifd] {
        for on in [false, true] {
            let (mut params, mut capabilities) = multifd(2);
            params.zero_page_detection = detection;
            capabilities.multifd = on;
            arrives(&config(), &params, capabilities);
        }
    }
}

#[test]
fn userfaultfd_tracking_carries_a_writing_guest() {
    let config = ProcessConfig { tracking: Tracking::Automatic, ..config() };
    let (params, capabilities) = multifd(2);
    arrives(&config, &params, capabilities);
}

#[test]
fn paused_guest_arrives_paused() {
    let (source, target) = pair(&config());
    source.pause().unwrap();
    let (params, capabilities) = multifd(2);
    let (_, outcome, arrival) = migrate(&source, &target, &params, capabilities);
    assert!(matches!(outcome, sterna::Outcome::Completed), "{outcome:?}");
    assert!(matches!(arrival, sterna::Arrival::Completed(sterna::RunState::Paused)), "{arrival:?}");
    assert!(target.check().unwrap().is_consistent());
    target.cont().unwrap();
    assert_lives_on(&target);
}

#[test]
fn guest_goes_there_and_back_many_times() {
    let (mut here, mut there) = pair(&config());
    let (params, capabilities) = multifd(2);
    for _ in 0..5 {
        let (_, outcome, arrival) = migrate(&here, &there, &params, capabilities);
        assert_arrived(&outcome, &arrival, &there);
        here = there;
        there = ProcessGuest::waiting(config()).unwrap();
    }
}

#[test]
fn recording_of_a_migration_gives_the_same_decisions_again() {
    let (params, capabilities) = multifd(2);
    let (source, target) = pair(&config());
    let (migration, outcome, arrival) = migrate(&source, &target, &params, capabilities);
    assert_arrived(&outcome, &arrival, &target);

    let recording = migration.recording().unwrap();
    let text = serde_json::to_string(&recording).unwrap();
    let read: sterna::Recording = serde_json::from_str(&text).unwrap();

    assert!(recording.inputs() > 2 && recording.decisions() > 1, "{recording:?}");
    assert_eq!(read, recording);
    assert_eq!(read.replay(), recording);
}

#[test]
fn statistics_of_a_finished_migration_add_up() {
    let (source, target) = pair(&config());
    let (params, capabilities) = multifd(2);
    let (migration, outcome, arrival) = migrate(&source, &target, &params, capabilities);
    assert_arrived(&outcome, &arrival, &target);
    let stats = migration.statistics();
    assert_eq!(stats.ram_total_bytes, source.ram().total_bytes());
    assert_eq!(stats.ram_remaining_bytes, 0);
    assert_eq!(stats.transferred_bytes, stats.precopy_bytes + stats.downtime_bytes);
    assert_eq!(stats.rounds.len() as u64, stats.rounds_begun);
    assert!(stats.rounds.last().unwrap().stopped);
    assert!(stats.normal_pages + stats.zero_pages >= stats.ram_total_bytes / 4096);
    assert_eq!(stats.peer_is_sterna, Some(true));
    assert!(stats.downtime.is_some());
    let parts: std::time::Duration = stats.switchover.iter().map(|(_, took)| *took).sum();
    assert!(parts <= stats.downtime.unwrap() * 11 / 10, "{parts:?} of {:?}", stats.downtime);
}

/// A listener whose queue is full accepts no connection, and the socket becomes ready for nothing.
#[test]
fn cancel_ends_connecting_to_a_destination_that_accepts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("migration");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket =
        || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let waiting: Vec<_> = std::iter::repeat_with(|| {
        let client = socket();
        connect(&client, &address).map(|()| client)
    })
    .take_while(Result::is_ok)
    .collect();
    let source = ProcessGuest::boot(config()).unwrap();
    source.cont().unwrap();
    let limits = WaitLimits { setup: Duration::from_secs(60), ..LIMITS };
    let params = Parameters { limits, ..parameters() };
    let to = format!("unix:{}", path.display()).parse().unwrap();
    let migration = start(&source, &to, &params, Capabilities::default(), Arc::new(()));
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();

    migration.cancel().unwrap();

    assert!(matches!(migration.wait(), Outcome::Cancelled));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_lives_on(&source);
    drop(waiting);
}
