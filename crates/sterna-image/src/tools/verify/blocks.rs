//! Checks the list of blocks, each with its place in the file (specs/mapped-ram.md §2.1, §4.2).
//!
//! Entries are between pages: the next entry, or the end of the list, follows a block's pages. Therefore one wrong
//! offset or length hides all later entries. If no entry is at its expected place, the walk tries the places of
//! QEMU's own layout before it gives up.

use sterna_wire::PAGE_SIZE;
use sterna_wire::mapped_ram::{PAGES_ALIGNMENT, bitmap_bytes};
use sterna_wire::ram::flags;

use super::head::{Head, truncated};
use super::report::Report;
use super::window::{Window, be32, be64};
use crate::ImageError;
use crate::read::MappedBlock;
use crate::read::head::MOST_RAM_BYTES;
use crate::tools::finding::{Finding, Place};

const LIST: &str = "specs/mapped-ram.md §2.1";
const HEADER: &str = "specs/mapped-ram.md §4.2";
const LAYOUT: &str = "specs/mapped-ram.md §4.3";
const EVILS: &str = "specs/mapped-ram.md §6.5";
/// The longest entry in bytes: name, length, address, header.
const ENTRY_BYTES: usize = 1 + 255 + 8 + 8 + 28;
const PAGE: u64 = PAGE_SIZE as u64;

/// The places of a block in the file, as its entry states them.
#[derive(Debug, Clone)]
pub(super) struct BlockPlace {
    pub(super) name: String,
    pub(super) length_bytes: u64,
    pub(super) entry: u64,
    /// Offset after the entry's header.
    pub(super) entry_end: u64,
    pub(super) bitmap: u64,
    pub(super) pages: u64,
    pub(super) is_skipped: bool,
    /// Whether the places are valid, so that bitmap and pages can be read.
    pub(super) is_usable: bool,
}

impl BlockPlace {
    pub(super) fn pages_end(&self) -> u64 {
        self.pages.saturating_add(self.length_bytes)
    }
}

/// The decoded list of blocks.
#[derive(Debug, Default)]
pub(super) struct BlockList {
    pub(super) section_id: u32,
    pub(super) blocks: Vec<BlockPlace>,
    /// Offset after START and its footer; none if the walk did not reach it.
    pub(super) end: Option<u64>,
    /// Offset of EOS; none if the walk did not reach it.
    pub(super) eos: Option<u64>,
    pub(super) has_footers: bool,
}

impl BlockList {
    /// The places of blocks that an open image has already read.
    pub(super) fn of(blocks: &[MappedBlock]) -> Self {
        let place = |block: &MappedBlock| BlockPlace {
            name: block.name.clone(),
            length_bytes: block.length_bytes,
            entry: 0,
            entry_end: 0,
            bitmap: block.bitmap_offset,
            pages: block.pages_offset,
            is_skipped: block.is_skipped,
            is_usable: true,
        };
        Self { blocks: blocks.iter().map(place).collect(), ..Self::default() }
    }
}

/// Walks through the list and adds findings.
pub(super) fn examine(
    window: &Window<'_>,
    head: &Head,
    report: &mut Report,
) -> Result<BlockList, ImageError> {
    let start = window.get(head.ram_offset, 25)?;
    let (Some(section_id), Some(word)) = (be32(&start, 1), be64(&start, 17)) else {
        report.add(truncated(window, "the section of RAM"));
        return Ok(BlockList::default());
    };
    let total = word & !flags::MASK;
    let mut walk = Walk {
        window,
        head,
        list: BlockList { section_id, ..BlockList::default() },
        at: head.ram_offset + 25,
    };
    let mut sum = 0u64;
    loop {
        let bytes = window.get(walk.at, ENTRY_BYTES)?;
        if be64(&bytes, 0) == Some(flags::EOS) {
            break;
        }
        if !walk.entry(&bytes, report)? {
            return Ok(walk.list);
        }
        sum = sum.saturating_add(walk.list.blocks.last().map_or(0, |block| block.length_bytes));
        if sum > MOST_RAM_BYTES {
            let what = format!(
                "the blocks have at least {sum:#x} bytes, but no machine has more than {MOST_RAM_BYTES:#x}"
            );
            report.add(
                Finding::error("ram-size", LIST, Place::byte(walk.at), what)
                    .effect("QEMU stops: the machine has less")
                    .remedy("A block's length was changed: use a good copy of the file"),
            );
            return Ok(walk.list);
        }
        if walk.list.blocks.len() > sterna_wire::limits::BLOCKS {
            report.add(Finding::error(
                "blocks",
                LIST,
                Place::byte(walk.at),
                "more blocks than a machine can have",
            ));
            return Ok(walk.list);
        }
    }
    if sum != total {
        let what = format!("the sum of the blocks is {sum:#x} bytes, but the stream's total is {total:#x}");
        let effect = if total < sum {
            "QEMU stops: \"Unexpected RAM flags\""
        } else {
            "QEMU stops: \"Unknown ramblock\""
        };
        report
            .add(Finding::error("total-size", EVILS, Place::byte(head.ram_offset + 17), what).effect(effect));
    }
    walk.end(report)?;
    Ok(walk.list)
}

