//! A lane into a file.

use std::sync::Arc;

use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_transport::{PageQueue, QueueOptions};

use super::mapped::MappedFile;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageWriter;

/// Pages of one piece of I/O, at most: 2 MiB.
const PIECE_PAGES: u64 = 512;

/// Zero pages between others that are written with them, at most: 64 KiB. A disk takes one large piece much
/// faster than several small ones.
const GAP_PAGES: u64 = 16;

/// Writes pages into a file, straight out of guest RAM, several large pieces on their way at once.
///
/// Neighbouring runs become one piece. A few zero pages between them are written along, and have their bits set: they
/// are data as good as any. If the guest has written one of them meanwhile, it is dirty and comes again.
pub(crate) struct FileWriter {
    image: Arc<MappedFile>,
    queue: PageQueue,
    /// What is to be written next.
    piece: Option<PageRun>,
    /// Zero pages right after the piece, which go with it if more follows.
    gap: u64,
}

impl FileWriter {
    /// A lane that writes pages of `ram` into `image`.
    pub(crate) fn new(image: Arc<MappedFile>, ram: &GuestRam) -> Self {
        Self::with_options(image, ram, QueueOptions::default())
    }

    /// As [`FileWriter::new`], with its queue working as `options` say.
    pub(crate) fn with_options(image: Arc<MappedFile>, ram: &GuestRam, options: QueueOptions) -> Self {
        let queue = PageQueue::with_ram(image.file(), ram, options);
        Self { image, queue, piece: None, gap: 0 }
    }

    /// These pages are zero and were never populated: reading them would populate them.
    pub(crate) fn absent_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.image.drop_pages(run)
    }

    /// Sends the piece on its way; zero pages after it are nothing but zero pages.
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

    /// Everything is with the disk: what follows, on any lane, cannot be overtaken.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        self.send_piece()?;
        self.queue.drain().map_err(MigrationError::storage)
    }

    /// Nobody waits: dropping the file removes what was written.
    fn abort(&mut self) {}
}
