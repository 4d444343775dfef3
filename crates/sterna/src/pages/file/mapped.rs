//! A mapped-ram file that is being written, with each page at a fixed place.

use std::ops::Range;
use std::sync::Arc;

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE};
use sterna_transport::{IoPart, PageFile};
use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes, mark_page};

use crate::error::MigrationError;
use crate::order::PageRun;

/// The pages of a guest in a file that is being written. All lanes share it.
///
/// A written page has its bit set. If the page becomes zero later, its bit is cleared and its disk space is
/// released. Therefore no stale data is stored under a clear bit.
#[derive(Debug)]
pub(crate) struct MappedFile {
    file: Arc<PageFile>,
    headers: Vec<MappedHeader>,
    /// Pages whose bytes are in the file.
    held: DirtyBitmaps,
}

impl MappedFile {
    /// The pages of `ram` at the places that `headers` name, with one header per block.
    pub(crate) fn new(file: Arc<PageFile>, headers: Vec<MappedHeader>, ram: &GuestRam) -> Self {
        Self { file, headers, held: DirtyBitmaps::new(ram) }
    }

    /// The file to which lanes write.
    pub(crate) fn file(&self) -> &Arc<PageFile> {
        &self.file
    }

    /// Number of pages whose bytes are in the file.
    #[cfg(test)]
    pub(crate) fn held_pages(&self) -> u64 {
        self.held.count()
    }

    /// Writes the bitmap of every block. Call this after all pages were written.
    ///
    /// # Errors
    /// [`MigrationError::System`], for example for a full disk.
    pub(crate) fn write_bitmaps(&self) -> Result<(), MigrationError> {
        for (block, header) in self.headers.iter().enumerate() {
            let held = self.held.block(block);
            let mut bytes = vec![0; bitmap_bytes(held.pages() * PAGE_SIZE as u64) as usize];
            let mut page = 0;
            while let Some(run) = held.next_run(page, held.pages(), held.pages()) {
                (run.first..run.end()).for_each(|page| mark_page(&mut bytes, page));
                page = run.end();
            }
            self.file
                .write_at(header.bitmap_offset, &[IoPart::Bytes(&bytes)])
                .map_err(MigrationError::storage)?;
        }
        Ok(())
    }

    /// Offset in the file of the first page of `run`.
    pub(super) fn place(&self, run: PageRun) -> u64 {
        self.headers[run.block].page_offset(run.first)
    }

    /// Sets the bits of these pages, whose content is written next.
    pub(super) fn hold(&self, run: PageRun) {
        self.held.block(run.block).set_range(run.first, run.count);
    }

    /// Clears the bits of these pages, which are zero. If they had space in the file, releases it.
    pub(super) fn drop_pages(&self, run: PageRun) -> Result<(), MigrationError> {
        if self.held.block(run.block).clear_range(run.first, run.count) == 0 {
            return Ok(());
        }
        let start = self.place(run);
        let range: Range<u64> = start..start + run.count * PAGE_SIZE as u64;
        self.file.punch(range).map_err(MigrationError::storage)
    }
}
