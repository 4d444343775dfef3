//! Records the pages that a source has sent without a confirmation of their round.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use sterna_ram::{DirtyBitmaps, GuestRam};
use sterna_wire::extension::{Holds, decode_held};

use super::held::block_pages;
use crate::error::{BadAnswer, MigrationError};

const CHANNEL: &str = "answer on a new connection";
/// Most bitmaps that are kept, each with one bit per page: 32 MiB for 1 TiB of RAM. For a destination that
/// keeps up, two or three rounds are open. If it confirms none, all rounds after the first three share the last
/// bitmap.
const MOST_BITMAPS: usize = 4;

/// The pages of every round whose end the destination may not have read.
pub(crate) struct Unconfirmed {
    ram: GuestRam,
    state: Mutex<Rounds>,
}

#[derive(Default)]
struct Rounds {
    session: u32,
    /// Numbers of rounds of this session: begun, and confirmed by the destination.
    begun: u64,
    confirmed: u64,
    /// Unconfirmed rounds, oldest first.
    open: VecDeque<OpenRounds>,
}

/// One round, or several consecutive ones that share a bitmap. All pages of shared rounds count as missing
/// until the last of them is confirmed.
struct OpenRounds {
    session: u32,
    /// The first round's index in its session, from 0.
    first: u64,
    last: u64,
    pages: DirtyBitmaps,
    /// Pages that were never populated must be detected among them.
    looks_for_absent: bool,
}

/// The pages that the destination lacks.
pub(crate) struct Missing {
    pub(crate) pages: DirtyBitmaps,
    /// Pages that were never populated must be detected among them.
    pub(crate) looks_for_absent: bool,
}

impl Unconfirmed {
    /// Starts without a sent page.
    pub(crate) fn new(ram: &GuestRam) -> Self {
        Self { ram: ram.clone(), state: Mutex::default() }
    }

    /// Records a round of `pages`. Call this before the first of them is sent.
    pub(crate) fn begin_round(&self, pages: &DirtyBitmaps, looks_for_absent: bool) {
        let mut state = self.state.lock();
        let (session, index) = (state.session, state.begun);
        state.begun += 1;
        let is_full = state.open.len() >= MOST_BITMAPS;
        if let Some(newest) = state.open.back_mut().filter(|newest| is_full && newest.session == session) {
            newest.last = index;
            newest.pages.or_from(pages);
            newest.looks_for_absent |= looks_for_absent;
            return;
        }
        let mut copy = DirtyBitmaps::new(&self.ram);
        copy.or_from(pages);
        state.open.push_back(OpenRounds {
            session,
            first: index,
            last: index,
            pages: copy,
            looks_for_absent,
        });
    }

    /// Records that the destination has read the end of this session's oldest unconfirmed round.
    ///
    /// # Errors
    /// All begun rounds are confirmed already.
    pub(crate) fn confirmed(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        if state.confirmed >= state.begun {
            return Err(BadAnswer::Confirmed { round: state.confirmed + 1, begun: state.begun }.into());
        }
        state.confirmed += 1;
        let known = (state.session, state.confirmed);
        state.open.retain(|rounds| (rounds.session, rounds.last) >= known);
        Ok(())
    }

    /// Begins session number `session` with a destination that reports `holds`. Returns the missing pages, all
    /// of which the session's first round must send.
    ///
    /// # Errors
    /// The destination's report contradicts the rounds that were sent.
    pub(crate) fn begin_session(&self, session: u32, holds: &Holds) -> Result<Missing, MigrationError> {
        let mut state = self.state.lock();
        let reached = (holds.session, holds.rounds);
        let is_known = match holds.session.cmp(&state.session) {
            // The destination has read nothing of this session.
            std::cmp::Ordering::Less => state.confirmed == 0,
            std::cmp::Ordering::Equal => (state.confirmed..=state.begun).contains(&holds.rounds),
            // The source abandoned this session's connection attempt before it sent a page. Only an older
            // Sterna reports such a session.
            std::cmp::Ordering::Greater => holds.session < session && holds.rounds == 0,
        };
        // In this case the destination has discarded the record of earlier rounds.
        let is_forgotten = holds.session > state.session;
        if !is_known {
            let (rounds, session) = (holds.rounds, holds.session);
            let (begun, current, confirmed) = (state.begun, state.session, state.confirmed);
            return Err(BadAnswer::Holds { rounds, session, begun, current, confirmed }.into());
        }
        let mut missing = Missing { pages: DirtyBitmaps::new(&self.ram), looks_for_absent: false };
        let held = DirtyBitmaps::new(&self.ram);
        let mark = |block: usize, first, count| {
            held.block(block).set_range(first, count);
        };
        decode_held(&holds.pages, &block_pages(&self.ram), mark).map_err(MigrationError::wire(CHANNEL))?;
        if is_forgotten && held.count() > 0 {
            return Err(BadAnswer::HoldsOfEmptySession { session: holds.session }.into());
        }
        for rounds in std::mem::take(&mut state.open) {
            if (rounds.session, rounds.last) < reached && !is_forgotten {
                continue;
            }
            // A page that was received in one round may be missing in the next.
            if rounds.first == rounds.last && (rounds.session, rounds.first) == reached {
                take_out(&rounds.pages, &held);
            }
            missing.pages.or_from(&rounds.pages);
            missing.looks_for_absent |= rounds.looks_for_absent;
        }
        (state.session, state.begun, state.confirmed) = (session, 0, 0);
        Ok(missing)
    }
}

/// Clears the bits in `pages` that are set in `others`.
pub(super) fn take_out(pages: &DirtyBitmaps, others: &DirtyBitmaps) {
    for (pages, others) in pages.blocks().iter().zip(others.blocks()) {
        for (word, other) in pages.words().iter().zip(others.words()) {
            word.fetch_and(!other.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

impl Missing {
    /// Excludes these pages from the missing ones.
    pub(crate) fn leave_out(&self, pages: &DirtyBitmaps) {
        take_out(&self.pages, pages);
    }
}

#[cfg(test)]
#[path = "unconfirmed/tests.rs"]
mod tests;
