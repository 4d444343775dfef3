//! Writes bitmaps into the image itself. No reader accepts it before it is complete.
//!
//! Bitmaps cannot be written in one step. An image with some of them looks like a complete image with fewer pages.
//! Therefore the first step changes one byte of the stream's magic, so that Sterna, QEMU and libvirt refuse the
//! image. The last step restores the magic after the bitmaps are on the disk.
//!
//! Each of the three steps is durable before the next starts. A step writes a single byte, or bytes that no reader
//! uses at that time. Therefore an interruption at any point, and any write order of the disk, are safe.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sterna_wire::main::FileHeader;

/// Index of the byte in which the two magics differ.
const AT: usize = 3;

/// The target of a repair in place: the image's file. Tests replace it to record the order of writes.
pub trait Medium {
    /// Writes all bytes at `offset`.
    ///
    /// # Errors
    /// An error of the system.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when all written bytes are on the disk.
    ///
    /// # Errors
    /// An error of the system.
    fn sync(&self) -> io::Result<()>;
}

impl Medium for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Writes `bitmaps`, each at its offset, into an image whose stream starts at `stream_offset`.
pub(super) fn write(medium: &dyn Medium, stream_offset: u64, bitmaps: &[(u64, Vec<u8>)]) -> io::Result<()> {
    let magic = |magic: [u8; 4]| medium.write_all_at(&magic[AT..=AT], stream_offset + AT as u64);
    magic(FileHeader::REPAIR_MAGIC)?;
    medium.sync()?;
    for (offset, bytes) in bitmaps {
        medium.write_all_at(bytes, *offset)?;
    }
    medium.sync()?;
    magic(FileHeader::MAGIC)?;
    medium.sync()
}
