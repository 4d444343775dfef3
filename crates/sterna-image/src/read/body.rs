//! Reads a stream from the end of RAM's START section to its end.

use sterna_wire::limits::VM_DESCRIPTION_BYTES;
use sterna_wire::main::SectionKind;
use sterna_wire::ram::{SECTION_NAME, flags};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE, xbzrle};

use super::cursor::Cursor;
use super::head::{self, Head, Lengths};
use super::opaque::{self, COMMAND, END, EOF, FULL, HEADER_BYTES, PART, START};
use super::tail;
use crate::error::ImageError;
use crate::format::Form;
use crate::model::{Beside, BlockShape, OPAQUE_BYTES, Shape};

/// Bytes of EOF, and of the description's mark and length.
const DESCRIPTION_HEAD: usize = 6;
/// Bytes that are read from a device between two searches for the image's end.
const DEVICE_STEP: usize = 1 << 20;
const RECORDS: &str = "specs/mapped-ram.md §3.1";

/// Receives the page records of a legacy stream, one by one, in stream order.
pub(crate) trait RecordSink {
    /// A page with its full content.
    fn page(&mut self, block: usize, page: u64, content: &[u8; PAGE_SIZE]) -> Result<(), ImageError>;
    /// Like [`page`](Self::page), with the offset of its content in the stream.
    fn page_at(
        &mut self,
        _position: u64,
        block: usize,
        page: u64,
        content: &[u8; PAGE_SIZE],
    ) -> Result<(), ImageError> {
        self.page(block, page, content)
    }
    /// A page that contains only zeros.
    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError>;
    /// Like [`zero`](Self::zero), with the offset after its record in the stream.
    fn zero_at(&mut self, _end: u64, block: usize, page: u64) -> Result<(), ImageError> {
        self.zero(block, page)
    }
    /// A page whose previous content changes by a delta. The delta's encoding was checked.
    fn delta(&mut self, block: usize, page: u64, delta: &[u8]) -> Result<(), ImageError>;
}

/// How the stream ended.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct End {
    /// Offset after the stream, including its description.
    pub(crate) stream_end: u64,
    /// Number of bytes after `stream_end`.
    pub(crate) trailing_bytes: u64,
    /// Whether a description starts but is truncated.
    pub(crate) is_description_torn: bool,
    /// Whether the end cannot be determined, because footers and description are missing.
    pub(crate) is_end_unsure: bool,
}

/// Reads the stream after START into the head's shape; page records go to `sink`.
///
/// RAM ends at its END section. A background snapshot has none. There, RAM ends at the first FULL section that no
/// section of RAM follows (§1.4).
pub(crate) fn read(
    cursor: &mut Cursor,
    head: &mut Head,
    lengths: &mut Lengths,
    sink: &mut dyn RecordSink,
) -> Result<End, ImageError> {
    let mut records = Records { last: None, is_mapped: head.shape.form() == Form::Mapped };
    let mut beside = Beside::default();
    let ram = head.shape.ram.section_id;
    let live = &mut head.live;
    live.insert(ram);
    let shape = &mut head.shape;
    while !shape.has_end {
        let bytes = cursor.peek(HEADER_BYTES)?;
        let id = bytes.get(1..5).map(|id| u32::from_be_bytes([id[0], id[1], id[2], id[3]]));
        let have = bytes.len();
        let taken = match (bytes.first(), id) {
            (Some(&kind @ (PART | END)), Some(id)) if id == ram => {
                beside.ram_went_on(SectionKind::Part);
                cursor.consume(5);
                records.read(cursor, shape, sink)?;
                head::footer(cursor, ram, Some(shape.ram.footers))?;
                shape.has_end = kind == END;
                Ok(())
            }
            (Some(&(PART | END)), Some(id)) if live.contains(&id) => {
                let out = beside.place(shape, Some(SectionKind::Part));
                opaque::take_section(cursor, id, 5, live, out)
            }
            (Some(&COMMAND), _) => opaque::take_command(cursor, beside.place(shape, None)),
            // Without footers, the border between two sections is unknown.
            (Some(&FULL), _) if !shape.ram.footers => break,
            (Some(&kind @ (START | FULL)), _) => {
                match opaque::header(bytes).filter(|header| kind == FULL || header.name != SECTION_NAME) {
                    Some(header) => {
                        let of = if kind == FULL { SectionKind::Full } else { SectionKind::Start };
                        let out = beside.place(shape, Some(of));
                        head::new_section(cursor, kind, &header, lengths, live, out)
                    }
                    None => Err(no_element(cursor, have)),
                }
            }
            (Some(&EOF), _) => break,
            _ => Err(no_element(cursor, have)),
        };
        // After a FULL section that no section of RAM followed, the bytes are devices, even if they are damaged.
        if let Err(error) = taken {
            match error {
                ImageError::Torn { .. } | ImageError::Broken { .. } if beside.may_be_devices() => break,
                error => return Err(error),
            }
        }
    }
    // Hold the end of the stream back. A copy without its end cannot be loaded.
    cursor.hold()?;
    let devices = beside.devices(shape);
    rest(cursor, shape, devices)
}

