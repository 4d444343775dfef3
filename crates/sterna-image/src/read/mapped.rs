//! Random access to the pages of a mapped-ram image.

use std::fmt;
use std::sync::Arc;

use sterna_ram::PageBitmap;
use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::source::ReadAt;
use super::source::read_exact;
use super::visitor::PageVisitor;
use crate::error::ImageError;
use crate::model::BlockShape;

/// Largest read in bytes while all pages are visited.
const STRIDE: u64 = 1 << 20;

/// One block of a mapped-ram image, with its bitmap.
#[derive(Debug)]
pub struct MappedBlock {
    /// Name of the block, such as `pc.ram`.
    pub name: String,
    /// Used length in bytes.
    pub length_bytes: u64,
    /// File offset of the bitmap; 0 if the block is skipped.
    pub bitmap_offset: u64,
    /// File offset of page 0; 0 if the block is skipped.
    pub pages_offset: u64,
    /// The pages that the file contains; empty if the block is skipped.
    pub bitmap: PageBitmap,
    /// Whether the image contains none of its pages (`specs/mapped-ram.md §4.8`).
    pub is_skipped: bool,
}

impl MappedBlock {
    /// Number of pages in the block.
    pub fn pages(&self) -> u64 {
        self.length_bytes >> PAGE_SHIFT
    }
}

/// The pages of a mapped-ram image.
pub struct MappedPages {
    blocks: Vec<MappedBlock>,
    source: Arc<dyn ReadAt>,
    file: Arc<str>,
}

impl fmt::Debug for MappedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedPages").field("file", &self.file).field("blocks", &self.blocks).finish()
    }
}

impl MappedPages {
    /// Reads the bitmaps of `blocks`. The caller has checked that the file contains their places.
    pub(crate) fn read_bitmaps(
        blocks: &[BlockShape],
        placed: &[MappedHeader],
        source: Arc<dyn ReadAt>,
        file: Arc<str>,
    ) -> Result<Self, ImageError> {
        let mut mapped = Self { blocks: Vec::with_capacity(blocks.len()), source, file };
        for (block, header) in blocks.iter().zip(placed) {
            let pages = if block.is_skipped { 0 } else { block.length_bytes >> PAGE_SHIFT };
            let mut bitmap = PageBitmap::new(pages);
            if !block.is_skipped {
                mapped.read_bitmap(header.bitmap_offset, block.length_bytes, &mut bitmap)?;
            }
            mapped.blocks.push(MappedBlock {
                name: block.name.clone(),
                length_bytes: block.length_bytes,
                bitmap_offset: header.bitmap_offset,
                pages_offset: header.pages_offset,
                bitmap,
                is_skipped: block.is_skipped,
            });
        }
        Ok(mapped)
    }

    /// The blocks, in the order of [`RamShape::blocks`](crate::RamShape::blocks).
    pub fn blocks(&self) -> &[MappedBlock] {
        &self.blocks
    }

    /// The file of the image. Offsets of blocks are offsets in this file.
    pub fn source(&self) -> &Arc<dyn ReadAt> {
        &self.source
    }

    /// Fills `to`, whole pages, with the pages of block `block` from page `first`.
    ///
    /// Pages whose bit is clear are zeros, whatever the file contains at their places (§4.6).
    ///
    /// # Errors
    /// [`ImageError::Torn`] if the file has become shorter; [`ImageError::Io`] if a read fails.
    ///
    /// # Panics
    /// If the pages are not in the block, or `to` is not a whole number of pages.
    pub fn read(&self, block: usize, first: u64, to: &mut [u8]) -> Result<(), ImageError> {
        let count = (to.len() / PAGE_SIZE) as u64;
        assert!(to.len().is_multiple_of(PAGE_SIZE), "whole pages are read");
        let block = &self.blocks[block];
        assert!(first + count <= block.pages(), "the pages are in the block");
        if block.is_skipped {
            to.fill(0);
            return Ok(());
        }
        let (mut at, end) = (first, first + count);
        while at < end {
            let run = block.bitmap.next_run(at, end, end - at);
            let (start, stop) = run.map_or((end, end), |run| (run.first, run.end()));
            to[bytes(at - first)..bytes(start - first)].fill(0);
            let offset = block.pages_offset + (start << PAGE_SHIFT);
            self.read_exact(offset, &mut to[bytes(start - first)..bytes(stop - first)])?;
            at = stop;
        }
        Ok(())
    }

    /// Visits every page once, block by block, in ascending order; skipped blocks are left out.
    pub(crate) fn visit(&self, visitor: &mut dyn PageVisitor) -> Result<(), ImageError> {
        let mut buffer = vec![0; STRIDE as usize];
        for (index, block) in self.blocks.iter().enumerate().filter(|(_, block)| !block.is_skipped) {
            let mut at = 0;
            while at < block.pages() {
                let run = block.bitmap.next_run(at, block.pages(), STRIDE >> PAGE_SHIFT);
                let start = run.map_or(block.pages(), |run| run.first);
                if start > at {
                    visitor.zero(index, at, start - at)?;
                    at = start;
                }
                if let Some(run) = run {
                    let content = &mut buffer[..bytes(run.count)];
                    self.read_exact(block.pages_offset + (run.first << PAGE_SHIFT), content)?;
                    visitor.pages(index, run.first, content)?;
                    at = run.end();
                }
            }
        }
        Ok(())
    }

    fn read_bitmap(&self, offset: u64, length_bytes: u64, bitmap: &mut PageBitmap) -> Result<(), ImageError> {
        let total = bitmap_bytes(length_bytes);
        let mut buffer = vec![0; total.min(STRIDE) as usize];
        let mut done = 0;
        while done < total {
            let piece = (total - done).min(STRIDE) as usize;
            self.read_exact(offset + done, &mut buffer[..piece])?;
            let words: Vec<u64> = buffer[..piece]
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
                .collect();
            // Bits beyond the last page are ignored (§4.5).
            bitmap.merge_words(done * 8, &words);
            done += piece as u64;
        }
        Ok(())
    }

    fn read_exact(&self, offset: u64, to: &mut [u8]) -> Result<(), ImageError> {
        read_exact(&*self.source, &self.file, offset, to, "RAM's pages")
    }
}

fn bytes(pages: u64) -> usize {
    (pages as usize) << PAGE_SHIFT
}
