//! Memory arrives complete, with every kind of destination.

use std::sync::atomic::{AtomicBool, Ordering};

use sterna_wire::rdma::ChunkSize;

use super::*;

fn chunk(mib: u64) -> ChunkSize {
    ChunkSize::new(mib * MIB).unwrap()
}

fn completes(
    lab: &Lab,
    seed: u64,
    manner: Manner,
    params: Parameters,
    pin_all: bool,
) -> (sterna::Statistics, Seen) {
    println!("{manner:?}, own chunk {}, pin-all {pin_all}: seed {seed}", params.rdma.chunk);
    let guest = guest(&mut fastrand::Rng::with_seed(seed));
    // The guest writes when all of its memory has been sent.
    guest.at_last(|guest| (0..300).for_each(|at| guest.write(at * 17 % 2300, at as u8)));
    let (outcome, statistics, seen) = migrate(lab, &guest, manner, params, pin_all);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(seen.is_whole && seen.session.is_some_and(|session| session != [0; 16]));
    lab.assert_empty();
    (statistics, seen)
}

#[test]
fn qemu_of_any_chunk_size_gets_all_memory_and_no_question_twice() {
    for (index, mib) in [1, 2, 8, 64, 1024].into_iter().enumerate() {
        for own in [1, 1024] {
            let lab = Lab::new(Settings::seeded(index as u64));
            let (statistics, seen) =
                completes(&lab, mib, manner(Kind::Qemu, mib), lab.parameters(chunk(own)), false);

            let mut starts: Vec<_> = seen.windows.iter().map(|window| (window.block, window.start)).collect();
            starts.sort_unstable();
            starts.dedup();
            assert_eq!(starts.len(), seen.windows.len(), "{:?}", seen.windows);
            let rdma = statistics.rdma.unwrap();
            assert_eq!((rdma.in_flight_bytes, rdma.pinned_bytes, rdma.destination_pinned_bytes), (0, 0, 0));
            assert!(rdma.written_bytes > 0 && rdma.writes > 0 && rdma.registrations > 0, "{rdma:?}");
            assert_eq!(rdma.windows, seen.windows.len() as u64);
            let counts = lab.network.counts();
            assert_eq!((counts.writes, counts.write_bytes), (rdma.writes, rdma.written_bytes));
            assert!(counts.write_bytes_most <= (own * MIB).min(2 * MIB));
        }
    }
}

#[test]
fn qemu_without_return_path_gets_all_memory() {
    let lab = Lab::new(Settings::seeded(3));
    let without = Manner { has_return_path: false, ..manner(Kind::Qemu, 1) };
    completes(&lab, 3, without, lab.parameters(chunk(1)), false);
}

#[test]
fn pages_that_are_found_while_a_window_is_granted_make_few_windows() {
    let lab = Lab::new(Settings::seeded(6));
    let guest = Plain::new(ram(Some(0x5a)));
    let gate: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    let slow = Manner { gate: Some(gate), ..manner(Kind::Sterna, 1) };
    let target = ram(Some(0xa5));
    let destination = Destination::listen(&lab.destination, target.clone(), slow);
    let migration = start(&guest, &destination, lab.parameters(chunk(1)), capabilities(true, false)).unwrap();
    // The source registers all of its memory meanwhile, so all blocks were found.
    let all: u64 = BLOCKS.iter().map(|(_, length)| length).sum();
    while migration.statistics().rdma.is_none_or(|rdma| rdma.pinned_bytes < all) {
        assert!(migration.outcome().is_none(), "{:?}", migration.outcome());
        std::thread::sleep(Duration::from_millis(1));
    }
    gate.store(true, Ordering::Release);

    assert!(matches!(migration.wait(), Outcome::Completed));
    let seen = destination.wait();
    assert_eq!(contents(&guest.ram), contents(&target));
    // The first request, and the rest of each block.
    assert!(seen.windows.len() <= 1 + BLOCKS.len(), "{:?}", seen.windows);
}

