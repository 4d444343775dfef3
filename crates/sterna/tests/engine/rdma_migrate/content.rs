//! The cost of a migration depends on memory's content: zero pages need no WRITEs, and absent pages no memory.

use super::*;
use crate::plain::{Plain, byte_of};
use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};

pub(super) const PAGES_OF_MIB: u64 = MIB / PAGE_SIZE as u64;

pub(super) fn ram(mib: u64, backing: Backing) -> GuestRam {
    GuestRam::new(vec![RamBlock::new("ram", mib * MIB, backing).unwrap()]).unwrap()
}

/// Starts a migration. Returns both sides.
pub(super) fn start(lab: &Lab, source: &Arc<Plain>, target: &Arc<Plain>, lanes: u8) -> (Migration, Incoming) {
    start_with(lab, source, target, lanes, |_| ())
}

/// Like [`start`]; `change` changes the settings of both sides.
pub(super) fn start_with(
    lab: &Lab,
    source: &Arc<Plain>,
    target: &Arc<Plain>,
    lanes: u8,
    change: impl Fn(&mut Parameters),
) -> (Migration, Incoming) {
    let destination = Arc::clone(&lab.destination_fabric);
    let capabilities = Capabilities { multifd: lanes > 0, ..Capabilities::default() };
    let parameters = |fabric| {
        let mut params = Parameters { multifd_channels: lanes.max(1), ..lab.parameters(fabric, 1) };
        change(&mut params);
        params
    };
    let at: Address = "rdma:10.0.0.2:0".parse().unwrap();
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let incoming =
        Incoming::listen(vm, &at, parameters(&destination), capabilities, Arc::new(())).expect("listening");
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    let ours = parameters(&lab.source);
    let migration =
        Migration::start(vm, &incoming.address(), ours, capabilities, Arc::new(())).expect("started");
    (migration, incoming)
}

pub(super) fn finish(migration: Migration, incoming: Incoming) -> Statistics {
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}, {arrival:?}");
    assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
    migration.statistics()
}

pub(super) fn resident(guest: &Plain) -> u64 {
    guest.ram.block(0).resident_bytes().unwrap()
}

/// A guest of 2 GiB whose content is 64 MiB, in pieces of `piece_pages` at equal distances.
fn assert_sparse_guest_stays_sparse(backing: Backing, lanes: u8, piece_pages: u64) {
    const GUEST_MIB: u64 = 2048;
    let lab = Lab::new(Settings::new());
    let [source, target] = [(); 2].map(|()| Plain::new(ram(GUEST_MIB, backing)));
    let pieces = 64 * PAGES_OF_MIB / piece_pages;
    let apart = GUEST_MIB * PAGES_OF_MIB / pieces;
    // Not at the beginning of a chunk.
    let first_of = |piece: u64| piece * apart + 100;
    let byte = |page: u64| 1 + (page % 200) as u8;
    for piece in 0..pieces {
        (first_of(piece)..first_of(piece) + piece_pages).for_each(|page| source.write(page, byte(page)));
    }

    let (migration, incoming) = start(&lab, &source, &target, lanes);
    let mut most = [0, 0];
    while migration.outcome().is_none() {
        most = [most[0].max(resident(&source)), most[1].max(resident(&target))];
    }
    let statistics = finish(migration, incoming);
    most = [most[0].max(resident(&source)), most[1].max(resident(&target))];

    let what = format!("{backing:?}, {lanes} lanes, pieces of {piece_pages} pages: {most:?} bytes resident");
    println!("{what}");
    assert!(most.iter().all(|most| (64 * MIB..192 * MIB).contains(most)), "{what}");
    assert_eq!(statistics.rdma.unwrap().written_bytes, 64 * MIB, "{what}");
    for piece in [0, pieces / 2, pieces - 1] {
        let first = first_of(piece);
        assert_eq!(byte_of(&target.ram, first - 1), 0);
        for page in [first, first + piece_pages - 1] {
            assert_eq!(byte_of(&target.ram, page), byte(page), "page {page}");
        }
    }
    drop((source, target));
    lab.assert_empty();
}

