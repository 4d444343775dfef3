//! Reads a mapped-ram image: copies pages with several threads, or visits them in order.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sterna_transport::{Direct, PageFile, QueueOptions, RangeReader};
use sterna_wire::PAGE_SHIFT;

use super::counts::{Counted, Counts};
use super::request::{ConvertOptions, threads};
use crate::ImageError;
use crate::crew;
use crate::read::visitor::PageVisitor;
use crate::read::{Image, MappedBlock, MappedPages};
use crate::write::{MappedLane, MappedWriter};

/// Pages that a thread claims in one step: 64 MiB.
const UNIT: u64 = 16 << 10;

/// Passes every page to `visitor`, in stream order, with read-ahead.
pub(super) fn visit(image: &Image, direct: Direct, visitor: &mut dyn PageVisitor) -> Result<(), ImageError> {
    let (Some(mapped), Some(file)) = (image.mapped(), image.page_file(direct)?) else {
        return image.visit_pages(visitor);
    };
    let mut reader = RangeReader::new(&file, QueueOptions::default());
    for (index, block) in mapped.blocks().iter().enumerate().filter(|(_, block)| !block.is_skipped) {
        let mut next = 0;
        reader.read(ranges(block, 0..block.pages()), |offset, content| -> Result<(), ImageError> {
            let first = (offset - block.pages_offset) >> PAGE_SHIFT;
            if first > next {
                visitor.zero(index, next, first - next)?;
            }
            next = first + (content.len() as u64 >> PAGE_SHIFT);
            visitor.pages(index, first, content)
        })?;
        if next < block.pages() {
            visitor.zero(index, next, block.pages() - next)?;
        }
    }
    Ok(())
}

/// File ranges of those `pages` that the image contains, in ascending order.
fn ranges(block: &MappedBlock, pages: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
    let mut at = pages.start;
    std::iter::from_fn(move || {
        let run = block.bitmap.next_run(at, pages.end, pages.end)?;
        at = run.end();
        Some(block.pages_offset + (run.first << PAGE_SHIFT)..block.pages_offset + (run.end() << PAGE_SHIFT))
    })
}

/// Copies every page to `writer`: shared if the file system supports reflinks, otherwise copied. Holes stay holes.
pub(super) fn copy(
    image: &Image,
    writer: &MappedWriter,
    options: &ConvertOptions,
    counts: &Counts,
) -> Result<(), ImageError> {
    let (mapped, file) = match (image.mapped(), image.page_file(options.direct)?) {
        (Some(mapped), Some(file)) => (mapped, file),
        (Some(mapped), None) => return copy_frames(mapped, writer, options, counts),
        (None, _) => {
            let mut lane = writer.lane();
            image.visit_pages(&mut Counted { to: &mut lane, counts })?;
            return lane.drain();
        }
    };
    let units: Vec<(usize, Range<u64>)> = mapped.blocks().iter().enumerate().flat_map(units).collect();
    let next = AtomicUsize::new(0);
    crew::share(threads(options.threads).min(units.len()), || {
        let mut copier = Copier::new(mapped, &file, writer, counts);
        while let Some((block, pages)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let done = copier.unit(*block, pages.clone());
            if done.is_err() {
                // After an error, the other threads claim no further units.
                next.store(units.len(), Ordering::Relaxed);
            }
            done?;
        }
        copier.lane.drain()
    })
}

/// Copies pages that are not in a file, such as those of frames: several threads decompress them.
fn copy_frames(
    mapped: &MappedPages,
    writer: &MappedWriter,
    options: &ConvertOptions,
    counts: &Counts,
) -> Result<(), ImageError> {
    /// Pages of one read: a multiple of every extent.
    const STRIDE: u64 = 512;
    let units: Vec<(usize, Range<u64>)> = mapped.blocks().iter().enumerate().flat_map(units).collect();
    let next = AtomicUsize::new(0);
    crew::share(threads(options.threads).min(units.len()), || {
        let (mut lane, mut content) = (writer.lane(), vec![0; (STRIDE as usize) << PAGE_SHIFT]);
        let mut unit = |block: usize, pages: Range<u64>| -> Result<(), ImageError> {
            let bitmap = &mapped.blocks()[block].bitmap;
            let held = bitmap.count_range(pages.start, pages.end - pages.start);
            counts.data.fetch_add(held, Ordering::Relaxed);
            counts.zero.fetch_add(pages.end - pages.start - held, Ordering::Relaxed);
            for start in pages.clone().step_by(STRIDE as usize) {
                let end = (start + STRIDE).min(pages.end);
                let mut at = start;
                while let Some(run) = bitmap.next_run(at, end, end - at) {
                    let content = &mut content[..(run.count as usize) << PAGE_SHIFT];
                    mapped.read(block, run.first, content)?;
                    lane.pages(block, run.first, content)?;
                    at = run.end();
                }
            }
            Ok(())
        };
        while let Some((block, pages)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let done = unit(*block, pages.clone());
            if done.is_err() {
                // After an error, the other threads claim no further units.
                next.store(units.len(), Ordering::Relaxed);
            }
            done?;
        }
        lane.drain()
    })
}

