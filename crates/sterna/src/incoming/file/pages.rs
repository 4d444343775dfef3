//! Loads pages of a mapped-ram file into guest RAM, by several threads.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_ram::PAGE_SIZE;
use sterna_transport::{PageFile, PageQueue, QueueOptions, RangeReader};

use super::structure::MappedBlock;
use crate::error::MigrationError;
use crate::incoming::shared::Shared;
use crate::order::PageRun;
use crate::pages::PageSink;
use crate::threads::{ThreadRole, died, tried};

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages that a thread claims together: 8192 pages are 32 MiB.
const WINDOW_PAGES: u64 = 8192;
/// Most pages of one I/O: 512 pages are 2 MiB. New memory is populated in these pieces, just before it is read.
const PIECE_PAGES: u64 = 512;
/// Shorter runs (below 32 pages, 128 KiB) are read together with their neighbours and copied. This is faster
/// than many small reads.
const SMALL_PAGES: u64 = 32;

/// Loads all pages: those in the file from the file, all others as zero.
pub(super) fn load(
    shared: &Shared,
    file: &Arc<PageFile>,
    blocks: &[MappedBlock],
) -> Result<(), MigrationError> {
    let threads = if shared.capabilities.multifd { usize::from(shared.params.multifd_channels) } else { 1 };
    let windows = windows(blocks);
    let next = AtomicU64::new(0);
    let load = || -> Result<(), MigrationError> {
        let mut lane = Lane::new(shared, file, blocks)?;
        while let Some(window) = windows.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            if shared.stopping.load(Ordering::Acquire) {
                break;
            }
            if let Err(error) = lane.window(window) {
                // The other threads stop at their next claim.
                next.store(u64::from(u32::MAX), Ordering::Relaxed);
                return Err(error);
            }
        }
        lane.finish()
    };
    let work = || tried("a thread that loads pages", load);
    std::thread::scope(|scope| {
        let spawn = |index: usize| {
            ThreadRole::Lane
                .of(index)
                .spawn_scoped(scope, work)
                .map_err(|error| MigrationError::system(format!("thread of a lane: {error}"), error))
        };
        let others = (1..threads).map(spawn).collect::<Result<Vec<_>, _>>();
        let mut result = work();
        for other in others? {
            let ended = other.join();
            result = result.and(ended.unwrap_or_else(|panic| Err(died("a loading thread", &*panic))));
        }
        result
    })
}

/// A range of pages in one block, by the block's index in the list.
struct Window {
    block: usize,
    pages: Range<u64>,
}

fn windows(blocks: &[MappedBlock]) -> Vec<Window> {
    let of_block = |(block, mapped): (usize, &MappedBlock)| {
        let pages = mapped.held.pages();
        let firsts = (0..pages).step_by(WINDOW_PAGES as usize);
        firsts
            .map(|first| Window { block, pages: first..pages.min(first + WINDOW_PAGES) })
            .collect::<Vec<_>>()
    };
    blocks.iter().enumerate().flat_map(of_block).collect()
}

/// The state of one loading thread.
struct Lane<'a> {
    shared: &'a Shared,
    blocks: &'a [MappedBlock],
    sink: &'a dyn PageSink,
    /// Reads large pieces directly into RAM.
    queue: PageQueue,
    /// Reads small pieces through its own buffer.
    reader: Option<RangeReader>,
    file: &'a Arc<PageFile>,
}

impl<'a> Lane<'a> {
    fn new(
        shared: &'a Shared,
        file: &'a Arc<PageFile>,
        blocks: &'a [MappedBlock],
    ) -> Result<Self, MigrationError> {
        let queue = PageQueue::with_ram(file, &shared.layout()?.ram, QueueOptions::default());
        Ok(Self { shared, blocks, sink: shared.sink(0)?.as_ref(), queue, reader: None, file })
    }

    fn window(&mut self, window: &Window) -> Result<(), MigrationError> {
        let block = &self.blocks[window.block];
        let mut small = Vec::new();
        let (mut normal, mut zero) = (0, 0);
        let mut page = window.pages.start;
        while page < window.pages.end {
            let held = block.held.next_run(page, window.pages.end, WINDOW_PAGES);
            let first = held.map_or(window.pages.end, |run| run.first);
            if first > page {
                self.sink.zero(PageRun { block: block.index, first: page, count: first - page })?;
                zero += first - page;
            }
            let Some(run) = held else { break };
            normal += run.count;
            page = run.end();
            let run = PageRun { block: block.index, first: run.first, count: run.count };
            if run.count < SMALL_PAGES {
                self.sink.prepare(run)?;
                small.push(run);
            } else {
                self.read(block, run)?;
            }
        }
        self.copy(block, &small)?;
        self.shared.normal_pages.fetch_add(normal, Ordering::Relaxed);
        self.shared.zero_pages.fetch_add(zero, Ordering::Relaxed);
        self.shared.received_bytes.fetch_add(normal * PAGE, Ordering::Relaxed);
        Ok(())
    }

    /// Starts the reads of a run, directly into RAM.
    fn read(&mut self, block: &MappedBlock, run: PageRun) -> Result<(), MigrationError> {
        let mut rest = Some(run);
        while let Some(run) = rest {
            let (piece, others) = run.split(PIECE_PAGES);
            self.sink.prepare(piece)?;
            let at = block.header.page_offset(piece.first);
            let (offset, length) = (piece.first * PAGE, piece.count as usize * PAGE_SIZE);
            self.queue.read_ram(at, piece.block, offset, length).map_err(MigrationError::storage)?;
            rest = others;
        }
        Ok(())
    }

    /// Reads small runs together with the gaps between them, and copies the runs.
    fn copy(&mut self, block: &MappedBlock, runs: &[PageRun]) -> Result<(), MigrationError> {
        if runs.is_empty() {
            return Ok(());
        }
        let ram = self.shared.layout()?.ram.block(block.index);
        let start = block.header.page_offset(0);
        let ranges = runs.iter().map(|run| start + run.first * PAGE..start + run.end() * PAGE);
        let reader = self.reader.get_or_insert_with(|| RangeReader::new(self.file, QueueOptions::default()));
        let mut failed = None;
        let read = reader.read(ranges, |at, bytes| match ram.write(at - start, bytes) {
            Ok(()) => Ok(()),
            Err(error) => {
                failed = Some(error.into());
                Err(sterna_transport::TransportError::Cancelled { channel: "loading".to_owned() })
            }
        });
        match (failed, read) {
            (Some(error), _) => Err(error),
            (None, read) => read.map_err(MigrationError::storage),
        }
    }

    /// Waits until all reads have completed.
    fn finish(&mut self) -> Result<(), MigrationError> {
        self.queue.drain().map_err(MigrationError::storage)
    }
}
