//! The page writer of a lane that writes to a file.

use std::sync::Arc;

use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_transport::{PageQueue, QueueOptions};

use super::mapped::MappedFile;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageWriter;

/// Most pages of one I/O: 512 pages are 2 MiB.
const PIECE_PAGES: u64 = 512;

/// Most zero pages in a gap that is written together with its neighbours: 16 pages are 64 KiB. A disk writes
/// one large piece much faster than several small ones.
const GAP_PAGES: u64 = 16;

/// Writes pages to a file, directly from guest RAM, with several large pieces in flight.
///
/// Neighbouring runs form one piece. A few zero pages between them are written as well, and their bits are set.
/// This is allowed, because zeros are valid content. If the guest has written such a page meanwhile, the page
/// is dirty and is sent again.
pub(crate) struct FileWriter {
    image: Arc<MappedFile>,
    queue: PageQueue,
    /// The pages that are written next.
    piece: Option<PageRun>,
    /// Number of zero pages directly after the piece. They are written with it if another run follows.
    gap: u64,
}

impl FileWriter {
    /// The writer of a lane that writes pages of `ram` to `image`.
    pub(crate) fn new(image: Arc<MappedFile>, ram: &GuestRam) -> Self {
        Self::with_options(image, ram, QueueOptions::default())
    }

    /// As [`FileWriter::new`], with `options` for its I/O queue.
    pub(crate) fn with_options(image: Arc<MappedFile>, ram: &GuestRam, options: QueueOptions) -> Self {
        let queue = PageQueue::with_ram(image.file(), ram, options);
        Self { image, queue, piece: None, gap: 0 }
    }

    /// Records zero pages that were never populated. They are not read, because reading would populate them.
    pub(crate) fn absent_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.image.drop_pages(run)
    }

    /// Starts the write of the piece. The zero pages after it are only recorded as zero.
    fn send_piece(&mut self) -> Result<(), MigrationError> {
        let Some(piece) = self.piece.take() else { return Ok(()) };
        let gap = std::mem::take(&mut self.gap);
        if gap > 0 {
            self.image.drop_pages(PageRun { first: piece.end(), count: gap, ..piece })?;
        }
        let (offset, length) = (piece.first * PAGE_SIZE as u64, piece.count as usize * PAGE_SIZE);
        self.image.hold(piece);
        self.queue
            .write_ram(self.image.place(piece), piece.block, offset, length)
            .map_err(MigrationError::storage)
    }
}

impl PageWriter for FileWriter {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        if let Some(piece) = &mut self.piece
            && piece.block == run.block
            && piece.end() + self.gap == run.first
            && piece.count + self.gap + run.count <= PIECE_PAGES
        {
            piece.count += self.gap + run.count;
            self.gap = 0;
        } else {
            self.send_piece()?;
            self.piece = Some(run);
        }
        if self.piece.is_some_and(|piece| piece.count >= PIECE_PAGES) {
            return self.send_piece();
        }
        Ok(())
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        if let Some(piece) = self.piece
            && piece.block == run.block
            && piece.end() + self.gap == run.first
            && self.gap + run.count <= GAP_PAGES
        {
            self.gap += run.count;
            return Ok(());
        }
        self.image.drop_pages(run)
    }

    /// Waits until the disk has all pages, so that later writes of any lane are ordered after them.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.send_piece()?;
        self.queue.drain().map_err(MigrationError::storage)
    }

    /// No thread is waiting here. The incomplete file is removed when it is dropped.
    fn abort(&mut self) {}
}
