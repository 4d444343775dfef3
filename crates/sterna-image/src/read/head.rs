//! Reads a stream from its first byte to the end of RAM's START section.

use std::collections::BTreeSet;

use sterna_wire::limits::{BLOCKS, MAIN_STEP_BYTES};
use sterna_wire::main::{Configuration, FileHeader};
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::ram::{self, flags};
use sterna_wire::vmdesc::SectionLength;
use sterna_wire::{PAGE_SIZE, WireError};

use super::cursor::Cursor;
use super::opaque::{self, COMMAND, FOOTER, FULL, HEADER_BYTES, START};
use crate::error::ImageError;
use crate::format::Form;
use crate::model::{BlockShape, RamShape, Shape};

const LIST: &str = "specs/mapped-ram.md §2.1";
/// The limit of RAM in an image: 32 TiB. Its bitmaps take 1 GiB of memory.
pub(crate) const MOST_RAM_BYTES: u64 = 32 << 40;

/// The decoded head of a stream.
pub(crate) struct Head {
    /// The shape; the parts after the head are still empty.
    pub(crate) shape: Shape,
    /// For [`Form::Mapped`], the places of each block; both offsets are 0 if skipped.
    pub(crate) placed: Vec<MappedHeader>,
    /// File ranges that the head itself occupies.
    pub(crate) regions: Vec<(u64, u64)>,
    /// Section numbers of other live devices that started before RAM.
    pub(crate) live: BTreeSet<u32>,
}

/// Lengths of the FULL sections' bodies in stream order, if the description is available.
pub(crate) struct Lengths {
    load: Option<Box<dyn FnOnce() -> Vec<SectionLength>>>,
    left: std::vec::IntoIter<SectionLength>,
}

impl Lengths {
    /// Takes the lengths from `load`, which is called at the first FULL section.
    pub(crate) fn new(load: impl FnOnce() -> Vec<SectionLength> + 'static) -> Self {
        Self { load: Some(Box::new(load)), left: Vec::new().into_iter() }
    }

    /// No lengths are known.
    pub(crate) fn unknown() -> Self {
        Self { load: None, left: Vec::new().into_iter() }
    }

    /// The length of the next FULL section's body, if the description names this section.
    fn of(&mut self, header: &opaque::Header) -> Option<usize> {
        if let Some(load) = self.load.take() {
            self.left = load().into_iter();
        }
        let known = self.left.next()?;
        let fits = (&known.name, known.instance) == (&header.name, header.instance);
        usize::try_from(known.length_bytes).ok().filter(|_| fits)
    }
}

/// Reads the head. Afterwards, the cursor is after START.
pub(crate) fn read(cursor: &mut Cursor, lengths: &mut Lengths) -> Result<Head, ImageError> {
    let start = cursor.position();
    let header = cursor.need(FileHeader::BYTES, "the header")?.to_vec();
    FileHeader::decode(&header).map_err(|error| wire(cursor, error))?;
    cursor.consume(FileHeader::BYTES);
    let mut shape = Shape::empty();
    shape.has_configuration = cursor.need(1, "the configuration")?[0] == 0x07;
    if shape.has_configuration {
        let bytes = cursor.peek(MAIN_STEP_BYTES)?;
        let (decoded, have) = (Configuration::decode(bytes), bytes.len());
        let Some((configuration, used)) = decoded.map_err(|error| wire(cursor, error))? else {
            return Err(cursor.torn(have, "the configuration"));
        };
        cursor.consume(used);
        shape.configuration = configuration;
    }
    let mut live = BTreeSet::new();
    shape.early = early(cursor, lengths, &mut live)?;
    let mut head = Head { shape, placed: Vec::new(), regions: Vec::new(), live };
    ram_start(cursor, &mut head, start)?;
    Ok(head)
}

/// Reads sections and commands before RAM (§1.5). Adds the numbers of live sections to `live`.
fn early(
    cursor: &mut Cursor,
    lengths: &mut Lengths,
    live: &mut BTreeSet<u32>,
) -> Result<Vec<u8>, ImageError> {
    let mut early = Vec::new();
    loop {
        let bytes = cursor.peek(HEADER_BYTES)?;
        let have = bytes.len();
        match bytes.first() {
            None => return Err(cursor.torn(0, "the sections before RAM")),
            Some(&COMMAND) => opaque::take_command(cursor, &mut early)?,
            Some(&kind @ (START | FULL)) => {
                let Some(header) = opaque::header(bytes) else {
                    if have < HEADER_BYTES {
                        return Err(cursor.torn(have, "a section header"));
                    }
                    return Err(cursor.broken(0, "specs/mapped-ram.md §1.3", "this is not a section header"));
                };
                if kind == START && header.name == ram::SECTION_NAME {
                    return Ok(early);
                }
                new_section(cursor, kind, &header, lengths, live, &mut early)?;
            }
            Some(0) => {
                return Err(cursor.broken(0, "specs/mapped-ram.md §1.4", "the stream ends without RAM"));
            }
            Some(other) => {
                let rule = format!("{other:#04x} is not an element that can precede RAM");
                return Err(cursor.broken(0, "specs/mapped-ram.md §1.3", rule));
            }
        }
    }
}

