//! What a guest reads.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_pager::{FillRate, GuestStage, Pager, PagerOptions, RawMemory, SocketPlan};

use crate::common::{MIB, SlowSource, World, guest, served, until};

const OFF: FillRate = FillRate::Off;

#[test]
fn guest_reads_the_image_page_by_page() {
    let world = World::new(8 * MIB);
    let pager = world.pager(OFF);
    let regions = [3 * MIB, 5 * MIB];
    let Some(mut guest) = served("guest_reads_the_image_page_by_page", &regions, &world.socket()) else {
        return;
    };

    assert_eq!(guest.sum(5 * MIB, MIB), Ok(world.sum(5 * MIB, MIB)));
    let active = &until(&pager, "256 pages", |guests| guests[0].missing_pages == 7 * MIB / 4096)[0];
    assert!(matches!(active.stage, GuestStage::Active), "only touched pages are placed");
    assert_eq!(guest.sum(0, 8 * MIB), Ok(world.sum(0, 8 * MIB)));
    let ended = &until(&pager, "the release", |guests| guests[0].is_over())[0];
    assert_eq!(ended.faults, 2048);
    assert!(ended.zero_pages > 400, "{ended:?}");
}

#[test]
fn removed_pages_read_as_zeros_and_others_as_before() {
    let world = World::new(4 * MIB);
    let pager = world.pager(OFF);
    let name = "removed_pages_read_as_zeros_and_others_as_before";
    let Some(mut guest) = served(name, &[4 * MIB], &world.socket()) else { return };

    assert_eq!(guest.sum(0, MIB), Ok(world.sum(0, MIB)));
    // Half of the range was placed before.
    guest.remove(MIB / 2, MIB).unwrap();

    let zeros = sterna_uffd_peer::sum(&vec![0; MIB as usize]);
    assert_eq!(guest.sum(MIB / 2, MIB), Ok(zeros));
    assert_eq!(guest.sum(0, MIB / 2), Ok(world.sum(0, MIB / 2)));
    assert_eq!(guest.sum(3 * MIB / 2, 5 * MIB / 2), Ok(world.sum(3 * MIB / 2, 5 * MIB / 2)));
    assert_eq!(until(&pager, "the release", |guests| guests[0].is_over())[0].removed_pages, 256);
    // The memory is the guest's own now.
    guest.remove(0, MIB).unwrap();
    assert_eq!(guest.sum(0, MIB), Ok(zeros));
}

/// Faults, removals and the fill race for the same pages. A page must be zero as soon as its removal has returned.
#[test]
fn page_that_is_removed_while_it_is_touched_and_filled_is_zero() {
    let world = World::new(16 * MIB);
    for fill in [OFF, FillRate::BytesPerSecond(64 << 20), FillRate::Max] {
        let pager = world.pager(fill);
        let name = "page_that_is_removed_while_it_is_touched_and_filled_is_zero";
        let Some(mut guest) = served(name, &[16 * MIB], &world.socket()) else { return };

        assert_eq!(guest.ask(&format!("race {} 3000", 16 * MIB)), Ok("0".to_owned()));
        drop(guest);
        until(&pager, "the end", |guests| guests[0].is_over());
    }
}

/// The memory is of small pages, but the peer says 2 MiB: the pager must place whole 2 MiB.
#[test]
fn pages_of_2_mib_are_placed_whole() {
    let mut world = World::new(16 * MIB);
    world.memory[4 * MIB as usize..6 * MIB as usize].fill(0);
    std::fs::write(world.path("memory"), &world.memory).unwrap();
    let pager = world.pager(OFF);
    let Some(mut guest) = guest("pages_of_2_mib_are_placed_whole", 2 * MIB, &[4 * MIB, 12 * MIB]) else {
        return;
    };
    guest.hand_over(&world.socket(), "whole").unwrap();

    assert_eq!(guest.ask(&format!("read {}", 5 * MIB)), Ok("0".to_owned()));
    assert_eq!(guest.sum(0, 2 * MIB), Ok(world.sum(0, 2 * MIB)));
    // The kernel lets the guest continue before the pager counts the page.
    until(&pager, "two pages", |guests| (guests[0].missing_pages, guests[0].zero_pages) == (6, 1));
    guest.remove(8 * MIB, 4 * MIB).unwrap();
    assert_eq!(guest.sum(8 * MIB, 4 * MIB), Ok(sterna_uffd_peer::sum(&vec![0; 4 * MIB as usize])));
    assert_eq!(guest.sum(12 * MIB, 4 * MIB), Ok(world.sum(12 * MIB, 4 * MIB)));
}

#[test]
fn memory_in_huge_pages_is_served() {
    let world = World::new(4 * MIB);
    let _pager = world.pager(FillRate::Max);
    let mut guest = crate::common::start();
    if let Err(why) = guest.map_huge(&[4 * MIB]) {
        #[allow(clippy::print_stderr, reason = "a test that cannot run says why")]
        {
            eprintln!("SKIPPED memory_in_huge_pages_is_served: huge pages of this host: {why}");
        }
        return;
    }
    guest.hand_over(&world.socket(), "whole").unwrap();

    assert_eq!(guest.sum(0, 4 * MIB), Ok(world.sum(0, 4 * MIB)));
}

