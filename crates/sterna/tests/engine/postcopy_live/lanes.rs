//! Background pages arrive over multifd channels, between two Sternas.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::error::{BadRound, Misbehaviour};
use sterna::ram::{Backing, PAGE_SIZE};
use sterna::{
    Arrival, Capabilities, Compression, Incoming, Migration, MigrationError, Outcome, Parameters, RunState,
    Status, Tls, TlsCredentials, TlsEndpoint, Vm, ZeroPageDetection,
};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_wire::extension::Features;
use sterna_wire::main::{Command, MainItem};
use sterna_wire::return_path::ReturnMessage;

use super::lanes_peer::{LanesOfDestination, Packets, Page};
use super::peer::{HandMadeDestination, HandMadeSource};
use super::{Pair, capabilities, config, slow};
use crate::common;
use crate::support::{eventually, until_status};

/// `None` if this host forbids postcopy.
fn over_lanes(preempt: bool) -> Option<Capabilities> {
    Some(Capabilities { multifd: true, ..capabilities(preempt)? })
}

fn channels(count: u8) -> Parameters {
    Parameters { multifd_channels: count, ..slow() }
}

/// Asserts that the main and the preempt channel carried only requested pages: all others were sent over the lanes.
fn assert_came_over_lanes(pair: &Pair) {
    let (ours, theirs) = (pair.migration.statistics(), pair.incoming.statistics());
    let postcopy = theirs.postcopy.expect("it ran early");
    assert_eq!(postcopy.missing_pages, 0);
    assert_eq!(postcopy.requests, ours.postcopy_requests, "each request came");
    let page = pair.target.ram().blocks().iter().map(|block| block.page_bytes()).max().unwrap();
    let main = ours.transferred_bytes - ours.multifd_bytes;
    // Heads of records, devices, discard commands and keep-alives.
    let most = ours.postcopy_requests * (page + page / 64 + 64) + (256 << 10);
    assert!(main <= most, "{main} bytes beside the lanes, {most} at most: {ours:?}");
    assert!(ours.postcopy_bytes > main, "{ours:?}");
}

#[test]
fn guest_goes_on_at_once_and_its_pages_follow_over_all_lanes() {
    for (count, preempt) in [(2, false), (2, true), (4, false), (4, true)] {
        let Some(capabilities) = over_lanes(preempt) else { return };
        let pair = Pair::begin(&config(), &channels(count), capabilities).switch().arrives();
        assert_came_over_lanes(&pair);
        let following = [Status::PostcopyDevice, Status::PostcopyActive, Status::Completed];
        assert_eq!(pair.told(0, Status::PostcopyDevice), following);
    }
}

#[test]
fn precopy_over_lanes_goes_on_over_them_compressed_or_not() {
    for compression in [Compression::None, Compression::Zstd, Compression::Zlib] {
        let Some(capabilities) = over_lanes(true) else { return };
        let params = Parameters { multifd_compression: compression, ..channels(3) };
        let pair = Pair::begin(&config(), &params, capabilities).after_rounds(1).switch().arrives();
        assert_came_over_lanes(&pair);
        // A round takes long. Precopy ends only if the writers get no CPU time during a round.
        let params = Parameters { max_bandwidth_bytes: 100 << 20, downtime_limit: Duration::ZERO, ..params };
        Pair::begin(&config(), &params, capabilities).after_rounds(3).switch().arrives();
    }
}

#[test]
fn zero_pages_are_in_packets_however_they_are_found() {
    for zero_page_detection in [ZeroPageDetection::Legacy, ZeroPageDetection::None] {
        let Some(capabilities) = over_lanes(true) else { return };
        let params = Parameters { zero_page_detection, ..channels(2) };
        let config = ProcessConfig { fill: Fill::Zero, ..config() };
        let pair = Pair::begin(&config, &params, capabilities).switch().arrives();
        assert_eq!(pair.incoming.statistics().postcopy.unwrap().missing_pages, 0);
    }
}

