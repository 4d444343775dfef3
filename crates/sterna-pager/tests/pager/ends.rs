//! How the service of a guest ends.

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_pager::{FillRate, GuestEnd, GuestError, GuestStage, PagerOptions, SourceError};

use crate::common::{MIB, SlowSource, World, served, until};

const OFF: PagerOptions = PagerOptions {
    cache_limit_bytes: 64 << 20,
    fill: FillRate::Off,
    working_set: None,
    record: false,
    fault_threads: 2,
    reader_threads: 2,
};

#[test]
fn peer_that_dies_is_noticed() {
    let world = World::new(MIB);
    let pager = world.pager(FillRate::Off);
    let Some(mut guest) = served("peer_that_dies_is_noticed", &[MIB], &world.socket()) else { return };
    guest.sum(0, MIB / 2).unwrap();
    guest.kill();

    let guests = until(&pager, "the end", |guests| guests[0].is_over());
    assert!(matches!(guests[0].stage, GuestStage::Ended(GuestEnd::PeerEnded)));
}

/// The image fails under a guest that waits for a page.
#[test]
fn guest_is_killed_if_the_image_cannot_be_read() {
    let world = World::new(MIB);
    let source = SlowSource::new(&world, 64 << 10, Duration::ZERO);
    let pager = world.pager_of(source.clone(), OFF);
    let name = "guest_is_killed_if_the_image_cannot_be_read";
    let Some(mut guest) = served(name, &[MIB], &world.socket()) else { return };
    assert_eq!(guest.sum(0, MIB / 2), Ok(world.sum(0, MIB / 2)));
    source.is_broken.store(true, Ordering::Relaxed);

    guest.tell(&format!("sum 0 {MIB}")).unwrap();
    assert_eq!(guest.wait().unwrap().signal(), Some(9));
    let guests = until(&pager, "the end", |guests| guests[0].is_over());
    let GuestStage::Ended(GuestEnd::GivenUp { why: GuestError::Source { source: why, .. }, is_killed: true }) =
        &guests[0].stage
    else {
        panic!("{guests:?}")
    };
    assert!(matches!(**why, SourceError::Short { .. }), "{why:?}");
}

/// An image that was written to is not the guest's memory any more.
#[test]
fn guest_is_killed_rather_than_given_pages_of_a_changed_image() {
    let world = World::new(MIB);
    let pager = world.pager_of(world.source(), OFF);
    let name = "guest_is_killed_rather_than_given_pages_of_a_changed_image";
    let Some(mut guest) = served(name, &[MIB], &world.socket()) else { return };
    guest.sum(0, 4096).unwrap();
    let file = std::fs::File::options().write(true).open(world.path("memory")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], MIB / 2).unwrap();

    guest.tell(&format!("sum 0 {MIB}")).unwrap();
    assert_eq!(guest.wait().unwrap().signal(), Some(9));
    let guests = until(&pager, "the end", |guests| guests[0].is_over());
    assert!(
        matches!(&guests[0].stage, GuestStage::Ended(GuestEnd::GivenUp { why: GuestError::Source { source: why, .. }, .. })
            if matches!(**why, SourceError::Changed { .. })),
        "{guests:?}"
    );
}

/// A guest that lacks pages hangs without the pager. One that has all pages does not need it.
#[test]
fn end_of_the_pager_kills_only_guests_that_lack_pages() {
    let name = "end_of_the_pager_kills_only_guests_that_lack_pages";
    let world = World::new(MIB);
    let pager = world.pager_of(world.source(), OFF);
    let Some(mut lacks) = served(name, &[MIB], &world.socket()) else { return };
    lacks.sum(0, 4096).unwrap();
    drop(pager);
    assert_eq!(lacks.wait().unwrap().signal(), Some(9));

    let pager = world.pager(FillRate::Max);
    let Some(mut complete) = served(name, &[MIB], &world.socket()) else { return };
    until(&pager, "the release", |guests| guests.first().is_some_and(|guest| guest.is_over()));
    drop(pager);
    assert_eq!(complete.sum(0, MIB), Ok(world.sum(0, MIB)));
    assert!(!world.socket().exists());
}
