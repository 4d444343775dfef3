//! A configuration space that a device changes while its driver reads it.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

/// What the driver reads, and how often it has changed.
pub(crate) struct ConfigurationSpace {
    bytes: Mutex<Vec<u8>>,
    generation: AtomicU32,
}

impl ConfigurationSpace {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Mutex::new(bytes), generation: AtomicU32::new(0) }
    }

    /// Fills `to` from byte `at` on; there is nothing but zeros behind its end.
    pub(super) fn read(&self, at: u64, to: &mut [u8]) {
        let bytes = self.bytes.lock();
        let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        let length = from.len().min(to.len());
        to.fill(0);
        to[..length].copy_from_slice(&from[..length]);
    }

    /// A driver that sees another generation than before reads everything again.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Whether it is just this.
    pub(super) fn is(&self, bytes: &[u8]) -> bool {
        *self.bytes.lock() == bytes
    }

    /// Changes it. The driver has to be told, unless it has asked for the change.
    pub(crate) fn change(&self, change: impl FnOnce(&mut [u8])) {
        let mut bytes = self.bytes.lock();
        change(&mut bytes);
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}
