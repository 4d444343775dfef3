//! A source and a destination without a network. After a cut, exactly the pages that the destination lacks
//! count as missing.

use sterna_ram::{Backing, PAGE_SIZE, RamBlock};

use super::*;
use crate::reconnect::HeldPages;

const PAGES: [u64; 2] = [700, 130];

fn ram() -> GuestRam {
    let block = |(index, pages): (usize, u64)| {
        RamBlock::new(format!("b{index}"), pages * PAGE_SIZE as u64, Backing::Anonymous).unwrap()
    };
    GuestRam::new(PAGES.into_iter().enumerate().map(block).collect()).unwrap()
}

/// A planted bug of the record, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// Pages of earlier rounds count as received, too.
    KeepsHeld,
    /// A page counts as received before all its bytes have arrived.
    CountsHalf,
    /// The received pages of a session are reported for the next session, which has begun since.
    NamesNextSession,
}

/// Versions of all pages: in the source's guest, and at the destination. `None`: half of the page has arrived.
struct World {
    source: Vec<Vec<u64>>,
    destination: Vec<Vec<Option<u64>>>,
    unconfirmed: Unconfirmed,
    held: HeldPages,
    ever_held: Vec<Vec<bool>>,
    session: u32,
    /// The last session that the destination has begun.
    begun_there: u32,
    random: fastrand::Rng,
    planted: Planted,
}

impl World {
    fn new(seed: u64, planted: Planted) -> Self {
        let each = |value: u64| PAGES.map(|pages| vec![value; pages as usize]).to_vec();
        let ram = ram();
        Self {
            source: each(1),
            destination: PAGES.map(|pages| vec![Some(0); pages as usize]).to_vec(),
            unconfirmed: Unconfirmed::new(&ram),
            held: HeldPages::new(&ram),
            ever_held: PAGES.map(|pages| vec![false; pages as usize]).to_vec(),
            session: 0,
            begun_there: 0,
            random: fastrand::Rng::with_seed(seed),
            planted,
        }
    }

    /// The guest writes pages. Each written page is dirty for the next round.
    fn write(&mut self, dirty: &DirtyBitmaps) {
        for _ in 0..self.random.usize(0..60) {
            let block = self.random.usize(0..PAGES.len());
            let page = self.random.u64(0..PAGES[block]);
            self.source[block][page as usize] += 1;
            dirty.block(block).set(page);
        }
    }

    /// Sends rounds until the connection breaks. Returns the pages that are dirty then and in no round.
    fn session(&mut self, first: DirtyBitmaps) -> DirtyBitmaps {
        let ram = ram();
        let mut round = first;
        let mut bytes_left = self.random.i64(0..1500);
        let mut answers_left = self.random.i64(0..4);
        let (mut reads_ahead, mut is_read) = (self.random.i64(0..300), true);
        loop {
            self.unconfirmed.begin_round(&round, false);
            let next = DirtyBitmaps::new(&ram);
            for (block, pages) in PAGES.into_iter().enumerate() {
                for page in 0..pages {
                    if !round.block(block).get(page) {
                        continue;
                    }
                    // The guest may write a page of the round before it is read. The write is then sent with
                    // the page.
                    if self.random.u8(..) < 3 {
                        self.write(&next);
                    }
                    let version = self.source[block][page as usize];
                    bytes_left -= 1;
                    is_read &= bytes_left > 0;
                    if is_read {
                        self.destination[block][page as usize] = Some(version);
                        self.held.came(block, page, 1);
                        self.ever_held[block][page as usize] = true;
                    } else if bytes_left == 0 {
                        self.destination[block][page as usize] = None;
                        if self.planted == Planted::CountsHalf {
                            self.held.came(block, page, 1);
                        }
                    } else {
                        // The page is in a buffer of the network, and is lost.
                        reads_ahead -= 1;
                        if reads_ahead <= 0 {
                            return next;
                        }
                    }
                }
            }
            if is_read {
                self.held.round_ended();
                if self.planted == Planted::KeepsHeld {
                    self.hold_what_ever_came();
                }
                answers_left -= 1;
                if answers_left > 0 {
                    self.unconfirmed.confirmed().unwrap();
                }
            }
            if self.random.u8(..) < 8 {
                return next;
            }
            self.write(&next);
            round = next;
        }
    }

    fn hold_what_ever_came(&self) {
        for (block, pages) in self.ever_held.iter().enumerate() {
            for page in (0..).zip(pages).filter(|(_, held)| **held).map(|(page, _)| page) {
                self.held.came(block, page, 1);
            }
        }
    }