#[test]
fn lanes_bring_private_memory_and_huge_pages() {
    for backing in [Backing::Anonymous, Backing::Huge2M] {
        let Some(capabilities) = over_lanes(true) else { return };
        let config = ProcessConfig { backing, ..config() };
        if let Err(error) = ProcessGuest::waiting(config.clone()).map(drop) {
            tracing::warn!("skipped: {error}");
            continue;
        }
        for count in [2, 4] {
            let pair = Pair::begin(&config, &channels(count), capabilities).switch().arrives();
            assert_eq!(pair.incoming.statistics().postcopy.unwrap().missing_pages, 0);
        }
    }
}

#[test]
fn lanes_go_over_tls() {
    let Some(capabilities) = over_lanes(true) else { return };
    let certificates = crate::certificates::good_directory();
    let tls = |endpoint| {
        let credentials = TlsCredentials::from_directory(certificates.path(), endpoint, false).unwrap();
        Some(Tls::new(Arc::new(credentials)))
    };
    for compression in [Compression::None, Compression::Zstd] {
        let params = Parameters { multifd_compression: compression, ..channels(4) };
        let (source, target) = common::pair(&config());
        let theirs = Parameters { tls: tls(TlsEndpoint::Server), ..params.clone() };
        let incoming = common::listen(&target, &theirs, capabilities);
        let ours = Parameters { tls: tls(TlsEndpoint::Client), ..params };
        let migration = common::start(&source, &incoming.address(), &ours, capabilities, Arc::new(()));
        migration.start_postcopy().unwrap();
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        common::assert_arrived(&outcome, &arrival, &target);
    }
}

#[test]
fn paused_guest_arrives_over_lanes_with_all_of_its_pages() {
    let Some(capabilities) = over_lanes(false) else { return };
    let (source, target) = common::pair(&config());
    source.pause().unwrap();
    let incoming = common::listen(&target, &channels(4), capabilities);
    let migration = common::start(&source, &incoming.address(), &channels(4), capabilities, Arc::new(()));
    migration.start_postcopy().unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    super::assert_same_memory(&source, &target);
    target.cont().unwrap();
    common::assert_lives_on(&target);
}

#[test]
fn all_lanes_together_keep_to_the_bandwidth_and_requests_do_not_wait_for_it() {
    let Some(capabilities) = over_lanes(true) else { return };
    let limit = 16 << 20;
    let params = Parameters { max_postcopy_bandwidth_bytes: limit, ..channels(4) };
    let config = ProcessConfig { fill: Fill::Random(7), working_set_pages: Some(64), ..config() };
    let pair = Pair::begin(&config, &params, capabilities).switch();
    until_status(&pair.migration, Status::PostcopyActive);
    let (began, before) = (Instant::now(), pair.migration.statistics());
    // The writers get their pages long before all background pages are sent.
    assert!(pair.target.wait_progress(200, Duration::from_secs(30)), "it waits for the background");
    let (took, now) = (began.elapsed(), pair.migration.statistics());
    assert_eq!(now.status, Status::PostcopyActive);
    let sent = now.multifd_bytes - before.multifd_bytes;
    // Each lane may exceed the limit by one packet, at the beginning and at the end.
    let most = (limit as f64 * took.as_secs_f64()) as u64 + (limit / 10) + 8 * (600 << 10);
    assert!(sent <= most, "{sent} bytes in {took:?}, {most} at most");
    pair.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    assert_came_over_lanes(&pair.arrives());
}

