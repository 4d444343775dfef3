//! Checks that bitmaps and pages are in the file and do not overlap. Reads the bitmaps.

use std::sync::atomic::Ordering;

use sterna_wire::mapped_ram::bitmap_bytes;
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::blocks::{BlockList, BlockPlace};
use super::head::Head;
use super::report::Report;
use super::window::Window;
use crate::ImageError;
use crate::read::MappedBlock;
use crate::read::head::MOST_RAM_BYTES;
use crate::tools::finding::{Finding, Place};

/// Bytes of a bitmap that are read in one step.
const STRIDE: usize = 1 << 20;
const EVILS: &str = "specs/mapped-ram.md §6.5";
const RULES: &str = "specs/mapped-ram.md §8";

/// Compares all places with the file and with each other. Blocks at invalid places become unusable.
pub(super) fn examine(window: &Window<'_>, head: &Head, list: &mut BlockList, report: &mut Report) {
    let of_stream = |start, end, what: &str| Region { start, end, what: what.to_owned(), block: None };
    let mut regions = vec![
        of_stream(0, head.stream_offset, "libvirt's header and texts"),
        of_stream(head.stream_offset, head.ram_offset + 25, "the stream's head"),
    ];
    if let (Some(eos), Some(_)) = (list.eos, list.end) {
        regions.push(of_stream(eos, window.length.max(eos + 1), "the stream after RAM"));
    }
    for (index, block) in list.blocks.iter_mut().enumerate() {
        let name = &block.name;
        let mut region = |start, end, what: &str| {
            regions.push(Region {
                start,
                end,
                what: format!("{what} of block {name:?}"),
                block: Some(index),
            });
        };
        region(block.entry, block.entry_end, "the entry");
        if block.is_skipped || !block.is_usable {
            continue;
        }
        let bitmap_end = block.bitmap.saturating_add(bitmap_bytes(block.length_bytes));
        let place = |offset: u64| Place::byte(block.entry_end - offset).block(name);
        if bitmap_end > window.length {
            let what = format!("the bitmap at {:#x} reaches beyond the file", block.bitmap);
            report.add(
                Finding::error("bitmap-outside", EVILS, place(16), what)
                    .effect("QEMU stops: \"Error reading dirty bitmap\""),
            );
            block.is_usable = false;
        } else if block.bitmap != block.entry_end {
            let what = format!("the header places the bitmap at {:#x}, not after the header", block.bitmap);
            report.add(
                Finding::warning("bitmap-offset", "specs/mapped-ram.md §4.3", place(16), what)
                    .effect("QEMU uses the bytes there as the bitmap"),
            );
        }
        if block.pages_end() > window.length {
            let what = format!(
                "the pages from {:#x} to {:#x} reach beyond the file of {:#x} bytes",
                block.pages,
                block.pages_end(),
                window.length
            );
            report.add(
                Finding::error("pages-outside", EVILS, place(8), what)
                    .effect("QEMU stops at the first such page, and with multifd it crashes")
                    .remedy("The file is truncated, or not complete yet: use a complete copy"),
            );
        }
        region(block.bitmap, bitmap_end, "the bitmap");
        region(block.pages, block.pages_end(), "the pages");
        // A bitmap for more RAM than this limit would need too much memory.
        block.is_usable &= block.length_bytes <= MOST_RAM_BYTES;
    }
    overlaps(regions, list, report);
}

/// A range of the file with its content.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Region {
    start: u64,
    end: u64,
    what: String,
    /// Index of the block; none for ranges of the stream.
    block: Option<usize>,
}

fn overlaps(mut regions: Vec<Region>, list: &mut BlockList, report: &mut Report) {
    regions.retain(|region| region.start < region.end);
    regions.sort();
    // Compare each region with the earlier region that has the highest end.
    let mut farthest = 0;
    for index in 1..regions.len() {
        let (over, own) = (&regions[farthest], &regions[index]);
        if own.start < over.end {
            let mut place = Place::byte(own.start);
            place.block = own.block.map(|block| list.blocks[block].name.clone());
            report.add(
                Finding::error("overlap", RULES, place, format!("{} overlap {}", own.what, over.what))
                    .effect("QEMU does not check this, and loads wrong memory")
                    .remedy("Use a good copy of the file"),
            );
            for block in [own.block, over.block].into_iter().flatten() {
                list.blocks[block].is_usable = false;
            }
        }
        if own.end > over.end {
            farthest = index;
        }
    }
}

/// The pages of a block that the file contains, by the block's bitmap.
#[derive(Debug, Clone, Default)]
pub(super) struct Bits {
    /// Page `p` is bit `p % 64` of word `p / 64`. Bits beyond the last page are cleared.
    pub(super) words: Vec<u64>,
    /// Bits of the last word beyond the last page.
    pub(super) beyond: u64,
    pub(super) set: u64,
}

impl Bits {
    /// The bitmaps of blocks that an open image has already read.
    pub(super) fn of(blocks: &[MappedBlock]) -> Vec<Self> {
        let bits = |block: &MappedBlock| {
            let words = block.bitmap.words().iter().map(|word| word.load(Ordering::Relaxed)).collect();
            Self { words, beyond: 0, set: block.bitmap.count() }
        };
        blocks.iter().map(bits).collect()
    }
}

/// Reads the bitmaps, in the order of the blocks. Bits beyond the end of the file count as clear.
pub(super) fn bitmaps(
    window: &Window<'_>,
    list: &BlockList,
    report: &mut Report,
) -> Result<Vec<Bits>, ImageError> {
    let mut all = Vec::new();
    for block in &list.blocks {
        if block.is_skipped || !block.is_usable {
            all.push(Bits::default());
            continue;
        }
        let mut words = words(window, block)?;
        let pages = block.length_bytes >> PAGE_SHIFT;
        let tail = (pages % 64) as u32;
        let mut behind = 0;
        if let Some(last) = words.get_mut((pages / 64) as usize).filter(|_| tail > 0) {
            let beyond = *last & (u64::MAX << tail);
            *last &= !beyond;
            behind = beyond;
            if beyond != 0 {
                let at = block.bitmap + pages / 64 * 8;
                let what = format!("{} bits are set beyond the last page", beyond.count_ones());
                report.add(
                    Finding::warning(
                        "bits-beyond",
                        "specs/mapped-ram.md §4.5",
                        Place::byte(at).block(&block.name),
                        what,
                    )
                    .effect("QEMU ignores them, and never writes them"),
                );
            }
        }
        let set = words.iter().map(|word| u64::from(word.count_ones())).sum();
        all.push(Bits { words, beyond: behind, set });
    }
    Ok(all)
}

/// Reads a block's bitmap, limited to the pages that the file can contain.
///
/// Without this limit, a wrong length would cost memory.
fn words(window: &Window<'_>, block: &BlockPlace) -> Result<Vec<u64>, ImageError> {
    let room = window.length.saturating_sub(block.pages).next_multiple_of(PAGE_SIZE as u64);
    let total = bitmap_bytes(block.length_bytes.min(room)) as usize;
    let mut words = Vec::with_capacity(total / 8);
    while words.len() * 8 < total {
        let done = words.len() * 8;
        let bytes = window.get(block.bitmap + done as u64, (total - done).min(STRIDE))?;
        let (whole, rest) = bytes.as_chunks();
        words.extend(whole.iter().map(|word| u64::from_le_bytes(*word)));
        if bytes.len() < STRIDE.min(total - done) {
            // The file has become shorter.
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            words.push(u64::from_le_bytes(word));
            break;
        }
    }
    Ok(words)
}

/// Bytes of that many pages.
pub(super) fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}
