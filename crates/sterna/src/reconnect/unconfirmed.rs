//! What a source has sent and does not know to be held.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use sterna_ram::{DirtyBitmaps, GuestRam};
use sterna_wire::extension::{Holds, decode_held};

use super::held::block_pages;
use crate::error::MigrationError;

const CHANNEL: &str = "answer to a connection that was made anew";

/// The pages of every round whose end the destination is not known to have read.
pub(crate) struct Unconfirmed {
    ram: GuestRam,
    state: Mutex<Rounds>,
}

#[derive(Default)]
struct Rounds {
    session: u32,
    /// Of this session: rounds that were begun, and those that the destination has confirmed.
    begun: u64,
    confirmed: u64,
    /// Oldest first.
    open: VecDeque<OpenRound>,
}

struct OpenRound {
    session: u32,
    /// Counted from 0 in its session.
    index: u64,
    pages: DirtyBitmaps,
    /// Pages that were never populated are to be found among them.
    looks_for_absent: bool,
}

/// What the destination lacks.
pub(crate) struct Missing {
    pub(crate) pages: DirtyBitmaps,
    /// Pages that were never populated are to be found among them.
    pub(crate) looks_for_absent: bool,
}

impl Unconfirmed {
    /// Nothing was sent yet.
    pub(crate) fn new(ram: &GuestRam) -> Self {
        Self { ram: ram.clone(), state: Mutex::default() }
    }

    /// A round of `pages` begins. Before any of them is sent.
    pub(crate) fn begin_round(&self, pages: &DirtyBitmaps, looks_for_absent: bool) {
        let mut copy = DirtyBitmaps::new(&self.ram);
        copy.or_from(pages);
        let mut state = self.state.lock();
        let (session, index) = (state.session, state.begun);
        state.begun += 1;
        state.open.push_back(OpenRound { session, index, pages: copy, looks_for_absent });
    }

    /// The destination has read the end of the oldest round of this session that it had not confirmed.
    ///
    /// # Errors
    /// There is no such round.
    pub(crate) fn confirmed(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        if state.confirmed >= state.begun {
            return Err(misbehaved(format!("it confirmed round {} of {}", state.confirmed + 1, state.begun)));
        }
        state.confirmed += 1;
        let known = (state.session, state.confirmed);
        state.open.retain(|round| (round.session, round.index) >= known);
        Ok(())
    }

    /// Session number `session` begins, over a destination that `holds` this: what it lacks. The first round of the session has to
    /// send all of that.
    ///
    /// # Errors
    /// The destination says what cannot be.
    pub(crate) fn begin_session(&self, session: u32, holds: &Holds) -> Result<Missing, MigrationError> {
        let mut state = self.state.lock();
        let reached = (holds.session, holds.rounds);
        let is_known = match holds.session.cmp(&state.session) {
            // It has read nothing of this session.
            std::cmp::Ordering::Less => state.confirmed == 0,
            std::cmp::Ordering::Equal => (state.confirmed..=state.begun).contains(&holds.rounds),
            // An attempt that this side gave up, of an older Sterna: nothing was sent in it.
            std::cmp::Ordering::Greater => holds.session < session && holds.rounds == 0,
        };
        // It has forgotten then what it held of rounds before.
        let is_forgotten = holds.session > state.session;
        if !is_known {
            let what = format!(
                "it says that it has read {} rounds of session {}; {} of session {} were sent, of which it had confirmed {}",
                holds.rounds, holds.session, state.begun, state.session, state.confirmed
            );
            return Err(misbehaved(what));
        }
        let mut missing = Missing { pages: DirtyBitmaps::new(&self.ram), looks_for_absent: false };
        let held = DirtyBitmaps::new(&self.ram);
        let mark = |block: usize, first, count| {
            held.block(block).set_range(first, count);
        };
        decode_held(&holds.pages, &block_pages(&self.ram), mark).map_err(MigrationError::wire(CHANNEL))?;
        if is_forgotten && held.count() > 0 {
            let what =
                format!("it says that pages came in session {}, in which none was sent", holds.session);
            return Err(misbehaved(what));
        }
        for round in std::mem::take(&mut state.open) {
            let at = (round.session, round.index);
            if at < reached && !is_forgotten {
                continue;
            }
            if at == reached {
                take_out(&round.pages, &held);
            }
            missing.pages.or_from(&round.pages);
            missing.looks_for_absent |= round.looks_for_absent;
        }
        (state.session, state.begun, state.confirmed) = (session, 0, 0);
        Ok(missing)
    }
}

/// Clears in `pages` what is set in `others`.
pub(super) fn take_out(pages: &DirtyBitmaps, others: &DirtyBitmaps) {
    for (pages, others) in pages.blocks().iter().zip(others.blocks()) {
        for (word, other) in pages.words().iter().zip(others.words()) {
            word.fetch_and(!other.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

impl Missing {
    /// Of these pages nothing is to be sent.
    pub(crate) fn leave_out(&self, pages: &DirtyBitmaps) {
        take_out(&self.pages, pages);
    }
}

fn misbehaved(what: String) -> MigrationError {
    MigrationError::PeerMisbehaved { what: format!("{what} (specs/extension.md §13)") }
}

#[cfg(test)]
#[path = "unconfirmed/tests.rs"]
mod tests;
