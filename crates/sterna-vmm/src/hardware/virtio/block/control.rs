//! A disk as an operator and the other side see it, whatever its driver does.

use std::sync::Arc;

use sterna_disk::{Image, SECTOR};

use super::changes::Changes;
use crate::config::{DiskMigration, DiskOptions};

/// How a disk moves, and how long it is.
pub(crate) struct DiskControl {
    pub(super) image: Arc<Image>,
    pub(super) changes: Arc<Changes>,
    pub(crate) options: DiskOptions,
}

impl DiskControl {
    pub(crate) fn migration(&self) -> DiskMigration {
        self.options.migration
    }

    /// In bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.image.len_bytes()
    }

    /// The first field of the configuration space: how many sectors there are.
    pub(crate) fn capacity(&self) -> [u8; 8] {
        (self.image.len_bytes() / SECTOR).to_le_bytes()
    }

    /// Looks how long it is: the machine that had it before may have made it longer.
    pub(crate) fn find_length(&self) -> Result<(), String> {
        self.image.find_length()
    }

    /// Writes, and notes it for whoever copies.
    #[cfg(feature = "bench")]
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.image.write_at(bytes, at)?;
        self.changes.written(at, bytes.len() as u64);
        Ok(())
    }

    /// Makes it longer. Why it cannot be.
    pub(crate) fn grow(&self, len_bytes: u64) -> Result<(), String> {
        if self.changes.is_tracking() {
            return Err("it is being copied to another host: wait until the migration has ended".to_owned());
        }
        self.image.grow(len_bytes)
    }
}
