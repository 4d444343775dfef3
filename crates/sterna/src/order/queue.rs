//! Passes rounds from the control thread to the lanes, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use super::RoundPages;
use parking_lot::{Condvar, Mutex};

/// The rounds that lanes work on: at most the round that some lanes still send, and the next one.
pub(crate) struct RoundQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

/// The next task of a lane.
pub(crate) enum Next<T> {
    /// Send the pages of this round.
    Round(Arc<RoundPages>),
    /// Send data other than pages, for example a chunk of a device stream.
    Other(T),
}

#[derive(Default)]
struct QueueState {
    rounds: VecDeque<Arc<RoundPages>>,
    /// Number of the last round whose flush is written.
    flushed: u64,
    ended: bool,
}

impl Default for RoundQueue {
    fn default() -> Self {
        Self { state: Mutex::new(QueueState::default()), changed: Condvar::new() }
    }
}

impl RoundQueue {
    /// Publishes `round`, so that lanes can begin it.
    pub(crate) fn publish(&self, round: Arc<RoundPages>) {
        self.state.lock().rounds.push_back(round);
        self.changed.notify_all();
    }

    /// Waits for the round after number `after`, or for a result of `other`. `None`: no further round follows.
    ///
    /// With `after_flush`, a round is returned only after the flush of round `after` is written. Code that
    /// gives `other` a new result must call [`RoundQueue::wake`].
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
            // Pages have priority, because lanes also call this while they send pages.
            if let Some(found) = other() {
                return Some(Next::Other(found));
            }
            self.changed.wait(&mut state);
        }
    }

    /// Records that all lanes have finished round `number` and that its flush is written.
    pub(crate) fn flushed(&self, number: u64) {
        let mut state = self.state.lock();
        state.flushed = number;
        state.rounds.retain(|round| round.number() > number);
        drop(state);
        self.changed.notify_all();
    }

    /// Number of the last round whose flush is written.
    #[cfg(feature = "postcopy")]
    pub(crate) fn last_flushed(&self) -> u64 {
        self.state.lock().flushed
    }

    /// Wakes lanes because `other` has a new result. `any`: every lane can take it, otherwise only a certain
    /// one.
    pub(crate) fn wake(&self, any: bool) {
        // Locked, so that the wake cannot happen between a lane's check and its wait.
        drop(self.state.lock());
        if any {
            self.changed.notify_one();
        } else {
            self.changed.notify_all();
        }
    }

    /// Allows rounds again after [`RoundQueue::end`]. Call this only while no lane waits.
    #[cfg(feature = "reconnect")]
    pub(crate) fn reopen(&self) {
        let mut state = self.state.lock();
        state.rounds.clear();
        state.ended = false;
    }

    /// Ends the queue: lanes that wait return.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }
}
