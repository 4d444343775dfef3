//! Interface to a disk's content, which the program that embeds the standby implements.

use std::io;
use std::sync::Arc;

/// Content of a disk. Several threads use it in parallel.
pub trait DiskFile: Send + Sync {
    /// Length of the disk in bytes. It does not change.
    fn len_bytes(&self) -> u64;
    /// Reads from byte `at` on.
    ///
    /// # Errors
    /// The host's I/O error.
    fn read_at(&self, to: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes from byte `at` on.
    ///
    /// # Errors
    /// The host's I/O error.
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()>;
    /// Makes `length` bytes from byte `at` on zero.
    ///
    /// # Errors
    /// The host's I/O error.
    fn make_zero(&self, at: u64, length: u64) -> io::Result<()>;
    /// Makes all writes durable, so that they survive a power failure of this host.
    ///
    /// # Errors
    /// The host's I/O error.
    fn sync(&self) -> io::Result<()>;
    /// Ends the use of the file: no further call reads or writes, and another program may use it.
    ///
    /// # Errors
    /// The host's I/O error.
    fn release(&self) -> io::Result<()>;
}

/// A disk of the guest, at its standby.
#[derive(Clone)]
pub struct StandbyDisk {
    /// Name by which the primary selects the disk: the name of the NBD export.
    pub name: String,
    /// Content of the disk.
    pub file: Arc<dyn DiskFile>,
}
