//! Reads frames and pages of an image.

use std::sync::Arc;

use super::image::StoredImage;
use crate::error::StoreError;
use crate::frame;
use crate::layout::{Extent, PAGE_BYTES};

impl StoredImage {
    /// Reads, decrypts, decompresses and checks frame `frame` of layer `layer`. The cache is not asked.
    ///
    /// # Errors
    /// [`StoreError::Frame`] if the frame is damaged; the errors of reads.
    ///
    /// # Panics
    /// If the layer or the frame does not exist.
    pub fn frame(&self, layer: usize, frame: u32) -> Result<Vec<u8>, StoreError> {
        if let (Some(below), Some(base)) = (layer.checked_sub(1), &self.base) {
            return base.frame(below, frame);
        }
        let entry = &self.index.frames[frame as usize];
        let mut stored = vec![0; entry.stored_bytes as usize];
        self.source.read(entry, &mut stored).map_err(|error| self.at_frame(frame, error))?;
        self.unpacked(frame, stored)
    }

    /// Decrypts, decompresses and checks the stored bytes of a frame of this layer.
    ///
    /// # Errors
    /// [`StoreError::Frame`].
    pub fn unpacked(&self, frame: u32, stored: Vec<u8>) -> Result<Vec<u8>, StoreError> {
        let entry = &self.index.frames[frame as usize];
        let unpacked = frame::unpack(&self.crypt, entry, stored);
        unpacked.map_err(|reason| self.frame_error(frame, reason))
    }

    /// Fills `to` with the bytes of block `block` from `offset`.
    ///
    /// # Errors
    /// The errors of [`frame`](Self::frame).
    ///
    /// # Panics
    /// If the bytes are not in the block.
    pub fn read(&self, block: usize, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let extent_bytes = u64::from(self.header.extent_bytes);
        let (mut at, mut rest) = (offset, to);
        while !rest.is_empty() {
            let count = ((extent_bytes - at % extent_bytes) as usize).min(rest.len());
            let (part, more) = rest.split_at_mut(count);
            self.read_in_extent(block, at, part)?;
            at += count as u64;
            rest = more;
        }
        Ok(())
    }

    fn read_in_extent(&self, block: usize, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let extent_bytes = u64::from(self.header.extent_bytes);
        let extent = self.index.extents[block].get(offset / extent_bytes);
        let inside = (offset % extent_bytes) as usize;
        let (mut frame, mut at, mut rest) = (None, inside, to);
        while !rest.is_empty() {
            let (page, byte) = (at / PAGE_BYTES, at % PAGE_BYTES);
            let (part, more) = {
                let count = (PAGE_BYTES - byte).min(rest.len());
                rest.split_at_mut(count)
            };
            if extent.holds(page) {
                let content = match &frame {
                    Some(content) => content,
                    None => frame.insert(self.cached(extent.frame)?),
                };
                let start = extent.rank(page) * PAGE_BYTES + byte;
                part.copy_from_slice(&content[start..start + part.len()]);
            } else {
                self.read_below(block, &extent, page, offset - inside as u64 + at as u64, part)?;
            }
            at += part.len();
            rest = more;
        }
        Ok(())
    }

    fn read_below(
        &self,
        block: usize,
        extent: &Extent<'_>,
        page: usize,
        offset: u64,
        to: &mut [u8],
    ) -> Result<(), StoreError> {
        match &self.base {
            Some(base) if extent.is_of_base(page) => base.read_in_extent_of(block, offset, to),
            _ => {
                to.fill(0);
                Ok(())
            }
        }
    }

    /// Like [`read`](Self::read), from a layer above, whose extents may have another length.
    fn read_in_extent_of(&self, block: usize, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        self.read(block, offset, to)
    }

    fn cached(&self, frame: u32) -> Result<Arc<Vec<u8>>, StoreError> {
        self.cache.get(frame, || self.frame(0, frame))
    }

    fn at_frame(&self, frame: u32, error: StoreError) -> StoreError {
        match error {
            StoreError::Torn { .. } => self.frame_error(frame, "the file ends inside of it".to_owned()),
            error => StoreError::FrameRead {
                name: self.name().to_owned(),
                frame,
                pages: self.pages_of(frame),
                source: Box::new(error),
            },
        }
    }

    fn frame_error(&self, frame: u32, reason: String) -> StoreError {
        StoreError::Frame { name: self.name().to_owned(), frame, pages: self.pages_of(frame), reason }
    }

    /// The first extent that names a frame, in words.
    fn pages_of(&self, frame: u32) -> String {
        let pages = u64::from(self.header.extent_bytes) / PAGE_BYTES as u64;
        for (block, table) in self.index.blocks.iter().zip(&self.index.extents) {
            if let Some(extent) = (0..table.extents()).find(|extent| table.get(*extent).frame == frame) {
                let (first, end) = (extent * pages, ((extent + 1) * pages).min(block.pages()));
                return match block.name.as_str() {
                    "" => "bytes of the machine's files".to_owned(),
                    name => format!("block {name}, pages {first:#x} to {:#x}", end - 1),
                };
            }
        }
        "of no page".to_owned()
    }
}
