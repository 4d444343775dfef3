//! The mapped-ram file that an image in Sterna's format contains: its bytes without the pages.

use sterna_ram::PageBitmap;
use sterna_wire::mapped_ram::PAGES_ALIGNMENT;

use super::encode;
use super::libvirt::Envelope;
use super::mapped::layout;
use crate::error::ImageError;
use crate::format::{Form, Format};
use crate::model::Shape;

/// A part of the file.
pub(crate) enum ViewPart {
    /// Bytes that are not pages, from this offset.
    Bytes(u64, Vec<u8>),
    /// All pages of a block, from this offset.
    Pages(u64, usize),
}

/// The parts of the mapped-ram file of `shape`, in the order of the file. Between them are zeros.
///
/// `held` has a bit for each page that is not zero, for each block.
pub(crate) fn view(
    shape: &Shape,
    envelope: Option<&Envelope>,
    held: &[PageBitmap],
) -> Result<Vec<ViewPart>, ImageError> {
    let shape = shape.for_form(Form::Mapped);
    let (mut parts, mut start) = (Vec::new(), 0);
    if let Some(envelope) = envelope {
        let (bytes, offset) = envelope.bytes(Format::LibvirtSparse, Some(&shape))?;
        parts.push(ViewPart::Bytes(0, bytes));
        start = offset;
    }
    let (pieces, headers, tail_offset) = layout(&shape, start, PAGES_ALIGNMENT)?;
    parts.extend(pieces.into_iter().map(|(offset, bytes)| ViewPart::Bytes(offset, bytes)));
    for (index, (header, block)) in headers.iter().zip(&shape.ram.blocks).enumerate() {
        if !block.is_skipped {
            parts.push(ViewPart::Bytes(header.bitmap_offset, bitmap(&held[index])));
            parts.push(ViewPart::Pages(header.pages_offset, index));
        }
    }
    let mut tail = Vec::new();
    encode::setup(&shape, &mut tail);
    if shape.begins_between_anew() {
        encode::part(&shape, &mut tail);
        encode::end_of_section(&shape, &mut tail);
    }
    encode::tail(&shape, &mut tail)?;
    parts.push(ViewPart::Bytes(tail_offset, tail));
    parts.sort_by_key(|part| match part {
        ViewPart::Bytes(offset, _) | ViewPart::Pages(offset, _) => *offset,
    });
    Ok(parts)
}

fn bitmap(held: &PageBitmap) -> Vec<u8> {
    let words = held.words().iter();
    words.flat_map(|word| word.load(std::sync::atomic::Ordering::Relaxed).to_le_bytes()).collect()
}