    /// Begins the next session on both sides. Returns its first round.
    fn reconnect(&mut self, dirty: &DirtyBitmaps) -> DirtyBitmaps {
        self.session += 1;
        if self.random.u8(..) < 64 {
            // The destination had all channels of an attempt that the source has abandoned, and waits for that
            // session's pages.
            self.held.begin_session(self.session);
            self.begun_there = self.session;
            self.session += 1;
        }
        let mut holds = self.held.report();
        if self.planted == Planted::NamesNextSession {
            holds.session = self.begun_there;
        }
        let mut missing = match self.unconfirmed.begin_session(self.session, &holds) {
            Ok(missing) => missing,
            // The planted bug was detected, so nothing is sent.
            Err(_) if self.planted != Planted::Nothing => return DirtyBitmaps::new(&ram()),
            Err(error) => panic!("{error}"),
        };
        missing.pages.or_from(dirty);
        // The connection may break before the destination begins this session.
        if self.random.bool() {
            self.begun_there = self.session;
            self.held.begin_session(self.session);
        }
        missing.pages
    }

    /// Whether the next round contains every page that differs.
    fn is_sound(&self, round: &DirtyBitmaps) -> bool {
        (0..PAGES.len()).all(|block| {
            (0..PAGES[block]).all(|page| {
                let is_same =
                    self.destination[block][page as usize] == Some(self.source[block][page as usize]);
                is_same || round.block(block).get(page)
            })
        })
    }
}

/// Whether after every cut the next round contains all missing pages.
fn survives(seed: u64, planted: Planted) -> bool {
    let mut world = World::new(seed, planted);
    let mut round = DirtyBitmaps::new(&ram());
    round.set_all();
    for _ in 0..8 {
        if world.session != world.begun_there {
            // The destination reads nothing of this session, because its connection breaks immediately.
            world.unconfirmed.begin_round(&round, false);
            let none = DirtyBitmaps::new(&ram());
            round = world.reconnect(&none);
            continue;
        }
        let dirty = world.session(round);
        round = world.reconnect(&dirty);
        if !world.is_sound(&round) {
            return false;
        }
    }
    true
}

#[test]
fn what_is_missing_after_any_cut_is_in_the_next_round() {
    for seed in 0..400 {
        assert!(survives(seed, Planted::Nothing), "seed {seed}");
    }
}

/// Found by `soak --resumed-case 42 --seed 17`.
#[test]
fn session_that_began_at_the_destination_alone_leaves_everything_missing() {
    let ram = ram();
    let round = DirtyBitmaps::new(&ram);
    round.set_all();
    let begun = || {
        let unconfirmed = Unconfirmed::new(&ram);
        unconfirmed.begin_round(&round, false);
        unconfirmed
    };
    let held = HeldPages::new(&ram);
    let none = held.report().pages;
    held.came(0, 3, 1);
    let one = held.report().pages;

    let missing = begun().begin_session(3, &Holds { session: 2, rounds: 0, pages: none.clone() }).unwrap();
    assert_eq!(missing.pages.count(), PAGES.iter().sum::<u64>());

    // Session 2 was never used, so it cannot have rounds or pages. Session 3 has not begun.
    for (session, rounds, pages) in [(2, 1, &none), (2, 0, &one), (3, 0, &none)] {
        let lies = Holds { session, rounds, pages: pages.clone() };
        assert!(begun().begin_session(3, &lies).is_err(), "{session}, {rounds}");
    }
}

#[test]
fn every_wrong_way_to_tell_what_is_held_is_found() {
    for planted in [Planted::KeepsHeld, Planted::CountsHalf, Planted::NamesNextSession] {
        assert!((0..400).any(|seed| !survives(seed, planted)), "{planted:?}");
    }
}

#[test]
fn pages_that_are_held_are_not_sent_again() {
    let (ram, unconfirmed) = (ram(), Unconfirmed::new(&ram()));
    let (all, held) = (DirtyBitmaps::new(&ram), HeldPages::new(&ram));
    all.set_all();
    unconfirmed.begin_round(&all, true);
    held.came(0, 0, 690);
    held.came(1, 64, 66);

    let missing = unconfirmed.begin_session(1, &held.report()).unwrap();

    assert_eq!((missing.pages.count(), missing.looks_for_absent), (10 + 64, true));
    // Nothing of session 1 was read, so all pages of its round are missing.
    unconfirmed.begin_round(&missing.pages, true);
    let again = unconfirmed.begin_session(2, &held.report()).unwrap();
    assert_eq!(again.pages.count(), 74);
}

/// A destination that confirms no round, however many are sent.
#[test]
fn destination_that_confirms_nothing_costs_a_bounded_number_of_bitmaps_and_nothing_is_forgotten() {
    let (ram, unconfirmed, held) = (ram(), Unconfirmed::new(&ram()), HeldPages::new(&ram()));
    for round in 0..500 {
        let pages = DirtyBitmaps::new(&ram);
        pages.block(0).set(round);
        unconfirmed.begin_round(&pages, round == 400);
        assert!(unconfirmed.state.lock().open.len() <= MOST_BITMAPS);
    }

    // It has read one round, and has received the page of the next.
    held.round_ended();
    held.came(0, 1, 1);
    let missing = unconfirmed.begin_session(1, &held.report()).unwrap();

    assert_eq!((missing.pages.count(), missing.looks_for_absent), (498, true));
    assert!(!missing.pages.block(0).get(0) && !missing.pages.block(0).get(1));
}

