use std::collections::BTreeSet;

use super::*;

fn order(pages: &[u64]) -> PageOrder {
    PageOrder::new(pages, (0..pages.len()).collect())
}

fn request(order: &mut PageOrder, block: usize, first: u64, count: u64) {
    order.request(block, first * 4096, count * 4096).unwrap();
}

/// All remaining runs, requested pages first.
fn rest(order: &mut PageOrder) -> Vec<(usize, u64)> {
    let mut pages = Vec::new();
    while let Some(run) = order.take_requested(CHUNK_PAGES).or_else(|| order.take_background()) {
        pages.extend((run.first..run.end()).map(|page| (run.block, page)));
    }
    pages
}

#[test]
fn background_goes_through_the_blocks_in_their_sequence_and_never_beyond_a_chunk() {
    let mut order = PageOrder::new(&[100, 3], vec![1, 0]);

    let runs: Vec<_> = std::iter::from_fn(|| order.take_background()).collect();

    let wanted = [(1, 0, 3), (0, 0, 64), (0, 64, 36)];
    assert_eq!(runs, wanted.map(|(block, first, count)| PageRun { block, first, count }));
    assert_eq!(order.unsent_pages(), 0);
}

#[test]
fn background_begins_with_the_chosen_pages_and_sends_each_page_once() {
    let mut order = order(&[200, 70]);
    let run = |block, first, count| PageRun { block, first, count };
    order.begin_with([
        run(1, 65, 2),
        run(0, 130, 1),
        run(0, 60, 10),
        run(1, 66, 1),
        run(7, 0, 1),
        run(1, 9999, 5),
    ]);

    assert_eq!(order.ahead(5), [(1, 1), (0, 2), (0, 0), (0, 1), (0, 0)]);
    let mut taken = Vec::new();
    while let Some(run) = order.take_background() {
        taken.push((run.block, run.first, run.count));
    }

    assert_eq!(taken, [(1, 64, 6), (0, 128, 64), (0, 0, 64), (0, 64, 64), (0, 192, 8), (1, 0, 64)]);
    assert!(order.ahead(1).is_empty());
}

#[test]
fn requests_go_first_in_their_order_and_their_neighbours_next() {
    let mut order = order(&[1000, 1000]);
    request(&mut order, 1, 700, 1);
    request(&mut order, 0, 300, 2);

    assert_eq!(order.take_requested(64), Some(PageRun { block: 1, first: 700, count: 1 }));
    assert_eq!(order.take_requested(1), Some(PageRun { block: 0, first: 300, count: 1 }));
    assert_eq!(order.take_requested(1), Some(PageRun { block: 0, first: 301, count: 1 }));
    assert_eq!(order.take_requested(1), None);
    assert!(!order.has_requests());
    // 640 to 703 without 700, then 256 to 319 without 300 and 301, then from the start.
    let runs: Vec<_> = (0..5).filter_map(|_| order.take_background()).collect();
    let wanted = [(1, 640, 60), (1, 701, 3), (0, 256, 44), (0, 302, 18), (0, 0, 64)];
    assert_eq!(runs, wanted.map(|(block, first, count)| PageRun { block, first, count }));
}

#[test]
fn page_that_was_sent_is_not_sent_again_however_often_it_is_requested() {
    let mut order = order(&[10]);
    assert!(order.take_background().is_some());

    for _ in 0..3 {
        request(&mut order, 0, 0, 10);
    }

    assert!(!order.has_requests());
    assert_eq!(order.take_requested(64), None);
}

#[test]
fn page_that_is_requested_twice_goes_out_once() {
    let mut order = order(&[10]);
    request(&mut order, 0, 3, 1);
    request(&mut order, 0, 2, 4);

    let pages = rest(&mut order);

    let mut sorted = pages.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..10).map(|page| (0, page)).collect::<Vec<_>>());
    assert_eq!(pages[0], (0, 3));
}

