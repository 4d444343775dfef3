//! Writing bitmaps into the image itself, so that it is never taken for whole before it is.
//!
//! Bitmaps cannot be written in one step, and an image with some of them looks like a whole one with fewer pages. So
//! the stream's magic is taken away first, one byte of it: nobody reads the image then, QEMU and libvirt neither.
//! It comes back when the bitmaps are on the disk. Each of the three steps is durable before the next begins; in each a
//! single byte, or bytes that nobody reads, are written, so that it does not matter where the step is interrupted or
//! in which order the disk writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sterna_wire::main::FileHeader;

/// The byte of the magic that tells the two apart.
const AT: usize = 3;

/// What a repair in place writes to: the image's file. A trait for tests alone, which want to know what is written when.
pub trait Medium {
    /// Writes all bytes at `offset`.
    ///
    /// # Errors
    /// The system's.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when all that was written is on the disk.
    ///
    /// # Errors
    /// The system's.
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
