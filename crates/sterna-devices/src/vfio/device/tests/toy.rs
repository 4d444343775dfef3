//! A port without a device. Tests set its sizes, and it records the written bytes.

use std::io;

use crate::vfio::{MigState, MigrationFeatures, MigrationPort, PortError, PrecopyInfo, path};
use parking_lot::Mutex;

/// A port with all states. It does not report what can be read while it runs.
pub(super) struct Toy {
    /// Refuses any state other than [`Toy::WHOLE`] and enters ERROR then.
    checks: bool,
    inner: Mutex<Inner>,
}

struct Inner {
    state: MigState,
    /// Unread bytes of its state, and the part that can be read while it runs.
    size: u64,
    readable: u64,
    can_reset: bool,
    resets: usize,
    /// Bytes written in the present or last RESUMING state.
    written: Vec<u8>,
}

impl Default for Toy {
    fn default() -> Self {
        let inner = Inner {
            state: MigState::Running,
            size: 0,
            readable: 0,
            can_reset: true,
            resets: 0,
            written: Vec::new(),
        };
        Self { checks: false, inner: Mutex::new(inner) }
    }
}

impl Toy {
    /// The only valid state.
    pub(super) const WHOLE: &[u8] = b"the whole state";

    /// A toy that detects an incomplete state.
    pub(super) fn that_checks() -> Self {
        Self { checks: true, ..Self::default() }
    }

    /// Sets the number of unread bytes, and how many can be read while running.
    pub(super) fn set_sizes(&self, size: u64, readable: u64) {
        let mut inner = self.inner.lock();
        (inner.size, inner.readable) = (size, readable);
    }

    /// Sets whether resets succeed.
    pub(super) fn set_can_reset(&self, can: bool) {
        self.inner.lock().can_reset = can;
    }

    /// Number of resets so far.
    pub(super) fn resets(&self) -> usize {
        self.inner.lock().resets
    }

    /// Bytes written in the last load.
    pub(super) fn loaded(&self) -> Vec<u8> {
        self.inner.lock().written.clone()
    }
}

fn refused(request: &'static str) -> PortError {
    PortError::Refused { request, source: io::ErrorKind::InvalidInput.into() }
}

impl MigrationPort for Toy {
    fn name(&self) -> String {
        "toy".to_owned()
    }

    fn features(&self) -> MigrationFeatures {
        MigrationFeatures { p2p: true, pre_copy: true }
    }

    fn state(&self) -> Result<MigState, PortError> {
        Ok(self.inner.lock().state)
    }

    fn set_state(&self, to: MigState) -> Result<(), PortError> {
        let mut inner = self.inner.lock();
        for next in path(self.features(), inner.state, to).ok_or_else(|| refused("a change"))? {
            if next == MigState::Resuming {
                inner.written.clear();
            }
            if inner.state == MigState::Resuming && self.checks && inner.written != Self::WHOLE {
                inner.state = MigState::Error;
                return Err(refused("a state"));
            }
            inner.state = next;
        }
        Ok(())
    }

    fn reset(&self) -> Result<(), PortError> {
        let mut inner = self.inner.lock();
        if !inner.can_reset {
            return Err(refused("a reset"));
        }
        inner.state = MigState::Running;
        inner.resets += 1;
        Ok(())
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError> {
        let mut inner = self.inner.lock();
        let left = if inner.state.runs() { inner.readable } else { inner.size };
        let read = left.min(to.len() as u64);
        (inner.size, inner.readable) = (inner.size - read, inner.readable.saturating_sub(read));
        Ok(read as usize)
    }

    fn write_data(&self, from: &[u8]) -> Result<(), PortError> {
        let mut inner = self.inner.lock();
        if inner.state != MigState::Resuming {
            return Err(refused("a write"));
        }
        inner.written.extend(from);
        Ok(())
    }

    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError> {
        Ok(None)
    }

    fn data_size(&self) -> Result<u64, PortError> {
        Ok(self.inner.lock().size)
    }
}
