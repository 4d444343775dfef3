//! A port without a device: sizes are told to it, and what is written is kept.

use std::io;
use std::sync::{Mutex, MutexGuard};

use crate::vfio::{MigState, MigrationFeatures, MigrationPort, PortError, PrecopyInfo, path};

/// All states, and no word on what can be read while it runs.
pub(super) struct Toy {
    inner: Mutex<Inner>,
}

struct Inner {
    state: MigState,
    /// Bytes of its state that were not read, and how many of them can be read while it runs.
    size: u64,
    readable: u64,
}

impl Default for Toy {
    fn default() -> Self {
        Self { inner: Mutex::new(Inner { state: MigState::Running, size: 0, readable: 0 }) }
    }
}

impl Toy {
    /// From now on it has so much to be read, and so much of it while it runs.
    pub(super) fn set_sizes(&self, size: u64, readable: u64) {
        let mut inner = self.lock();
        (inner.size, inner.readable) = (size, readable);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic")
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
        Ok(self.lock().state)
    }

    fn set_state(&self, to: MigState) -> Result<(), PortError> {
        let mut inner = self.lock();
        path(self.features(), inner.state, to).ok_or_else(|| refused("a change"))?;
        inner.state = to;
        Ok(())
    }

    fn reset(&self) -> Result<(), PortError> {
        self.lock().state = MigState::Running;
        Ok(())
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError> {
        let mut inner = self.lock();
        let left = if inner.state.runs() { inner.readable } else { inner.size };
        let read = left.min(to.len() as u64);
        (inner.size, inner.readable) = (inner.size - read, inner.readable.saturating_sub(read));
        Ok(read as usize)
    }

    fn write_data(&self, _: &[u8]) -> Result<(), PortError> {
        Err(refused("a write"))
    }

    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError> {
        Ok(None)
    }

    fn data_size(&self) -> Result<u64, PortError> {
        Ok(self.lock().size)
    }
}
