//! The background fill.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_pager::{FillRate, Pager, PagerError, PagerOptions, SocketPlan, WorkingSet};

use crate::common::{MIB, SlowSource, World, served, until};

#[test]
fn guest_that_touches_nothing_becomes_complete() {
    let world = World::new(32 * MIB);
    for fill in [FillRate::Adaptive, FillRate::Max, FillRate::BytesPerSecond(1 << 30)] {
        let pager = world.pager(fill);
        let name = "guest_that_touches_nothing_becomes_complete";
        let Some(mut guest) = served(name, &[32 * MIB], &world.socket()) else { return };

        let all = until(&pager, "the release", |guests| guests.first().is_some_and(|guest| guest.is_over()));
        assert_eq!((all[0].missing_pages, all[0].faults), (0, 0));
        assert_eq!(guest.sum(0, 32 * MIB), Ok(world.sum(0, 32 * MIB)));
    }
}

/// What one guest touched is filled first for the next one, in the order of the touches.
#[test]
fn recorded_pages_are_filled_first() {
    let name = "recorded_pages_are_filled_first";
    let world = World::new(64 * MIB);
    let options = PagerOptions { fill: FillRate::Off, record: true, ..PagerOptions::default() };
    let pager = world.pager_of(world.source(), options);
    let Some(mut first) = served(name, &[64 * MIB], &world.socket()) else { return };
    first.sum(40 * MIB, MIB).unwrap();
    first.sum(8 * MIB, 4096).unwrap();
    let recorded = pager.working_set().unwrap();
    assert_eq!(recorded.runs, [(40 * MIB, MIB), (8 * MIB, 4096)]);
    drop((first, pager));

    // So slow that the test can see which pages come first.
    let options = PagerOptions {
        fill: FillRate::BytesPerSecond(4 << 20),
        working_set: Some(recorded),
        ..PagerOptions::default()
    };
    let pager = world.pager_of(world.source(), options);
    let Some(mut second) = served(name, &[64 * MIB], &world.socket()) else { return };
    let pages = (MIB + (64 << 10)) / 4096;
    until(&pager, "the first fill", |guests| {
        guests.first().is_some_and(|guest| guest.total_pages - guest.missing_pages >= pages)
    });
    assert_eq!(second.sum(40 * MIB, MIB), Ok(world.sum(40 * MIB, MIB)));
    assert_eq!(second.sum(8 * MIB, 64 << 10), Ok(world.sum(8 * MIB, 64 << 10)));
    assert_eq!(pager.guests()[0].faults, 0);
}

#[test]
fn working_set_of_another_image_is_refused() {
    let world = World::new(MIB);
    let working_set = Some(WorkingSet { memory_bytes: 2 * MIB, runs: vec![(0, 4096)] });
    let options = PagerOptions { working_set, ..PagerOptions::default() };

    let refused = Pager::start(world.source(), &[], options).err();
    assert!(matches!(refused, Some(PagerError::OtherWorkingSet { recorded, .. }) if recorded == 2 * MIB));
}

/// The rest of the memory is read once for all guests.
#[test]
fn fill_reads_each_frame_once_for_all_guests() {
    let world = World::new(8 * MIB);
    let source = SlowSource::new(&world, 512 << 10, Duration::from_millis(20));
    let plans: Vec<SocketPlan> =
        (0..3).map(|index| SocketPlan { path: world.path(&index.to_string()), guests: 1 }).collect();
    let options = PagerOptions { fill: FillRate::Max, ..PagerOptions::default() };
    let pager = Pager::start(source.clone(), &plans, options).unwrap();
    let mut guests = Vec::new();
    for plan in &plans {
        let Some(guest) = served("fill_reads_each_frame_once_for_all_guests", &[8 * MIB], &plan.path) else {
            return;
        };
        guests.push(guest);
    }

    until(&pager, "the release", |guests| guests.len() == 3 && guests.iter().all(|guest| guest.is_over()));
    assert_eq!(source.reads.load(Ordering::Relaxed), 16);
    for mut guest in guests {
        assert_eq!(guest.sum(0, 8 * MIB), Ok(world.sum(0, 8 * MIB)));
    }
}
