//! A source's speed does not depend on the chunk size.
//!
//! The tests simulate virtual time with the costs of fast adapters, where registering costs more than writing.
//! `-- --nocapture` prints the table.

mod model;
mod source;

use model::{Costs, DEFAULT, MIB, Registering, Time};
use source::{Migration, Outcome, Planted, To, migrate};
use sterna_wire::rdma::ChunkSize;

const GUEST: u64 = 8 << 30;
const CHUNKS_MIB: [u64; 7] = [1, 2, 8, 32, 64, 256, 1024];
const ALL: [To; 3] = [To::KnownQemu, To::UnknownQemu, To::Sterna];

fn chunk(mib: u64) -> ChunkSize {
    ChunkSize::new(mib * MIB).unwrap()
}

fn run(to: To, [source, destination]: [u64; 2], planted: Planted, costs: &Costs) -> Outcome {
    let (source_chunk, destination_chunk) = (chunk(source), chunk(destination));
    migrate(Migration { to, source_chunk, destination_chunk, pinned: None, planted }, &[GUEST], costs)
}

/// Migration times for each chunk size, with the same size on both sides.
fn sweep(to: To, planted: Planted, costs: &Costs) -> Vec<Time> {
    CHUNKS_MIB.iter().map(|mib| run(to, [*mib; 2], planted, costs).time).collect()
}

/// Checks that the times differ little and are near the minimum.
///
/// The worst is within 5 % of the best, and the best within 10 % of the theoretical minimum.
fn check(times: &[Time], costs: &Costs) -> Result<(), String> {
    let (Some(best), Some(worst)) = (times.iter().min(), times.iter().max()) else { return Ok(()) };
    let (spread, speed) = (*best as f64 / *worst as f64, costs.least(GUEST) as f64 / *best as f64);
    match spread >= 0.95 && speed >= 0.90 {
        true => Ok(()),
        false => Err(format!("worst over best {spread:.3}, best over possible {speed:.3}: {times:?} ns")),
    }
}

