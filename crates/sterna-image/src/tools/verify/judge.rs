//! Compares bitmaps with content: finds stale data, lost data, and saves that were never finished.

use sterna_wire::PAGE_SHIFT;

use super::blocks::{BlockList, BlockPlace};
use super::content::Content;
use super::places::{Bits, bytes};
use super::report::Report;
use super::tail::Tail;
use super::window::Window;
use crate::tools::finding::{Finding, Place};

const BITMAP: &str = "specs/mapped-ram.md §4.5";
const TRAPS: &str = "specs/mapped-ram.md §4.6";
const UNFINISHED: &str = "specs/mapped-ram.md §4.9";

/// Adds findings about bitmaps and content, and counts pages.
pub(super) fn judge(
    window: &Window<'_>,
    list: &BlockList,
    bitmaps: &[Bits],
    content: &Content,
    tail: &Tail,
    report: &mut Report,
) {
    let held: Vec<Held<'_>> = list
        .blocks
        .iter()
        .zip(bitmaps)
        .zip(&content.data)
        .filter(|((block, _), _)| block.is_usable && !block.is_skipped)
        .map(|((block, bits), data)| Held::new(block, bits, data))
        .collect();
    report.verdict.data_pages = held.iter().map(|held| held.set).sum();
    let pages: u64 = held.iter().map(|held| held.block.length_bytes >> PAGE_SHIFT).sum();
    report.verdict.zero_pages = pages.saturating_sub(report.verdict.data_pages);
    let is_all_usable = list.blocks.iter().all(|block| block.is_usable || block.is_skipped);
    let any_bit = held.iter().any(|held| held.set > 0);
    let stale: u64 = held.iter().map(|held| held.stale).sum();
    if !any_bit {
        let is_cut = !tail.has_devices && !tail.has_eof;
        // Blocks that could not be examined allow no conclusion.
        if is_all_usable || (is_cut && !held.is_empty()) {
            no_bits(window, stale, tail, report);
        }
        return;
    }
    if !tail.is_there && list.end.is_some() {
        report.add(no_tail(window));
    }
    if !tail.has_end && tail.has_eof && stale > 0 && list.has_footers {
        // A background snapshot writes each page at most once. Stale data is impossible, so a repair was interrupted.
        let what = format!(
            "{stale} pages have data but clear bits, and RAM has no END: not all bitmaps were written"
        );
        report.add(background(what));
        return;
    }
    if !tail.has_end && tail.has_eof && list.has_footers {
        let what = "RAM has no END: this is a background snapshot whose bitmaps were written afterwards";
        report.add(Finding::note("no-end", UNFINISHED, Place::default(), what).effect("QEMU loads it"));
    }
    for held in &held {
        held.report(content, report);
    }
}

/// Whether bitmaps and holes alone make it necessary to examine the pages.
///
/// Reasons are:
/// - no bit is set in any block
/// - RAM has no END (a background snapshot, whose bitmaps may be partly written)
/// - set bits over holes
///
/// This check misses two cases that [`judge`] detects: stale data, and bitmaps in the other byte order in a file
/// without holes. Stale data is no damage.
pub(super) fn is_suspect(window: &Window<'_>, list: &BlockList, bitmaps: &[Bits], tail: &Tail) -> bool {
    let held = || {
        let pairs = list.blocks.iter().zip(bitmaps);
        pairs.filter(|(block, _)| block.is_usable && !block.is_skipped && block.length_bytes > 0)
    };
    if held().next().is_none() {
        return false;
    }
    if !tail.has_end || held().all(|(_, bits)| bits.set == 0) {
        return true;
    }
    let content = Content::holes_of(window);
    held().any(|(block, bits)| {
        let all_set = bits.set == block.length_bytes >> PAGE_SHIFT;
        !all_set
            && set_pages(bits).any(|page| {
                let start = block.pages + bytes(page);
                !content.is_stored(start, start + bytes(1))
            })
    })
}

/// The pages whose bits are set.
fn set_pages(bits: &Bits) -> impl Iterator<Item = u64> {
    bits.words.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(|(index, word)| {
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index as u64 * 64 + bit)
    })
}

fn background(what: String) -> Finding {
    Finding::error("background-snapshot", UNFINISHED, Place::default(), what)
        .effect("QEMU reports such a save as completed, and cannot load it: RAM stays zero")
        .remedy("`sterna repair` writes the bitmaps")
}

/// Adds the finding for an image without any set bit.
fn no_bits(window: &Window<'_>, stale: u64, tail: &Tail, report: &mut Report) {
    let place = Place::default();
    if !tail.has_devices && !tail.has_eof {
        // The early end of the stream is part of this finding. Remove its separate findings.
        report.verdict.findings.retain(|finding| !matches!(finding.code, "devices" | "no-eof" | "truncated"));
        let what = format!("no bitmap was written, and no device follows RAM: {stale} pages have data");
        report.add(
            Finding::error("cancelled", UNFINISHED, Place::byte(window.length), what)
                .effect("QEMU stops, or with multifd crashes, when it loads this")
                .remedy("The save was cancelled, was killed, or is still running: save again"),
        );
    } else if stale == 0 {
        report.add(Finding::note("no-data", BITMAP, place, "all of RAM is zero"));
    } else if tail.has_eof && !tail.has_end {
        let what = format!(
            "no bitmap was written, although {stale} pages have data and the devices are complete: this is a \
             background snapshot of QEMU, which lacks RAM's END and therefore the bitmaps"
        );
        report.add(background(what));
    } else {
        let what = format!("no bit is set in any bitmap, although {stale} pages have data");
        report.add(
            Finding::error("bitmaps-lost", BITMAP, place, what)
                .effect("QEMU loads it with RAM all zero")
                .remedy("Use a good copy of the file, because it is unknown which pages are stale"),
        );
    }
}

