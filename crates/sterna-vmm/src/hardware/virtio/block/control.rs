//! Operations on a disk that do not depend on its driver. An operator and the other side of a migration use
//! them.

use std::sync::Arc;

use sterna_disk::{Image, SECTOR};

use super::changes::Changes;
use crate::config::{DiskMigration, DiskOptions};

/// The migration mode and the length of a disk.
pub(crate) struct DiskControl {
    pub(super) image: Arc<Image>,
    pub(super) changes: Arc<Changes>,
    pub(crate) options: DiskOptions,
}

impl DiskControl {
    pub(crate) fn migration(&self) -> DiskMigration {
        self.options.migration
    }

    /// The disk's length in bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.image.len_bytes()
    }

    /// Number of sectors, the first field of the configuration space.
    pub(crate) fn capacity(&self) -> [u8; 8] {
        (self.image.len_bytes() / SECTOR).to_le_bytes()
    }

    /// Reads the length from the file. The machine that used the disk before may have grown it.
    pub(crate) fn find_length(&self) -> Result<(), String> {
        self.image.find_length()
    }

    /// Writes to the disk, and records the write for the copy.
    #[cfg(feature = "bench")]
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.image.write_at(bytes, at)?;
        self.changes.written(at, bytes.len() as u64);
        Ok(())
    }

    /// Makes the disk longer. The error says why this is not possible.
    pub(crate) fn grow(&self, len_bytes: u64) -> Result<(), String> {
        if self.changes.is_tracking() {
            return Err("it is being copied to another host: wait until the migration has ended".to_owned());
        }
        self.image.grow(len_bytes)
    }
}
