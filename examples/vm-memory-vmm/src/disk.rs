//! The lock of a disk. This VMM has no block device; the lock is the resource that a migration hands over.

use std::fs::File;
use std::io;
use std::path::Path;

/// A disk that only one VMM may use at a time.
pub struct Disk(File);

impl Disk {
    /// Opens the disk without a lock.
    pub fn open(path: &Path) -> io::Result<Self> {
        File::options().create(true).append(true).open(path).map(Self)
    }

    /// Locks the disk. Fails immediately if another VMM has the lock.
    pub fn lock(&self) -> io::Result<()> {
        self.0.try_lock().map_err(|error| io::Error::other(format!("the disk is in use: {error}")))
    }

    /// Releases the lock for another VMM.
    pub fn unlock(&self) -> io::Result<()> {
        self.0.unlock()
    }
}