#[test]
fn program_that_goes_chunk_by_chunk_takes_the_published_times() {
    for (mib, published) in [(1, 37.9), (1024, 4.4)] {
        let seconds = DEFAULT.chunk_by_chunk(GUEST, chunk(mib)) as f64 / 1e9;

        assert!((seconds / published - 1.0).abs() < 0.10, "{mib} MiB: {seconds} s, published {published} s");
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the table that benches/RESULTS.md states")]
fn source_is_within_5_percent_of_its_best_at_every_chunk_size() {
    let columns = ALL.map(|to| sweep(to, Planted::Nothing, &DEFAULT));
    println!("| chunk, MiB | chunk by chunk, s | to QEMU, known | to QEMU, unknown | to Sterna |");
    println!("| --- | --- | --- | --- | --- |");
    for (index, mib) in CHUNKS_MIB.iter().enumerate() {
        let [known, unknown, sterna] = columns.each_ref().map(|times| times[index] as f64 / 1e9);
        let by_chunk = DEFAULT.chunk_by_chunk(GUEST, chunk(*mib)) as f64 / 1e9;
        println!("| {mib} | {by_chunk:.2} | {known:.3} | {unknown:.3} | {sterna:.3} |");
    }
    println!("least possible: {:.3} s", DEFAULT.least(GUEST) as f64 / 1e9);
    for (to, times) in ALL.iter().zip(&columns) {
        check(times, &DEFAULT).unwrap_or_else(|error| panic!("{to:?}: {error}"));
    }
}

#[test]
fn chunk_sizes_of_the_two_sides_may_differ() {
    for to in ALL {
        let pairs = CHUNKS_MIB.iter().flat_map(|source| CHUNKS_MIB.map(|destination| [*source, destination]));
        let times: Vec<_> = pairs.map(|pair| run(to, pair, Planted::Nothing, &DEFAULT).time).collect();

        check(&times, &DEFAULT).unwrap_or_else(|error| panic!("{to:?}: {error}"));
    }
}

#[test]
fn other_adapters_change_nothing() {
    let slow = Registering { call: 250_000, mib: 900_000 };
    let quick = Registering { call: 30_000, mib: 20_000 };
    let others = [
        ("the link is the limit", Costs { bytes_per_second: 1_250_000_000, ..DEFAULT }),
        ("the destination is", Costs { destination: slow, ..DEFAULT }),
        ("the source is", Costs { source: slow, destination: quick, ..DEFAULT }),
        ("everything is quick", Costs { source: quick, destination: quick, ..DEFAULT }),
        ("answers take long", Costs { round_trip: 500_000, ..DEFAULT }),
    ];
    for (which, costs) in others {
        for to in ALL {
            let times = sweep(to, Planted::Nothing, &costs);

            check(&times, &costs).unwrap_or_else(|error| panic!("{which}, {to:?}: {error}"));
        }
    }
}

/// Compares a migration with a limit to one without limit and fault.
///
/// Returns the ratio of their speeds, and the most bytes that were registered at the same time.
fn below_a_limit(guest_mib: u64, chunk_mib: u64, pinned: u64, planted: Planted) -> (f64, [u64; 2]) {
    // Both sides know the limit and reduce their chunks to it.
    let time = |pinned: Option<u64>, planted| {
        let chunk = pinned.map_or(chunk(chunk_mib), |limit| chunk(chunk_mib).twice_within(limit));
        let (to, source_chunk, destination_chunk) = (To::Sterna, chunk, chunk);
        let migration = Migration { to, source_chunk, destination_chunk, pinned, planted };
        migrate(migration, &[guest_mib * MIB], &DEFAULT)
    };
    let (without, with) = (time(None, Planted::Nothing), time(Some(pinned), planted));
    (without.time as f64 / with.time as f64, with.most_registered_bytes)
}

#[test]
#[expect(clippy::print_stdout, reason = "the ratios that benches/RESULTS.md states")]
fn limit_on_registered_memory_costs_less_than_a_fifth_of_the_speed() {
    // Without a limit, a larger guest has longer windows. With the limit it does not, so the calls cost more.
    for (guest_mib, least) in [(512, 0.8), (8192, 0.7)] {
        for chunk_mib in CHUNKS_MIB {
            let limit = 64 * MIB;
            let (ratio, most) = below_a_limit(guest_mib, chunk_mib, limit, Planted::Nothing);
            println!(
                "{guest_mib} MiB, chunks of {chunk_mib} MiB, limit 64 MiB: {ratio:.3} of the speed without"
            );

            assert!(most.iter().all(|most| *most <= limit), "{most:?}");
            assert!(ratio >= least, "{guest_mib} MiB, chunks of {chunk_mib} MiB: {ratio:.3}");
        }
    }
    // The test detects a source that does not register one window while it writes the other.
    let (ratio, _) = below_a_limit(512, 1, 64 * MIB, Planted::WaitsForEachWindow);
    assert!(ratio < 0.8, "{ratio:.3}");
}

#[test]
fn planted_faults_are_noticed() {
    let faults = [
        (Planted::WaitsForEachWindow, &ALL[..]),
        (Planted::WindowsOfOneChunk, &[To::KnownQemu, To::UnknownQemu]),
        (Planted::CountsInMib, &[To::UnknownQemu]),
        (Planted::PlansAtOnce, &[To::Sterna]),
    ];
    for (planted, destinations) in faults {
        for to in destinations {
            let verdict = check(&sweep(*to, planted, &DEFAULT), &DEFAULT);

            assert!(verdict.is_err(), "{planted:?} towards {to:?} goes unnoticed");
        }
    }
}

#[test]
fn unknown_qemu_registers_no_more_than_a_known_one() {
    for mib in CHUNKS_MIB {
        let [known, unknown] =
            [To::KnownQemu, To::UnknownQemu].map(|to| run(to, [mib; 2], Planted::Nothing, &DEFAULT));

        assert_eq!([known.registered_bytes, unknown.registered_bytes], [GUEST; 2], "{mib} MiB");
        assert!(unknown.registrations <= known.registrations + 9, "{mib} MiB: {unknown:?}");
        assert!(unknown.exchanges <= known.exchanges + 11, "{mib} MiB: {unknown:?}");
        assert!(known.exchanges <= 32, "{mib} MiB: {known:?}");
    }
}
