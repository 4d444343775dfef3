//! Windows and WRITEs: each byte is written once, inside registered memory, with every kind of destination.

use crate::common::seeded;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use std::collections::{HashMap, VecDeque};
use sterna_wire::Fault;
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkProbe, ChunkSize, Destination, PlanLimits, RegistrationPlan,
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn range(block: usize, start: u64, length: u64) -> BlockRange {
    BlockRange { block, start, length }
}

fn limits(most_message: u64, pinned: Option<u64>) -> PlanLimits {
    PlanLimits { own_chunk: ChunkSize::LEAST, most_message, pinned }
}

fn chunk() -> impl Strategy<Value = ChunkSize> {
    (20u32..=30).prop_map(|shift| ChunkSize::new(1 << shift).unwrap())
}

/// Lengths of blocks, some above 1 GiB, and rounds of runs in them. The runs are in order, and no page is twice
/// in a round.
fn guest() -> impl Strategy<Value = (Vec<u64>, Vec<Vec<BlockRange>>)> {
    let lengths = vec(prop_oneof![1u64..600, 1u64..40_000, 200_000u64..700_000], 1..4);
    (lengths, vec(vec((any::<u64>(), any::<u64>()), 1..12), 1..5)).prop_map(|(lengths, rounds)| {
        let blocks: Vec<u64> = lengths.iter().map(|pages| pages * PAGE).collect();
        let rounds = rounds.into_iter().map(|drawn| {
            let mut runs = Vec::new();
            for (block, pages) in lengths.iter().enumerate() {
                let mut at = 0;
                for (skip, count) in &drawn {
                    // A mixture of long gaps and no gaps, and of long runs and single pages.
                    at += skip % [1, 5, 3_000, 300_000][(skip >> 40) as usize % 4];
                    let length = (1 + count % [1, 40, 2_000, 200_000][(count >> 40) as usize % 4])
                        .min(pages.saturating_sub(at));
                    if length > 0 {
                        runs.push(range(block, at * PAGE, length * PAGE));
                    }
                    at += length;
                }
            }
            runs
        });
        (blocks.clone(), rounds.collect())
    })
}

/// Measurements of one run of a plan.
struct Outcome {
    asked: Vec<BlockRange>,
    given_back: usize,
    most_pinned: u64,
}

/// Performs a plan. Checks each WRITE against the registered memory, and the written bytes against the
/// requested ones.
fn carry_out(
    plan: &mut RegistrationPlan,
    rounds: &[Vec<BlockRange>],
    most_message: u64,
    most_bytes: u64,
    mut registered: Vec<BlockRange>,
    mut answer: impl FnMut(BlockRange) -> BlockRange,
) -> Result<Outcome, TestCaseError> {
    let mut outcome = Outcome { asked: Vec::new(), given_back: 0, most_pinned: 0 };
    // The range of the answer's key, by requested window.
    let mut covered: HashMap<BlockRange, BlockRange> =
        registered.iter().map(|window| (*window, *window)).collect();
    for runs in rounds {
        let mut queue: VecDeque<BlockRange> = runs.iter().copied().collect();
        let mut written = Vec::new();
        while !queue.is_empty() {
            let batch = plan.next_batch(&mut queue, most_bytes).unwrap();
            prop_assert!(!batch.writes.is_empty(), "a batch without progress");
            for window in &batch.give_back {
                let index = registered.iter().position(|known| known == window);
                prop_assert!(index.is_some(), "{window:?} is given back, and is not registered");
                registered.swap_remove(index.unwrap_or_default());
            }
            outcome.given_back += batch.give_back.len();
            for window in &batch.ask {
                let overlaps = registered.iter().any(|known| {
                    known.block == window.block && known.start < window.end() && window.start < known.end()
                });
                prop_assert!(!overlaps, "{window:?} is registered in part");
                registered.push(*window);
                covered.insert(*window, answer(*window));
            }
            outcome.asked.extend(&batch.ask);
            let pinned = registered.iter().map(|window| window.length).sum();
            prop_assert_eq!(plan.pinned(), pinned);
            outcome.most_pinned = outcome.most_pinned.max(pinned);
            let bytes: u64 = batch.writes.iter().map(|write| write.length).sum();
            prop_assert!(bytes <= most_bytes.max(PAGE));
            for write in &batch.writes {
                let window = plan.window(write.block, write.start);
                let window =
                    window.filter(|window| registered.contains(window) && write.end() <= window.end());
                let key = window.and_then(|window| covered.get(&window));
                prop_assert!(
                    key.is_some_and(|key| key.start <= write.start && write.end() <= key.end()),
                    "{write:?} leaves {key:?}"
                );
                prop_assert!(write.length <= most_message && write.length.is_multiple_of(PAGE));
            }
            // Adjacent ranges in one window form one WRITE, unless it would be too long.
            for pair in batch.writes.windows(2) {
                let is_next = pair[0].block == pair[1].block && pair[0].end() == pair[1].start;
                if is_next
                    && plan.window(pair[0].block, pair[0].start) == plan.window(pair[1].block, pair[1].start)
                {
                    prop_assert_eq!(pair[0].length, most_message / PAGE * PAGE);
                }
            }
            written.extend(batch.writes);
        }
        prop_assert_eq!(joined(&written), joined(runs), "every byte once, in order");
    }
    Ok(outcome)
}

