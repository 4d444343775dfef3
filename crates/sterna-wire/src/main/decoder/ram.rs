//! Decoding of the RAM section, record by record (`specs/stream.md §2`).

use super::{DecoderState, MainDecoder, Taken, silent, taken};
use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::limits::BLOCKS;
use crate::main::item::MainItem;
use crate::mapped_ram::MappedHeader;
use crate::multifd::BlockTable;
use crate::ram::{BlockEntry, BlockList, flags};
use crate::reader::{Reader, Stop};
use crate::xbzrle;

const SPEC: &str = "specs/stream.md §2.3";
const HOOK_SPEC: &str = "specs/rdma.md §5.2";

impl MainDecoder {
    /// Requires the next page record to name its block.
    pub(super) fn forget_block(&mut self) {
        self.ram.last_block = None;
    }

    pub(super) fn ram_total(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let word = r.u64()?;
        if word & flags::MASK != flags::MEM_SIZE {
            return Err(r.bad(
                "specs/stream.md §2.2",
                format!("word {word:#x} instead of the start of the block list"),
            ));
        }
        let left = word & !flags::MASK;
        if left == 0 {
            return self.list_complete(r);
        }
        self.state = DecoderState::RamBlocks { left };
        silent(r)
    }

    pub(super) fn ram_block(&mut self, r: &mut Reader<'_>, left: u64) -> Result<Taken, Stop> {
        // The last entry consumed the whole total, but a MappedBlock had to be reported first.
        if left == 0 {
            return self.list_complete(r);
        }
        let spec = "specs/stream.md §2.2";
        let entry = BlockEntry::read(r, left, self.expect.ignore_shared)?;
        let (name, length) = (&entry.name, entry.length_bytes);
        if self.ram.listed.len() >= BLOCKS {
            return Err(r.bad(spec, format!("more than {BLOCKS} blocks")));
        }
        if self.ram.names.contains(name) {
            return Err(r.bad(spec, format!("block {name:?} occurs twice")));
        }
        if let Some(expected) = &self.blocks {
            match expected.find(name.as_bytes()).map(|index| expected.length_bytes(index)) {
                Some(ours) if ours == length => {}
                Some(ours) => {
                    let rule = format!(
                        "block {name:?} has {length} bytes at the source and {ours} here: start both sides \
                                 with the same RAM"
                    );
                    return Err(r.unfit(spec, rule));
                }
                None => {
                    let rule = format!(
                        "block {name:?} of {length} bytes does not exist here: start both sides with the same \
                                 RAM"
                    );
                    return Err(r.unfit(spec, rule));
                }
            }
        }
        let item = if self.expect.mapped_ram { Some(self.mapped_block(r, name, length)?) } else { None };
        let left = left - length;
        self.ram.names.insert(name.clone());
        self.ram.listed.push(entry);
        self.state = DecoderState::RamBlocks { left };
        match item {
            Some(item) => taken(r, item),
            None if left == 0 => self.list_complete(r),
            None => silent(r),
        }
    }

    fn mapped_block(&self, r: &mut Reader<'_>, name: &str, length_bytes: u64) -> Result<MainItem, Stop> {
        let start = r.at() as u64;
        // The header's decoder counts from the header's start. Here `start` is added, and `next` adds the channel
        // position.
        let read = MappedHeader::decode(r.rest()).map_err(|error| error.at(start))?;
        let Some((header, used)) = read else {
            return Err(Stop::Short(r.at() + MappedHeader::BYTES));
        };
        r.take(used)?;
        let end = self.position + r.at() as u64;
        if self.expect.ignore_shared && header.is_skipped() {
            return Ok(MainItem::MappedBlock { name: name.to_owned(), length_bytes, header, resume_at: end });
        }
        header.check(end, length_bytes).map_err(|error| error.at(start))?;
        let resume_at = header.end_of_pages(length_bytes);
        Ok(MainItem::MappedBlock { name: name.to_owned(), length_bytes, header, resume_at })
    }

    /// Ends the block list: checks that no expected block is missing, and fixes indices.
    fn list_complete(&mut self, r: &Reader<'_>) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §2.2";
        let mut blocks = std::mem::take(&mut self.ram.listed);
        let names = std::mem::take(&mut self.ram.names);
        match &self.blocks {
            Some(expected) => {
                if let Some((name, _)) =
                    expected.iter().find(|(name, length)| *length > 0 && !names.contains(*name))
                {
                    let rule =
                        format!("block {name:?} is missing in the list: start both sides with the same RAM");
                    return Err(r.unfit(spec, rule));
                }
                blocks.sort_by_key(|block| expected.find(block.name.as_bytes()));
            }
            None => {
                let pairs = blocks.iter().map(|block| (block.name.clone(), block.length_bytes));
                // Names and lengths were checked one by one.
                self.blocks = Some(BlockTable::new(pairs)?);
            }
        }
        self.state = DecoderState::RamSetup;
        taken(r, MainItem::RamStart(BlockList { blocks }))
    }

