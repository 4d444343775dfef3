//! Writes mapped-ram images: every page at its place, then bitmaps and devices.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use sterna_transport::{CreateOptions, IoPart, PageFile};
use sterna_wire::mapped_ram::{MappedHeader, PAGES_ALIGNMENT};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::bits::Bits;
use super::encode;
use super::libvirt::Envelope;
use super::mapped_file::{MappedFile, Placed};
use super::mapped_lane::MappedLane;
use crate::error::ImageError;
use crate::format::{Form, Format};
use crate::model::Shape;

/// Options of a new mapped-ram image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedOptions {
    /// Options of the page file.
    pub file: CreateOptions,
    /// Alignment of each block's pages in bytes, a multiple of the page size.
    pub alignment: u64,
    /// File offset of the stream in bytes, if there is no envelope.
    pub start_offset: u64,
    /// libvirt's container; none for a bare image.
    pub envelope: Option<Envelope>,
}

impl Default for MappedOptions {
    fn default() -> Self {
        Self { file: CreateOptions::default(), alignment: PAGES_ALIGNMENT, start_offset: 0, envelope: None }
    }
}

/// Writes a mapped-ram image. The file is absent from its path until [`complete`](Self::complete).
#[derive(Clone)]
pub struct MappedWriter {
    inner: Arc<MappedFile>,
}

impl fmt::Debug for MappedWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedWriter").field("file", &self.inner.file.path()).finish_non_exhaustive()
    }
}

impl MappedWriter {
    /// Starts an image of `shape` for `path`. The shape's devices may still be unknown.
    ///
    /// # Errors
    /// [`ImageError`]; no file is left.
    pub fn create(path: &Path, shape: &Shape, options: MappedOptions) -> Result<Self, ImageError> {
        Self::begin(PageFile::create(path, options.file)?, shape, options)
    }

    /// Starts an image without a name in `directory`, which [`PageFile::reopened`] then reads.
    pub(crate) fn temporary(directory: &Path, shape: &Shape) -> Result<Self, ImageError> {
        let options = MappedOptions::default();
        Self::begin(PageFile::temporary(directory, options.file.direct)?, shape, options)
    }

    fn begin(file: PageFile, shape: &Shape, options: MappedOptions) -> Result<Self, ImageError> {
        let file = Arc::new(file);
        let shape = shape.for_form(Form::Mapped);
        let mut start = options.start_offset;
        if let Some(envelope) = &options.envelope {
            let (bytes, offset) = envelope.bytes(Format::LibvirtSparse, None)?;
            file.write_at(0, &[IoPart::Bytes(&bytes)])?;
            start = offset;
        }
        let (pieces, headers, tail_offset) = layout(&shape, start, options.alignment)?;
        for (offset, bytes) in pieces {
            file.write_at(offset, &[IoPart::Bytes(&bytes)])?;
        }
        let blocks = shape.ram.blocks.iter().zip(headers).map(|(block, header)| {
            let pages = if block.is_skipped { 0 } else { block.length_bytes >> PAGE_SHIFT };
            Placed { header, held: Bits::new(pages), written: Bits::new(pages) }
        });
        let blocks = blocks.collect();
        let (ram, envelope) = (shape.ram, options.envelope);
        Ok(Self { inner: Arc::new(MappedFile { file, ram, blocks, tail_offset, envelope }) })
    }

    /// The file that is written.
    pub fn file(&self) -> &Arc<PageFile> {
        &self.inner.file
    }

    /// File offset of the pages of block `block`; 0 if it is skipped.
    pub fn pages_offset(&self, block: usize) -> u64 {
        self.inner.blocks[block].header.pages_offset
    }

