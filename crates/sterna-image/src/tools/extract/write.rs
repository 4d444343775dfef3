//! Writes the head and the pages of an extraction to the file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use sterna_transport::{Direct, PageFile, PageQueue, QueueOptions};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::plan::{Copy, Plan};
use super::request::{ExtractOptions, Extracted};
use crate::ImageError;
use crate::crew;
use crate::read::{Image, MappedPages};
use crate::tools::elf;

/// Bytes that a thread copies in one step.
const PIECE: u64 = 1 << 20;

/// Writes head and pages of `plan` to `file`. Several threads copy the pages.
pub(super) fn write(
    image: &Image,
    pages: &MappedPages,
    file: &Arc<PageFile>,
    plan: &Plan,
    options: &ExtractOptions,
) -> Result<Extracted, ImageError> {
    let head = match plan.architecture {
        Some(architecture) if plan.is_core => elf::head(architecture, &plan.loads, &plan.processors),
        _ => Vec::new(),
    };
    let base = head.len() as u64;
    file.set_len(base + plan.length)?;
    let from = image.page_file(Direct::Off)?;
    let copier = Copier {
        pages,
        from: from.as_deref(),
        file,
        base,
        shares: AtomicBool::new(from.is_some()),
        data: AtomicU64::new(0),
        shared: AtomicU64::new(0),
    };
    let mut pieces = Vec::new();
    for copy in &plan.copies {
        let mut done = 0;
        while done < copy.length {
            let length = (PIECE - (copy.to + done) % PIECE).min(copy.length - done);
            pieces.push(Copy { from: copy.from + done, to: copy.to + done, length, ..*copy });
            done += length;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if options.threads == 0 { cores } else { options.threads };
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), ImageError> {
        let mut queue = PageQueue::new(file, QueueOptions::default());
        let mut buffer = vec![0; PIECE as usize];
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            copier.copy(piece, &mut queue, &mut buffer)?;
        }
        Ok(queue.drain()?)
    };
    crew::share(threads.min(pieces.len()), work)?;
    if !head.is_empty() {
        file.write_at(0, &[sterna_transport::IoPart::Bytes(&head)])?;
    }
    Ok(Extracted {
        file_bytes: base + plan.length,
        data_bytes: copier.data.into_inner(),
        shared_bytes: copier.shared.into_inner(),
        ..Extracted::default()
    })
}

struct Copier<'a> {
    pages: &'a MappedPages,
    from: Option<&'a PageFile>,
    file: &'a PageFile,
    base: u64,
    /// False after the file system has refused a reflink.
    shares: AtomicBool,
    data: AtomicU64,
    shared: AtomicU64,
}

impl Copier<'_> {
    fn copy(&self, piece: &Copy, queue: &mut PageQueue, buffer: &mut [u8]) -> Result<(), ImageError> {
        let block = &self.pages.blocks()[piece.block];
        if block.is_skipped {
            return Ok(());
        }
        // A range may start or end inside a page.
        let end = piece.from + piece.length;
        let mut page = piece.from >> PAGE_SHIFT;
        let last = end.div_ceil(PAGE_SIZE as u64);
        while let Some(run) = block.bitmap.next_run(page, last, last - page) {
            page = run.end();
            let start = (run.first << PAGE_SHIFT).max(piece.from);
            let stop = (run.end() << PAGE_SHIFT).min(end);
            let to = self.base + piece.to + (start - piece.from);
            self.data.fetch_add(stop - start, Ordering::Relaxed);
            if self.share(to, block.pages_offset + start, stop - start)? {
                continue;
            }
            // Part of a page requires a read of the whole page. The pages may exceed the piece by one page.
            let whole = (run.count as usize) << PAGE_SHIFT;
            let skip = (start - (run.first << PAGE_SHIFT)) as usize;
            if whole <= buffer.len() {
                self.pages.read(piece.block, run.first, &mut buffer[..whole])?;
                queue.write_bytes(to, &buffer[skip..skip + (stop - start) as usize])?;
            } else {
                let mut content = vec![0; whole];
                self.pages.read(piece.block, run.first, &mut content)?;
                queue.write_bytes(to, &content[skip..skip + (stop - start) as usize])?;
            }
        }
        Ok(())
    }

    fn share(&self, to: u64, at: u64, length: u64) -> Result<bool, ImageError> {
        let Some(from) = self.from.filter(|_| self.shares.load(Ordering::Relaxed)) else { return Ok(false) };
        let is_aligned = (to | at | length).is_multiple_of(PAGE_SIZE as u64);
        if !is_aligned {
            return Ok(false);
        }
        let shared = self.file.reflink_range(to, from, at, length)?;
        if shared {
            self.shared.fetch_add(length, Ordering::Relaxed);
        } else {
            self.shares.store(false, Ordering::Relaxed);
        }
        Ok(shared)
    }
}