#[test]
fn connection_whose_lane_breaks_is_lost_and_the_source_never_runs_the_guest_again() {
    let Some(capabilities) = over_lanes(false) else { return };
    let Some(Begun { source, migration, mut destination, lanes }) = begun(capabilities, OVER_LANES) else {
        return;
    };
    let read = lanes.iter().map(|lane| lane.try_clone().unwrap()).collect();
    until_run(&mut destination, &LanesOfDestination::read(read, &config()));
    // The PING that asks whether the guest runs, which the destination answers.
    destination.until(|item| matches!(item, MainItem::Command(Command::Ping(_))));
    lanes[1].shutdown(std::net::Shutdown::Both).unwrap();
    until_status(&migration, Status::PostcopyPaused);
    assert!(!source.ram().custody().may_run());
    migration.decide(sterna::Decision::DestinationRuns).unwrap();
    assert!(matches!(migration.wait(), Outcome::Completed));
}

const OVER_LANES: Features = Features(Features::OURS.0 | Features::POSTCOPY.0 | Features::POSTCOPY_LANES.0);

fn is_run(item: &MainItem) -> bool {
    matches!(item, MainItem::Command(Command::PostcopyRun))
}

fn is_eof(item: &MainItem) -> bool {
    matches!(item, MainItem::Eof)
}

/// A source that is about to switch, and a played destination.
struct Begun {
    source: Arc<ProcessGuest>,
    migration: Migration,
    destination: HandMadeDestination,
    lanes: Vec<std::net::TcpStream>,
}

/// Two lanes; the destination announces `features`.
fn begun(capabilities: Capabilities, features: Features) -> Option<Begun> {
    let (source, _) = common::pair(&config());
    let mut destination = HandMadeDestination::sterna_with_lanes(features);
    let to = destination.address();
    let migration = common::start(&source, &to, &channels(2), capabilities, Arc::new(()));
    destination.main = Some(destination.accept());
    let lanes = (0..2).map(|_| destination.accept()).collect();
    migration.start_postcopy().unwrap();
    Some(Begun { source, migration, destination, lanes })
}

/// Reads up to RUN, and the lanes' packets up to the end of precopy.
fn until_run(destination: &mut HandMadeDestination, lanes: &LanesOfDestination) {
    destination.until(is_run);
    let flushes = destination.flushes;
    let syncs = |packets: &Packets| packets.iter().filter(|packet| packet.is_empty()).count();
    lanes.until(|packets| syncs(packets) == flushes);
    lanes.take();
}

#[test]
fn requested_page_comes_on_main_though_a_lane_has_it_in_hand_and_no_lane_is_read() {
    let Some(capabilities) = over_lanes(false) else { return };
    let Some(Begun { source, migration, mut destination, lanes }) = begun(capabilities, OVER_LANES) else {
        return;
    };
    let lanes = LanesOfDestination::read(lanes, &config());
    until_run(&mut destination, &lanes);
    let before = destination.pages.len();
    // Each lane delivers one packet. The source's lanes are further by then.
    lanes.hold(true);
    destination.until(|item| matches!(item, MainItem::Command(Command::Ping(_))));
    lanes.until(|packets| !packets.is_empty());
    let first = lanes.take();
    let (block, offset, _) = first[0][0][0].clone();
    let name = config().blocks[block].0.clone();
    let far = (1, 5 << 20);
    for (name, start) in [(name, offset), ("ram.high".into(), far.1)] {
        destination.say(&ReturnMessage::RequestPages { block: Some(name), start, length: 4096 });
    }
    let came = |destination: &HandMadeDestination| -> Vec<_> {
        destination.pages[before..].iter().map(|(block, offset, _)| (*block, *offset)).collect()
    };
    while came(&destination).len() < 2 {
        destination.next().expect("it goes on");
    }
    assert_eq!(came(&destination), [(block, offset), far], "in the order of the requests");
    lanes.hold(false);
    destination.until(is_eof);
    assert_eq!(came(&destination).len(), 2, "nothing else comes there");
    destination.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));

    let mut packets = lanes.end();
    packets.iter_mut().zip(first).for_each(|(packets, first)| drop(packets.splice(0..0, first)));
    for packets in &packets {
        let (last, others) = packets.split_last().unwrap();
        assert!(last.is_empty() && others.iter().all(|packet| !packet.is_empty()), "SYNC is the last");
    }
    let pages: Vec<&Page> = packets.iter().flatten().flatten().collect();
    let places: HashSet<_> = pages.iter().map(|(block, offset, _)| (*block, *offset)).collect();
    assert_eq!(places.len(), pages.len(), "once on all lanes together");
    assert!(places.contains(&(block, offset)) && !places.contains(&far));
    // The source continues near the distant page.
    let near = |packets: &Packets| {
        packets.iter().flatten().position(|(block, offset, _)| (*block, offset >> 18) == (1, far.1 >> 18))
    };
    let (lane, at) = packets.iter().enumerate().find_map(|(lane, list)| Some((lane, near(list)?))).unwrap();
    let behind = packets[lane].iter().flatten().count() - at;
    assert!(behind > 1024, "the neighbourhood came {behind} pages before the end of its lane");
    for (block, offset, content) in pages.into_iter().chain(&destination.pages[before..]) {
        let mut ours = vec![0; PAGE_SIZE];
        source.ram().block(*block).read(*offset, &mut ours).unwrap();
        assert_eq!(&ours, content, "{offset:#x} of block {block}");
    }
}