fn no_element(cursor: &Cursor, have: usize) -> ImageError {
    if have < HEADER_BYTES {
        return cursor.torn(have, "RAM");
    }
    cursor.broken(0, "specs/mapped-ram.md §1.4", "this is not an element that can follow a section of RAM")
}

/// Reads the list of records of one section.
struct Records {
    /// The block named last. CONTINUE refers to it, also in later sections (§3.1).
    last: Option<usize>,
    is_mapped: bool,
}

impl Records {
    fn read(
        &mut self,
        cursor: &mut Cursor,
        shape: &Shape,
        sink: &mut dyn RecordSink,
    ) -> Result<(), ImageError> {
        let what = "RAM's pages";
        loop {
            let word = cursor.u64(what)?;
            let (flag, offset) = (word & flags::MASK, word & !flags::MASK);
            if word == flags::EOS {
                return Ok(());
            }
            if self.is_mapped {
                let rule =
                    format!("word {word:#x} in a section of RAM, which must be empty in a mapped-ram image");
                return Err(cursor.broken(8, "specs/mapped-ram.md §4.1", rule));
            }
            match flag & !flags::CONTINUE {
                flags::PAGE => {
                    let (block, page) = self.place(cursor, shape, flag, offset)?;
                    let position = cursor.position();
                    let content = cursor.need(PAGE_SIZE, what)?;
                    if let Some(content) = content.first_chunk() {
                        sink.page_at(position, block, page, content)?;
                    }
                    cursor.consume(PAGE_SIZE);
                }
                flags::ZERO => {
                    let (block, page) = self.place(cursor, shape, flag, offset)?;
                    let fill = cursor.u8(what)?;
                    if fill != 0 {
                        return Err(cursor.broken(1, RECORDS, format!("a zero page of bytes {fill:02x}")));
                    }
                    sink.zero_at(cursor.position(), block, page)?;
                }
                flags::XBZRLE => self.delta(cursor, shape, flag, offset, sink)?,
                _ => {
                    let rule = format!("word {word:#x} is not a page record");
                    return Err(cursor.broken(8, "specs/mapped-ram.md §2", rule));
                }
            }
        }
    }

