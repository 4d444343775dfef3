//! Cuts while the guest runs: of any connection, in either direction, at any point.

use std::time::Duration;

use super::*;
use crate::certificates::good_directory;
use crate::common::{multifd, parameters};
use sterna::{Compression, Tls, TlsCredentials, TlsEndpoint, ZeroPageDetection};

/// Cuts at `points` places, most of which must take effect.
fn survives(settings: &(Parameters, Capabilities), lines: &[Line], seed: u64, points: usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut struck = 0;
    for _ in 0..points {
        let at = random.u64(200_000..48 << 20);
        let line = lines[random.usize(..lines.len())];
        let verdict = *random.choice([&Verdict::Cut, &Verdict::CutThis]).unwrap();
        // The destination sends nothing on connections other than the main one.
        let way = if line == Line::Main && random.bool() { Way::Back } else { Way::Forward };
        let bench = Bench::new(&config(), settings.clone(), after_bytes(at, (line, way), verdict, 1));
        let again = bench.arrives();
        assert!(again <= 1, "{line:?} {way:?} at {at}, {verdict:?}: {again} times");
        struck += again;
    }
    assert!(struck * 2 >= points, "only {struck} of {points} cuts struck");
}

#[test]
fn guest_over_multifd_channels_survives_cuts_of_any_of_them() {
    let lines = [Line::Main, Line::Lane(0), Line::Lane(1), Line::Lane(2)];
    survives(&surviving(multifd(3)), &lines, 1, 12);
}

#[test]
fn guest_over_the_main_channel_alone_survives_cuts() {
    survives(&surviving((parameters(), Capabilities::default())), &[Line::Main], 2, 8);
}

#[test]
fn compressed_channels_begin_anew() {
    for (seed, compression) in [(3, Compression::Zstd), (4, Compression::Zlib)] {
        let (mut params, capabilities) = surviving(multifd(2));
        params.multifd_compression = compression;
        params.downtime_limit = Duration::from_secs(10);
        let filter = after_bytes(2 << 20, (Line::Lane(seed as u8 % 2), Way::Forward), Verdict::Cut, 2);
        assert!(Bench::new(&config(), (params, capabilities), filter).arrives() >= 1, "{compression:?}");
    }
}

#[test]
fn zero_pages_on_the_main_channel_survive_a_cut() {
    let (mut params, capabilities) = surviving(multifd(2));
    params.zero_page_detection = ZeroPageDetection::Legacy;
    let filter = after_bytes(8 << 20, (Line::Lane(0), Way::Forward), Verdict::Cut, 1);
    assert_eq!(Bench::new(&config(), (params, capabilities), filter).arrives(), 1);
}

#[test]
fn connection_is_made_anew_over_tls() {
    let directory = good_directory();
    let tls = |endpoint| {
        let credentials = TlsCredentials::from_directory(directory.path(), endpoint, true).unwrap();
        Some(Tls::new(Arc::new(credentials)))
    };
    for line in [Line::Other, Line::Main] {
        let (params, mut capabilities) = surviving(multifd(2));
        // With encryption the proxy cannot distinguish lanes from the main channel.
        capabilities.multifd = line == Line::Other;
        let here = Parameters { tls: tls(TlsEndpoint::Client), ..params.clone() };
        let there = Parameters { tls: tls(TlsEndpoint::Server), ..params };
        let (source, target) = common::pair(&config());
        let vms = (TestVm::new(source), TestVm::new(target));
        let filter = after_bytes(12 << 20, (Line::Other, Way::Forward), Verdict::Cut, 2);
        let bench = Bench::between(vms, (&here, &there), capabilities, filter);
        assert!(bench.arrives() >= 1);
    }
}

#[test]
fn one_migration_survives_many_cuts() {
    let filter = after_bytes(5 << 20, (Line::Lane(1), Way::Forward), Verdict::Cut, 6);
    let again = Bench::new(&config(), surviving(multifd(2)), filter).arrives();
    assert!(again >= 5, "{again}");
}

#[test]
fn network_that_falls_silent_is_a_lost_connection() {
    for line in [Line::Lane(0), Line::Main] {
        let (params, capabilities) = surviving(multifd(2));
        let mut all_silent = false;
        let mut passed = 0;
        let mut main_seen = 0;
        // All connections that have been opened by then become silent, in both directions.
        let filter: Filter = Box::new(move |this, way, offset, piece| {
            if way == Way::Forward {
                passed += piece.len() as u64;
            }
            if offset == 0 && this == Line::Main && way == Way::Forward {
                main_seen += 1;
            }
            all_silent |= passed > 8 << 20 && (this == line || line == Line::Main);
            if all_silent && main_seen == 1 {
                piece.clear();
                return Verdict::Hold;
            }
            Verdict::Pass
        });
        let bench = Bench::new(&config(), (impatient(params), capabilities), filter);
        assert!(bench.arrives() >= 1);
    }
}

/// A guest that writes almost nothing.
fn idle() -> ProcessConfig {
    ProcessConfig { rate: 200, working_set_pages: Some(1), acts: Acts::WRITES, ..config() }
}

