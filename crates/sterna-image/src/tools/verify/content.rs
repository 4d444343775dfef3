//! Reads all data with several threads, and finds the pages that are not zero.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::blocks::BlockList;
use super::places::{Bits, bytes};
use super::report::{Report, VerifyOptions};
use super::window::Window;
use crate::ImageError;
use crate::crew;
use crate::tools::finding::{Finding, Place};
use crate::tools::reading::{Buffer, Reading};

/// Bytes that a thread reads in one step.
const PIECE: u64 = 1 << 20;
const PAGE: u64 = PAGE_SIZE as u64;
const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
/// The limit of unreadable places that are listed separately.
const NAMED: usize = 16;

/// The content of a file: pages with data, and ranges that are not holes.
pub(super) struct Content {
    /// For each block, one bit for each page that is not zero in the file.
    ///
    /// The bitmap does not affect these bits.
    pub(super) data: Vec<Vec<u64>>,
    /// Ranges of the file that are not holes.
    pub(super) extents: Vec<(u64, u64)>,
}

impl Content {
    /// Reads only the holes of the file, not its pages.
    pub(super) fn holes_of(window: &Window<'_>) -> Self {
        Self { data: Vec::new(), extents: Reading::extents(window.source, window.length) }
    }

    /// Whether a byte of `[start, end)` is outside all holes.
    pub(super) fn is_stored(&self, start: u64, end: u64) -> bool {
        let index = self.extents.partition_point(|extent| extent.1 <= start);
        self.extents.get(index).is_some_and(|extent| extent.0 < end)
    }
}

/// Reads the whole file and examines the pages of `list`.
pub(super) fn examine(
    window: &Window<'_>,
    list: &BlockList,
    options: &VerifyOptions,
    report: &mut Report,
) -> Result<Content, ImageError> {
    let reading = Reading::new(window.source, window.length);
    let extents = reading.data().to_vec();
    let scan = Scan::new(&reading, list, window.length);
    let pieces = pieces(&extents, window.length);
    let next = AtomicUsize::new(0);
    let longest = pieces.iter().map(|(start, end)| end - start).max().unwrap_or(0);
    let work = || {
        let mut buffer = Buffer::new(longest as usize);
        while let Some(&(start, end)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            scan.piece(start, end, &mut buffer);
        }
        Ok::<(), ImageError>(())
    };
    crew::share(options.threads.min(pieces.len()), work)?;
    report.verdict.read_bytes += scan.read.load(Ordering::Relaxed);
    scan.report(list, report);
    let data =
        scan.blocks.into_iter().map(|block| block.data.into_iter().map(AtomicU64::into_inner).collect());
    Ok(Content { data: data.collect(), extents })
}

/// Reads the whole file to find unreadable places, without knowledge of its structure.
pub(super) fn read_all(
    window: &Window<'_>,
    options: &VerifyOptions,
    report: &mut Report,
) -> Result<(), ImageError> {
    examine(window, &BlockList::default(), options, report).map(|_| ())
}

/// Pieces of the file with data. Within an aligned step of 1 MiB, a piece reaches from the first data to the last.
fn pieces(extents: &[(u64, u64)], length: u64) -> Vec<(u64, u64)> {
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    for &(start, end) in extents {
        let mut at = start / PAGE * PAGE;
        let end = end.next_multiple_of(PAGE).min(length.next_multiple_of(PAGE));
        while at < end {
            let stop = ((at / PIECE + 1) * PIECE).min(end);
            match pieces.last_mut() {
                Some(last) if last.0 / PIECE == at / PIECE => last.1 = last.1.max(stop),
                _ => pieces.push((at, stop)),
            }
            at = stop;
        }
    }
    pieces
}

struct Scan<'a> {
    reading: &'a Reading<'a>,
    length: u64,
    /// In the order of the block list.
    blocks: Vec<ScanBlock>,
    /// Indices of usable blocks, in the order of their pages in the file.
    order: Vec<usize>,
    read: AtomicU64,
    unreadable: Mutex<Vec<(u64, String)>>,
}

struct ScanBlock {
    start: u64,
    end: u64,
    data: Vec<AtomicU64>,
}

impl<'a> Scan<'a> {
    fn new(reading: &'a Reading<'a>, list: &BlockList, length: u64) -> Self {
        let blocks: Vec<ScanBlock> = list
            .blocks
            .iter()
            .map(|block| {
                let is_there = block.is_usable && !block.is_skipped && block.pages % PAGE == 0;
                let (start, end) = if is_there { (block.pages, block.pages_end()) } else { (0, 0) };
                // Only pages within the file's length need a bit.
                let pages = end.min(length).saturating_sub(start) >> PAGE_SHIFT;
                let data = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
                ScanBlock { start, end: start + bytes(pages), data }
            })
            .collect();
        let mut order: Vec<usize> =
            (0..blocks.len()).filter(|index| !blocks[*index].data.is_empty()).collect();
        order.sort_by_key(|index| blocks[*index].start);
        Self { reading, length, blocks, order, read: AtomicU64::new(0), unreadable: Mutex::default() }
    }

    fn piece(&self, start: u64, end: u64, buffer: &mut Buffer) {
        match self.reading.read(start, (end - start) as usize, buffer) {
            Ok(got) => {
                self.read.fetch_add(got as u64, Ordering::Relaxed);
                let expected = end.min(self.length) - start;
                if (got as u64) < expected {
                    self.bad(start + got as u64, "the file has become shorter".into());
                }
                self.look(start, buffer.first(got));
            }
            Err(error) if end - start <= PAGE => self.bad(start, error.to_string()),
            // Retry page by page, to read as much as possible and to find the unreadable page.
            Err(_) => {
                for page in (start..end).step_by(PAGE_SIZE) {
                    self.piece(page, (page + PAGE).min(end), buffer);
                }
            }
        }
    }