    fn delta(
        &mut self,
        cursor: &mut Cursor,
        shape: &Shape,
        flag: u64,
        offset: u64,
        sink: &mut dyn RecordSink,
    ) -> Result<(), ImageError> {
        let what = "RAM's pages";
        let (block, page) = self.place(cursor, shape, flag, offset)?;
        let encoding = cursor.u8(what)?;
        if encoding != 1 {
            return Err(cursor.broken(
                1,
                RECORDS,
                format!("encoding {encoding} of a delta; only 1 is known"),
            ));
        }
        let length = usize::from(u16::from_be_bytes(cursor.take(what)?));
        if !(1..=PAGE_SIZE).contains(&length) {
            return Err(cursor.broken(
                2,
                RECORDS,
                format!("a delta of {length} bytes, not 1 to {PAGE_SIZE}"),
            ));
        }
        let delta = cursor.need(length, what)?;
        match xbzrle::check(delta) {
            Ok(()) => sink.delta(block, page, delta)?,
            Err(error) => return Err(head::wire(cursor, error)),
        }
        cursor.consume(length);
        Ok(())
    }

    /// The block and page of a record.
    fn place(
        &mut self,
        cursor: &mut Cursor,
        shape: &Shape,
        flag: u64,
        offset: u64,
    ) -> Result<(usize, u64), ImageError> {
        let blocks = &shape.ram.blocks;
        let block = if flag & flags::CONTINUE == 0 {
            let length = usize::from(cursor.u8("RAM's pages")?);
            let name = cursor.need(length, "RAM's pages")?;
            let found = match self.last.filter(|last| blocks[*last].name.as_bytes() == name) {
                Some(last) => Some(last),
                None => blocks.iter().position(|block| block.name.as_bytes() == name),
            };
            let Some(block) = found else {
                let rule = format!("block {:?} is not in the block list", String::from_utf8_lossy(name));
                return Err(cursor.broken(9, RECORDS, rule));
            };
            cursor.consume(length);
            block
        } else {
            let rule = "CONTINUE without an earlier block name";
            self.last.ok_or_else(|| cursor.broken(8, RECORDS, rule))?
        };
        self.last = Some(block);
        if offset >= blocks[block].length_bytes {
            let BlockShape { name, length_bytes, .. } = &blocks[block];
            let rule = format!("offset {offset:#x} is beyond block {name:?} of {length_bytes:#x} bytes");
            return Err(cursor.broken(8, RECORDS, rule));
        }
        Ok((block, offset >> PAGE_SHIFT))
    }
}

/// Reads the stream after RAM. `bytes` are the bytes that were already read.
fn rest(cursor: &mut Cursor, shape: &mut Shape, mut bytes: Vec<u8>) -> Result<End, ImageError> {
    let start = cursor.position() - bytes.len() as u64;
    let mut looked_at = bytes.len();
    loop {
        if cursor.ends_anywhere() && bytes.len() - looked_at >= DEVICE_STEP {
            looked_at = bytes.len();
            if tail::first(&bytes, shape.ram.footers).is_some() {
                break;
            }
        }
        let some = cursor.some()?;
        let count = some.len();
        if count == 0 {
            break;
        }
        if bytes.len() + count > OPAQUE_BYTES + VM_DESCRIPTION_BYTES + DESCRIPTION_HEAD {
            let file = cursor.file().to_owned();
            let what = "the devices' state";
            return Err(ImageError::TooLarge { file, what, limit_bytes: OPAQUE_BYTES as u64 });
        }
        bytes.extend_from_slice(some);
        cursor.consume(count);
    }
    let first = if cursor.ends_anywhere() { tail::first(&bytes, shape.ram.footers) } else { None };
    let tail = first.unwrap_or_else(|| tail::split(&bytes, shape.ram.footers));
    let end = End {
        stream_end: start + tail.end as u64,
        trailing_bytes: if cursor.ends_anywhere() { 0 } else { (bytes.len() - tail.end) as u64 },
        is_description_torn: tail.is_description_torn,
        is_end_unsure: tail.is_end_unsure,
    };
    shape.has_eof = tail.has_eof;
    shape.description = tail.description.map(|range| bytes[range].to_vec());
    bytes.truncate(tail.devices);
    bytes.shrink_to_fit();
    shape.devices = bytes;
    Ok(end)
}