#[test]
fn little_is_sent_twice_and_the_report_says_how_much() {
    // A guest that writes nothing: bytes that are sent besides its memory are sent again.
    let idle = idle();
    let total = idle.blocks.iter().map(|(_, bytes)| bytes).sum::<u64>();
    for mut settings in [surviving(multifd(2)), surviving((parameters(), Capabilities::default()))] {
        // The rate is limited, so that few bytes are in transit at any time, however slow the destination is.
        settings.0.max_bandwidth_bytes = 40 << 20;
        let line = if settings.1.multifd { Line::Lane(0) } else { Line::Main };
        let filter = after_bytes(20 << 20, (line, Way::Forward), Verdict::Cut, 1);
        let bench = Bench::new(&idle, settings, filter);
        assert_eq!(bench.arrives(), 1);
        let statistics = bench.migration.statistics();
        let again = &statistics.reconnections[0];
        // Bytes that may be in the buffers of sockets and of the proxy.
        assert!(again.resent_bytes < 16 << 20, "{again:?}");
        assert!(statistics.transferred_bytes < total + (18 << 20), "{statistics:?}");
        assert!(again.took < Duration::from_secs(10) && !again.why.is_empty(), "{again:?}");
        assert_eq!((again.stood, statistics.disconnected), (None, None));
        // The interrupted round is listed with the bytes that were sent, and without a number of dirtied pages.
        let [first, second, ..] = &statistics.rounds[..] else { panic!("{:?}", statistics.rounds) };
        assert_eq!((first.number, first.unfinished, second.number, second.unfinished), (1, true, 2, false));
        assert!(first.bytes >= 10 << 20 && first.pages == total / 4096, "{first:?}");
        assert!(
            first.began + first.took <= again.at + again.took && first.began < again.at,
            "{first:?} {again:?}"
        );
        assert!(first.dirtied_time.is_zero() && !second.dirtied_time.is_zero(), "{second:?}");
    }
}

/// An answer on the return path that a round has ended.
const ROUND_ENDED: &[u8] = &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x0a];

/// Removes these answers.
fn without_ends_of_rounds() -> Filter {
    Box::new(|line, way, _, piece| {
        // The destination writes each answer in one piece.
        while (line, way) == (Line::Main, Way::Back)
            && let Some(at) = piece.windows(8).position(|window| window == ROUND_ENDED)
        {
            piece.drain(at..at + 8);
        }
        Verdict::Pass
    })
}

/// The source then cannot distinguish all of its rounds, and sends more pages again than necessary.
#[test]
fn guest_arrives_whole_from_a_loss_where_the_destination_has_confirmed_no_round() {
    for mut settings in [surviving(multifd(2)), surviving((parameters(), Capabilities::default()))] {
        // A page needs longer than the downtime limit.
        settings.0.max_bandwidth_bytes = 2 << 20;
        settings.0.downtime_limit = Duration::from_millis(1);
        let guest = ProcessConfig { working_set_pages: Some(100), ..crate::support::small() };
        // On a busy host the guest may write nothing during a round, so that precopy ends. The test then starts
        // again.
        let lasting = (0..20).find_map(|_| {
            let bench = Bench::new(&guest, settings.clone(), without_ends_of_rounds());
            let is_over = || bench.migration.status().is_terminal();
            let has_rounds = || bench.migration.statistics().rounds_begun > 8;
            crate::support::eventually("rounds", || is_over() || has_rounds());
            (!is_over()).then_some(bench)
        });
        let bench = lasting.expect("a guest that writes in every round");
        bench.proxy.refuse(true);
        bench.proxy.cut();
        crate::support::eventually("the loss", || bench.migration.statistics().disconnected.is_some());
        bench.proxy.refuse(false);
        let ready = |params: &mut Parameters| {
            params.max_bandwidth_bytes = 0;
            params.downtime_limit = Duration::from_secs(5);
        };
        bench.migration.set_live(ready).unwrap();
        assert_eq!(bench.arrives(), 1);
    }
}

/// Two later sessions have all channels at the destination, but the destination's answer is lost. The source does not
/// know these sessions. The destination's state before them counts.
#[test]
fn losses_in_a_row_send_no_more_again_than_one_does() {
    let idle = idle();
    let mut settings = surviving((parameters(), Capabilities::default()));
    settings.0.max_bandwidth_bytes = 40 << 20;
    let mut first = after_bytes(32 << 20, (Line::Main, Way::Forward), Verdict::Cut, 1);
    let mut mains = 0;
    let filter: Filter = Box::new(move |line, way, offset, piece| {
        if (line, way, offset) == (Line::Main, Way::Back, 0) {
            mains += 1;
            if matches!(mains, 2 | 3) {
                piece.clear();
                return Verdict::Cut;
            }
        }
        first(line, way, offset, piece)
    });
    let bench = Bench::new(&idle, settings, filter);
    assert_eq!(bench.arrives(), 1);
    let again = &bench.migration.statistics().reconnections[0];
    assert!(again.resent_bytes < 16 << 20, "{again:?}");
}

#[test]
fn statistics_and_events_tell_of_a_lost_connection_while_it_lasts() {
    let filter: Filter = Box::new(|_, _, _, _| Verdict::Pass);
    let (mut params, capabilities) = surviving(multifd(2));
    // Long enough for the test to cut it.
    params.max_bandwidth_bytes = 20 << 20;
    let bench = Bench::new(&config(), (params, capabilities), filter);
    crate::support::eventually("pages", || bench.migration.statistics().normal_pages > 1000);
    bench.proxy.refuse(true);
    bench.proxy.cut();
    crate::support::eventually("the loss", || bench.migration.statistics().disconnected.is_some());
    let lost = |event: &Event| matches!(event, Event::ConnectionLost { why } if !why.is_empty());
    crate::support::eventually("the event", || bench.told.events().iter().any(lost));
    assert_eq!(bench.migration.status(), sterna::Status::Active);
    assert!(bench.migration.may_guest_run() && bench.source.guest.wait_progress(10, Duration::from_secs(20)));
    bench.proxy.refuse(false);
    bench.migration.set_live(|params| params.max_bandwidth_bytes = 0).unwrap();
    assert_eq!(bench.arrives(), 1);
}