    /// Writes whole pages of block `block` from page `first`. Threads may call this in any order.
    ///
    /// # Errors
    /// [`ImageError::File`], such as a full disk.
    ///
    /// # Panics
    /// If the pages are not in the block.
    pub fn write(&self, block: usize, first: u64, parts: &[IoPart<'_>]) -> Result<(), ImageError> {
        let placed = &self.inner.blocks[block];
        let bytes: usize = parts
            .iter()
            .map(|part| match part {
                IoPart::Bytes(bytes) => bytes.len(),
                IoPart::Ram(slice) => slice.len(),
            })
            .sum();
        let count = (bytes / PAGE_SIZE) as u64;
        placed.written.set_range(first, count);
        self.inner.file.write_at(placed.header.page_offset(first), parts)?;
        placed.held.set_range(first, count);
        Ok(())
    }

    /// Marks pages as zero, whatever was written to them before.
    ///
    /// # Panics
    /// If the pages are not in the block.
    pub fn zero(&self, block: usize, first: u64, count: u64) {
        self.inner.blocks[block].held.clear_range(first, count);
    }

    /// Marks pages as present that other means write before [`complete`](Self::complete).
    ///
    /// Examples are reflinks, a separate queue, and another process.
    ///
    /// # Panics
    /// If the pages are not in the block.
    pub fn mark(&self, block: usize, first: u64, count: u64) {
        self.inner.blocks[block].written.set_range(first, count);
        self.inner.blocks[block].held.set_range(first, count);
    }

    /// Makes a lane for one thread. A lane queues and merges writes, and has several in flight.
    pub fn lane(&self) -> MappedLane {
        MappedLane::new(Arc::clone(&self.inner))
    }

    /// Fills `to` with the current content of a page. Writes that a lane has not drained are not visible.
    ///
    /// # Errors
    /// [`ImageError::File`] if the read fails.
    ///
    /// # Panics
    /// If the page is not in the block.
    pub fn read(&self, block: usize, page: u64, to: &mut [u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.inner.read(block, page, to)
    }

    /// Number of pages that the image contains so far.
    pub fn held_pages(&self) -> u64 {
        self.inner.blocks.iter().map(|placed| placed.held.count()).sum()
    }

    /// Finishes the image and publishes it at its path.
    ///
    /// This removes stale pages, writes bitmaps, devices and description, and syncs the file. All lanes must be
    /// drained before.
    ///
    /// # Errors
    /// [`ImageError::File`]: the path is unchanged. [`ImageError::Request`] if the RAM of `shape` differs from the
    /// RAM of the shape that the image was started with.
    pub fn complete(&self, shape: &Shape) -> Result<(), ImageError> {
        self.fill_in(shape)?;
        self.inner.file.publish()?;
        Ok(())
    }

    /// Finishes the image without publishing it: the file is complete and synced.
    ///
    /// Can be called again with a shape that contains more.
    ///
    /// # Errors
    /// The errors of [`complete`](Self::complete).
    pub fn fill_in(&self, shape: &Shape) -> Result<(), ImageError> {
        let shape = self.fill_in_unsynced(shape)?;
        let inner = &self.inner;
        inner.file.sync()?;
        if let Some(envelope) = &inner.envelope {
            let (bytes, _) = envelope.bytes(Format::LibvirtSparse, Some(&shape))?;
            inner.file.write_at(0, &[IoPart::Bytes(&bytes)])?;
            inner.file.sync()?;
        }
        Ok(())
    }

    /// Finishes the image without a sync, and without the mark of a complete container.
    ///
    /// For a file that disappears with this process.
    pub(crate) fn fill_in_unsynced(&self, shape: &Shape) -> Result<Shape, ImageError> {
        let inner = &self.inner;
        let shape = shape.for_form(Form::Mapped);
        let same = shape.ram.section_id == inner.ram.section_id
            && shape.ram.footers == inner.ram.footers
            && shape.ram.blocks == inner.ram.blocks;
        if !same {
            let text = "the image was begun with different RAM";
            return Err(ImageError::Request(text.to_owned()));
        }
        for placed in &inner.blocks {
            inner.punch_stale(placed)?;
            inner.write_bitmap(placed)?;
        }
        let mut tail = Vec::new();
        encode::setup(&shape, &mut tail);
        if shape.begins_between_anew() {
            encode::part(&shape, &mut tail);
            encode::end_of_section(&shape, &mut tail);
        }
        encode::tail(&shape, &mut tail)?;
        inner.file.write_at(inner.tail_offset, &[IoPart::Bytes(&tail)])?;
        Ok(shape)
    }
}

/// Parts before the pages with their offsets; the blocks' headers; the stream's offset after START.
pub(super) type Layout = (Vec<(u64, Vec<u8>)>, Vec<MappedHeader>, u64);

pub(super) fn layout(shape: &Shape, start: u64, alignment: u64) -> Result<Layout, ImageError> {
    let (mut pieces, mut headers) = (Vec::new(), Vec::new());
    let (mut at, mut bytes) = (start, Vec::new());
    encode::head(shape, &mut bytes)?;
    for block in &shape.ram.blocks {
        encode::block(block, &mut bytes)?;
        if block.is_skipped {
            encode::SKIPPED.encode(&mut bytes);
            headers.push(encode::SKIPPED);
            continue;
        }
        let header = MappedHeader::place_aligned(at + bytes.len() as u64, block.length_bytes, alignment)?;
        header.encode(&mut bytes);
        pieces.push((at, std::mem::take(&mut bytes)));
        at = header.end_of_pages(block.length_bytes);
        headers.push(header);
    }
    encode::end_of_section(shape, &mut bytes);
    let tail_offset = at + bytes.len() as u64;
    pieces.push((at, bytes));
    Ok((pieces, headers, tail_offset))
}