#[test]
fn sterna_without_return_path_is_shown_the_end_at_once() {
    let lab = Lab::new(Settings::seeded(3));
    let without = Manner { has_return_path: false, ..manner(Kind::Sterna, 1) };
    let (_, seen) = completes(&lab, 3, without, lab.parameters(chunk(1)), false);

    // An opaque machine's destination waits for the source to close, with the guest paused. A source that waits for
    // the destination instead gives up after 5 s.
    assert!(seen.waited_for_end < Duration::from_secs(4), "{seen:?}");
}

#[test]
fn pin_all_asks_for_nothing() {
    for kind in [Kind::Qemu, Kind::Sterna] {
        let lab = Lab::new(Settings::seeded(4));
        let (statistics, seen) = completes(&lab, 4, manner(kind, 1), lab.parameters(chunk(1)), true);

        assert_eq!(seen.windows.len(), BLOCKS.len());
        assert_eq!(statistics.rdma.unwrap().windows, 0);
    }
}

#[test]
fn sterna_of_any_chunk_size_gets_all_memory_and_zero_ranges_in_few_messages() {
    for (own, there) in [(1, 1), (1, 64), (64, 1), (1024, 1024)] {
        let lab = Lab::new(Settings::seeded(5));
        let (statistics, seen) =
            completes(&lab, 5, manner(Kind::Sterna, there), lab.parameters(chunk(own)), false);

        // One message for each round that has zero ranges.
        assert!(seen.zero_ranges > 8 && seen.zero_messages < seen.phases, "{seen:?}");
        assert_eq!(statistics.rdma.unwrap().registrations > 0, !seen.windows.is_empty());
    }
}

#[test]
fn limit_on_pinned_memory_holds_on_both_sides() {
    let lab = Lab::new(Settings::seeded(6));
    let mut params = lab.parameters(chunk(1));
    params.rdma.pinned_limit_bytes = Some(4 * MIB);

    let (_, seen) = completes(&lab, 6, manner(Kind::Sterna, 1), params, false);

    assert!(seen.most_pinned <= 4 * MIB && seen.given_back > 0, "{seen:?}");
    let buffers = 8 * MIB;
    let here = lab.network.counts_of(&lab.source).pinned_bytes_most;
    assert!(here <= 4 * MIB + buffers, "{here} bytes");
}

#[test]
fn locked_memory_limit_bounds_what_is_registered_at_once() {
    let mut settings = Settings::seeded(7);
    settings.locked_memory_bytes = Some(28 * MIB);
    let lab = Lab::new(settings);
    let other = lab.source.other_program();
    let adapter = other
        .resolve(([10, 0, 0, 2], 1).into(), Duration::from_secs(9), &sterna_transport::CancelFlag::new())
        .unwrap()
        .adapter();
    let memory = sterna_transport::rdma::Memory::anonymous((16 * MIB) as usize).unwrap();
    let taken = adapter.register(memory, sterna_transport::rdma::Access::SOURCE).unwrap();

    let guest = guest(&mut fastrand::Rng::with_seed(7));
    let (outcome, ..) = migrate(&lab, &guest, manner(Kind::Qemu, 1), lab.parameters(chunk(1)), false);

    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(lab.network.counts_of(&lab.source).pinned_bytes_most <= 28 * MIB);
    drop(taken);
    lab.assert_empty();
}

#[test]
fn source_whose_adapter_follows_memory_pins_none_of_it() {
    for kind in [Kind::Qemu, Kind::Sterna] {
        for pin_all in [false, true] {
            let lab = Lab::new(Settings::seeded(8));
            lab.network.set_on_demand_paging(&lab.source, true);
            let mut params = lab.parameters(chunk(1));
            params.rdma.pinned_limit_bytes = Some(2 * MIB);
            let (statistics, seen) = completes(&lab, 8, manner(kind, 1), params, pin_all);

            // Each block is registered once. A block with only zeros is not registered.
            let rdma = statistics.rdma.unwrap();
            assert!((1..=BLOCKS.len() as u64).contains(&rdma.registrations), "{rdma:?}");
            assert!(pin_all || !seen.windows.is_empty(), "{seen:?}");
            // Registrations for the messages of two connections.
            let here = lab.network.counts_of(&lab.source).pinned_bytes_most;
            assert!(here <= 8 * MIB, "{here} bytes are pinned");
        }
    }
}
