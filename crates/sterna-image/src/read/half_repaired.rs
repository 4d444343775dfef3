//! Detects an image whose repair in place was interrupted; reads it for the next repair.

use std::fs::File;
use std::io;
use std::sync::Arc;

use sterna_wire::libvirt::SaveHeader;
use sterna_wire::main::FileHeader;

use super::source::{ReadAt, Stamp};

/// The stream's offset in an image whose repair was interrupted; `None` for all other files.
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

/// An image whose repair was interrupted, read as if its magic were in its place. Repair and verification use it.
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
