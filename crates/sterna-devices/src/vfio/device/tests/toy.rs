//! A port without a device: sizes are told to it, and what is written is kept.

use std::io;

use crate::vfio::{MigState, MigrationFeatures, MigrationPort, PortError, PrecopyInfo, path};
use parking_lot::Mutex;

/// All states, and no word on what can be read while it runs.
pub(super) struct Toy {
    /// A state other than [`Toy::WHOLE`] is refused, and the device is in ERROR then.
    checks: bool,
    inner: Mutex<Inner>,
}

struct Inner {
    state: MigState,
    /// Bytes of its state that were not read, and how many of them can be read while it runs.
    size: u64,
    readable: u64,
    can_reset: bool,
    resets: usize,
    /// What came in the present RESUMING, or in the last.
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
    /// A whole state.
    pub(super) const WHOLE: &[u8] = b"the whole state";

    /// One that knows a whole state from half of one.
    pub(super) fn that_checks() -> Self {
        Self { checks: true, ..Self::default() }
    }

    /// From now on it has so much to be read, and so much of it while it runs.
    pub(super) fn set_sizes(&self, size: u64, readable: u64) {
        let mut inner = self.inner.lock();
        (inner.size, inner.readable) = (size, readable);
    }

    /// Whether resets do anything from now on.
    pub(super) fn set_can_reset(&self, can: bool) {
        self.inner.lock().can_reset = can;
    }

    /// How often it was reset.
    pub(super) fn resets(&self) -> usize {
        self.inner.lock().resets
    }

    /// What was written in one session.
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
