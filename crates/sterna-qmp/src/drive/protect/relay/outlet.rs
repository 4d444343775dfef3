//! What goes to the standby over the main channel. While QEMU is asked about its disks, the last piece waits.
//!
//! A checkpoint is whole with its last byte, so a standby that lacks the last piece holds nothing. All the others go on meanwhile: QEMU
//! writes RAM with its main lock held, and answers nothing as long as nobody reads.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_transport::{Channel, Piece, TransportError};

/// The way to the standby.
pub(super) struct Outlet {
    standby: Arc<Channel>,
    state: Mutex<Outgoing>,
    /// Since when the standby takes nothing.
    waits: Arc<Mutex<Option<Instant>>>,
}

struct Outgoing {
    /// QEMU has not answered yet.
    is_asking: bool,
    /// The last piece, if it waits; else empty.
    last: Piece,
}

impl Outlet {
    /// For pieces of `piece_bytes` that come from `qemu`.
    pub(super) fn new(qemu: &Channel, standby: Arc<Channel>, piece_bytes: usize) -> Self {
        let last = Piece::between(qemu, &standby, piece_bytes);
        Self { standby, state: Mutex::new(Outgoing { is_asking: false, last }), waits: Arc::default() }
    }

    pub(super) fn waits(&self) -> Arc<Mutex<Option<Instant>>> {
        Arc::clone(&self.waits)
    }

    /// From now on the last piece waits.
    pub(super) fn ask(&self) {
        self.state.lock().is_asking = true;
    }

    /// QEMU has answered, and the last piece may go.
    pub(super) fn answered(&self) -> Result<(), TransportError> {
        let mut state = self.state.lock();
        state.is_asking = false;
        self.write(&mut state.last)
    }

    /// The next piece, which is empty afterwards.
    pub(super) fn put(&self, piece: &mut Piece) -> Result<(), TransportError> {
        let mut state = self.state.lock();
        if state.is_asking {
            std::mem::swap(&mut state.last, piece);
        }
        self.write(piece)
    }

    fn write(&self, piece: &mut Piece) -> Result<(), TransportError> {
        if piece.is_empty() {
            return Ok(());
        }
        *self.waits.lock() = Some(Instant::now());
        let written = self.standby.write_piece(piece);
        *self.waits.lock() = None;
        written
    }
}
