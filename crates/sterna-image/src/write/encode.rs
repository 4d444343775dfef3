//! Encodes the parts of a shape as bytes of a stream.

use sterna_wire::main::{FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part};
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::ram::{BlockEntry, RamRecordWriter, SECTION_INSTANCE, SECTION_NAME, SECTION_VERSION, flags};
use sterna_wire::{WireError, vmdesc};

use crate::model::{BlockShape, Shape};

/// Appends the stream from its first byte to the total in RAM's block list.
pub(super) fn head(shape: &Shape, out: &mut Vec<u8>) -> Result<(), WireError> {
    FileHeader.encode(out);
    if shape.has_configuration {
        shape.configuration.encode(out)?;
    }
    out.extend_from_slice(&shape.early);
    let header = SectionHeader {
        id: shape.ram.section_id,
        name: SECTION_NAME,
        instance: SECTION_INSTANCE,
        version: SECTION_VERSION,
    };
    header.encode_start(out)?;
    out.extend_from_slice(&(shape.ram_bytes() | flags::MEM_SIZE).to_be_bytes());
    Ok(())
}

/// Appends a block's entry without a mapped-ram header.
pub(super) fn block(block: &BlockShape, out: &mut Vec<u8>) -> Result<(), WireError> {
    BlockEntry::new(block.name.clone(), block.length_bytes).encode(out)?;
    if let Some(bytes) = block.host_page_bytes {
        out.extend_from_slice(&bytes.to_be_bytes());
    }
    if let Some(address) = block.address {
        out.extend_from_slice(&address.to_be_bytes());
    }
    Ok(())
}

/// Appends the end of a section of RAM.
pub(super) fn end_of_section(shape: &Shape, out: &mut Vec<u8>) {
    RamRecordWriter::eos(out);
    if shape.ram.footers {
        encode_footer(shape.ram.section_id, out);
    }
}

/// Appends the header of RAM's PART.
pub(super) fn part(shape: &Shape, out: &mut Vec<u8>) {
    encode_section_part(shape.ram.section_id, false, out);
}

/// Appends the sections between START and RAM's pages, for a stream with pages in PARTs.
pub(super) fn setup(shape: &Shape, out: &mut Vec<u8>) {
    out.extend_from_slice(&shape.setup);
}

/// Appends the stream after the last section with pages.
pub(super) fn tail(shape: &Shape, out: &mut Vec<u8>) -> Result<(), WireError> {
    out.extend_from_slice(&shape.between);
    // Without END, FULL sections are devices unless a section of RAM follows them. Therefore an empty PART is
    // written.
    let is_alone = shape.setup.is_empty() && shape.between.is_empty();
    if !shape.has_end && !is_alone {
        part(shape, out);
        end_of_section(shape, out);
    }
    if shape.has_end {
        encode_section_part(shape.ram.section_id, true, out);
        end_of_section(shape, out);
    }
    out.extend_from_slice(&shape.devices);
    if shape.has_eof {
        encode_end(out);
    }
    if let Some(description) = &shape.description {
        vmdesc::encode(description, out)?;
    }
    Ok(())
}

/// The header of a block that is not in the image.
pub(super) const SKIPPED: MappedHeader = MappedHeader { bitmap_offset: 0, pages_offset: 0 };
