//! Writes the main channel to the standby. The last piece is held back while QEMU is asked about its disks.
//!
//! A checkpoint is complete with its last byte, so a standby that lacks the last piece cannot hold it. All other
//! pieces are written meanwhile: QEMU writes RAM with its main lock held, and cannot answer while its stream is not
//! read.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_transport::{Channel, Piece, TransportError};

/// The main channel towards the standby.
pub(super) struct Outlet {
    standby: Arc<Channel>,
    state: Mutex<Outgoing>,
    /// Time since which the standby has not read.
    waits: Arc<Mutex<Option<Instant>>>,
}

struct Outgoing {
    /// The check of the disks has begun, and QEMU has not answered yet.
    is_asking: bool,
    /// The piece that is held back; empty if none is.
    last: Piece,
}

impl Outlet {
    /// Creates an outlet for pieces of `piece_bytes` from `qemu`.
    pub(super) fn new(qemu: &Channel, standby: Arc<Channel>, piece_bytes: usize) -> Self {
        let last = Piece::between(qemu, &standby, piece_bytes);
        Self { standby, state: Mutex::new(Outgoing { is_asking: false, last }), waits: Arc::default() }
    }

    pub(super) fn waits(&self) -> Arc<Mutex<Option<Instant>>> {
        Arc::clone(&self.waits)
    }

    /// Holds the last piece back from now on.
    pub(super) fn ask(&self) {
        self.state.lock().is_asking = true;
    }

    /// Writes the piece that was held back, after QEMU has answered.
    pub(super) fn answered(&self) -> Result<(), TransportError> {
        let mut state = self.state.lock();
        state.is_asking = false;
        self.write(&mut state.last)
    }

    /// Takes the next piece. `piece` is empty afterwards.
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
