//! Writing bitmaps into the image itself, so that it is never taken for whole before it is.
//!
//! Bitmaps cannot be written in one step, and an image with some of them looks like a whole one with fewer pages. So
//! the stream's magic is taken away first, one byte of it: nobody reads the image then, QEMU and libvirt neither.
//! It comes back when the bitmaps are on the disk. Each of the three steps is durable before the next begins; in each a
//! single byte, or bytes that nobody reads, are written, so that it does not matter where the step is broken off or
//! in which order the disk writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use sterna_wire::libvirt::SaveHeader;
use sterna_wire::main::FileHeader;

use crate::read::{ReadAt, Stamp};

/// The byte of the magic that tells the two apart.
const AT: usize = 3;

/// What a repair in place writes to: the image's file.
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

/// Where the stream of an image starts in which a repair was broken off; `None` for all other files.
pub(crate) fn broken_off(source: &dyn ReadAt) -> io::Result<Option<u64>> {
    let mut start = [0; SaveHeader::BYTES];
    let got = read(source, 0, &mut start)?;
    let offset = match SaveHeader::decode(&start[..got]) {
        Ok(Some((header, _))) => header.stream_offset(),
        _ => 0,
    };
    let mut magic = [0; 4];
    let is_marked = read(source, offset, &mut magic)? == magic.len() && magic == FileHeader::REPAIR_MAGIC;
    Ok(is_marked.then_some(offset))
}

fn read(source: &dyn ReadAt, offset: u64, to: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < to.len() {
        match source.read_at(offset + done as u64, &mut to[done..])? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

/// An image in which a repair was broken off, with its magic in its place: for the next repair.
pub(crate) struct WithMagic {
    source: Arc<dyn ReadAt>,
    stream_offset: u64,
}

impl WithMagic {
    pub(crate) fn new(source: Arc<dyn ReadAt>, stream_offset: u64) -> Self {
        Self { source, stream_offset }
    }
}

impl ReadAt for WithMagic {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read_at(offset, to)?;
        for (at, byte) in (self.stream_offset..).zip(FileHeader::MAGIC) {
            if let Some(place) = at.checked_sub(offset).and_then(|index| to[..count].get_mut(index as usize))
            {
                *place = byte;
            }
        }
        Ok(count)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.source.len_bytes()
    }

    fn stamp(&self) -> io::Result<Stamp> {
        self.source.stamp()
    }

    fn file(&self) -> Option<&File> {
        self.source.file()
    }
}
