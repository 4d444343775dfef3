//! What goes to the standby over the main channel. While QEMU is asked about its disks, the last piece waits.
//!
//! A checkpoint is whole with its last byte, so a standby that lacks the last piece holds nothing. All the others go on meanwhile: QEMU
//! writes RAM with its main lock held, and answers nothing as long as nobody reads.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_transport::{Channel, TransportError};

/// The way to the standby.
pub(super) struct Outlet {
    standby: Arc<Channel>,
    state: Mutex<Outgoing>,
    /// Since when the standby takes nothing.
    waits: Arc<Mutex<Option<Instant>>>,
}

#[derive(Default)]
struct Outgoing {
    /// QEMU has not answered yet.
    is_asking: bool,
    /// The last piece, if it waits.
    last: Vec<u8>,
}

impl Outlet {
    pub(super) fn new(standby: Arc<Channel>) -> Self {
        Self { standby, state: Mutex::default(), waits: Arc::default() }
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
        let last = std::mem::take(&mut state.last);
        self.write(&last)
    }

    /// The next piece.
    pub(super) fn put(&self, piece: &[u8]) -> Result<(), TransportError> {
        let mut state = self.state.lock();
        if !state.is_asking {
            return self.write(piece);
        }
        let before = std::mem::replace(&mut state.last, piece.to_vec());
        self.write(&before)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), TransportError> {
        if bytes.is_empty() {
            return Ok(());
        }
        *self.waits.lock() = Some(Instant::now());
        let written = self.standby.write_all(bytes);
        *self.waits.lock() = None;
        written
    }
}
