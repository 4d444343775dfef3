//! The queue of frames that faults wait for. Faults of the same frame wait together.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::guest::{Fault, Guest};

/// The queue of frames that faults wait for.
#[derive(Default)]
pub(crate) struct Fetches {
    state: Mutex<State>,
    added: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Range<u64>>,
    waiting: HashMap<(u64, u64), Vec<Waiter>>,
    is_closed: bool,
}

/// A guest that needs a frame.
pub(crate) struct Waiter {
    pub(crate) guest: Arc<Guest>,
    /// `None`: only the rest of the frame is placed.
    pub(crate) fault: Option<Fault>,
}

impl Fetches {
    /// Lets `fault` wait for the content of `span`, which is then placed whole.
    pub(crate) fn add(&self, span: Range<u64>, guest: &Arc<Guest>, fault: Option<Fault>) {
        let mut state = self.state.lock();
        let waiters = state.waiting.entry((span.start, span.end)).or_default();
        let is_new = waiters.is_empty();
        waiters.push(Waiter { guest: Arc::clone(guest), fault });
        if is_new {
            state.queue.push_back(span);
            self.added.notify_one();
        }
    }

    /// Ends all waits for the next frame.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.added.notify_all();
    }

    /// The next frame to read; waits for it. `None` if the queue is closed.
    pub(crate) fn next(&self) -> Option<Range<u64>> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(span) = state.queue.pop_front() {
                return Some(span);
            }
            self.added.wait(&mut state);
        }
    }

    /// The faults that wait for `span`. A later fault of it is queued again.
    pub(crate) fn take(&self, span: &Range<u64>) -> Vec<Waiter> {
        self.state.lock().waiting.remove(&(span.start, span.end)).unwrap_or_default()
    }
}
