//! The gate of network cards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use sterna::error::MigrationError;
use sterna::internals::threads::ThreadRole;

use super::epoch_gate::{EpochGate, GateStatistics, MaySay};
use super::outlet::{Exit, Leaving, Outlet, State, gate_of_outlet};
use super::waiting::Piece;

/// Keeps packets of a guest's network cards, in order, until they are released. Each leaves at most once. Packets
/// that wait when the primary fails are lost, as on any network. While the gate is open and empty, cards send by
/// themselves.
pub struct PacketGate {
    outlet: Arc<Outlet<Cards>>,
    _leaving: Leaving<Cards>,
}

/// The gate's interface for one queue of a card.
pub struct PacketLane {
    outlet: Arc<Outlet<Cards>>,
    index: usize,
}

type SendPacket = Box<dyn Fn(&[u8]) + Send + Sync>;

/// Callbacks of a lane.
struct Lane {
    send: SendPacket,
    /// Called when there is room again.
    has_room: Box<dyn Fn() + Send + Sync>,
}

/// The cards that send released packets.
struct Cards {
    lanes: RwLock<Vec<Lane>>,
    /// Whether the gate is open and empty. It becomes false only while the guest is paused.
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

    /// Informs the lanes of room, if one waits for it.
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
    /// Creates an open gate without lanes. At most `limit_bytes` and one more packet wait.
    ///
    /// # Errors
    /// The host cannot create a thread.
    pub fn new(limit_bytes: u64) -> Result<Self, MigrationError> {
        let cards = Cards { lanes: RwLock::default(), is_open: AtomicBool::new(true) };
        let (outlet, _leaving) = Outlet::begin(ThreadRole::PacketGate, limit_bytes, cards)?;
        Ok(Self { outlet, _leaving })
    }

    /// Adds a queue. Released packets go to `send`. `has_room` is called when there is room again after the gate was
    /// full.
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
    /// Whether the card sends packets by itself.
    pub fn is_open(&self) -> bool {
        self.outlet.exit.is_open.load(Ordering::Acquire)
    }

    /// Adds a packet of the guest. Call it only while the gate is not open. The packet leaves later, or never.
    pub fn put(&self, packet: &[u8]) {
        self.outlet.state.lock().waiting.push(self.index, packet, 0);
        self.outlet.changed.notify_all();
    }

    /// Whether the guest may send another packet. If not, the gate requests a checkpoint, and calls the lane's
    /// `has_room` when there is room.
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
