//! Common part of all gates: waiting pieces, and a thread that sends released pieces one after the other.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna::error::MigrationError;
use sterna::internals::threads::{self, ThreadRole};

use super::waiting::{LOOK, Piece, Waiting};

/// The sink of a gate's released pieces.
pub(super) trait Exit: Send + Sync + 'static {
    /// Sends one piece. It may block.
    fn leave(&self, piece: &Piece);
    /// Called under the state's lock after every change, before another thread can see it.
    fn note(&self, state: &State) {
        let _ = state;
    }
    /// Called after every change, without the lock.
    fn changed(&self, state: &Mutex<State>) {
        let _ = state;
    }
}

/// State of a gate.
pub(super) struct State {
    pub(super) waiting: Waiting,
    /// The piece that is being sent. Until that is complete, the piece counts as unsent, and later pieces wait.
    pub(super) leaving: Option<Arc<Piece>>,
    /// Number of bytes that have left.
    pub(super) position: u64,
    /// Whether a writer waits for room.
    pub(super) is_awaited: bool,
    has_ended: bool,
}

/// A gate's pieces, and their sink.
pub(super) struct Outlet<E> {
    pub(super) exit: E,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

/// The thread that sends pieces. It ends when this is dropped; pieces that may not leave by then are dropped.
pub(super) struct Leaving<E: Exit> {
    outlet: Arc<Outlet<E>>,
    thread: Option<JoinHandle<()>>,
}

impl State {
    /// Whether no piece waits or is being sent.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.leaving.is_none()
    }
}

impl<E: Exit> Outlet<E> {
    /// Creates an open outlet, which sends pieces through `exit`. `name` is the thread's name.
    ///
    /// # Errors
    /// The host cannot create a thread.
    pub(super) fn begin(
        role: ThreadRole,
        limit_bytes: u64,
        exit: E,
    ) -> Result<(Arc<Self>, Leaving<E>), MigrationError> {
        let waiting = Waiting::new(limit_bytes);
        let state = State { waiting, leaving: None, position: 0, is_awaited: false, has_ended: false };
        let outlet = Arc::new(Self { exit, state: Mutex::new(state), changed: Condvar::new() });
        let lets_out = Arc::clone(&outlet);
        let thread = Some(threads::spawn(role, move || lets_out.let_out(), |_| {})?);
        Ok((Arc::clone(&outlet), Leaving { outlet, thread }))
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Waiting)) {
        let mut state = self.state.lock();
        change(&mut state.waiting);
        self.exit.note(&state);
        drop(state);
        self.changed.notify_all();
        self.exit.changed(&self.state);
    }

    /// Waits, at most `most`, until `is` returns true. Returns its last result.
    pub(super) fn wait_until(&self, most: Duration, is: impl Fn(&State) -> bool) -> bool {
        let until = Instant::now() + most;
        let mut state = self.state.lock();
        while !is(&state) {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return is(&state);
            }
        }
        true
    }

    fn let_out(&self) {
        while let Some(piece) = self.next() {
            self.exit.leave(&piece);
            let mut state = self.state.lock();
            state.leaving = None;
            state.position += piece.bytes.len() as u64;
            state.waiting.has_left(piece.came);
            self.exit.note(&state);
            drop(state);
            self.changed.notify_all();
            self.exit.changed(&self.state);
        }
    }

    /// Waits for a piece that may leave; `None` after the end.
    fn next(&self) -> Option<Arc<Piece>> {
        let mut state = self.state.lock();
        loop {
            if let Some(piece) = state.waiting.pop().map(Arc::new) {
                state.leaving = Some(Arc::clone(&piece));
                self.changed.notify_all();
                return Some(piece);
            }
            if state.has_ended {
                return None;
            }
            match state.waiting.is_empty() {
                false => drop(self.changed.wait_for(&mut state, LOOK)),
                true => self.changed.wait(&mut state),
            }
        }
    }
}

impl<E: Exit> Drop for Leaving<E> {
    fn drop(&mut self) {
        self.outlet.state.lock().has_ended = true;
        self.outlet.changed.notify_all();
        // A panic of the thread is ignored: the thread has ended in either case.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Implements `EpochGate` for a type whose field `outlet` is an [`Outlet`]. Further methods may follow.
macro_rules! gate_of_outlet {
    ($gate:ty { $($further:item)* }) => {
        impl EpochGate for $gate {
            fn close(&self, may_say: MaySay) {
                self.outlet.change(|waiting| waiting.close(may_say));
            }
            fn end_epoch(&self, epoch: u64) {
                self.outlet.change(|waiting| waiting.end_epoch(epoch));
            }
            fn release(&self, epoch: u64) {
                self.outlet.change(|waiting| waiting.release(epoch));
            }
            fn let_out(&self, most: std::time::Duration) {
                self.outlet.wait_until(most, |state| state.leaving.is_none() && !state.waiting.has_released());
            }
            fn open(&self) {
                self.outlet.change(crate::primary::gate::waiting::Waiting::open);
            }
            fn drop_output(&self) {
                self.outlet.change(crate::primary::gate::waiting::Waiting::clear);
            }
            fn ask_when_full(&self, ask: sterna::device_stream::AskCheckpoint) {
                self.outlet.change(|waiting| waiting.ask_when_full(ask));
            }
            fn waits_since(&self) -> Option<std::time::Instant> {
                self.outlet.state.lock().waiting.since()
            }
            fn statistics(&self) -> GateStatistics {
                self.outlet.state.lock().waiting.statistics()
            }
            $($further)*
        }
    };
}
pub(super) use gate_of_outlet;
