//! A place where migrations wait: the engine's calls into the VM pass the stage. A call at a wanted stop
//! waits until it is released.

use std::collections::VecDeque;
use std::time::Duration;

use crate::stop::Stop;
use parking_lot::{Condvar, Mutex};

/// The wanted stops in their order, and the progress of the migration.
#[derive(Default)]
pub struct Stage {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    wanted: VecDeque<Stop>,
    /// The migration waits at the first wanted stop.
    reached: bool,
    /// A child process already waits at the second wanted stop.
    next_reached: bool,
    /// Number of releases so far.
    released: u32,
    /// The stage is open: no call waits any more.
    open: bool,
    /// The call that waits at this stop panics when it is released. A call at the stop before may be released
    /// with it.
    panics: Option<Stop>,
}

impl Stage {
    /// A stage at which a migration waits at these stops.
    pub fn new(wanted: impl IntoIterator<Item = Stop>) -> Self {
        let state = State { wanted: wanted.into_iter().collect(), ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Called when the migration passes `stop`. Blocks if it is the next wanted stop.
    pub fn at(&self, stop: Stop) {
        let mut state = self.state.lock();
        // Blocks while the other side still waits at the stop before.
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
            // `resume_unwind` prints no backtrace. A backtrace would load the debug information, and resident
            // memory would grow.
            std::panic::resume_unwind(Box::new(format!("told to panic at {}", stop.label())));
        }
    }

    /// Makes the call at `stop` panic when it is released.
    pub fn panic(&self, stop: Stop) {
        self.state.lock().panics = Some(stop);
    }

    /// Whether `stop` is wanted and the migration has not reached it yet.
    pub fn wants(&self, stop: Stop) -> bool {
        let state = self.state.lock();
        !state.open && state.wanted.contains(&stop)
    }

    /// Records that a child process waits at the next wanted stop.
    pub fn reached_elsewhere(&self) {
        let mut state = self.state.lock();
        if state.reached {
            state.next_reached = true;
        }
        state.reached = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the migration reaches the next stop. Returns false after `limit`, or if the stage was
    /// opened.
    pub fn wait_reached(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        let due = |state: &mut State| !state.reached && !state.open;
        self.changed.wait_while_for(&mut state, due, limit);
        state.reached
    }

    /// Waits until the migration was released `times` times in total.
    pub fn wait_released(&self, times: u32) {
        let mut state = self.state.lock();
        while state.released < times {
            self.changed.wait(&mut state);
        }
    }

    /// Releases the migration, which continues to the next stop.
    pub fn release(&self) {
        let mut state = self.state.lock();
        state.reached = std::mem::take(&mut state.next_reached);
        state.wanted.pop_front();
        state.released += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Releases all waiting calls; no later call waits.
    pub fn open(&self) {
        self.state.lock().open = true;
        self.changed.notify_all();
    }
}
