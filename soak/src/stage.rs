//! Where a migration stands still: the engine's calls into the VM pass here, and one that is a wanted
//! stop waits until it is let go.

use std::collections::VecDeque;
use std::time::Duration;

use crate::stop::Stop;
use parking_lot::{Condvar, Mutex};

/// Knows which stops are wanted, in their order.
#[derive(Default)]
pub struct Stage {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    wanted: VecDeque<Stop>,
    /// The migration stands at the first of them.
    reached: bool,
    /// A child stands at the second of them already.
    next_reached: bool,
    /// How often it was let go.
    released: u32,
    /// Nobody stops any more.
    open: bool,
    /// Whoever is let go from there panics. Another may be let go with it, from the stop before.
    panics: Option<Stop>,
}

impl Stage {
    /// A stage at which a migration stops in these places.
    pub fn new(wanted: impl IntoIterator<Item = Stop>) -> Self {
        let state = State { wanted: wanted.into_iter().collect(), ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The migration passes `stop`: stays here if it is the one that is wanted next.
    pub fn at(&self, stop: Stop) {
        let mut state = self.state.lock();
        // The other side still stands at the stop before.
        while state.reached && !state.open && state.wanted.get(1) == Some(&stop) {
            self.changed.wait(&mut state);
        }
        if state.open || state.reached || state.wanted.front() != Some(&stop) {
            return;
        }
        state.reached = true;
        self.changed.notify_all();
        while state.reached && !state.open {
            self.changed.wait(&mut state);
        }
        let panics = state.panics.take_if(|at| *at == stop).is_some();
        drop(state);
        if panics {
            // Not by `panic!`: to print a backtrace, the process would load its debug information, and its resident memory
            // would grow by that.
            std::panic::resume_unwind(Box::new(format!("told to panic at {}", stop.label())));
        }
    }

    /// Whoever stands at `stop` panics when it is let go.
    pub fn panic(&self, stop: Stop) {
        self.state.lock().panics = Some(stop);
    }

    /// Whether the migration has not yet come to `stop`, and shall.
    pub fn wants(&self, stop: Stop) -> bool {
        let state = self.state.lock();
        !state.open && state.wanted.contains(&stop)
    }

    /// A child process says that it stands at the stop that is wanted next.
    pub fn reached_elsewhere(&self) {
        let mut state = self.state.lock();
        if state.reached {
            state.next_reached = true;
        }
        state.reached = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the migration stands at the next stop; false if that takes longer than `limit`, or the
    /// stage was opened.
    pub fn wait_reached(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        let due = |state: &mut State| !state.reached && !state.open;
        self.changed.wait_while_for(&mut state, due, limit);
        state.reached
    }

    /// Waits until the migration was let go `times` times in all.
    pub fn wait_released(&self, times: u32) {
        let mut state = self.state.lock();
        while state.released < times {
            self.changed.wait(&mut state);
        }
    }

    /// Lets the migration go on to the next stop.
    pub fn release(&self) {
        let mut state = self.state.lock();
        state.reached = std::mem::take(&mut state.next_reached);
        state.wanted.pop_front();
        state.released += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Lets everybody go, for good.
    pub fn open(&self) {
        self.state.lock().open = true;
        self.changed.notify_all();
    }
}
