//! A configuration space that the device can change while its driver reads it.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

/// The bytes of the configuration space, and the number of its changes.
pub(crate) struct ConfigurationSpace {
    bytes: Mutex<Vec<u8>>,
    generation: AtomicU32,
}

impl ConfigurationSpace {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Mutex::new(bytes), generation: AtomicU32::new(0) }
    }

    /// Fills `to` from byte `at` on. Bytes after the end read as zeros.
    pub(super) fn read(&self, at: u64, to: &mut [u8]) {
        let bytes = self.bytes.lock();
        let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        let length = from.len().min(to.len());
        to.fill(0);
        to[..length].copy_from_slice(&from[..length]);
    }

    /// Number of changes. A driver that sees another number than before reads everything again.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Whether the content equals `bytes`.
    pub(super) fn is(&self, bytes: &[u8]) -> bool {
        *self.bytes.lock() == bytes
    }

    /// Changes the content. The driver must be notified, unless it has requested the change.
    pub(crate) fn change(&self, change: impl FnOnce(&mut [u8])) {
        let mut bytes = self.bytes.lock();
        change(&mut bytes);
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}
