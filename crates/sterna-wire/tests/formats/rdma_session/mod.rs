//! The order of control messages in RDMA sessions.
//!
//! Every wrong order is refused. Sources and destinations in the right order complete the migration with any
//! delays on the wire.

mod actors;
mod orders;
mod planted;
mod qemu;
mod return_path;
mod world;

use planted::Plant;
use world::{Pairing, World};

/// Number of seeds for each pairing.
const SEEDS: u64 = 5_000;
/// Number of seeds within which each planted bug must be found.
const PLANTED_SEEDS: u64 = 300;

#[test]
fn sessions_with_any_delays_move_all_memory() {
    let first = sterna_testing::seed("rdma_session");
    for pairing in Pairing::ALL {
        let mut phases = 0;
        for seed in (0..SEEDS).map(|index| first.wrapping_add(index)) {
            match World::new(seed, pairing, None).run() {
                Ok(counted) => phases += counted,
                Err(violation) => panic!("{pairing:?}, STERNA_SEED={seed}: {violation}"),
            }
        }
        assert!(phases > 3 * SEEDS, "{pairing:?}: {phases} phases in all");
    }
}

#[test]
fn planted_bugs_are_found() {
    let first = sterna_testing::seed("rdma_session_planted");
    for plant in Plant::ALL {
        for pairing in plant.pairings() {
            let seeds = (0..PLANTED_SEEDS).map(|index| first.wrapping_add(index));
            let found: Vec<String> =
                seeds.filter_map(|seed| World::new(seed, *pairing, Some(plant)).run().err()).collect();
            assert!(!found.is_empty(), "{plant:?} with {pairing:?} was not noticed");
            assert!(
                found.iter().any(|found| plant.is_named_by(found)),
                "{plant:?} with {pairing:?} was noticed as something else: {}",
                found[0]
            );
        }
    }
}
