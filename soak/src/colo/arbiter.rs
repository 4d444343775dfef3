//! An arbiter of a case. It gives the claim to the first side that asks. It can be unreachable for a while,
//! and can favour one side.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_standby::Claims;
use sterna_standby::machines::Ruling;

/// Time for which the other side waits if the favoured side does not ask.
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
    /// Time since which the other side has been waiting.
    waits: Option<Instant>,
    /// For each side, the time until which the arbiter is unreachable.
    out_of_reach: [Option<Instant>; 2],
    /// An unreachable arbiter still processes the question; only the answer is lost.
    hears: bool,
}

impl Arbiter {
    /// Gives the claim to `side` if it asks, even if the other side asks first. A side that never asks gets
    /// nothing, because it may have ended the protection by a message.
    pub(super) fn favour(&self, side: Side) {
        self.0.lock().favoured = Some(side);
    }

    /// Makes the arbiter unreachable for a side. With `hears`, only the answer is lost.
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