fn units((index, block): (usize, &MappedBlock)) -> Vec<(usize, Range<u64>)> {
    let pages = if block.is_skipped { 0 } else { block.pages() };
    let starts = (0..pages).step_by(UNIT as usize);
    starts.map(|first| (index, first..(first + UNIT).min(pages))).collect()
}

/// The state of one copying thread.
struct Copier<'a> {
    mapped: &'a MappedPages,
    from: &'a Arc<PageFile>,
    reader: RangeReader,
    writer: &'a MappedWriter,
    lane: MappedLane,
    counts: &'a Counts,
    /// False after the file system has refused a reflink.
    can_share: bool,
}

impl<'a> Copier<'a> {
    fn new(
        mapped: &'a MappedPages,
        from: &'a Arc<PageFile>,
        writer: &'a MappedWriter,
        counts: &'a Counts,
    ) -> Self {
        let reader = RangeReader::new(from, QueueOptions::default());
        Self { mapped, from, reader, writer, lane: writer.lane(), counts, can_share: true }
    }

    fn unit(&mut self, index: usize, pages: Range<u64>) -> Result<(), ImageError> {
        let block = &self.mapped.blocks()[index];
        let held = block.bitmap.count_range(pages.start, pages.end - pages.start);
        self.counts.data.fetch_add(held, Ordering::Relaxed);
        self.counts.zero.fetch_add(pages.end - pages.start - held, Ordering::Relaxed);
        let mut data = Vec::new();
        for range in ranges(block, pages) {
            self.run(index, block, range, &mut data)?;
        }
        let lane = &mut self.lane;
        self.reader.read(data, |offset, content| {
            lane.pages(index, (offset - block.pages_offset) >> PAGE_SHIFT, content)
        })
    }

    /// Shares parts of `range` by reflinks, and adds the other parts to `data`.
    fn run(
        &mut self,
        index: usize,
        block: &MappedBlock,
        range: Range<u64>,
        data: &mut Vec<Range<u64>>,
    ) -> Result<(), ImageError> {
        let page = |offset: u64| (offset - block.pages_offset) >> PAGE_SHIFT;
        let mut at = range.start;
        while at < range.end {
            // A set bit of a page in a hole is legal (§4.6). Both the bit and the hole are kept.
            let next = self.from.next_data(at, range.end)?.unwrap_or(range.end..range.end);
            let start = at.max(next.start & !((1 << PAGE_SHIFT) - 1));
            let end = next.end.next_multiple_of(1 << PAGE_SHIFT).min(range.end);
            if start > at {
                self.writer.mark(index, page(at), page(start) - page(at));
            }
            if start < end && !self.share(index, block, start..end)? {
                data.push(start..end);
            }
            at = end.max(start);
        }
        Ok(())
    }

    fn share(&mut self, index: usize, block: &MappedBlock, range: Range<u64>) -> Result<bool, ImageError> {
        if !self.can_share {
            return Ok(false);
        }
        let (first, length) = ((range.start - block.pages_offset) >> PAGE_SHIFT, range.end - range.start);
        let to = self.writer.pages_offset(index) + (first << PAGE_SHIFT);
        self.can_share = self.writer.file().reflink_range(to, self.from, range.start, length)?;
        if self.can_share {
            self.writer.mark(index, first, length >> PAGE_SHIFT);
            self.counts.shared.fetch_add(length, Ordering::Relaxed);
        }
        Ok(self.can_share)
    }
}
