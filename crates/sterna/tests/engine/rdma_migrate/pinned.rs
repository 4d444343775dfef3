//! A limit for registered memory, on one side or on both.

use super::*;
use sterna::error::{Difference, MigrationError, RdmaDifference};

/// The side that has the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Source,
    Destination,
    Both,
}

const ALL: [At; 3] = [At::Source, At::Destination, At::Both];

/// A migration, and each host's maximum of registered bytes.
struct Moved {
    statistics: Statistics,
    source_most: u64,
    destination_most: u64,
    destination_windows: u64,
}

/// Chunk sizes of source and destination, in MiB.
type Chunks = [u64; 2];

fn moved(config: &ProcessConfig, lanes: u8, (chunks, limit): (Chunks, Option<(At, u64)>)) -> Moved {
    let lab = Lab::new(Settings::seeded(config.seed));
    let capabilities = Capabilities { multifd: lanes > 0, ..Capabilities::default() };
    let run = lab.start(config, capabilities, |params| {
        let fabric = params.rdma.fabric.as_ref();
        let is_source = fabric.is_some_and(|fabric| Arc::ptr_eq(fabric, &lab.source));
        params.multifd_channels = lanes.max(1);
        params.rdma.chunk = ChunkSize::new(chunks[usize::from(!is_source)] * MIB).unwrap();
        let other = if is_source { At::Destination } else { At::Source };
        params.rdma.pinned_limit_bytes = limit.filter(|(at, _)| *at != other).map(|(_, limit)| limit);
        params.downtime_limit = Duration::ZERO;
    });
    while run.migration.statistics().rounds_begun < 3 && run.migration.outcome().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let (statistics, run) = run.finish(Duration::ZERO);
    let most = |host: &Host| lab.network.counts_of(host).pinned_bytes_most;
    let (source_most, destination_most) = (most(&lab.source_host), most(&lab.destination));
    let destination_windows = run.incoming.statistics().rdma.unwrap().registrations;
    drop(run);
    lab.assert_empty();
    Moved { statistics, source_most, destination_most, destination_windows }
}

pub(super) fn guest(mib: u64, seed: u64) -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), mib * MIB)],
        fill: Fill::Random(seed),
        seed,
        ..writer(10_000)
    }
}

/// Bytes that the connections themselves register: measured with a guest of 1 MiB, without its memory.
pub(super) fn of_messages(lanes: u8) -> [u64; 2] {
    let moved = moved(&guest(1, 1), lanes, ([1, 1], None));
    [moved.source_most - MIB, moved.destination_most - MIB]
}

fn assert_below(moved: &Moved, of_messages: [u64; 2], (at, limit): (At, u64), what: &str) {
    let most = [moved.source_most - of_messages[0], moved.destination_most - of_messages[1]];
    for (side, most) in [At::Source, At::Destination].into_iter().zip(most) {
        if at == side || at == At::Both {
            assert!(most <= limit, "{what}: {most} bytes were registered at the {side:?}");
            assert!(most >= limit / 2, "{what}: {most} bytes were registered at the {side:?}, not more");
        }
    }
}

#[test]
fn registered_memory_stays_below_the_limit_of_either_side_over_any_number_of_lanes() {
    const LIMIT: u64 = 8 * MIB;
    for (lanes, seed) in [(0, 21), (2, 22), (4, 23)] {
        let of_messages = of_messages(lanes);
        for at in ALL {
            let what = format!("{lanes} lanes, limit at {at:?}, seed {seed}");
            println!("{what}");
            let moved = moved(&guest(24, seed), lanes, ([1, 1], Some((at, LIMIT))));

            assert_below(&moved, of_messages, (at, LIMIT), &what);
            // Windows were registered and released in each round.
            let rdma = moved.statistics.rdma.unwrap();
            let made = if at == At::Destination { moved.destination_windows } else { rdma.registrations };
            assert!(made >= 10, "{what}: {rdma:?}");
            assert_eq!((rdma.pinned_bytes, rdma.destination_pinned_bytes), (0, 0), "{what}");
        }
    }
}

#[test]
fn chunks_larger_than_the_limit_are_cut_to_it() {
    for (chunks, at) in [([64, 1], At::Source), ([1, 64], At::Destination), ([64, 64], At::Both)] {
        for lanes in [0, 2] {
            let what = format!("chunks of {chunks:?} MiB, {lanes} lanes, limit at {at:?}");
            println!("{what}");
            let moved = moved(&guest(24, 24), lanes, (chunks, Some((at, 8 * MIB))));

            assert_below(&moved, of_messages(lanes), (at, 8 * MIB), &what);
        }
    }
}

/// Distant pages of one packet need more windows than the limit allows, so the windows are used one after the other.
#[test]
fn packet_whose_pages_need_more_memory_than_the_limit_goes_in_parts() {
    for (limit, seed) in [(MIB, 25), (2 * MIB, 26), (4 * MIB, 27)] {
        println!("limit {limit}, seed {seed}");
        // Few steps between two rounds, so that dirty pages are far apart.
        let config = ProcessConfig { rate: 500, ..guest(64, seed) };
        let moved = moved(&config, 4, ([1, 1], Some((At::Both, limit))));

        let most = moved.destination_most - of_messages(4)[1];
        assert!(most <= limit, "{most} bytes with a limit of {limit}");
        assert!(moved.statistics.rounds_begun >= 3);
    }
}

#[test]
fn pin_all_above_the_limit_of_the_destination_is_refused_and_named() {
    let lab = Lab::new(Settings::new());
    let capabilities = Capabilities { rdma_pin_all: true, ..Capabilities::default() };
    let run = lab.start(&guest(40, 28), capabilities, |params| {
        params.rdma.pinned_limit_bytes = Some(8 * MIB);
    });

    let outcome = run.migration.wait();
    let arrival = run.incoming.wait();

    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    let Arrival::Failed(MigrationError::PeerIncompatible(Difference::Rdma(why))) = &arrival else {
        panic!("{arrival:?}")
    };
    assert!(matches!(why, RdmaDifference::PinAll { limit, .. } if *limit == 8 * MIB), "{why}");
    assert_lives_on(&run.source);
    drop(run);
    lab.assert_empty();
}