/// Appends the START or FULL section at the cursor to `out`.
///
/// A FULL section ends after the length in the description, if a footer follows there. Otherwise it ends at the first
/// possible footer.
pub(super) fn new_section(
    cursor: &mut Cursor,
    kind: u8,
    header: &opaque::Header,
    lengths: &mut Lengths,
    live: &mut BTreeSet<u32>,
    out: &mut Vec<u8>,
) -> Result<(), ImageError> {
    if kind == START {
        live.insert(header.id);
    } else if let Some(length) = lengths.of(header)
        && opaque::take_known(cursor, header, length, live, out)?
    {
        return Ok(());
    }
    opaque::take_section(cursor, header.id, header.bytes, live, out)
}

fn ram_start(cursor: &mut Cursor, head: &mut Head, start: u64) -> Result<(), ImageError> {
    let have = cursor.peek(HEADER_BYTES)?;
    let Some(header) = opaque::header(have) else {
        return Err(cursor.torn(0, "RAM's section header"));
    };
    if (header.instance, header.version) != (ram::SECTION_INSTANCE, ram::SECTION_VERSION) {
        let rule = format!(
            "section ram has instance {} and version {}; only 0 and 4 are known",
            header.instance, header.version
        );
        return Err(cursor.unsupported(rule, "specs/mapped-ram.md §1.3"));
    }
    cursor.consume(header.bytes);
    head.shape.ram = RamShape { section_id: header.id, blocks: Vec::new(), footers: false };
    let mut region = start;
    block_list(cursor, head, &mut region)?;
    let word = cursor.u64("RAM's block list")?;
    if word != flags::EOS {
        let rule = format!("word {word:#x} instead of the end of the block list (EOS)");
        return Err(cursor.broken(8, LIST, rule));
    }
    head.shape.ram.footers = footer(cursor, header.id, None)?;
    head.regions.push((region, cursor.position()));
    Ok(())
}

fn block_list(cursor: &mut Cursor, head: &mut Head, region: &mut u64) -> Result<(), ImageError> {
    let word = cursor.u64("RAM's block list")?;
    let mut left = word & !flags::MASK;
    if word & flags::MASK != flags::MEM_SIZE {
        return Err(cursor.broken(8, LIST, format!("word {word:#x} instead of the total size (MEM_SIZE)")));
    }
    if left > MOST_RAM_BYTES {
        let rule = format!("{left} bytes of RAM, more than the {MOST_RAM_BYTES} that Sterna supports");
        return Err(cursor.unsupported(rule, LIST));
    }
    while left > 0 {
        let block = block_entry(cursor, &head.shape, &mut left)?;
        if head.shape.form() == Form::Mapped {
            mapped_header(cursor, head, block, region)?;
        } else {
            head.shape.ram.blocks.push(block);
        }
    }
    Ok(())
}

fn block_entry(cursor: &mut Cursor, shape: &Shape, left: &mut u64) -> Result<BlockShape, ImageError> {
    let what = "RAM's block list";
    if shape.ram.blocks.len() == BLOCKS {
        return Err(cursor.unsupported(format!("more than {BLOCKS} RAM blocks"), LIST));
    }
    let length = usize::from(cursor.u8(what)?);
    let name = cursor.need(length, what)?;
    let Some(name) = std::str::from_utf8(name).ok().filter(|name| is_name(name)).map(str::to_owned) else {
        let rule = format!("no block name, although {left} bytes of the total are not listed yet");
        return Err(cursor.broken(1, LIST, rule));
    };
    cursor.consume(length);
    if shape.ram.blocks.iter().any(|block| block.name == name) {
        return Err(cursor.broken(
            length as u64,
            "specs/mapped-ram.md §8",
            format!("block {name:?} occurs twice"),
        ));
    }
    let length_bytes = cursor.u64(what)?;
    if !length_bytes.is_multiple_of(PAGE_SIZE as u64) || length_bytes > *left {
        let rule = format!(
            "block {name:?} has {length_bytes} bytes; its length must be at most {left}, the rest of the total, and a \
             multiple of {PAGE_SIZE}"
        );
        return Err(cursor.broken(8, LIST, rule));
    }
    *left -= length_bytes;
    let mut block =
        BlockShape { name, length_bytes, address: None, host_page_bytes: None, is_skipped: false };
    optional_fields(cursor, shape, *left, &mut block)?;
    Ok(block)
}

