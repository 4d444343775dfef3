//! The gate of network cards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::epoch_gate::{EpochGate, GateStatistics, MaySay};
use super::waiting::{LOOK, Piece, Waiting};
use crate::device_stream::AskCheckpoint;
use crate::error::MigrationError;
use crate::threads;

/// Holds packets of a guest's network cards, in order. Each leaves at most once: what waits when the primary is lost is lost like any packet
/// of a network. While nothing is held, cards send by themselves.
pub struct PacketGate {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A queue of a card at the gate.
pub struct PacketLane {
    shared: Arc<Shared>,
    index: usize,
}

type SendPacket = Box<dyn Fn(&[u8]) + Send + Sync>;

/// What a lane does.
struct Lane {
    send: SendPacket,
    /// There is room again.
    has_room: Box<dyn Fn() + Send + Sync>,
}

struct Shared {
    lanes: RwLock<Vec<Lane>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Nothing is held and nothing waits. Becomes false while the guest stands only.
    is_open: AtomicBool,
}

struct State {
    waiting: Waiting,
    /// A packet is being sent: later ones come after it.
    is_leaving: bool,
    /// Somebody waits for room.
    is_awaited: bool,
    has_ended: bool,
}

impl PacketGate {
    /// A gate that is open and has no lanes. At most `limit_bytes` wait, and one packet more.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub fn new(limit_bytes: u64) -> Result<Self, MigrationError> {
        let waiting = Waiting::new(limit_bytes);
        let state = State { waiting, is_leaving: false, is_awaited: false, has_ended: false };
        let shared = Arc::new(Shared {
            lanes: RwLock::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_open: AtomicBool::new(true),
        });
        let lets_out = Arc::clone(&shared);
        let thread = threads::spawn("packet gate", move || lets_out.let_out(), |_| {})?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Another queue. What leaves goes to `send`; `has_room` is called when there is room again after there was none.
    pub fn lane(
        &self,
        send: impl Fn(&[u8]) + Send + Sync + 'static,
        has_room: impl Fn() + Send + Sync + 'static,
    ) -> PacketLane {
        let mut lanes = self.shared.lanes.write();
        lanes.push(Lane { send: Box::new(send), has_room: Box::new(has_room) });
        PacketLane { shared: Arc::clone(&self.shared), index: lanes.len() - 1 }
    }
}

impl PacketLane {
    /// Whether the card sends by itself.
    pub fn is_open(&self) -> bool {
        self.shared.is_open.load(Ordering::Acquire)
    }

    /// The guest sends this, and the gate is not open. The packet leaves later, or never.
    pub fn put(&self, packet: &[u8]) {
        self.shared.state.lock().waiting.push(self.index, packet, 0);
        self.shared.changed.notify_all();
    }

    /// Whether the guest may send another packet. If not, a checkpoint is asked for, and the lane hears when there is room.
    pub fn has_room(&self) -> bool {
        let mut state = self.shared.state.lock();
        if state.waiting.has_room() {
            return true;
        }
        state.is_awaited = true;
        let ask = state.waiting.ask();
        drop(state);
        if let Some(ask) = ask {
            ask();
        }
        false
    }
}

impl EpochGate for PacketGate {
    fn close(&self, may_say: MaySay) {
        self.shared.change(|waiting| waiting.close(may_say));
    }

    fn end_epoch(&self, epoch: u64) {
        self.shared.change(|waiting| waiting.end_epoch(epoch));
    }

    fn release(&self, epoch: u64) {
        self.shared.change(|waiting| waiting.release(epoch));
    }

    fn let_out(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut state = self.shared.state.lock();
        while state.is_leaving || state.waiting.has_released() {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    fn open(&self) {
        self.shared.change(Waiting::open);
    }

    fn drop_output(&self) {
        self.shared.change(Waiting::clear);
    }

    fn ask_when_full(&self, ask: AskCheckpoint) {
        self.shared.change(|waiting| waiting.ask_when_full(ask));
    }

    fn waits_since(&self) -> Option<Instant> {
        self.shared.state.lock().waiting.since()
    }

    fn statistics(&self) -> GateStatistics {
        self.shared.state.lock().waiting.statistics()
    }
}

impl Drop for PacketGate {
    fn drop(&mut self) {
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_all();
        // One that panicked has ended, too.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        let mut state = self.state.lock();
        change(&mut state.waiting);
        self.note(&state);
        drop(state);
        self.changed.notify_all();
        self.tell_of_room();
    }

    fn note(&self, state: &State) {
        let waiting = &state.waiting;
        let is_open = waiting.is_open() && waiting.is_empty() && !state.is_leaving;
        self.is_open.store(is_open, Ordering::Release);
    }

    fn tell_of_room(&self) {
        let mut state = self.state.lock();
        let is_due = state.is_awaited && state.waiting.has_room();
        state.is_awaited &= !is_due;
        drop(state);
        if is_due {
            self.lanes.read().iter().for_each(|lane| (lane.has_room)());
        }
    }

    fn let_out(&self) {
        while let Some(piece) = self.next() {
            if let Some(lane) = self.lanes.read().get(piece.lane) {
                (lane.send)(&piece.bytes);
            }
            let mut state = self.state.lock();
            state.is_leaving = false;
            state.waiting.has_left(piece.came);
            self.note(&state);
            drop(state);
            self.changed.notify_all();
            self.tell_of_room();
        }
    }

    /// Waits for a packet that may leave; none when all is over.
    fn next(&self) -> Option<Piece> {
        let mut state = self.state.lock();
        loop {
            if let Some(piece) = state.waiting.pop() {
                state.is_leaving = true;
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

#[cfg(test)]
mod tests;
