//! Page order: the guest's memory arrives as a consistent state of one moment, however often it is written meanwhile.

use super::*;

fn arrives(seed: u64, capabilities: Capabilities, change: impl Fn(&mut Parameters)) -> Statistics {
    println!("{capabilities:?}: seed {seed}");
    let lab = Lab::new(Settings::seeded(seed));
    let run = lab.start(&writer(20_000), capabilities, |params| {
        params.downtime_limit = Duration::ZERO;
        change(params);
    });
    // Independent of the duration of a round.
    while run.migration.statistics().rounds_begun < 5 && run.migration.outcome().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let (statistics, run) = run.finish(Duration::ZERO);
    drop(run);
    lab.assert_empty();
    statistics
}

#[test]
fn guest_that_writes_arrives_whole_after_many_rounds() {
    for seed in 1..=3 {
        let statistics = arrives(seed, Capabilities::default(), |_| {});

        assert!(statistics.rounds.len() > 2, "{} rounds", statistics.rounds.len());
        assert_eq!(statistics.peer_is_sterna, Some(true));
        let rdma = statistics.rdma.unwrap();
        assert!(statistics.transferred_bytes >= rdma.written_bytes && rdma.written_bytes > 0, "{rdma:?}");
        assert!(statistics.bandwidth_bytes > 0);
    }
}

#[test]
fn guest_arrives_whole_with_pin_all() {
    let statistics = arrives(4, Capabilities { rdma_pin_all: true, ..Capabilities::default() }, |_| {});

    assert_eq!(statistics.rdma.unwrap().windows, 0);
}

#[test]
fn guest_arrives_whole_without_return_path() {
    arrives(5, Capabilities { return_path: false, ..Capabilities::default() }, |_| {});
}

#[test]
fn guest_arrives_whole_below_a_limit_on_pinned_memory() {
    let statistics = arrives(6, Capabilities::default(), |params| {
        params.rdma.pinned_limit_bytes = Some(4 * MIB);
    });

    let rdma = statistics.rdma.unwrap();
    assert!(rdma.windows > 8, "{rdma:?}");
}

#[test]
fn chunk_sizes_of_the_two_sides_may_differ() {
    for (ours, theirs) in [(1, 64), (64, 1)] {
        let lab = Lab::new(Settings::seeded(ours));
        let chunk = |mib: u64| ChunkSize::new(mib * MIB).unwrap();
        let is_source = |params: &Parameters| {
            let fabric: Option<&Arc<dyn Fabric>> = params.rdma.fabric.as_ref();
            fabric.is_some_and(|fabric| Arc::ptr_eq(fabric, &lab.source))
        };
        let run = lab.start(&writer(5_000), Capabilities::default(), |params| {
            params.rdma.chunk = if is_source(params) { chunk(ours) } else { chunk(theirs) };
        });
        drop(run.finish(Duration::ZERO));
        lab.assert_empty();
    }
}

/// With a bandwidth limit, a round takes time. A phase ends when another thread waits to write the stream, and at
/// least once a second. So the destination receives messages even if no other event happens.
#[test]
fn bandwidth_limit_is_kept_and_silence_on_the_stream_is_none() {
    let lab = Lab::new(Settings::seeded(9));
    let config = ProcessConfig { fill: Fill::Random(7), ..writer(10) };
    let run = lab.start(&config, Capabilities::default(), |params| {
        params.max_bandwidth_bytes = 6 << 20;
        // A keep-alive is due every quarter of this limit.
        params.limits.stall = Duration::from_millis(600);
    });
    let (statistics, run) = run.finish(Duration::ZERO);

    // 15 MiB. The last round may exceed the limit.
    assert!(statistics.total_time > Duration::from_millis(1200), "{:?}", statistics.total_time);
    drop(run);
    lab.assert_empty();
}