    fn bad(&self, offset: u64, why: String) {
        self.unreadable.lock().push((offset, why));
    }

    /// Marks the pages in `content`, from offset `start` of the file, that are not zero.
    fn look(&self, start: u64, content: &[u8]) {
        let mut next = self.order.partition_point(|index| self.blocks[*index].end <= start);
        let (mut word, mut bits) = (None::<&AtomicU64>, 0u64);
        let flush = |word: Option<&AtomicU64>, bits: u64| {
            if let Some(word) = word.filter(|_| bits != 0) {
                word.fetch_or(bits, Ordering::Relaxed);
            }
        };
        for (index, page) in content.chunks(PAGE_SIZE).enumerate() {
            let at = start + bytes(index as u64);
            while self.order.get(next).is_some_and(|index| self.blocks[*index].end <= at) {
                next += 1;
            }
            let Some(block) = self.order.get(next).map(|index| &self.blocks[*index]) else { break };
            if at < block.start || page == &ZEROS[..page.len()] {
                continue;
            }
            let number = (at - block.start) >> PAGE_SHIFT;
            let here = block.data.get((number / 64) as usize);
            if !matches!((word, here), (Some(old), Some(new)) if std::ptr::eq(old, new)) {
                flush(word, bits);
                (word, bits) = (here, 0);
            }
            bits |= 1 << (number % 64);
        }
        flush(word, bits);
    }

    fn report(&self, list: &BlockList, report: &mut Report) {
        let mut unreadable = self.unreadable.lock();
        unreadable.sort();
        for (offset, why) in unreadable.iter().take(NAMED) {
            let mut place = Place::byte(*offset);
            if let Some(index) =
                self.blocks.iter().position(|block| (block.start..block.end).contains(offset))
            {
                place = place
                    .block(&list.blocks[index].name)
                    .page((offset - self.blocks[index].start) >> PAGE_SHIFT);
            }
            report.add(
                Finding::error(
                    "unreadable",
                    "specs/mapped-ram.md §8",
                    place,
                    format!("cannot be read: {why}"),
                )
                .effect("The guest's memory is lost here")
                .remedy("Check the disk (dmesg) and use another copy of the file"),
            );
        }
        if unreadable.len() > NAMED {
            let what = format!("{} more parts cannot be read", unreadable.len() - NAMED);
            report.add(Finding::error("unreadable", "specs/mapped-ram.md §8", Place::default(), what));
        }
    }
}

/// Digest of all RAM: blocks in the order of their names.
///
/// A block contributes the digests of its pieces of 1 MiB.
pub(super) fn digest(
    window: &Window<'_>,
    list: &BlockList,
    bitmaps: &[Bits],
    options: &VerifyOptions,
) -> Result<String, ImageError> {
    let mut order: Vec<usize> =
        (0..list.blocks.len()).filter(|index| !list.blocks[*index].is_skipped).collect();
    order.sort_by(|a, b| list.blocks[*a].name.cmp(&list.blocks[*b].name));
    let reading = Reading::new(window.source, window.length);
    let mut whole = Xxh3::new();
    for index in order {
        let block = &list.blocks[index];
        whole.update(block.name.as_bytes());
        whole.update(&[0]);
        whole.update(&block.length_bytes.to_be_bytes());
        for piece in
            piece_digests(&reading, block.pages, block.length_bytes, &bitmaps[index], options.threads)
                .map_err(|error| ImageError::io(window.name, "read", error))?
        {
            whole.update(&piece.to_be_bytes());
        }
    }
    Ok(format!("{:032x}", whole.digest128()))
}

fn piece_digests(
    reading: &Reading<'_>,
    pages: u64,
    length: u64,
    bits: &Bits,
    threads: usize,
) -> std::io::Result<Vec<u128>> {
    let count = length.div_ceil(PIECE);
    // Many pieces of sparse RAM are all zero; their digest is computed only once.
    let zeros = OnceLock::new();
    let digests: Vec<Mutex<u128>> = (0..count).map(|_| Mutex::new(0)).collect();
    let next = AtomicU64::new(0);
    let work = || -> std::io::Result<()> {
        let mut buffer = Buffer::new(PIECE.min(length) as usize);
        let mut content = vec![0; PIECE.min(length) as usize];
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = digests.get(piece as usize) else { return Ok(()) };
            let start = piece * PIECE;
            let size = PIECE.min(length - start) as usize;
            let words = (PIECE >> PAGE_SHIFT) as usize / 64;
            let first = piece as usize * words;
            let mine = &bits.words[first.min(bits.words.len())..(first + words).min(bits.words.len())];
            let digest = if mine.iter().all(|word| *word == 0) && size == PIECE as usize {
                *zeros.get_or_init(|| xxh3_128(&vec![0; PIECE as usize]))
            } else {
                let got = reading.read(pages + start, size, &mut buffer)?;
                content[..size].fill(0);
                for page in 0..size / PAGE_SIZE {
                    let range = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
                    if mine[page / 64] >> (page % 64) & 1 == 1 && range.end <= got {
                        content[range.clone()].copy_from_slice(&buffer.first(got)[range]);
                    }
                }
                xxh3_128(&content[..size])
            };
            *slot.lock() = digest;
        }
    };
    crew::share(threads.min(count.min(usize::MAX as u64) as usize), work)?;
    Ok(digests.into_iter().map(Mutex::into_inner).collect())
}