/// The same bytes, with adjacent ranges joined.
fn joined(ranges: &[BlockRange]) -> Vec<BlockRange> {
    let mut out: Vec<BlockRange> = Vec::new();
    for next in ranges {
        match out.last_mut() {
            Some(last) if last.block == next.block && last.end() == next.start => last.length += next.length,
            _ => out.push(*next),
        }
    }
    out
}

/// A QEMU destination. It registers whole chunks of its own size, and remembers a registration under its first
/// chunk.
struct Qemu {
    places: BlockPlaces,
    chunk: ChunkSize,
    known: HashMap<(usize, u64), BlockRange>,
}

impl Qemu {
    fn new(blocks: &[u64], chunk: ChunkSize) -> Self {
        let place = |length: &u64| BlockPlace {
            host_address: 1 << 40,
            offset: 1 << 41,
            length_bytes: *length,
            key: 0,
        };
        let places = BlockPlaces::new(blocks.iter().map(place).collect()).unwrap();
        Self { places, chunk, known: HashMap::new() }
    }

    fn register(&mut self, window: BlockRange, unit: ChunkSize) -> BlockRange {
        let request = self.places.request(window, unit).unwrap();
        let fresh = self.places.requested(&request, self.chunk, 16).unwrap();
        *self.known.entry((fresh.block, fresh.start)).or_insert(fresh)
    }
}

fn check_qemu(
    (blocks, rounds): (Vec<u64>, Vec<Vec<BlockRange>>),
    window: ChunkSize,
    chunk: ChunkSize,
    is_known: bool,
    most_message: u64,
) -> TestCaseResult {
    let destination = Destination::Qemu(window);
    let mut plan = RegistrationPlan::new(&blocks, destination, limits(most_message, Some(MIB))).unwrap();
    let mut qemu = Qemu::new(&blocks, chunk);
    let unit = if is_known { chunk } else { ChunkSize::LEAST };
    let mut answers = Vec::new();
    let outcome = carry_out(&mut plan, &rounds, most_message, 700 * MIB, Vec::new(), |window| {
        let registered = qemu.register(window, unit);
        answers.push((window, registered));
        registered
    })?;
    prop_assert_eq!(outcome.given_back, 0);
    let mut starts: Vec<(usize, u64)> =
        outcome.asked.iter().map(|window| (window.block, window.start)).collect();
    prop_assert!(starts.iter().all(|(_, start)| start.is_multiple_of(window.bytes())));
    // No window is requested twice, and therefore none with a larger count.
    let count = starts.len();
    starts.sort_unstable();
    starts.dedup();
    prop_assert_eq!(starts.len(), count);
    for (asked, registered) in answers {
        // Every requested window contains a page of a run.
        let holds =
            |run: &BlockRange| run.block == asked.block && run.start < asked.end() && asked.start < run.end();
        prop_assert!(rounds.iter().flatten().any(holds), "{asked:?} for nothing");
        // If requests count in its own units, a QEMU registers only the chunks that contain the window.
        let end = asked.end().next_multiple_of(chunk.bytes()).min(blocks[asked.block]);
        prop_assert!(!is_known || registered.end() <= end, "{registered:?} for {asked:?}");
    }
    Ok(())
}

#[test]
fn windows_towards_a_qemu_have_one_key_whatever_its_chunk_size_and_are_asked_for_once() {
    let most = prop_oneof![Just(1u64 << 30), Just(1 << 31), 4096u64..1 << 26];
    seeded(
        "rdma_plan_qemu",
        &(guest(), chunk(), chunk(), any::<bool>(), most),
        |(guest, window, chunk, is_known, most)| check_qemu(guest, window, chunk, is_known, most),
    );
}

