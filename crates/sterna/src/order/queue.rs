//! Hands passes from the control thread to the lanes, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Pass;
use parking_lot::{Condvar, Mutex};

/// The passes that lanes work on: at most the one that some still send and the next.
pub struct PassQueue {
    state: Mutex<State>,
    changed: Condvar,
}

/// What a lane does next.
pub enum Next<T> {
    /// A pass.
    Pass(Arc<Pass>),
    /// Something that is no page.
    Other(T),
}

#[derive(Default)]
struct State {
    passes: VecDeque<Arc<Pass>>,
    /// The last pass whose flush stands in the main channel.
    flushed: u64,
    ended: bool,
}

impl Default for PassQueue {
    fn default() -> Self {
        Self { state: Mutex::new(State::default()), changed: Condvar::new() }
    }
}

impl PassQueue {
    /// Lets lanes begin `pass`.
    pub fn publish(&self, pass: Arc<Pass>) {
        self.state.lock().passes.push_back(pass);
        self.changed.notify_all();
    }

    /// Waits for the pass after pass number `after`, or for what `other` finds; `None` when there will be no pass.
    /// With `after_flush` it also waits until the flush of pass `after` is written. Whoever gives `other` something
    /// to find calls [`PassQueue::wake`].
    pub fn next<T>(
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
            if let Some(pass) = state.passes.iter().find(|p| p.number() > after).filter(|_| ready) {
                return Some(Next::Pass(Arc::clone(pass)));
            }
            // Behind the pass: lanes look for it while they send pages, too.
            if let Some(found) = other() {
                return Some(Next::Other(found));
            }
            self.changed.wait(&mut state);
        }
    }

    /// All lanes are through with pass `number` and its flush is written.
    pub fn flushed(&self, number: u64) {
        let mut state = self.state.lock();
        state.flushed = number;
        state.passes.retain(|pass| pass.number() > number);
        drop(state);
        self.changed.notify_all();
    }

    /// There is something else for lanes to find: for any of them, or for a certain one.
    pub fn wake(&self, any: bool) {
        // Taken, so that it cannot fall between a look and its sleep.
        drop(self.state.lock());
        if any {
            self.changed.notify_one();
        } else {
            self.changed.notify_all();
        }
    }

    /// No further pass: lanes that wait go home.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }
}
