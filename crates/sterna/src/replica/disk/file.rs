//! A disk's content, as whoever runs a standby has it.

use std::io;
use std::sync::Arc;

/// Where a disk's content lies. Several threads use it.
pub trait DiskFile: Send + Sync {
    /// The disk's length, which does not change.
    fn len_bytes(&self) -> u64;
    /// Reads from byte `at` on.
    ///
    /// # Errors
    /// The host's.
    fn read_at(&self, to: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes from byte `at` on.
    ///
    /// # Errors
    /// The host's.
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()>;
    /// Makes bytes zero.
    ///
    /// # Errors
    /// The host's.
    fn make_zero(&self, at: u64, length: u64) -> io::Result<()>;
    /// What was written outlives this host's power.
    ///
    /// # Errors
    /// The host's.
    fn sync(&self) -> io::Result<()>;
    /// Nothing more is read or written here: another program may use it.
    ///
    /// # Errors
    /// The host's.
    fn release(&self) -> io::Result<()>;
}

/// A disk of the guest's, as its standby has it.
#[derive(Clone)]
pub struct StandbyDisk {
    /// By which the primary asks for it: the NBD export's name.
    pub name: String,
    /// Its content.
    pub file: Arc<dyn DiskFile>,
}
