//! The lock of a shared disk, which is handed over with the guest.

use std::io;
use std::sync::Arc;

use sterna::{Hook, VmError};
use sterna_disk::Image;

/// Hook that hands the lock over with the guest. Both sides see the disk, and only one at a time uses it.
pub(super) struct ImageLock {
    index: usize,
    image: Arc<Image>,
}

impl ImageLock {
    pub(super) fn new(index: usize, image: Arc<Image>) -> Self {
        Self { index, image }
    }

    fn did(&self, result: io::Result<()>) -> Result<(), VmError> {
        result.map_err(|error| VmError::new(self.name(), format!("{}: {error}", self.image.path())))
    }
}

impl Hook for ImageLock {
    fn name(&self) -> String {
        format!("disk {}", self.index)
    }

    fn release(&self) -> Result<(), VmError> {
        self.did(self.image.release())
    }

    fn take_back(&self) -> Result<(), VmError> {
        self.did(self.image.lock())
    }

    fn acquire(&self) -> Result<(), VmError> {
        self.did(self.image.acquire())
    }

    fn give_back(&self) {
        if let Err(error) = self.image.release() {
            tracing::error!(disk = self.index, %error, "the disk stays locked");
        }
    }
}
