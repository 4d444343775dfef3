//! Tests the record in seeded schedules of pages, zeros, losses and failures. Records with planted bugs must
//! fail in the same schedules.

mod world;

use std::ops::Range;

use sterna_ram::PageBitmap;

use super::{Memory, Record};
use crate::order::PageRun;
use world::{Broken, PLANTED, Planted, World, geometry};

const SCHEDULES: u64 = 100_000;

/// The first of these seeds whose schedule fails, and the failure.
fn first_broken(mut seeds: Range<u64>, planted: Option<Planted>) -> Option<(u64, Broken)> {
    seeds.find_map(|seed| Some((seed, World::new(seed, planted).run().err()?)))
}

#[test]
fn memory_is_that_of_the_guest_in_a_hundred_thousand_schedules() {
    let broken = first_broken(0..SCHEDULES, None);

    assert_eq!(broken, None, "the seed, and what broke");
}

#[test]
fn every_planted_bug_is_found() {
    for planted in PLANTED {
        let found = first_broken(0..SCHEDULES / 10, Some(planted));

        assert!(found.is_some(), "{planted:?} breaks nothing");
    }
}

/// Regression: received pages lost their mark, so a zero over the next connection was not stored.
#[test]
fn finish_that_takes_marks_from_what_came_leaves_old_content_in_pages_that_become_zero() {
    let stale = |seed| {
        let run = World::new(seed, Some(Planted::FinishForgetsWhatCame)).run();
        matches!(run, Err(Broken::Differs { wanted: 0, .. }))
    };

    assert!((0..SCHEDULES / 10).any(stale));
}

/// Stores nothing, and records the pages that were to be zeroed.
#[derive(Default)]
struct Noted(std::cell::RefCell<Vec<(u64, u64)>>);

impl Memory for Noted {
    type Error = ();

    fn zero(&self, run: PageRun) -> Result<(), ()> {
        self.0.borrow_mut().push((run.first, run.count));
        Ok(())
    }

    fn pinned_in(&self, _: PageRun) -> Option<sterna_ram::Run> {
        None
    }
}

#[test]
fn pages_without_bytes_are_not_read_and_runs_are_as_long_as_possible() {
    let record = Record::new(geometry());
    let absent = PageBitmap::new(67);
    absent.set_range(0, 60);
    record.found(0, &absent);
    let run = |first, count| PageRun { block: 0, first, count };
    assert_eq!(record.content(run(62, 2)), 2);
    let memory = Noted::default();

    assert_eq!(record.zero(run(0, 10), &memory), Ok(0));
    assert_eq!(record.finish(0, &memory), Ok(5));
    assert_eq!(record.finish(0, &memory), Ok(0), "once is enough");
    assert_eq!(record.zero(run(61, 3), &memory), Ok(2), "what came may be zero later");

    assert_eq!(*memory.0.borrow(), [(60, 2), (64, 3), (62, 2)]);
}