#[test]
fn sparse_guest_stays_sparse_on_both_sides() {
    for backing in [Backing::Memfd, Backing::Anonymous] {
        for (lanes, piece_pages) in [(0, 64 * PAGES_OF_MIB), (2, PAGES_OF_MIB)] {
            assert_sparse_guest_stays_sparse(backing, lanes, piece_pages);
        }
    }
}

#[test]
fn zero_half_of_memory_costs_no_writes() {
    const GUEST_MIB: u64 = 32;
    const PAGES: u64 = GUEST_MIB * PAGES_OF_MIB;
    let contiguous: fn(u64) -> bool = |page| page < PAGES / 2;
    let every_second: fn(u64) -> bool = |page| page % 2 == 0;
    for (which, is_random) in [("contiguous halves", contiguous), ("every second page", every_second)] {
        for (lanes, zeros_are_there) in [(0, false), (0, true), (2, true)] {
            let lab = Lab::new(Settings::new());
            let [source, target] = [(); 2].map(|()| Plain::new(ram(GUEST_MIB, Backing::Memfd)));
            let mut random = fastrand::Rng::with_seed(31);
            let bytes: Vec<u8> =
                (0..PAGES).map(|page| if is_random(page) { random.u8(1..) } else { 0 }).collect();
            for (page, byte) in (0..PAGES).zip(&bytes) {
                if *byte > 0 || zeros_are_there {
                    source.write(page, *byte);
                }
            }

            let (migration, incoming) = start(&lab, &source, &target, lanes);
            let statistics = finish(migration, incoming);

            let what = format!("{which}, {lanes} lanes, zeros populated: {zeros_are_there}");
            assert_eq!(lab.network.counts_of(&lab.source_host).write_bytes, GUEST_MIB / 2 * MIB, "{what}");
            assert_eq!(statistics.rdma.unwrap().written_bytes, GUEST_MIB / 2 * MIB, "{what}");
            // Zero pages need messages, but one for thousands of pages.
            let messages = lab.network.counts_of(&lab.source_host).sends;
            assert!(messages < 200, "{what}: {messages} messages");
            assert!((0..PAGES).zip(&bytes).all(|(page, byte)| byte_of(&target.ram, page) == *byte), "{what}");
            drop((source, target));
            lab.assert_empty();
        }
    }
}

/// Posting a WRITE takes no time. A WRITE in flight takes time until it is complete; in this test the network is
/// stopped.
#[test]
fn bytes_move_until_they_are_complete_and_not_while_they_are_posted() {
    for lanes in [0, 2] {
        let lab = Lab::new(Settings::new());
        let capabilities = Capabilities { multifd: lanes > 0, ..Capabilities::default() };
        let run = lab.start(&writer(20_000), capabilities, |params| {
            params.downtime_limit = Duration::ZERO;
            params.multifd_channels = lanes.max(1);
        });
        let rdma = || run.migration.statistics().rdma.unwrap_or_default();
        while rdma().in_flight_bytes == 0 {
            lab.network.resume();
            std::thread::sleep(Duration::from_millis(1));
            lab.network.hold();
            // WRITEs that were executed before must be completed.
            std::thread::sleep(Duration::from_millis(20));
        }
        const HELD: Duration = Duration::from_millis(500);
        std::thread::sleep(HELD);
        let held = run.migration.statistics();
        lab.network.resume();
        let in_flight = held.rdma.unwrap().in_flight_bytes;
        assert!(in_flight > 0, "they were complete before");

        let (statistics, run) = run.finish(Duration::ZERO);

        let moving: Duration = statistics.rounds.iter().map(|round| round.lanes.moving).sum();
        let of_a_lane = HELD / u32::from(lanes.max(1));
        assert!(
            moving >= of_a_lane,
            "{lanes} lanes: bytes moved for {moving:?}, {in_flight} of them for {HELD:?}"
        );
        drop(run);
        lab.assert_empty();
    }
}