/// Reads the two optional fields of a block (§2.1).
///
/// After an entry, the next byte is the length of a name, which is not 0, or the word EOS follows. Therefore a zero
/// byte means that another field comes first.
fn optional_fields(
    cursor: &mut Cursor,
    shape: &Shape,
    left: u64,
    block: &mut BlockShape,
) -> Result<(), ImageError> {
    let what = "RAM's block list";
    let is_mapped = shape.form() == Form::Mapped;
    let has_address = shape.has_capability(crate::model::IGNORE_SHARED);
    // A mapped-ram header follows directly. Postcopy adds the host's page size, but excludes mapped-ram.
    if is_mapped {
        block.address = if has_address { Some(cursor.u64(what)?) } else { None };
        return Ok(());
    }
    let fields = if has_address { 2 } else { 1 };
    let bytes = cursor.peek(fields * 8 + 8)?;
    let word = |index: usize| {
        let bytes = bytes.get(index * 8..index * 8 + 8)?;
        Some(u64::from_be_bytes(bytes.try_into().ok()?))
    };
    let goes_on = |index: usize| match left {
        0 => word(index) == Some(flags::EOS),
        _ => bytes.get(index * 8).is_some_and(|length| *length != 0),
    };
    let has_host_page = !goes_on(fields - 1)
        && goes_on(fields)
        && word(0).is_some_and(|word| word.is_power_of_two() && word > PAGE_SIZE as u64);
    if has_host_page {
        block.host_page_bytes = Some(cursor.u64(what)?);
    }
    block.address = if has_address { Some(cursor.u64(what)?) } else { None };
    Ok(())
}

fn mapped_header(
    cursor: &mut Cursor,
    head: &mut Head,
    mut block: BlockShape,
    region: &mut u64,
) -> Result<(), ImageError> {
    let bytes = cursor.need(MappedHeader::BYTES, "a mapped-ram header")?;
    let decoded = MappedHeader::decode(bytes);
    let Some((placed, used)) = decoded.map_err(|error| wire(cursor, error))? else {
        return Err(cursor.torn(0, "a mapped-ram header"));
    };
    cursor.consume(used);
    block.is_skipped = placed.is_skipped() && head.shape.has_capability(crate::model::IGNORE_SHARED);
    if !block.is_skipped {
        head.regions.push((*region, cursor.position()));
        let end = placed.pages_offset.checked_add(block.length_bytes).filter(|end| *end <= i64::MAX as u64);
        let Some(end) = end else {
            let rule = format!("the pages of block {:?} end beyond 2^63 bytes", block.name);
            return Err(cursor.broken(8, "specs/mapped-ram.md §4.3", rule));
        };
        *region = end;
        cursor.jump(end)?;
    }
    head.shape.ram.blocks.push(block);
    head.placed.push(placed);
    Ok(())
}

/// Reads the footer of section `id`, and returns whether it exists.
///
/// `expected` is none until the first section has shown whether the stream has footers.
pub(super) fn footer(cursor: &mut Cursor, id: u32, expected: Option<bool>) -> Result<bool, ImageError> {
    let bytes = cursor.peek(5)?;
    let has_footer = bytes.first() == Some(&FOOTER);
    if expected == Some(false) || (expected.is_none() && !has_footer && !bytes.is_empty()) {
        return Ok(false);
    }
    let bytes: [u8; 5] = cursor.take("a section footer")?;
    if bytes[0] != FOOTER || bytes[1..] != id.to_be_bytes() {
        let rule = format!("{bytes:02x?} after section {id} instead of its footer");
        return Err(cursor.broken(5, "specs/mapped-ram.md §1.3", rule));
    }
    Ok(true)
}

/// Converts a violation of the wire format at the cursor into an error.
pub(super) fn wire(cursor: &Cursor, error: WireError) -> ImageError {
    let offset = cursor.position() + error.offset;
    let rule = format!("{}: {}", error.message, error.rule);
    match error.fault {
        sterna_wire::Fault::PeerIncompatible => {
            let rule = format!("byte {offset}: {rule}");
            cursor.unsupported(rule, error.paragraph)
        }
        _ => ImageError::Broken { file: cursor.file().to_owned(), offset, rule, paragraph: error.paragraph },
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains('\0')
}
