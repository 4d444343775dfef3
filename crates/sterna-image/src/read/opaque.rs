//! Device sections that Sterna does not decode: kept byte for byte, up to their footer.
//!
//! A body has no length field (`specs/mapped-ram.md §1.3`). It ends at the first footer with its section's number
//! that an element of a valid stream follows.

use std::collections::BTreeSet;

use super::cursor::Cursor;
use crate::error::ImageError;
use crate::model::OPAQUE_BYTES;

pub(super) const EOF: u8 = 0x00;
pub(super) const START: u8 = 0x01;
pub(super) const PART: u8 = 0x02;
pub(super) const END: u8 = 0x03;
pub(super) const FULL: u8 = 0x04;
pub(super) const DESCRIPTION: u8 = 0x06;
pub(super) const COMMAND: u8 = 0x08;
pub(super) const FOOTER: u8 = 0x7e;
/// Bytes of a footer: type and section number.
pub(super) const FOOTER_BYTES: usize = 5;
/// The longest header of a section: type, number, name, instance, version.
pub(super) const HEADER_BYTES: usize = 1 + 4 + 1 + 255 + 4 + 4;

/// The limit in bytes for a section that is read by its described length.
const KNOWN_BYTES: usize = 16 << 20;

/// The decoded header of a START or FULL section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) id: u32,
    pub(super) name: String,
    pub(super) instance: u32,
    pub(super) version: u32,
    /// Length of the header in bytes, including the type.
    pub(super) bytes: usize,
}

/// Decodes the header of a START or FULL section; `None` if `bytes` start otherwise.
pub(super) fn header(bytes: &[u8]) -> Option<Header> {
    let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let length = usize::from(*bytes.get(5)?);
    let name = bytes.get(6..6 + length)?;
    if length == 0 || !name.iter().all(|byte| (0x20..0x7f).contains(byte)) {
        return None;
    }
    Some(Header {
        id: word(1)?,
        name: String::from_utf8_lossy(name).into_owned(),
        instance: word(6 + length)?,
        version: word(10 + length)?,
        bytes: 14 + length,
    })
}

/// Appends a device's section to `out`. The cursor is at the section's header.
pub(super) fn take_section(
    cursor: &mut Cursor,
    id: u32,
    header_bytes: usize,
    live: &BTreeSet<u32>,
    out: &mut Vec<u8>,
) -> Result<(), ImageError> {
    take(cursor, header_bytes, "a section header", out)?;
    loop {
        let bytes = cursor.some()?;
        if bytes.is_empty() {
            return Err(cursor.torn(0, "a device section before the end of RAM"));
        }
        let plain = bytes.iter().position(|byte| *byte == FOOTER).unwrap_or(bytes.len());
        take(cursor, plain, "a device section", out)?;
        let ahead = cursor.peek(FOOTER_BYTES + HEADER_BYTES)?;
        if ahead.first() != Some(&FOOTER) {
            continue;
        }
        let is_footer = ahead.get(1..FOOTER_BYTES) == Some(&id.to_be_bytes()[..])
            && begins_element(&ahead[FOOTER_BYTES..], live);
        take(cursor, if is_footer { FOOTER_BYTES } else { 1 }, "a device section", out)?;
        if is_footer {
            return Ok(());
        }
    }
}

/// Appends a section of known length to `out`, if its footer is in place.
pub(super) fn take_known(
    cursor: &mut Cursor,
    header: &Header,
    length: usize,
    live: &BTreeSet<u32>,
    out: &mut Vec<u8>,
) -> Result<bool, ImageError> {
    let whole = header.bytes.saturating_add(length).saturating_add(FOOTER_BYTES);
    if whole > KNOWN_BYTES {
        return Ok(false);
    }
    let ahead = cursor.peek(whole + HEADER_BYTES)?;
    let footer = ahead.get(whole - FOOTER_BYTES..whole);
    let is_there = footer.is_some_and(|footer| footer[0] == FOOTER && footer[1..] == header.id.to_be_bytes())
        && begins_element(&ahead[whole..], live);
    if is_there {
        take(cursor, whole, "a device section", out)?;
    }
    Ok(is_there)
}

/// Appends the command at the cursor to `out`.
pub(super) fn take_command(cursor: &mut Cursor, out: &mut Vec<u8>) -> Result<(), ImageError> {
    let head = cursor.need(5, "a command")?;
    let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
    take(cursor, 5 + length, "a command", out)
}

/// Appends `count` bytes to `out`. Its length is limited to [`OPAQUE_BYTES`].
fn take(cursor: &mut Cursor, count: usize, what: &'static str, out: &mut Vec<u8>) -> Result<(), ImageError> {
    if out.len() + count > OPAQUE_BYTES {
        let file = cursor.file().to_owned();
        return Err(ImageError::TooLarge {
            file,
            what: "a device's state",
            limit_bytes: OPAQUE_BYTES as u64,
        });
    }
    out.extend_from_slice(cursor.need(count, what)?);
    cursor.consume(count);
    Ok(())
}

/// Whether an element of a valid stream can start with these bytes.
fn begins_element(bytes: &[u8], live: &BTreeSet<u32>) -> bool {
    match bytes.first() {
        Some(&(START | FULL)) => header(bytes).is_some(),
        Some(&(PART | END)) => {
            let id = bytes.get(1..5).and_then(|id| id.first_chunk());
            id.is_some_and(|id| live.contains(&u32::from_be_bytes(*id)))
        }
        Some(&COMMAND) => {
            bytes.get(1..3).is_some_and(|number| number[0] == 0 && (1..=11).contains(&number[1]))
        }
        Some(&EOF) => matches!(bytes.get(1), None | Some(&DESCRIPTION)),
        _ => false,
    }
}
