//! The gate of network cards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};

use super::epoch_gate::{EpochGate, GateStatistics, MaySay};
use super::outlet::{Exit, Leaving, Outlet, State, gate_of_outlet};
use super::waiting::Piece;
use crate::error::MigrationError;

/// Holds packets of a guest's network cards, in order. Each leaves at most once: what waits when the primary is lost is lost like any packet
/// of a network. While nothing is held, cards send by themselves.
pub struct PacketGate {
    outlet: Arc<Outlet<Cards>>,
    _leaving: Leaving<Cards>,
}

/// A queue of a card at the gate.
pub struct PacketLane {
    outlet: Arc<Outlet<Cards>>,
    index: usize,
}

type SendPacket = Box<dyn Fn(&[u8]) + Send + Sync>;

/// What a lane does.
struct Lane {
    send: SendPacket,
    /// There is room again.
    has_room: Box<dyn Fn() + Send + Sync>,
}

/// The cards by which packets leave.
struct Cards {
    lanes: RwLock<Vec<Lane>>,
    /// Nothing is held and nothing waits. Becomes false while the guest stands only.
    is_open: AtomicBool,
}

impl Exit for Cards {
    fn leave(&self, piece: &Piece) {
        if let Some(lane) = self.lanes.read().get(piece.lane) {
            (lane.send)(&piece.bytes);
        }
    }

    fn note(&self, state: &State) {
        self.is_open.store(state.waiting.is_open() && state.is_empty(), Ordering::Release);
    }

    /// Tells the lanes of room, if one waits for it.
    fn changed(&self, state: &Mutex<State>) {
        let mut state = state.lock();
        let is_due = state.is_awaited && state.waiting.has_room();
        state.is_awaited &= !is_due;
        drop(state);
        if is_due {
            self.lanes.read().iter().for_each(|lane| (lane.has_room)());
        }
    }
}

impl PacketGate {
    /// A gate that is open and has no lanes. At most `limit_bytes` wait, and one packet more.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub fn new(limit_bytes: u64) -> Result<Self, MigrationError> {
        let cards = Cards { lanes: RwLock::default(), is_open: AtomicBool::new(true) };
        let (outlet, _leaving) = Outlet::begin("packet gate", limit_bytes, cards)?;
        Ok(Self { outlet, _leaving })
    }

    /// Another queue. What leaves goes to `send`; `has_room` is called when there is room again after there was none.
    pub fn lane(
        &self,
        send: impl Fn(&[u8]) + Send + Sync + 'static,
        has_room: impl Fn() + Send + Sync + 'static,
    ) -> PacketLane {
        let mut lanes = self.outlet.exit.lanes.write();
        lanes.push(Lane { send: Box::new(send), has_room: Box::new(has_room) });
        PacketLane { outlet: Arc::clone(&self.outlet), index: lanes.len() - 1 }
    }
}

impl PacketLane {
    /// Whether the card sends by itself.
    pub fn is_open(&self) -> bool {
        self.outlet.exit.is_open.load(Ordering::Acquire)
    }

    /// The guest sends this, and the gate is not open. The packet leaves later, or never.
    pub fn put(&self, packet: &[u8]) {
        self.outlet.state.lock().waiting.push(self.index, packet, 0);
        self.outlet.changed.notify_all();
    }

    /// Whether the guest may send another packet. If not, a checkpoint is asked for, and the lane hears when there is room.
    pub fn has_room(&self) -> bool {
        let mut state = self.outlet.state.lock();
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

gate_of_outlet!(PacketGate {});

#[cfg(test)]
mod tests;