struct Walk<'a> {
    window: &'a Window<'a>,
    head: &'a Head,
    list: BlockList,
    at: u64,
}

/// The fields of an entry before its mapped-ram header.
struct Entry {
    name: String,
    length_bytes: u64,
    /// Bytes before the mapped-ram header.
    front: usize,
}

impl Walk<'_> {
    /// Reads the current entry and moves to the element after its pages. Returns false if the walk must stop.
    fn entry(&mut self, bytes: &[u8], report: &mut Report) -> Result<bool, ImageError> {
        let Some(entry) = parse(bytes, self.head.has_ignore_shared) else {
            self.lost(report);
            return Ok(false);
        };
        let at = self.at;
        let place = |offset: usize| Place::byte(at + offset as u64).block(&entry.name);
        if self.list.blocks.iter().any(|block| block.name == entry.name) {
            let finding = Finding::error(
                "block-twice",
                "specs/mapped-ram.md §8",
                place(1),
                "the block is listed twice",
            );
            report.add(finding.effect("QEMU loads one over the other"));
        }
        let front = entry.front;
        let header =
            (be32(bytes, front), be64(bytes, front + 4), be64(bytes, front + 12), be64(bytes, front + 20));
        let (Some(version), Some(page_size), Some(bitmap), Some(pages)) = header else {
            report.add(truncated(self.window, "a block's header"));
            return Ok(false);
        };
        let mut block = BlockPlace {
            name: entry.name.clone(),
            length_bytes: entry.length_bytes,
            entry: at,
            entry_end: at + front as u64 + 28,
            bitmap,
            pages,
            is_skipped: bitmap == 0 && pages == 0 && self.head.has_ignore_shared,
            is_usable: true,
        };
        check_header(&mut block, version, page_size, &place(front), report);
        self.at = if block.is_skipped { block.entry_end } else { block.pages_end() };
        let goes_on = block.is_skipped || self.is_plausible(self.at)?;
        if !goes_on && block.pages_end() <= self.window.length {
            self.find_pages(&mut block, report)?;
        }
        self.list.blocks.push(block);
        Ok(true)
    }

    /// Searches for the block's pages at the places of QEMU's layout.
    ///
    /// The caller has found no entry after the stated place of the pages.
    fn find_pages(&mut self, block: &mut BlockPlace, report: &mut Report) -> Result<(), ImageError> {
        let end_of_bitmap = block.entry_end + bitmap_bytes(block.length_bytes);
        for alignment in [PAGES_ALIGNMENT, PAGE] {
            let pages = end_of_bitmap.next_multiple_of(alignment);
            let next = pages.saturating_add(block.length_bytes);
            if pages != block.pages && self.is_plausible(next)? {
                let what =
                    format!("the header places the pages at {:#x}, but they are at {pages:#x}", block.pages);
                let place = Place::byte(block.entry_end - 8).block(&block.name);
                report.add(
                    Finding::error("pages-offset", LAYOUT, place, what)
                        .effect("QEMU loads wrong bytes as pages, and then stops")
                        .remedy("Use a good copy of the file"),
                );
                block.pages = pages;
                self.at = next;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Whether an entry, or the end of the list, is at `at`.
    fn is_plausible(&self, at: u64) -> Result<bool, ImageError> {
        let bytes = self.window.get(at, ENTRY_BYTES)?;
        if let Some(word) = be64(&bytes, 0)
            && word == flags::EOS
        {
            return Ok(true);
        }
        Ok(parse(&bytes, self.head.has_ignore_shared).is_some_and(|entry| {
            matches!(be32(&bytes, entry.front), Some(0..=15)) && entry.length_bytes < 1 << 50
        }))
    }

    fn lost(&self, report: &mut Report) {
        if self.at >= self.window.length {
            report.add(truncated(self.window, "RAM"));
            return;
        }
        let before = match self.list.blocks.last() {
            Some(block) => format!("after block {:?}", block.name),
            None => "at the start of the list".into(),
        };
        let what = format!("neither a block nor the end of the list is {before}");
        let mut place = Place::byte(self.at);
        place.block = self.list.blocks.last().map(|block| block.name.clone());
        report.add(
            Finding::error("block-list", EVILS, place, what)
                .effect("QEMU stops: \"Unknown ramblock\" with a junk name")
                .remedy("The block's length, the position of its pages, or the bytes here were changed: use a good \
                         copy"),
        );
    }

    /// Reads EOS and the footer.
    fn end(&mut self, report: &mut Report) -> Result<(), ImageError> {
        self.list.eos = Some(self.at);
        let bytes = self.window.get(self.at + 8, 5)?;
        match bytes.first() {
            Some(0x7e) if be32(&bytes, 1) == Some(self.list.section_id) => {
                self.list.has_footers = true;
                self.list.end = Some(self.at + 13);
            }
            Some(0x7e) if bytes.len() == 5 => {
                let what = "the footer of RAM's section has a different number than the section";
                let finding =
                    Finding::error("footer", "specs/mapped-ram.md §1.3", Place::byte(self.at + 8), what);
                report.add(finding.effect("QEMU stops"));
                self.list.has_footers = true;
                self.list.end = Some(self.at + 13);
            }
            Some(0x00..=0x08) => self.list.end = Some(self.at + 8),
            Some(byte) if bytes.len() == 5 => {
                let what = format!("byte {byte:#04x} instead of the footer of RAM's section");
                let finding =
                    Finding::error("footer", "specs/mapped-ram.md §1.3", Place::byte(self.at + 8), what);
                report.add(finding.effect("QEMU stops"));
            }
            _ => report.add(truncated(self.window, "the section of RAM")),
        }
        Ok(())
    }
}

fn parse(bytes: &[u8], has_address: bool) -> Option<Entry> {
    let length = usize::from(*bytes.first()?);
    let name = std::str::from_utf8(bytes.get(1..1 + length)?).ok()?;
    if name.is_empty() || name.contains(char::is_control) {
        return None;
    }
    let length_bytes = be64(bytes, 1 + length)?;
    let front = 1 + length + 8 + if has_address { 8 } else { 0 };
    length_bytes.is_multiple_of(PAGE).then(|| Entry { name: name.to_owned(), length_bytes, front })
}

fn check_header(block: &mut BlockPlace, version: u32, page_size: u64, place: &Place, report: &mut Report) {
    let at = |offset: u64| Place { byte: place.byte.map(|byte| byte + offset), ..place.clone() };
    if version > 1 {
        let what = format!("version {version} of the header; only 1 is known");
        let finding = Finding::error("header-version", HEADER, at(0), what);
        report.add(finding.effect("QEMU stops: version not supported"));
    } else if version == 0 {
        let what = "version 0 of the header, which no known program writes";
        report.add(Finding::warning("header-version", HEADER, at(0), what).effect("QEMU loads it"));
    }
    if page_size != PAGE {
        let what = format!("pages of {page_size} bytes, not {PAGE}");
        let finding = Finding::error("page-size", HEADER, at(4), what);
        report.add(finding.effect("QEMU stops: \"invalid page_size\"; before 11 it crashed on 0"));
    }
    if block.is_skipped {
        let what =
            "its RAM is not in the image: it was shared memory, and the save left it out (x-ignore-shared)";
        report.add(
            Finding::note("skipped", "specs/mapped-ram.md §4.8", at(12), what)
                .effect("The image loads only together with the memory file of the guest"),
        );
        return;
    }
    if block.bitmap == 0 && block.pages == 0 {
        let what =
            "the block has no position in the file, but the list of capabilities lacks x-ignore-shared";
        let finding = Finding::error("no-place", "specs/mapped-ram.md §4.8", at(12), what);
        report.add(finding.effect("QEMU stops: \"Unknown ramblock\" with an empty name"));
        block.is_usable = false;
        return;
    }
    if !block.pages.is_multiple_of(PAGE) {
        let what = format!("the pages start at {:#x}, not at a multiple of {PAGE}", block.pages);
        let finding = Finding::error("pages-alignment", LAYOUT, at(20), what);
        report.add(finding.effect("QEMU stops: \"region has bad alignment\""));
    }
}