#[test]
fn bad_requests_are_refused_and_change_nothing() {
    let mut order = order(&[10]);
    let block_bytes = 10 * 4096;

    for (start, length, why) in [
        (1, 4096, BadRequest::Unaligned),
        (4096, 100, BadRequest::Unaligned),
        (4096, 0, BadRequest::Empty),
        (block_bytes, 4096, BadRequest::Outside { block_bytes }),
        (0, block_bytes + 4096, BadRequest::Outside { block_bytes }),
        (u64::MAX - 4095, 8192, BadRequest::Outside { block_bytes }),
    ] {
        assert_eq!(order.request(0, start, length), Err(why), "{start:#x} {length:#x}");
    }

    assert!(!order.has_requests());

    let mut order = PageOrder::new(&[64], vec![0]);
    request(&mut order, 0, 0, 8);
    // The second request includes the pages of the first, which are sent only once.
    request(&mut order, 0, 0, 16);
    assert_eq!(order.take_requested(64).unwrap().count, 8);
    assert_eq!(order.take_requested(64).unwrap().count, 8);
    assert!(!order.has_requests());
    request(&mut order, 0, 16, 32);
    request(&mut order, 0, 16, 48);
    order.queue.swap(0, 1);
    assert_eq!(order.take_requested(64).unwrap().count, 48);
    assert!(!order.has_requests(), "the other one has nothing left");
}

#[test]
fn a_million_requests_at_once_are_remembered_in_bounded_memory_and_all_served() {
    let mut order = order(&[2_000_000]);
    for page in (0..2_000_000).rev().step_by(2) {
        request(&mut order, 0, page, 1);
    }

    assert!(order.queue.len() <= QUEUE);
    let mut served = 0;
    let mut first = Vec::new();
    while let Some(run) = order.take_requested(64) {
        served += run.count;
        if first.len() < 2 {
            first.push(run.first);
        }
    }
    assert_eq!((served, first), (1_000_000, vec![1_999_999, 1_999_997]));
    assert!(order.near.len() <= NEIGHBOURHOODS);
    assert_eq!(order.unsent_pages(), 1_000_000);
}

#[test]
fn after_a_break_exactly_what_did_not_arrive_is_sent_again() {
    let mut order = order(&[200, 70]);
    while order.take_background().is_some() {}
    let mut received = [ReceivedPages::none(200), ReceivedPages::none(70)];
    (0..150).for_each(|page| received[0].add(page));
    (0..70).filter(|page| page % 7 > 0).for_each(|page| received[1].add(page));

    order.forget_requests();
    order.received(0, &received[0]);
    order.received(1, &received[1]);

    let wanted: Vec<_> =
        (150..200).map(|page| (0, page)).chain((0..70).step_by(7).map(|page| (1, page))).collect();
    assert_eq!(order.unsent_pages(), wanted.len() as u64);
    assert_eq!(rest(&mut order), wanted);
}

/// Requests, both senders and lost connections in any order: between two losses every page is sent once.
#[test]
fn every_page_goes_out_exactly_once_whatever_is_requested() {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let sizes = [random.u64(1..300), random.u64(0..300), random.u64(1..80)];
        let mut order = PageOrder::new(&sizes, vec![2, 0, 1]);
        let mut missing: BTreeSet<_> = sizes
            .iter()
            .enumerate()
            .flat_map(|(block, pages)| (0..*pages).map(move |page| (block, page)))
            .collect();
        for _ in 0..200 {
            let block = random.usize(..3);
            let taken = match random.u8(..10) {
                0..4 if sizes[block] > 0 => {
                    let first = random.u64(..sizes[block]);
                    request(&mut order, block, first, random.u64(1..=sizes[block] - first));
                    None
                }
                4..7 => order.take_requested(random.u64(1..=64)),
                7 if random.u8(..8) == 0 => {
                    order.forget_requests();
                    for (block, pages) in sizes.iter().enumerate() {
                        let mut received = ReceivedPages::none(*pages);
                        (0..*pages)
                            .filter(|page| !missing.contains(&(block, *page)))
                            .for_each(|page| received.add(page));
                        order.received(block, &received);
                    }
                    None
                }
                _ => order.take_background(),
            };
            for page in taken.iter().flat_map(|run| run.first..run.end()) {
                let of = taken.map(|run| run.block).unwrap();
                assert!(missing.remove(&(of, page)), "seed {seed}: page {page} of {of} went out twice");
            }
            assert_eq!(order.unsent_pages(), missing.len() as u64, "seed {seed}");
        }
        let mut left = rest(&mut order);
        left.sort_unstable();
        assert_eq!(left, Vec::from_iter(missing), "seed {seed}");
    }
}

