//! At the sender: which pages the receiver probably has.

use std::collections::{HashMap, HashSet, VecDeque};

use super::hash::PageHash;
use crate::frame::Rule;

/// Most pages of dictionaries that a relay announces or accepts: 4 GiB of different pages.
pub const MOST_ANNOUNCED: usize = 1 << 20;
/// A page that went out on one carrier is used on another one after so many later pages, because carriers overtake
/// each other.
const SETTLED: u64 = 4096;

/// Hashes of pages that the receiver has, by their first 8 bytes.
///
/// The receiver drops its oldest pages. This side forgets them earlier: it remembers three quarters of what the
/// receiver keeps. A wrong guess costs a MISS.
#[derive(Debug, Default)]
pub struct Known {
    pages: HashMap<u64, Place>,
    order: VecDeque<u64>,
    most: usize,
    /// Number of pages that were noted so far.
    count: u64,
    /// Pages that stay for the whole session.
    lasting: HashSet<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    number: u64,
    carrier: u64,
}

impl Known {
    /// For a receiver that keeps `cache_pages`, of which this side remembers at most `own_pages`.
    pub fn new(cache_pages: u32, own_pages: u32) -> Self {
        let most = (cache_pages as usize * 3 / 4).min(own_pages as usize);
        // The pages that the receiver announces are settled.
        Self { most, count: SETTLED, ..Self::default() }
    }

    /// Whether pages are named at all: the receiver keeps some, or has announced some.
    pub fn is_used(&self) -> bool {
        self.most > 0 || !self.lasting.is_empty()
    }

    /// Whether the receiver has this page before it reads the next bytes of the carrier.
    pub fn has(&self, page: &PageHash, carrier: u64) -> bool {
        let prefix = page.prefix();
        let place = self.pages.get(&prefix);
        let is_there = |place: &Place| place.carrier == carrier || place.number + SETTLED <= self.count;
        self.lasting.contains(&prefix) || place.is_some_and(is_there)
    }

    /// The page is sent on this carrier, and the receiver keeps it. False: the receiver keeps none.
    pub fn note(&mut self, page: &PageHash, carrier: u64) -> bool {
        if self.most > 0 {
            self.insert(page.prefix(), carrier);
        }
        self.most > 0
    }

    /// The receiver has announced pages by the first 8 bytes of their hashes.
    ///
    /// # Errors
    /// More than [`MOST_ANNOUNCED`] that stay.
    pub fn announced(&mut self, stay: bool, prefixes: &[u64]) -> Result<(), Rule> {
        for prefix in prefixes {
            if stay {
                self.lasting.insert(*prefix);
            } else if self.most > 0 && !self.pages.contains_key(prefix) {
                self.insert(*prefix, 0);
                // They are at the receiver, and overtake nothing.
                if let Some(place) = self.pages.get_mut(prefix) {
                    place.number = place.number.saturating_sub(SETTLED);
                }
            }
        }
        if self.lasting.len() > MOST_ANNOUNCED { Err(Rule::TooManyHashes(MOST_ANNOUNCED)) } else { Ok(()) }
    }

    /// The receiver did not have a page: forgets the older half.
    pub fn missed(&mut self) {
        for _ in 0..self.order.len().div_ceil(2) {
            self.forget_oldest();
        }
    }

    fn insert(&mut self, prefix: u64, carrier: u64) {
        self.count += 1;
        let place = Place { number: self.count, carrier };
        if self.pages.insert(prefix, place).is_none() {
            self.order.push_back(prefix);
        }
        while self.order.len() > self.most {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.order.pop_front() {
            self.pages.remove(&oldest);
        }
    }
}
