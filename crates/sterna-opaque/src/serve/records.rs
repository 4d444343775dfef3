//! Encodes pages as records of RAM.

use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna_ram::RamSlice;
use sterna_wire::PAGE_SIZE;
use sterna_wire::ram::RamRecordWriter;

use super::served::ServedImage;
use super::stream;

/// The numbers of pages that were encoded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) content_pages: u64,
    pub(crate) zero_pages: u64,
}

/// Encodes the pages of `run` into `out`: as a PART of the section of RAM, or without a section, as on the
/// preempt channel.
///
/// `content` must have all pages of the run. Pages that the image does not contain are not read from it.
/// Without `content` the image contains none of the pages.
pub(crate) fn encode(
    image: &ServedImage,
    section: Option<u32>,
    run: PageRun,
    content: Option<RamSlice<'_>>,
    out: &mut Vec<u8>,
) -> Result<Encoded, MigrationError> {
    out.clear();
    match section {
        Some(section) => stream::part(section, out, |out| records(image, run, content, out)),
        None => records(image, run, content, out),
    }
}

fn records(
    image: &ServedImage,
    run: PageRun,
    content: Option<RamSlice<'_>>,
    out: &mut Vec<u8>,
) -> Result<Encoded, MigrationError> {
    let name = &image.shape().ram.blocks[run.block].name;
    let held = image.cache().store().held(run.block);
    let wire = MigrationError::wire("RAM");
    // The first record of each write names its block, so that the threads can write in any order.
    let mut writer = RamRecordWriter::new();
    let mut encoded = Encoded::default();
    for index in 0..run.count {
        let page = run.first + index;
        let bytes = match content {
            Some(content) if held.get(page) => {
                let bytes = content.part(index as usize * PAGE_SIZE, PAGE_SIZE);
                bytes.ok_or_else(|| MigrationError::Internal("a page beyond its buffer".into()))?
            }
            _ => {
                writer.zero(run.block, name, page * PAGE_SIZE as u64, out).map_err(&wire)?;
                encoded.zero_pages += 1;
                continue;
            }
        };
        if bytes.is_zero()? {
            writer.zero(run.block, name, page * PAGE_SIZE as u64, out).map_err(&wire)?;
            encoded.zero_pages += 1;
        } else {
            writer.page_header(run.block, name, page * PAGE_SIZE as u64, out).map_err(&wire)?;
            let at = out.len();
            out.resize(at + PAGE_SIZE, 0);
            bytes.copy_to(&mut out[at..])?;
            encoded.content_pages += 1;
        }
    }
    Ok(encoded)
}
