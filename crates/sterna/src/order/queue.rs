//! Hands rounds from the control thread to the lanes, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use super::RoundPages;
use parking_lot::{Condvar, Mutex};

/// The rounds that lanes work on: at most the one that some still send and the next.
pub(crate) struct RoundQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

/// What a lane does next.
pub(crate) enum Next<T> {
    /// A round.
    Round(Arc<RoundPages>),
    /// Something that is no page.
    Other(T),
}

#[derive(Default)]
struct QueueState {
    rounds: VecDeque<Arc<RoundPages>>,
    /// The last round whose flush is written.
    flushed: u64,
    ended: bool,
}

impl Default for RoundQueue {
    fn default() -> Self {
        Self { state: Mutex::new(QueueState::default()), changed: Condvar::new() }
    }
}

impl RoundQueue {
    /// Lets lanes begin `round`.
    pub(crate) fn publish(&self, round: Arc<RoundPages>) {
        self.state.lock().rounds.push_back(round);
        self.changed.notify_all();
    }

    /// Waits for the round after number `after`, or for what `other` finds; `None` when there will be no round.
    /// With `after_flush` it also waits until the flush of round `after` is written. Who gives `other` something
    /// to find calls [`RoundQueue::wake`].
    pub(crate) fn next<T>(
        &self,
        after: u64,
        after_flush: bool,
        mut other: impl FnMut() -> Option<T>,
    ) -> Option<Next<T>> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return None;
            }
            let ready = !after_flush || state.flushed >= after;
            if let Some(round) = state.rounds.iter().find(|p| p.number() > after).filter(|_| ready) {
                return Some(Next::Round(Arc::clone(round)));
            }
            // Pages come first: lanes ask for this while they send pages, too.
            if let Some(found) = other() {
                return Some(Next::Other(found));
            }
            self.changed.wait(&mut state);
        }
    }

    /// All lanes are through with round `number` and its flush is written.
    pub(crate) fn flushed(&self, number: u64) {
        let mut state = self.state.lock();
        state.flushed = number;
        state.rounds.retain(|round| round.number() > number);
        drop(state);
        self.changed.notify_all();
    }

    /// The last round whose flush is written.
    pub(crate) fn last_flushed(&self) -> u64 {
        self.state.lock().flushed
    }

    /// There is something else for lanes to find: for any of them, or for a certain one.
    pub(crate) fn wake(&self, any: bool) {
        // Locked, so that the wake cannot fall between a lane's check and its sleep.
        drop(self.state.lock());
        if any {
            self.changed.notify_one();
        } else {
            self.changed.notify_all();
        }
    }

    /// After [`RoundQueue::end`]: there will be others. No lane waits now.
    pub(crate) fn reopen(&self) {
        let mut state = self.state.lock();
        state.rounds.clear();
        state.ended = false;
    }

    /// No further round: lanes that wait end.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }
}