#[test]
fn each_lane_goes_through_its_share_in_ascending_order() {
    let Some(capabilities) = over_lanes(false) else { return };
    let Some(Begun { migration, mut destination, lanes, .. }) = begun(capabilities, OVER_LANES) else {
        return;
    };
    let lanes = LanesOfDestination::read(lanes, &config());
    until_run(&mut destination, &lanes);
    destination.until(is_eof);
    destination.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));
    for packets in lanes.end() {
        // In a packet, zero pages follow the others.
        let first = |packet: &Vec<Page>| packet.iter().map(|(block, offset, _)| (*block, *offset)).min();
        let firsts: Vec<_> = packets.iter().filter_map(first).collect();
        assert!(firsts.is_sorted(), "{firsts:?}");
    }
}

#[test]
fn peer_without_the_bit_gets_the_old_form() {
    let Some(capabilities) = over_lanes(false) else { return };
    let features = Features::OURS.union(Features::POSTCOPY);
    let Some(Begun { migration, mut destination, lanes, .. }) = begun(capabilities, features) else { return };
    let lanes = LanesOfDestination::read(lanes, &config());
    let mut dropped = 0;
    let flushes = loop {
        match destination.next().unwrap() {
            MainItem::Command(Command::PostcopyDiscard { ranges, .. }) => {
                dropped += ranges.iter().map(|(_, bytes)| bytes >> 12).sum::<u64>();
            }
            item if is_run(&item) => break destination.flushes,
            _ => {}
        }
    };
    let before = destination.pages.len();
    destination.until(is_eof);
    destination.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));

    assert_eq!(destination.flushes, flushes, "no flush behind LISTEN");
    let following: HashSet<_> =
        destination.pages[before..].iter().map(|(block, offset, _)| (*block, *offset)).collect();
    assert_eq!(following.len(), destination.pages.len() - before, "each once");
    assert_eq!(following.len() as u64, dropped, "all on the main channel");
    for packets in lanes.end() {
        assert!(packets.last().unwrap().is_empty(), "nothing behind the last SYNC of precopy");
        assert_eq!(packets.iter().filter(|packet| packet.is_empty()).count(), flushes);
    }
}

/// If the source misbehaves, a guest without content is sufficient.
fn small() -> ProcessConfig {
    let blocks = vec![("ram.low".into(), 4 << 20), ("ram.high".into(), 4 << 20)];
    ProcessConfig { blocks, ..config() }
}

struct Waiting {
    source: Arc<ProcessGuest>,
    target: Arc<ProcessGuest>,
    incoming: Incoming,
    played: HandMadeSource,
}

