//! A flow that may be libvirt's control connection: answers its end's keep-alive messages while the other relay is away.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna_transport::{Channel, TransportError};

use crate::phase::{Control, PONG};
use crate::session::{Piece, Role};

/// Shared by the two threads of a flow.
pub(super) struct ControlFlow {
    /// It is another stream. Its bytes are not looked at any more.
    is_off: AtomicBool,
    state: Mutex<State>,
}

struct State {
    control: Control,
    /// Answers that wait for the end of a packet.
    owed: usize,
}

impl ControlFlow {
    pub(super) fn new(role: Role) -> Self {
        let state = State { control: Control::new(role == Role::Dialer), owed: 0 };
        Self { is_off: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Whether its bytes pass as they are.
    pub(super) fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Relaxed)
    }

    /// Takes bytes of this relay's end, and answers its keep-alive messages if the other relay `is_away`. Returns the bytes for the
    /// other relay.
    pub(super) fn taken(
        &self,
        channel: &Channel,
        piece: Piece,
        is_away: impl FnOnce() -> bool,
    ) -> Option<Piece> {
        if self.is_off() {
            return Some(piece);
        }
        let mut state = self.state.lock();
        let mut pass = Vec::new();
        let pings = state.control.taken(&piece, is_away(), &mut pass);
        state.owed += pings;
        // An end that does not read is found by the next write of its bytes.
        let _ = state.answer(channel);
        self.look(&state);
        (!pass.is_empty()).then(|| Piece::from(pass))
    }

    /// The bytes for the other relay that were kept, at the end of this relay's end.
    pub(super) fn rest(&self) -> Option<Piece> {
        let rest = self.state.lock().control.rest_of_taken();
        (!rest.is_empty()).then(|| Piece::from(rest))
    }

    /// Writes bytes of the other relay to this relay's end, in whole packets.
    pub(super) fn write(&self, channel: &Channel, bytes: &[u8]) -> Result<(), TransportError> {
        if self.is_off() {
            return channel.write_all(bytes);
        }
        let mut state = self.state.lock();
        let mut pass = Vec::new();
        state.control.arrived(bytes, &mut pass);
        self.look(&state);
        channel.write_all(&pass)?;
        state.answer(channel)
    }

    /// Writes the bytes that were kept, before the other relay's end of the direction.
    pub(super) fn write_rest(&self, channel: &Channel) {
        let rest = self.state.lock().control.rest_of_arrived();
        // The direction ends also if its last bytes cannot be written.
        let _ = channel.write_all(&rest);
    }

    fn look(&self, state: &State) {
        if state.control.is_off() {
            self.is_off.store(true, Ordering::Relaxed);
        }
    }
}

impl State {
    /// Writes the answers that are owed, if that is possible now.
    fn answer(&mut self, channel: &Channel) -> Result<(), TransportError> {
        if self.owed == 0 || !self.control.may_answer() {
            return Ok(());
        }
        channel.write_all(&PONG.repeat(std::mem::take(&mut self.owed)))
    }
}