/// A source that can only read with waiting reads whole frames. They are placed whole, without a fill.
#[test]
fn frame_that_was_read_for_one_page_is_placed_whole() {
    let world = World::new(2 * MIB);
    let source = SlowSource::new(&world, 512 << 10, Duration::ZERO);
    let pager = world.pager_of(source, PagerOptions { fill: OFF, ..PagerOptions::default() });
    let name = "frame_that_was_read_for_one_page_is_placed_whole";
    let Some(mut guest) = served(name, &[2 * MIB], &world.socket()) else { return };

    for frame in 0..4 {
        guest.sum((frame << 19) + 4096 * 9, 4096).unwrap();
    }

    let ended = &until(&pager, "the release", |guests| guests[0].is_over())[0];
    assert_eq!(ended.faults, 4);
    assert_eq!(guest.sum(0, 2 * MIB), Ok(world.sum(0, 2 * MIB)));
}

/// All guests touch all pages at the same time. Each frame is read once.
#[test]
fn guests_that_fault_at_the_same_time_share_each_read() {
    const GUESTS: usize = 4;
    let world = World::new(4 * MIB);
    let source = SlowSource::new(&world, 256 << 10, Duration::from_millis(5));
    let plans: Vec<SocketPlan> =
        (0..GUESTS).map(|index| SocketPlan { path: world.path(&index.to_string()), guests: 1 }).collect();
    let options = PagerOptions { fill: OFF, ..PagerOptions::default() };
    let pager = Pager::start(source.clone(), &plans, options).unwrap();
    let mut guests = Vec::new();
    for plan in &plans {
        let name = "guests_that_fault_at_the_same_time_share_each_read";
        let Some(guest) = served(name, &[4 * MIB], &plan.path) else { return };
        guests.push(guest);
    }

    guests.iter_mut().for_each(|guest| guest.tell(&format!("sum 0 {}", 4 * MIB)).unwrap());
    let expected = world.sum(0, 4 * MIB).to_string();
    guests.iter_mut().for_each(|guest| assert_eq!(guest.answer().as_ref(), Ok(&expected)));

    assert_eq!(source.reads.load(Ordering::Relaxed), 16, "one read for each frame");
    until(&pager, "the release", |guests| guests.iter().all(|guest| guest.is_over()));
}

/// The cache is smaller than the memory, so frames are read again, and guests get the right pages nevertheless.
#[test]
fn guests_are_served_out_of_a_cache_smaller_than_their_memory() {
    let world = World::new(16 * MIB);
    let source = SlowSource::new(&world, 2 * MIB, Duration::ZERO);
    let options = PagerOptions {
        fill: FillRate::Max,
        cache_limit_bytes: 0,
        reader_threads: 2,
        ..PagerOptions::default()
    };
    let pager = world.pager_of(source, options);
    let name = "guests_are_served_out_of_a_cache_smaller_than_their_memory";
    let Some(mut guest) = served(name, &[16 * MIB], &world.socket()) else { return };

    assert_eq!(guest.sum(0, 16 * MIB), Ok(world.sum(0, 16 * MIB)));
    until(&pager, "the release", |guests| guests[0].is_over());
}

/// One process serves many guests with the same few threads.
#[test]
fn hundred_guests_are_served_with_the_threads_of_one() {
    let world = World::new(MIB);
    let plans: Vec<SocketPlan> =
        (0..100).map(|index| SocketPlan { path: world.path(&index.to_string()), guests: 1 }).collect();
    let options = PagerOptions { fill: OFF, ..PagerOptions::default() };
    let pager = Pager::start(world.source(), &plans, options).unwrap();
    let mut guests = Vec::new();
    for plan in &plans {
        let name = "hundred_guests_are_served_with_the_threads_of_one";
        let Some(guest) = served(name, &[MIB], &plan.path) else { return };
        guests.push(guest);
    }

    guests.iter_mut().for_each(|guest| guest.tell(&format!("sum 0 {MIB}")).unwrap());
    let expected = world.sum(0, MIB).to_string();
    guests.iter_mut().for_each(|guest| assert_eq!(guest.answer().as_ref(), Ok(&expected)));
    let all = until(&pager, "the release", |guests| guests.iter().all(|guest| guest.is_over()));
    assert_eq!(all.len(), 100);
}

#[test]
fn holes_of_the_file_are_placed_without_a_read() {
    let world = World::new(MIB);
    let file = std::fs::File::create(world.path("memory")).unwrap();
    file.set_len(MIB).unwrap();
    drop(file);
    let pager = world.pager_of(
        std::sync::Arc::new(RawMemory::open(&world.path("memory")).unwrap()),
        PagerOptions { fill: FillRate::Max, ..PagerOptions::default() },
    );
    let name = "holes_of_the_file_are_placed_without_a_read";
    let Some(mut guest) = served(name, &[MIB], &world.socket()) else { return };

    assert_eq!(guest.sum(0, MIB), Ok(sterna_uffd_peer::sum(&vec![0; MIB as usize])));
    let ended = &until(&pager, "the release", |guests| guests[0].is_over())[0];
    assert_eq!((ended.content_pages, ended.zero_pages), (0, 256));
}