    /// Reads a word after the list: HOOK with RDMA, MULTIFD_FLUSH with multifd, or EOS.
    pub(super) fn ram_setup(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let word = r.u64()?;
        match word {
            flags::MULTIFD_FLUSH => {
                self.ram.flushed = true;
                self.flush(r)
            }
            flags::HOOK if self.expect.rdma && self.ram.hooked => {
                Err(r.bad(HOOK_SPEC, "a second hook in START: the blocks are exchanged once"))
            }
            flags::HOOK if self.expect.rdma => {
                self.ram.hooked = true;
                self.hook(r)
            }
            flags::EOS if self.expect.rdma && !self.ram.hooked => {
                Err(r.unfit(HOOK_SPEC, "no hook in START: the source does not send memory by RDMA"))
            }
            flags::EOS => {
                if self.expect.multifd && !self.expect.mapped_ram && !self.ram.flushed {
                    if !self.expect.accept_legacy_flush {
                        let rule = "no MULTIFD_FLUSH before EOS: the source flushes after each section, or without \
                                    multifd; give both sides the same multifd setting and machine type";
                        return Err(r.unfit("specs/stream.md §3.5", rule));
                    }
                    self.ram.legacy_flush = true;
                }
                self.end_of_list(r)
            }
            _ => {
                let rule = format!("word {word:#x} instead of HOOK, MULTIFD_FLUSH or EOS");
                Err(r.bad("specs/stream.md §2.2", rule))
            }
        }
    }

    pub(super) fn ram_record(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let word = r.u64()?;
        let (flag, offset) = (word & flags::MASK, word & !flags::MASK);
        const PAGES: u64 = flags::PAGE | flags::ZERO | flags::XBZRLE;
        if self.expect.rdma && flag & PAGES != 0 {
            return Err(
                r.bad(HOOK_SPEC, format!("word {word:#x} is a page record, but memory is sent by RDMA"))
            );
        }
        match flag & !flags::CONTINUE {
            flags::PAGE if !self.expect.mapped_ram => {
                let block = self.block(r, flag, offset)?;
                self.ram.last_block = Some(block);
                self.state = DecoderState::RamPayload;
                taken(r, MainItem::PagePayloadFollows { block, offset })
            }
            flags::ZERO if !self.expect.mapped_ram => {
                let block = self.block(r, flag, offset)?;
                let fill = r.u8()?;
                if fill != 0 {
                    return Err(r.bad(SPEC, format!("a zero page of bytes {fill:02x}")));
                }
                self.ram.last_block = Some(block);
                taken(r, MainItem::Zero { block, offset })
            }
            flags::XBZRLE if !self.expect.mapped_ram && !self.expect.multifd => self.delta(r, flag, offset),
            _ if word == flags::EOS => self.end_of_list(r),
            _ if word == flags::MULTIFD_FLUSH => self.flush(r),
            _ if word == flags::HOOK && self.expect.rdma => self.hook(r),
            _ => Err(r.bad(
                "specs/stream.md §2.1",
                format!("word {word:#x} is not a record that is possible here"),
            )),
        }
    }

    fn delta(&mut self, r: &mut Reader<'_>, flag: u64, offset: u64) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §2.4";
        let block = self.block(r, flag, offset)?;
        let encoding = r.u8()?;
        if encoding != 1 {
            return Err(r.bad(spec, format!("encoding {encoding} of a delta; only 1 is known")));
        }
        let length = usize::from(r.u16()?);
        if !(1..=PAGE_SIZE).contains(&length) {
            return Err(r.bad(spec, format!("a delta of {length} bytes, not 1 to {PAGE_SIZE}")));
        }
        let start = r.at() as u64;
        let delta = r.take(length)?;
        xbzrle::check(delta).map_err(|error| {
            let name = self.blocks.as_ref().map(|table| table.name(block)).unwrap_or_default();
            let rule = format!("{}: page {offset:#x} of block {name:?}", error.rule);
            WireError { rule: rule.into(), ..error }.at(start)
        })?;
        self.ram.last_block = Some(block);
        taken(r, MainItem::Xbzrle { block, offset, delta: delta.to_vec() })
    }

    /// Index of the block that a page record refers to. Checks the offset against the block.
    fn block(&self, r: &mut Reader<'_>, flag: u64, offset: u64) -> Result<usize, Stop> {
        let word = r.clone();
        let Some(table) = &self.blocks else {
            return Err(r.bad(SPEC, "a page before the block list"));
        };
        let block = if flag & flags::CONTINUE != 0 {
            self.ram.last_block.ok_or_else(|| r.bad(SPEC, "CONTINUE before the first page"))?
        } else {
            let name = r.name()?;
            let find = table.find(name.as_bytes());
            find.ok_or_else(|| r.bad(SPEC, format!("block {name:?} is not in the block list")))?
        };
        let length = table.length_bytes(block);
        if offset >= length {
            let name = table.name(block);
            return Err(
                word.bad(SPEC, format!("offset {offset:#x} is beyond block {name:?} of {length:#x} bytes"))
            );
        }
        Ok(block)
    }

    fn hook(&self, r: &Reader<'_>) -> Result<Taken, Stop> {
        match self.current.kind {
            Some(kind) => taken(r, MainItem::Hook { kind }),
            None => Err(r.bad(HOOK_SPEC, "a hook outside of a section")),
        }
    }

    fn flush(&mut self, r: &Reader<'_>) -> Result<Taken, Stop> {
        let spec = "specs/stream.md §3.5";
        if !self.expect.multifd || self.expect.mapped_ram {
            let rule = "MULTIFD_FLUSH without multifd: give both sides the same multifd setting";
            return Err(r.unfit(spec, rule));
        }
        if self.ram.legacy_flush {
            return Err(r.bad(spec, "MULTIFD_FLUSH, although START had none"));
        }
        taken(r, MainItem::MultifdFlush)
    }

    fn end_of_list(&mut self, r: &Reader<'_>) -> Result<Taken, Stop> {
        // An EOS that is also a flush is reported before it is consumed, so that the flush precedes the end of
        // the section.
        if self.ram.legacy_flush && !self.ram.eos_flushed {
            self.ram.eos_flushed = true;
            return Ok(Taken { used: 0, item: Some(MainItem::MultifdFlush) });
        }
        self.ram.eos_flushed = false;
        self.state = DecoderState::Footer;
        silent(r)
    }
}