/// A destination with two lanes, and a played source whose guest is stopped.
fn waiting() -> Option<Waiting> {
    let capabilities = over_lanes(false)?;
    let (source, target) = common::pair(&small());
    assert!(source.wait_progress(20, Duration::from_secs(20)));
    let incoming = common::listen(&target, &channels(2), capabilities);
    let played = HandMadeSource::of(&source, &incoming.address()).with_lanes(2);
    Some(Waiting { source, target, incoming, played })
}

/// Reads requests until four writers wait for one page each, no two for the same page. Returns the four pages.
fn hear_requests(played: &mut HandMadeSource, target: &ProcessGuest) -> Vec<(usize, u64)> {
    hear_four(played, target, None)
}

/// Like [`hear_requests`], after requests of which the last was in that block: a request names its block only when it
/// changes.
fn hear_four(
    played: &mut HandMadeSource,
    target: &ProcessGuest,
    mut last: Option<usize>,
) -> Vec<(usize, u64)> {
    let mut asked = Vec::new();
    while asked.len() < 4 {
        if let ReturnMessage::RequestPages { block, start, .. } = played.hear().expect("it goes on") {
            let ram = target.ram();
            let named = block.map(|name| ram.blocks().iter().position(|known| known.name() == name).unwrap());
            last = named.or(last);
            asked.push((last.expect("the first request names its block"), start >> 12));
        }
    }
    asked
}

fn hear_shut(played: &mut HandMadeSource) -> Option<u32> {
    std::iter::from_fn(|| played.hear())
        .find_map(|message| if let ReturnMessage::Shut(code) = message { Some(code) } else { None })
}

/// Sends all pages of a block over two lanes, in packets that alternate between the lanes.
fn all_pages(played: &mut HandMadeSource, block: usize, pages: u64) {
    for (packet, first) in (0..pages).step_by(128).enumerate() {
        played.lane_pages(packet % 2, block, first..first + 128);
    }
}

#[test]
fn page_that_was_asked_for_may_come_on_both_ways_and_is_placed_once() {
    for main_first in [false, true] {
        let Some(Waiting { target, incoming, mut played, .. }) = waiting() else { return };
        played.hand_over_as_sterna();
        let asked = hear_requests(&mut played, &target);
        if main_first {
            played.pages(asked.iter().copied());
            // The writers continue, and request more pages: each waits again, possibly before this side reads the
            // requests.
            hear_four(&mut played, &target, asked.last().map(|(block, _)| *block));
        }
        for block in 0..2 {
            all_pages(&mut played, block, 1024);
        }
        if !main_first {
            played.pages(asked.iter().copied());
        }
        played.sync();
        played.flush();
        played.end();
        assert_eq!(hear_shut(&mut played), Some(0));
        drop(played);
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        common::assert_lives_on(&target);
    }
}

#[test]
fn sterna_whose_lanes_stay_silent_is_served_as_before() {
    let Some(Waiting { target, incoming, mut played, .. }) = waiting() else { return };
    played.hand_over_as_sterna();
    played.every_page().chunks(64).for_each(|pages| played.pages(pages.iter().copied()));
    played.end();
    assert_eq!(hear_shut(&mut played), Some(0));
    drop(played);
    assert!(matches!(incoming.wait(), Arrival::Completed(RunState::Running)));
    common::assert_lives_on(&target);
}

/// A source's misbehaviour on its lanes after RUN: the guest waits, and sees no other content.
fn paused(word: &str, acts: impl FnOnce(&mut HandMadeSource, u64, &Incoming)) {
    let Some(Waiting { source, target, incoming, mut played }) = waiting() else { return };
    played.hand_over_as_sterna();
    let asked = hear_requests(&mut played, &target);
    // No writer requests this page, because all writers wait.
    let free = (0..).find(|page| !asked.contains(&(1, *page))).unwrap();
    acts(&mut played, free, &incoming);
    eventually("the pause", || incoming.status() == Status::PostcopyPaused);
    let error = incoming.statistics().error.unwrap();
    assert!(error.contains(word), "{error}");
    drop(played);
    // The writers block in the kernel, because their pages never arrive. They end with the process.
    std::mem::forget((target, incoming, source));
}

