//! A disk's lock. This VMM has no block device; the lock is what a migration has to hand over.

use std::fs::File;
use std::io;
use std::path::Path;

/// A disk that one VMM may use at a time.
pub struct Disk(File);

impl Disk {
    /// Opens it without locking it.
    pub fn open(path: &Path) -> io::Result<Self> {
        File::options().create(true).append(true).open(path).map(Self)
    }

    /// Locks it. Fails at once if another VMM has it.
    pub fn lock(&self) -> io::Result<()> {
        self.0.try_lock().map_err(|error| io::Error::other(format!("the disk is in use: {error}")))
    }

    /// Lets go of it.
    pub fn unlock(&self) -> io::Result<()> {
        self.0.unlock()
    }
}