fn no_tail(window: &Window<'_>) -> Finding {
    let what = "the file ends with RAM: no device follows";
    Finding::error("truncated", "specs/mapped-ram.md §6.5", Place::byte(window.length), what)
        .effect("QEMU stops when it loads this")
        .remedy("Use a complete copy of the file, or save again")
}

/// Compares a block's bits with its content.
struct Held<'a> {
    block: &'a BlockPlace,
    words: &'a [u64],
    data: &'a [u64],
    /// Bits of the last word beyond the last page.
    beyond: u64,
    set: u64,
    /// Pages with data under a clear bit.
    stale: u64,
    /// Pages without data under a set bit.
    blank: u64,
}

impl<'a> Held<'a> {
    fn new(block: &'a BlockPlace, bits: &'a Bits, data: &'a [u64]) -> Self {
        let mut held =
            Self { block, words: &bits.words, data, beyond: bits.beyond, set: bits.set, stale: 0, blank: 0 };
        held.stale = held.count(|bits, data| data & !bits);
        held.blank = held.count(|bits, data| bits & !data);
        held
    }

    fn pairs(&self) -> impl Iterator<Item = (u64, u64)> {
        let word = |words: &[u64], index: usize| words.get(index).copied().unwrap_or(0);
        (0..self.words.len().max(self.data.len()))
            .map(move |index| (word(self.words, index), word(self.data, index)))
    }

    fn count(&self, of: impl Fn(u64, u64) -> u64) -> u64 {
        self.pairs().map(|(bits, data)| u64::from(of(bits, data).count_ones())).sum()
    }

    /// The pages that `of` selects, in ascending order.
    fn pages(&self, of: impl Fn(u64, u64) -> u64) -> impl Iterator<Item = u64> {
        self.pairs().enumerate().flat_map(move |(index, (bits, data))| {
            let word = of(bits, data);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index as u64 * 64 + bit)
        })
    }

    fn place(&self, page: u64) -> Place {
        Place::byte(self.block.pages + bytes(page)).block(&self.block.name).page(page)
    }

    fn report(&self, content: &Content, report: &mut Report) {
        if self.is_swapped() {
            let place = Place::byte(self.block.bitmap).block(&self.block.name);
            let what = format!(
                "the bitmap matches the pages only with the bytes of each word reversed: {} pages with data have \
                 clear bits, {} without have set ones",
                self.stale, self.blank
            );
            report.add(
                Finding::error("bitmap-byte-order", BITMAP, place, what)
                    .effect("QEMU loads it with wrong memory, without an error")
                    .remedy(
                        "The file is from a host with the other byte order, or was edited: use a good copy",
                    ),
            );
            return;
        }
        if let Some(first) = self.pages(|bits, data| data & !bits).next() {
            let what = format!("{} pages from here have data but clear bits", self.stale);
            report.add(
                Finding::warning("stale-data", TRAPS, self.place(first), what)
                    .effect("QEMU loads them as zero, which is correct; a program that maps the file would restore wrong memory")
                    .remedy("`sterna convert` writes an image without them"),
            );
        }
        let lost: Vec<u64> = self
            .pages(|bits, data| bits & !data)
            .filter(|page| {
                let start = self.block.pages + bytes(*page);
                !content.is_stored(start, start + bytes(1))
            })
            .collect();
        let all_set = self.set == self.block.length_bytes >> PAGE_SHIFT;
        if let Some(first) = lost.first().filter(|_| !all_set) {
            let what = format!("{} pages from here have set bits but are holes of the file", lost.len());
            report.add(
                Finding::warning("set-over-hole", TRAPS, self.place(*first), what)
                    .effect("They load as zeros; QEMU writes this only with zero-page-detection=none")
                    .remedy(
                        "If the file was copied, its data may have been lost: compare it with the original",
                    ),
            );
        }
        let blank = self.blank - if all_set { 0 } else { lost.len() as u64 };
        if blank > 0 {
            let first = self.pages(|bits, data| bits & !data).next().unwrap_or(0);
            let why = if all_set { " (the save did not detect zero pages)" } else { "" };
            let what = format!("{blank} pages of zeros have set bits{why}");
            report.add(Finding::note("zeros-stored", TRAPS, self.place(first), what));
        }
    }

    /// Whether bits and content disagree, but agree after a swap of each word's bytes.
    fn is_swapped(&self) -> bool {
        let wrong = self.stale + self.blank;
        if self.stale == 0 || self.blank == 0 || wrong < 8 {
            return false;
        }
        let last = self.words.len().saturating_sub(1);
        let swapped: u64 = self
            .pairs()
            .enumerate()
            .map(|(index, (bits, data))| {
                let bits = if index == last { bits | self.beyond } else { bits };
                u64::from((bits.swap_bytes() ^ data).count_ones())
            })
            .sum();
        swapped * 8 < wrong
    }
}