#[test]
fn source_that_breaks_a_rule_on_a_lane_after_run_leaves_the_guest_waiting() {
    paused("beyond the end of block", |played, _, _| {
        played.lanes[0].packet("ram.high", &[4 << 20], &[], &[1; PAGE_SIZE]);
    });
    paused("not a multiple", |played, _, _| played.lanes[0].packet("ram.high", &[], &[7], &[]));
    paused("\"vga\"", |played, _, _| played.lanes[0].packet("vga", &[], &[0], &[]));
    paused("came twice", |played, free, _| {
        played.lane_pages(0, 1, [free].into_iter());
        played.lane_pages(0, 1, [free].into_iter());
    });
    paused("came twice", |played, free, _| {
        played.lane_pages(0, 1, [free].into_iter());
        played.lane_pages(1, 1, [free].into_iter());
    });
    // Sent on both ways, without a request.
    paused("came twice", |played, free, _| {
        played.lane_pages(0, 1, [free].into_iter());
        played.pages([(1, free)].into_iter());
    });
    paused("differences", |played, free, _| played.lanes[0].differences("ram.high", free << 12, &[0, 1, 0]));
    paused("ended before its last SYNC", |played, _, _| {
        played.lanes[1].stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    paused("one MULTIFD_FLUSH", |played, _, _| {
        played.sync();
        played.flush();
        played.flush();
    });
    paused("where this channel has none", |played, free, _| {
        played.sync();
        played.flush();
        played.lane_pages(0, 1, [free].into_iter());
    });
    paused("came after MULTIFD_FLUSH number 1", |played, free, incoming| {
        let missing = || incoming.statistics().postcopy.unwrap().missing_pages;
        let before = missing();
        played.lane_pages(0, 1, [free].into_iter());
        eventually("the page", || missing() < before);
        played.end();
    });
}

/// A source's misbehaviour before RUN: the destination refuses, runs no guest and keeps no state.
fn refused(expected: impl Fn(&BadRound) -> bool, acts: impl FnOnce(&mut HandMadeSource, &Incoming)) {
    let Some(Waiting { source, target, incoming, mut played }) = waiting() else { return };
    acts(&mut played, &incoming);
    played.hear_refusal();
    drop((played, source));
    let Arrival::Failed(error) = incoming.wait() else { panic!("arrived") };
    let MigrationError::PeerMisbehaved(Misbehaviour::Round(why)) = &error else { panic!("{error}") };
    assert!(expected(why), "{error}");
    assert!(!target.has_guest());
    let resident: u64 = target.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
    assert_eq!(resident, 0, "bytes left");
}

#[test]
fn packets_that_come_before_their_time_are_refused() {
    refused(
        |why| matches!(why, BadRound::PacketsBeforeListen { .. }),
        |played, incoming| {
            played.open_as_sterna();
            played.hear_pong(0x10);
            played.lane_pages(0, 1, 0..4);
            let came = || incoming.statistics().normal_pages + incoming.statistics().zero_pages;
            eventually("the packet", || came() == 4);
            played.discard_all();
            played.package(&[], &[]);
        },
    );
    // A source that is not a Sterna may not send pages on these channels.
    refused(
        |why| matches!(why, BadRound::PacketInPostcopy { .. }),
        |played, _| {
            played.open(PAGE_SIZE as u64);
            played.hear_pong(0x10);
            played.discard_all();
            played.package(&[], &[Command::Ping(3)]);
            played.hear_pong(3);
            played.lane_pages(0, 1, 0..4);
        },
    );
}
