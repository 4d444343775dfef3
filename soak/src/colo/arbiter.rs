//! An arbiter that gives the claim to who asks first, that a side may not reach for a while, and that waits for the side it favours.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::replica::Claims;
use sterna::replica::machines::Ruling;

/// How long the other side waits for one that is favoured and does not ask.
const FAVOUR: Duration = Duration::from_millis(500);

/// A side of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Primary,
    Standby,
}

#[derive(Default)]
pub(super) struct Arbiter(Mutex<State>);

#[derive(Default)]
struct State {
    owner: Option<Side>,
    favoured: Option<Side>,
    /// Since when the other side waits.
    waits: Option<Instant>,
    /// Until when each side does not reach it.
    out_of_reach: [Option<Instant>; 2],
    /// A question that cannot be answered is heard all the same.
    hears: bool,
}

impl Arbiter {
    /// It gets the claim if it asks, though the other side may ask before. A side that never asks owns nothing: it may have ended the
    /// protection by word.
    pub(super) fn favour(&self, side: Side) {
        self.0.lock().favoured = Some(side);
    }

    /// `hears`: only the answer is lost.
    pub(super) fn hide(&self, from: Side, until: Instant, hears: bool) {
        let mut state = self.0.lock();
        state.out_of_reach[from as usize] = Some(until);
        state.hears = hears;
    }

    pub(super) fn owner(&self) -> Option<Side> {
        self.0.lock().owner
    }

    pub(super) fn claims(self: &Arc<Self>, side: Side) -> Arc<dyn Claims> {
        let this = Arc::clone(self);
        Arc::new(move || {
            let mut state = this.0.lock();
            let is_hidden = state.out_of_reach[side as usize].is_some_and(|until| Instant::now() < until);
            if is_hidden && !state.hears {
                return Err("the arbiter is out of reach".to_owned());
            }
            if state.owner.is_none() && state.favoured.is_some_and(|favoured| favoured != side) {
                let since = *state.waits.get_or_insert_with(Instant::now);
                if since.elapsed() < FAVOUR {
                    return Err("the arbiter has not decided".to_owned());
                }
            }
            let owner = *state.owner.get_or_insert(side);
            match is_hidden {
                true => Err("the arbiter's answer is lost".to_owned()),
                false if owner == side => Ok(Ruling::Won),
                false => Ok(Ruling::Lost),
            }
        })
    }
}
