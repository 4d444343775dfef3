//! A mapped-ram image while it is written: its file, and where its pages are.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use sterna_transport::{IoPart, PageFile};
use sterna_wire::PAGE_SIZE;
use sterna_wire::mapped_ram::MappedHeader;

use crate::error::ImageError;
use crate::model::RamShape;
use crate::write::bits::{Bits, CHUNK};
use crate::write::libvirt::Envelope;

pub(super) struct MappedFile {
    pub file: Arc<PageFile>,
    pub ram: RamShape,
    pub blocks: Vec<Placed>,
    /// File offset of the stream after START.
    pub tail_offset: u64,
    pub envelope: Option<Envelope>,
}

pub(super) struct Placed {
    /// Both offsets are 0 if the block is skipped.
    pub header: MappedHeader,
    /// Pages with content in the image.
    pub held: Bits,
    /// Pages that were written. Written pages that are not in `held` are stale.
    pub written: Bits,
}

impl MappedFile {
    pub(super) fn read(&self, block: usize, page: u64, to: &mut [u8; PAGE_SIZE]) -> Result<(), ImageError> {
        let placed = &self.blocks[block];
        if placed.held.get(page) {
            self.file.read_bytes_at(placed.header.page_offset(page), to)?;
        } else {
            to.fill(0);
        }
        Ok(())
    }

    pub(super) fn punch_stale(&self, placed: &Placed) -> Result<(), ImageError> {
        for (index, chunk) in placed.written.made() {
            let held = placed.held.chunk(index);
            for (word, written) in chunk.words().iter().enumerate() {
                let stale = written.load(Acquire) & !held.map_or(0, |held| held.words()[word].load(Acquire));
                for bit in (0..64).filter(|bit| stale >> bit & 1 == 1) {
                    let offset = placed.header.page_offset(index * CHUNK + word as u64 * 64 + bit);
                    self.file.punch(offset..offset + PAGE_SIZE as u64)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn write_bitmap(&self, placed: &Placed) -> Result<(), ImageError> {
        // A chunk without set bits is a hole of the new file, which reads as clear bits.
        for (index, chunk) in placed.held.made() {
            let bytes: Vec<u8> =
                chunk.words().iter().flat_map(|word| word.load(Acquire).to_le_bytes()).collect();
            let offset = placed.header.bitmap_offset + index * (CHUNK / 8);
            self.file.write_at(offset, &[IoPart::Bytes(&bytes)])?;
        }
        Ok(())
    }
}