/// A destination that confirms late, and has read more rounds than it has confirmed.
#[test]
fn rounds_that_share_a_bitmap_are_missing_until_the_last_of_them_was_read() {
    let ram = ram();
    let begun = |confirmed: u64| {
        let unconfirmed = Unconfirmed::new(&ram);
        for round in 0..10 {
            let pages = DirtyBitmaps::new(&ram);
            // Every round contains the same page.
            pages.block(1).set(7);
            pages.block(0).set(round);
            unconfirmed.begin_round(&pages, false);
        }
        (0..confirmed).for_each(|_| unconfirmed.confirmed().unwrap());
        unconfirmed
    };
    // Rounds 3 to 9 share one bitmap.
    for (confirmed, read, missing) in [(0, 3, 8), (2, 9, 8), (9, 9, 8), (10, 10, 0), (0, 10, 0), (0, 2, 9)] {
        let held = HeldPages::new(&ram);
        (0..read).for_each(|_| held.round_ended());
        // The page is of the round that the destination is reading.
        held.came(1, 7, 1);
        let lacks = begun(confirmed).begin_session(1, &held.report()).unwrap();
        assert_eq!(lacks.pages.count(), missing, "{confirmed} of {read} confirmed");
        assert_eq!(lacks.pages.block(1).get(7), missing > 0, "{confirmed} of {read} confirmed");
    }
}

/// Two cuts: at the second one the destination has all channels, and the source does not know it.
#[test]
fn session_of_which_nothing_came_takes_nothing_from_what_is_held() {
    let (ram, unconfirmed) = (ram(), Unconfirmed::new(&ram()));
    let (all, held) = (DirtyBitmaps::new(&ram), HeldPages::new(&ram));
    all.set_all();
    unconfirmed.begin_round(&all, false);
    held.came(0, 0, 690);
    held.begin_session(1);
    held.begin_session(2);

    let missing = unconfirmed.begin_session(3, &held.report()).unwrap();
    assert_eq!(missing.pages.count(), 10 + 130, "nothing is sent again");

    // From the first page of a session on, only this session's pages count.
    unconfirmed.begin_round(&missing.pages, false);
    held.begin_session(3);
    held.came(1, 0, 30);
    assert_eq!((held.report().session, held.report().rounds), (3, 0));
    let again = unconfirmed.begin_session(4, &held.report()).unwrap();
    assert_eq!(again.pages.count(), 10 + 100);
    // The end of a round without pages counts as received data, too.
    unconfirmed.begin_round(&again.pages, false);
    held.begin_session(4);
    held.round_ended();
    assert_eq!((held.report().session, held.report().rounds), (4, 1));
    assert_eq!(unconfirmed.begin_session(5, &held.report()).unwrap().pages.count(), 0);
}

/// Several lanes receive the first pages of a session at the same time. All of them must be recorded.
#[test]
fn first_pages_of_a_session_that_come_together_are_all_held() {
    let ram = ram();
    for _ in 0..200 {
        let held = HeldPages::new(&ram);
        held.came(0, 600, 50);
        held.begin_session(1);
        std::thread::scope(|scope| {
            for lane in 0..4 {
                let held = &held;
                scope.spawn(move || held.came(0, lane * 64, 64));
            }
        });
        let unconfirmed = Unconfirmed::new(&ram);
        unconfirmed
            .begin_session(1, &Holds { session: 0, rounds: 0, pages: HeldPages::new(&ram).report().pages })
            .unwrap();
        let all = DirtyBitmaps::new(&ram);
        all.set_all();
        unconfirmed.begin_round(&all, false);
        let missing = unconfirmed.begin_session(2, &held.report()).unwrap();
        assert_eq!(missing.pages.count(), PAGES.iter().sum::<u64>() - 256);
    }
}

#[test]
fn answers_that_cannot_be_are_refused() {
    let (ram, unconfirmed) = (ram(), Unconfirmed::new(&ram()));
    let (all, held) = (DirtyBitmaps::new(&ram), HeldPages::new(&ram));
    unconfirmed.begin_round(&all, false);
    unconfirmed.begin_round(&all, false);
    unconfirmed.confirmed().unwrap();
    let pages = held.report().pages;
    for (session, rounds) in [(0, 0), (0, 3), (1, 0), (u32::MAX, 1)] {
        let holds = Holds { session, rounds, pages: pages.clone() };
        assert!(unconfirmed.begin_session(1, &holds).is_err(), "{session}, {rounds}");
    }
    let of_another_guest = Holds { session: 0, rounds: 1, pages: pages[1..].to_vec() };
    assert!(unconfirmed.begin_session(1, &of_another_guest).is_err());
    assert!(unconfirmed.begin_session(1, &Holds { session: 0, rounds: 1, pages }).is_ok());
    assert!(unconfirmed.confirmed().is_err(), "nothing of this session was sent");
}