/// A probe requests first. The windows then have the length for the chunk size that it found.
fn check_probed(
    (blocks, rounds): (Vec<u64>, Vec<Vec<BlockRange>>),
    chunk: ChunkSize,
    most_message: u64,
) -> TestCaseResult {
    let mut qemu = Qemu::new(&blocks, chunk);
    let mut probe = ChunkProbe::new(&blocks);
    // Different registrations have different keys.
    let key = |registered: BlockRange| 1 + (registered.start / MIB) as u32;
    while let Some(range) = probe.next_ask() {
        probe.answered(key(qemu.register(range, probe.unit())));
    }
    let largest = blocks.iter().copied().max().unwrap_or(0);
    prop_assert!(probe.unit() == chunk || probe.unit() < chunk && largest <= 2 * probe.unit().bytes());

    let kind = Destination::Qemu(probe.unit().window());
    let mut plan = RegistrationPlan::new(&blocks, kind, limits(most_message, None)).unwrap();
    let windows: Vec<BlockRange> = probe.windows().map(|(window, _)| window).collect();
    for window in &windows {
        plan.registered(*window);
    }
    let outcome = carry_out(&mut plan, &rounds, most_message, 700 * MIB, windows, |window| {
        qemu.register(window, probe.unit())
    })?;

    for window in outcome.asked {
        let block = blocks[window.block];
        let is_rule_kept = window.start.is_multiple_of(window.length.next_power_of_two())
            && (window.length.is_power_of_two() || window.end() == block)
            && window.length <= 1 << 30;
        prop_assert!(is_rule_kept, "{window:?}");
    }
    // The registrations do not overlap: no byte is registered twice.
    let registered: u64 = qemu.known.values().map(|range| range.length).sum();
    prop_assert!(registered <= blocks.iter().sum(), "{:?}", qemu.known);
    Ok(())
}

#[test]
fn what_a_probe_has_registered_is_used_and_nothing_is_registered_twice() {
    let most = prop_oneof![Just(1u64 << 30), 4096u64..1 << 26];
    seeded("rdma_plan_probed", &(guest(), chunk(), most), |(guest, chunk, most)| {
        check_probed(guest, chunk, most)
    });
}

#[test]
fn windows_towards_a_sterna_stay_below_the_limit_and_come_again() {
    let pinned = proptest::option::of(MIB..1500 * MIB);
    let values = (guest(), chunk(), chunk(), pinned, 4096u64..1 << 31, PAGE..1 << 31);
    seeded(
        "rdma_plan_sterna",
        &values,
        |((blocks, rounds), own_chunk, chunk, pinned, most_message, most_bytes)| {
            let limits = PlanLimits { own_chunk, most_message, pinned };
            let mut plan = RegistrationPlan::new(&blocks, Destination::Sterna(chunk), limits).unwrap();
            let outcome =
                carry_out(&mut plan, &rounds, most_message, most_bytes, Vec::new(), |window| window)?;
            prop_assert!(outcome.most_pinned <= pinned.unwrap_or(u64::MAX));
            if pinned.is_none() {
                prop_assert_eq!(outcome.given_back, 0);
            }
            // Windows begin at multiples of the smaller chunk size, or of half the limit if that is smaller.
            let grid = chunk
                .min(own_chunk)
                .bytes()
                .min(pinned.map_or(u64::MAX, |limit| 1 << (limit / 2).max(MIB).ilog2()));
            prop_assert!(outcome.asked.iter().all(|window| window.start.is_multiple_of(grid)));
            Ok(())
        },
    );
}

#[test]
fn pin_all_asks_for_nothing_and_gives_nothing_back() {
    let values = (guest(), 4096u64..1 << 31);
    seeded("rdma_plan_pin_all", &values, |((blocks, rounds), most_message)| {
        let limits = limits(most_message, Some(MIB));
        let mut plan = RegistrationPlan::new(&blocks, Destination::PinAll, limits).unwrap();
        let all: Vec<_> = blocks.iter().enumerate().map(|(block, length)| range(block, 0, *length)).collect();
        let outcome = carry_out(&mut plan, &rounds, most_message, 1 << 40, all, |window| window)?;
        prop_assert!(outcome.asked.is_empty() && outcome.given_back == 0);
        Ok(())
    });
}

