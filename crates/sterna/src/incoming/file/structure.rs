//! Reads a mapped-ram file's structure, without pages, and checks it before RAM or devices change.

use std::sync::Arc;

use sterna_ram::{PAGE_SIZE, PageBitmap};
use sterna_transport::PageFile;
use sterna_wire::main::MainItem;
use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes};

use crate::error::MigrationError;
use crate::incoming::loader::{Loader, Read};

/// A block, and the pages that the file contains.
#[derive(Debug)]
pub(super) struct MappedBlock {
    /// The block's name in the file.
    pub name: String,
    pub length_bytes: u64,
    /// The block's index in this side's RAM.
    pub index: usize,
    pub header: MappedHeader,
    /// Pages that the file contains. All others are zero.
    pub held: PageBitmap,
}

impl MappedBlock {
    /// Whether the second reading of the file describes the same block.
    pub(super) fn is(&self, name: &str, length_bytes: u64, header: &MappedHeader) -> bool {
        (self.name.as_str(), self.length_bytes, &self.header) == (name, length_bytes, header)
    }
}

/// Reads to the end of the file.
///
/// The decoder checks every element against the format's rules and against this machine: machine type,
/// capabilities, names and lengths of blocks, places of bitmaps and pages, devices, versions. Only the blocks
/// are kept, because devices may have more state than fits into memory.
pub(super) fn read(
    loader: &mut Loader<'_>,
    file: &Arc<PageFile>,
) -> Result<Vec<MappedBlock>, MigrationError> {
    let mut places = Vec::new();
    loop {
        match loader.read()? {
            Read::Item(MainItem::MappedBlock { name, length_bytes, header, resume_at }) => {
                places.push((name, length_bytes, header));
                loader.reader.go_to(resume_at)?;
            }
            Read::Item(_) => {}
            Read::Stopped | Read::End => break,
        }
    }
    let block = |(name, length_bytes, header): &(String, u64, MappedHeader)| {
        let index = loader
            .block_index(name)
            .ok_or_else(|| MigrationError::Internal(format!("block {name:?} passed and is not here")))?;
        let mut bytes = vec![0; bitmap_bytes(*length_bytes) as usize];
        file.read_bytes_at(header.bitmap_offset, &mut bytes).map_err(MigrationError::storage)?;
        let mut held = PageBitmap::new(length_bytes / PAGE_SIZE as u64);
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| {
                u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]])
            })
            .collect();
        // Bits after the last page are ignored (specs/mapped-ram.md §4.5).
        held.merge_words(0, &words);
        Ok(MappedBlock { name: name.clone(), length_bytes: *length_bytes, index, header: *header, held })
    };
    places.iter().map(block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_only_what_was_read_the_first_time() {
        let header = MappedHeader { bitmap_offset: 600, pages_offset: 1 << 20 };
        let held = PageBitmap::new(16);
        let block = MappedBlock { name: "ram".to_owned(), length_bytes: 16 << 12, index: 0, header, held };
        let moved = MappedHeader { bitmap_offset: 608, ..header };
        let elsewhere = MappedHeader { pages_offset: 2 << 20, ..header };

        assert!(block.is("ram", 16 << 12, &header));
        assert!(!block.is("rom", 16 << 12, &header));
        assert!(!block.is("ram", 8 << 12, &header));
        assert!(!block.is("ram", 16 << 12, &moved));
        assert!(!block.is("ram", 16 << 12, &elsewhere));
    }
}
