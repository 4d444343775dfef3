//! The RAM section of a mapped-ram image, from the file's first byte to its bitmaps.

use std::path::PathBuf;

use sterna_ram::{GuestRam, PAGE_SIZE, PageBitmap, RamSlice};
use sterna_transport::{IoPart, RamFile};
use sterna_wire::main::{Configuration, FileHeader, SectionHeader, encode_footer};
use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes, mark_page};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};

use crate::ImageError;

const RAM_SECTION: u32 = 1;

/// The RAM of a guest in a file, being written. Absent from its place until [`MappedRam::complete`].
#[derive(Debug)]
pub struct MappedRam {
    file: RamFile,
    blocks: Vec<Placed>,
}

#[derive(Debug)]
struct Placed {
    header: MappedHeader,
    pages: u64,
    /// Pages whose bytes are in the file.
    held: PageBitmap,
}

impl MappedRam {
    /// Begins an image of `ram` for `path`: header, configuration and block list.
    ///
    /// # Errors
    /// [`ImageError`]; nothing is left behind.
    pub fn create(path: impl Into<PathBuf>, machine_type: &str, ram: &GuestRam) -> Result<Self, ImageError> {
        let file = RamFile::create(path)?;
        let mut head = Vec::new();
        FileHeader.encode(&mut head);
        let capabilities = vec!["mapped-ram".to_owned()];
        let configuration =
            Configuration { machine_type: machine_type.to_owned(), capabilities, ..Default::default() };
        configuration.encode(&mut head)?;
        SectionHeader { id: RAM_SECTION, name: "ram", instance: 0, version: 4 }.encode_start(&mut head)?;
        // The list's total stands before the entries; each entry is where the pages before it end.
        let entries: Vec<_> =
            ram.blocks().iter().map(|block| BlockEntry::new(block.name(), block.len_bytes())).collect();
        let mut whole = Vec::new();
        BlockList { blocks: entries.clone() }.encode(&mut whole)?;
        head.extend_from_slice(&whole[..size_of::<u64>()]);

        let mut at = 0;
        let mut blocks = Vec::new();
        for (entry, block) in entries.iter().zip(ram.blocks()) {
            entry.encode(&mut head)?;
            let header = MappedHeader::place(at + head.len() as u64, entry.length_bytes)?;
            header.encode(&mut head);
            file.write_at(at, &[IoPart::Bytes(&head)])?;
            head.clear();
            at = header.end_of_pages(entry.length_bytes);
            blocks.push(Placed { header, pages: block.pages(), held: PageBitmap::new(block.pages()) });
        }
        RamRecordWriter::eos(&mut head);
        encode_footer(RAM_SECTION, &mut head);
        file.write_at(at, &[IoPart::Bytes(&head)])?;
        Ok(Self { file, blocks })
    }

    /// Writes pages of block `block` from page `first` on. Any thread, any order.
    ///
    /// # Errors
    /// [`ImageError::File`], such as a full disk.
    pub fn write(&self, block: usize, first: u64, content: RamSlice<'_>) -> Result<(), ImageError> {
        let placed = &self.blocks[block];
        self.file.write_at(placed.header.page_offset(first), &[IoPart::Ram(content)])?;
        placed.held.set_range(first, (content.len() / PAGE_SIZE) as u64);
        Ok(())
    }

    /// These pages are zero: their bits stay clear, whatever bytes stand there.
    pub fn zero(&self, block: usize, first: u64, count: u64) {
        for page in first..first + count {
            self.blocks[block].held.clear(page);
        }
    }

    /// Pages whose bytes are in the file.
    pub fn held_pages(&self) -> u64 {
        self.blocks.iter().map(|placed| placed.held.count()).sum()
    }

    /// Writes the bitmaps, syncs, and puts the file in its place.
    ///
    /// # Errors
    /// [`ImageError::File`]; the place is as it was.
    pub fn complete(self) -> Result<(), ImageError> {
        for placed in &self.blocks {
            let mut bytes = vec![0; bitmap_bytes(placed.pages * PAGE_SIZE as u64) as usize];
            let mut page = 0;
            while let Some(run) = placed.held.next_run(page, placed.pages, placed.pages) {
                (run.first..run.first + run.count).for_each(|page| mark_page(&mut bytes, page));
                page = run.first + run.count;
            }
            self.file.write_at(placed.header.bitmap_offset, &[IoPart::Bytes(&bytes)])?;
        }
        Ok(self.file.complete()?)
    }
}