#[test]
fn contiguous_memory_needs_few_exchanges_at_the_smallest_chunk_size() {
    let mut plan =
        RegistrationPlan::new(&[512 * MIB], Destination::Sterna(ChunkSize::LEAST), limits(1 << 30, None))
            .unwrap();
    let mut runs = VecDeque::from([range(0, 0, 512 * MIB)]);

    let batch = plan.next_batch(&mut runs, u64::MAX).unwrap();

    let windows: Vec<_> = (0..2).map(|at| range(0, at * 256 * MIB, 256 * MIB)).collect();
    assert_eq!((&batch.ask, &batch.writes), (&windows, &windows));
    // In a sparse block, only chunks with pages are registered.
    let mut sparse =
        RegistrationPlan::new(&[512 * MIB], Destination::Sterna(ChunkSize::LEAST), limits(1 << 30, None))
            .unwrap();
    let mut runs: VecDeque<_> = (0..16).map(|at| range(0, at * 32 * MIB + 8 * PAGE, PAGE)).collect();
    let batch = sparse.next_batch(&mut runs, u64::MAX).unwrap();
    assert_eq!((batch.ask.len(), sparse.pinned()), (16, 16 * MIB));
}

#[test]
fn window_that_was_not_used_for_longest_is_given_back_first() {
    let limits = limits(1 << 30, Some(4 * MIB));
    let mut plan = RegistrationPlan::new(&[64 * MIB], Destination::Sterna(ChunkSize::LEAST), limits).unwrap();
    let mut touch = |mib: u64| {
        let mut runs = VecDeque::from([range(0, mib * MIB, PAGE)]);
        let batch = plan.next_batch(&mut runs, u64::MAX).unwrap();
        batch.give_back.iter().map(|window| window.start / MIB).collect::<Vec<_>>()
    };
    for mib in [0, 10, 20, 30, 0, 10] {
        assert_eq!(touch(mib), [0; 0]);
    }
    assert_eq!([touch(40), touch(50), touch(0), touch(60)], [vec![20], vec![30], vec![], vec![10]]);
}

#[test]
fn block_on_demand_is_neither_asked_for_nor_given_back_and_counts_nothing() {
    let limits = limits(1 << 30, Some(2 * MIB));
    let blocks = [64 * MIB, 8 * MIB, 0];
    let mut plan = RegistrationPlan::new(&blocks, Destination::Sterna(ChunkSize::LEAST), limits).unwrap();
    plan.on_demand(0);
    plan.on_demand(2);
    for _ in 0..3 {
        let all = [range(0, 0, 64 * MIB), range(1, 0, 8 * MIB)];
        let mut runs = VecDeque::from(all);
        let (mut written, mut asked) = (Vec::new(), 0);
        while !runs.is_empty() {
            let batch = plan.next_batch(&mut runs, u64::MAX).unwrap();
            assert!(batch.ask.iter().chain(&batch.give_back).all(|window| window.block == 1), "{batch:?}");
            assert!(plan.pinned() <= 2 * MIB);
            asked += batch.ask.iter().map(|window| window.length).sum::<u64>();
            written.extend(batch.writes);
        }
        assert_eq!(joined(&written), all);
        assert_eq!((written[0], asked), (all[0], 8 * MIB), "all of it is one window");
        assert_eq!(plan.window(0, 5 * MIB), Some(all[0]));
    }
}

#[test]
fn run_outside_of_the_blocks_and_limits_that_fit_nothing_are_our_fault() {
    let sterna = Destination::Sterna(ChunkSize::LEAST);
    for (what, limits) in [("port", limits(4095, None)), ("limit", limits(1 << 30, Some(MIB - 1)))] {
        let error = RegistrationPlan::new(&[MIB], sterna, limits).expect_err(what);
        assert_eq!(error.fault, Fault::Local, "{error}");
    }
    let mut plan = RegistrationPlan::new(&[MIB], sterna, limits(1 << 30, None)).unwrap();
    for bad in
        [range(1, 0, PAGE), range(0, 0, 0), range(0, MIB, PAGE), range(0, PAGE, MIB), range(0, 1, u64::MAX)]
    {
        let mut runs = VecDeque::from([range(0, 0, PAGE), bad]);
        assert_eq!(plan.next_batch(&mut runs, u64::MAX).unwrap_err().fault, Fault::Local);
        assert_eq!(runs.len(), 2);
    }
    // If an answer never arrives, the window is requested again.
    let mut runs = VecDeque::from([range(0, 0, PAGE)]);
    let asked = plan.next_batch(&mut runs, u64::MAX).unwrap().ask;
    plan.lost(asked[0]);
    assert_eq!(plan.pinned(), 0);
    let mut runs = VecDeque::from([range(0, 0, PAGE)]);
    assert_eq!(plan.next_batch(&mut runs, u64::MAX).unwrap().ask, asked);
}
