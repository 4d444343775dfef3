//! A guest that zeroes pages between a lost connection and the next one: their old content must not be at the
//! destination.

use sterna::ram::{Backing, GuestRam, RamBlock};
use sterna::{Arrival, Outcome, SourceVm, TargetVm};

use super::*;
use crate::common::{multifd, parameters};
use crate::plain::{Plain, byte_of};

const PAGES: u64 = 256;

fn ram() -> GuestRam {
    GuestRam::new(vec![RamBlock::new("m0", PAGES << 12, Backing::Memfd).unwrap()]).unwrap()
}

/// The guest changes its memory by `after` when its switchover is undone. Returns the pages that differ at the
/// destination.
fn stale(
    settings: (Parameters, Capabilities),
    filter: Filter,
    after: impl FnOnce(&Plain) + Send + 'static,
) -> Vec<u64> {
    let (params, capabilities) = surviving(settings);
    let (source, target) = (Plain::new(ram()), Plain::new(ram()));
    // Content of an earlier guest.
    (0..PAGES).step_by(5).for_each(|page| target.write(page, 0xee));
    (0..PAGES).filter(|page| page % 7 != 0).for_each(|page| source.write(page, 1 + (page % 200) as u8));
    source.at_resume(after);
    let vm: Arc<dyn TargetVm> = target.clone();
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(vm, &at, params.clone(), capabilities, Arc::new(())).unwrap();
    let proxy = Proxy::new(&incoming.address(), filter);
    let vm: Arc<dyn SourceVm> = source.clone();
    let migration = Migration::start(vm, &proxy.address(), params, capabilities, Arc::new(())).unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(
        matches!((&outcome, &arrival), (Outcome::Completed, Arrival::Completed(_))),
        "{outcome:?} {arrival:?}"
    );
    assert_eq!(migration.statistics().reconnections.len(), 1, "one loss");
    (0..PAGES).filter(|page| byte_of(&target.ram, *page) != byte_of(&source.ram, *page)).collect()
}

fn zero_every_other(vm: &Plain) {
    (0..PAGES).step_by(2).for_each(|page| vm.write(page, 0));
}

/// Cuts before *prepare*, and before its answer.
const CUTS: [Way; 2] = [Way::Forward, Way::Back];

fn ways() -> [(Parameters, Capabilities); 2] {
    [multifd(2), (parameters(), Capabilities::default())]
}

#[test]
fn page_that_becomes_zero_after_a_loss_in_the_switchover_is_zero_at_the_destination() {
    for way in CUTS {
        for settings in ways() {
            let stale = stale(settings, at_words(way, false, &[PREPARE]), zero_every_other);
            assert!(stale.is_empty(), "{way:?}: {} stale pages: {stale:?}", stale.len());
        }
    }
}

/// Pages that were zero get content, are zeroed, and get content again.
#[test]
fn pages_that_change_between_zero_and_content_after_a_lost_answer_arrive_as_they_are() {
    let changes = |vm: &Plain| {
        zero_every_other(vm);
        (0..PAGES).step_by(3).for_each(|page| vm.write(page, 9));
        (0..PAGES).step_by(9).for_each(|page| vm.write(page, 0));
    };
    for settings in ways() {
        let stale = stale(settings, at_words(Way::Back, false, &[PREPARE]), changes);
        assert!(stale.is_empty(), "{} stale pages: {stale:?}", stale.len());
    }
}