/// The background, which waits while requests exist, must not wait without end.
#[test]
fn no_request_is_left_when_the_last_requested_page_was_taken() {
    let pages = 3 * QUEUE as u64;
    let mut order = PageOrder::new(&[pages], vec![0]);
    for page in (0..pages).step_by(2) {
        order.request(0, page << PAGE_SHIFT, PAGE_SIZE as u64).unwrap();
    }
    for _ in 0..pages / 2 {
        assert!(order.has_requests());
        assert_eq!(order.take_requested(16).unwrap().count, 1);
    }
    assert!(!order.has_requests());
}

/// All runs that the lane takes, in its order.
fn lane(pages: &LanePages) -> Vec<(usize, u64, u64)> {
    let mut place = LanePlace::default();
    std::iter::from_fn(|| pages.take(&mut place, 128)).map(|run| (run.block, run.first, run.count)).collect()
}

#[test]
fn lane_goes_through_all_blocks_by_chunks_and_takes_huge_pages_whole() {
    let mut order = order(&[100, 0, 1024, 3]);
    let pages = order.share(&[1, 1, 512, 1]);
    let huge = |first| (2, first, 128);
    let mut wanted = vec![(0, 0, 64), (0, 64, 36)];
    wanted.extend((0..8).map(|part| huge(part * 128)));
    wanted.push((3, 0, 3));
    assert_eq!(lane(&pages), wanted);
    assert_eq!(pages.left(), 0);
}

#[test]
fn neighbours_of_requests_go_to_lanes_first_and_requested_pages_to_none() {
    let mut order = order(&[1000, 2048]);
    let pages = order.share(&[1, 512]);
    request(&mut order, 0, 700, 1);
    request(&mut order, 1, 1024, 512);
    assert_eq!(order.take_requested(16), Some(PageRun { block: 0, first: 700, count: 1 }));
    assert_eq!(order.take_requested(16), Some(PageRun { block: 1, first: 1024, count: 16 }));
    let taken = lane(&pages);
    assert_eq!(taken[..2], [(0, 640, 60), (0, 701, 3)]);
    // A whole huge page, except the pages that are on their way.
    assert_eq!(taken[2..6], [(1, 1040, 128), (1, 1168, 128), (1, 1296, 128), (1, 1424, 112)]);
    assert_eq!(taken[6], (0, 0, 64));
}

#[test]
fn pages_go_to_lanes_once_all_together_and_as_requested_ones_once_whatever_a_lane_has() {
    const PAGES: u64 = 10_000;
    let mut order = order(&[PAGES, PAGES]);
    let pages = order.share(&[1, 1]);
    let (taken, requested) = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..4).map(|_| scope.spawn(|| lane(&pages))).collect();
        let requested = scope.spawn(|| {
            let mut taken = BTreeSet::new();
            for round in 0..3 {
                for first in (0..PAGES).step_by(100) {
                    request(&mut order, 1, first, 3);
                    while let Some(run) = order.take_requested(16) {
                        assert_eq!((round, run.block), (0, 1), "{run:?} a second time");
                        assert!((run.first..run.end()).all(|page| taken.insert(page)));
                    }
                }
            }
            taken
        });
        let lanes = lanes.into_iter().flat_map(|lane| lane.join().unwrap()).collect::<Vec<_>>();
        (lanes, requested.join().unwrap())
    });
    let mut on_lanes = BTreeSet::new();
    for (block, first, count) in taken {
        assert!((first..first + count).all(|page| on_lanes.insert((block, page))));
    }
    assert_eq!(requested.len(), 300);
    for page in 0..PAGES {
        assert!(on_lanes.contains(&(0, page)));
        assert!(on_lanes.contains(&(1, page)) || requested.contains(&page));
    }
}

#[test]
fn connection_that_is_replaced_has_no_lanes() {
    let mut order = order(&[200]);
    let pages = order.share(&[1]);
    lane(&pages);
    order.forget_requests();
    let mut received = ReceivedPages::none(200);
    (0..190).for_each(|page| received.add(page));
    order.received(0, &received);
    request(&mut order, 0, 0, 1);
    assert!(!order.has_requests(), "it came over a lane");
    assert_eq!(rest(&mut order), (190..200).map(|page| (0, page)).collect::<Vec<_>>());
}
