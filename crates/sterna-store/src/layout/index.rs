//! The index: blocks, files, frames and extents (`specs/image.md §4, §5`).

use std::collections::HashSet;

use super::bytes::{Fields, Rule, put_text};
use super::limits::PAGE_BYTES;
use super::sections::{OPTIONAL, Sections, put as section, put_optional};
use super::tables::{ExtentTable, NO_FRAME};
use super::working_set::{self, PageRange};
use crate::digest::Digest;
use crate::key::Crypt;

/// Bytes of a frame's entry.
pub(crate) const FRAME_BYTES: usize = 48;
/// Bit of a frame's stored length: the pages are not compressed.
const RAW: u32 = 1 << 31;
/// Bits of the word that has a frame's offset and number of pages.
const OFFSET_BITS: u32 = 48;

const META: u32 = 1;
const BASE: u32 = 2;
const PACKS: u32 = 3;
const FRAMES: u32 = 4;
const EXTENTS: u32 = 5;
const WORKING_SET: u32 = OPTIONAL | 1;

/// A block of RAM, or the bytes of the image's files that are not pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Name of the block, such as `pc.ram`.
    pub name: String,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Guest physical address; none if the VMM's format does not tell it.
    pub address: Option<u64>,
}

impl Block {
    /// Number of pages; the last one may be incomplete.
    pub fn pages(&self) -> u64 {
        self.length_bytes.div_ceil(PAGE_BYTES as u64)
    }
}

/// A file that the image can write again, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredFile {
    /// What the file is: `view`, `stream`, or its name in a directory.
    pub name: String,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Place of the file's recipe in the block of bytes.
    pub(crate) recipe: (u64, u64),
}

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameEntry {
    /// Number of the pack; 0 in a plain file.
    pub(crate) pack: u32,
    /// Offset in the file or the pack.
    pub(crate) offset: u64,
    /// Stored length in bytes.
    pub(crate) stored_bytes: u32,
    /// Whether the pages are stored without compression.
    pub(crate) is_raw: bool,
    /// Number of pages.
    pub(crate) pages: u16,
    /// Digest of the pages.
    pub(crate) digest: Digest,
}

/// The decoded index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    /// What made the image: `qemu`, `firecracker`, `cloud-hypervisor`, `sterna`.
    pub(crate) kind: String,
    /// Name of the image in its store; empty in a file.
    pub(crate) name: String,
    /// Seconds since 1970 when the image was made.
    pub(crate) made: u64,
    /// RAM; the last block has the bytes of the files.
    pub(crate) blocks: Vec<Block>,
    pub(crate) files: Vec<StoredFile>,
    /// Digest of the base, and the name under which the writer knew it.
    pub(crate) base: Option<(Digest, String)>,
    pub(crate) packs: Vec<[u8; 16]>,
    pub(crate) frames: Vec<FrameEntry>,
    pub(crate) extents: Vec<ExtentTable>,
    /// Pages that guests touch first, in the order of the touches.
    pub(crate) working_set: Vec<PageRange>,
}

impl Index {
    /// Number of extents of a block.
    pub(crate) fn extents_of(block: &Block, extent_bytes: u32) -> u64 {
        block.length_bytes.div_ceil(u64::from(extent_bytes))
    }

    /// Whether pages that block `block` does not hold come from the base. Those of the files' bytes never do.
    pub(crate) fn inherits(&self, block: usize) -> bool {
        self.base.is_some() && block + 1 < self.blocks.len()
    }

    /// The sections that the image's digest covers.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        section(&mut out, META, &self.meta());
        if let Some((digest, hint)) = &self.base {
            let mut bytes = digest.0.to_vec();
            put_text(&mut bytes, hint);
            section(&mut out, BASE, &bytes);
        }
        if !self.packs.is_empty() {
            section(&mut out, PACKS, &self.packs.concat());
        }
        let mut frames = Vec::with_capacity(self.frames.len() * FRAME_BYTES);
        for frame in &self.frames {
            let place = frame.offset | u64::from(frame.pages) << OFFSET_BITS;
            let stored = frame.stored_bytes | if frame.is_raw { RAW } else { 0 };
            frames.extend_from_slice(&place.to_le_bytes());
            frames.extend_from_slice(&stored.to_le_bytes());
            frames.extend_from_slice(&frame.pack.to_le_bytes());
            frames.extend_from_slice(&frame.digest.0);
        }
        section(&mut out, FRAMES, &frames);
        let tables: Vec<&[u8]> = self.extents.iter().map(ExtentTable::bytes).collect();
        section(&mut out, EXTENTS, &tables.concat());
        out
    }

    /// The optional sections of the image with this digest, which follow the others.
    pub(crate) fn encode_optional(&self, crypt: &Crypt, digest: Digest) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.working_set.is_empty() {
            put_optional(&mut out, crypt, digest, WORKING_SET, &working_set::encode(&self.working_set));
        }
        out
    }

    fn meta(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_text(&mut out, &self.kind);
        put_text(&mut out, &self.name);
        out.extend_from_slice(&self.made.to_le_bytes());
        out.extend_from_slice(&(self.blocks.len() as u32).to_le_bytes());
        for block in &self.blocks {
            put_text(&mut out, &block.name);
            out.extend_from_slice(&block.length_bytes.to_le_bytes());
            out.extend_from_slice(&block.address.unwrap_or(u64::MAX).to_le_bytes());
        }
        out.extend_from_slice(&(self.files.len() as u32).to_le_bytes());
        for file in &self.files {
            put_text(&mut out, &file.name);
            for number in [file.length_bytes, file.recipe.0, file.recipe.1] {
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
        out
    }

    /// Decodes an index for extents of `extent_bytes`, and checks everything that needs no frame and no seal.
    pub(crate) fn decode(sections: &Sections<'_>, extent_bytes: u32) -> Result<Self, Rule> {
        let mut index = Self {
            kind: String::new(),
            name: String::new(),
            made: 0,
            blocks: Vec::new(),
            files: Vec::new(),
            base: None,
            packs: Vec::new(),
            frames: Vec::new(),
            extents: Vec::new(),
            working_set: Vec::new(),
        };
        let (mut tables, mut touched): (&[u8], &[u8]) = (&[], &[]);
        for section in sections.iter() {
            let (kind, body) = (section.kind, section.body());
            match kind {
                META => index.decode_meta(body)?,
                BASE => {
                    let mut fields = Fields::new(body, "the section of the base");
                    index.base = Some((Digest(fields.array()?), fields.text()?));
                    fields.end()?;
                }
                PACKS => index.packs = packs(body)?,
                FRAMES => index.frames = frames(body)?,
                EXTENTS => tables = body,
                WORKING_SET => touched = body,
                _ if section.is_optional() => {}
                _ => return Err((format!("section {kind} is not known: it needs a later Sterna"), "§4")),
            }
        }
        let has = |kind| sections.iter().any(|section| section.kind == kind);
        if !has(META) || !has(FRAMES) || !has(EXTENTS) {
            return Err(("a section that every image has is missing".to_owned(), "§4"));
        }
        index.decode_tables(tables, extent_bytes)?;
        index.check(extent_bytes)?;
        let ram = &index.blocks[..index.blocks.len() - 1];
        let pages: Vec<u64> = ram.iter().map(Block::pages).collect();
        index.working_set = working_set::decode(touched, &pages)?;
        Ok(index)
    }

    fn decode_meta(&mut self, body: &[u8]) -> Result<(), Rule> {
        let mut fields = Fields::new(body, "the section of the machine");
        (self.kind, self.name, self.made) = (fields.text()?, fields.text()?, fields.u64()?);
        let mut names = HashSet::new();
        for _ in 0..fields.u32()? {
            let (name, length_bytes, address) = (fields.text()?, fields.u64()?, fields.u64()?);
            if !names.insert(name.clone()) {
                return Err((format!("block {name:?} occurs twice"), "§4"));
            }
            let address = Some(address).filter(|address| *address != u64::MAX);
            self.blocks.push(Block { name, length_bytes, address });
        }
        if self.blocks.is_empty() {
            return Err(("the image has no block".to_owned(), "§4"));
        }
        let mut names = HashSet::new();
        for _ in 0..fields.u32()? {
            let name = fields.text()?;
            if !names.insert(name.clone()) {
                return Err((format!("file {name:?} occurs twice"), "§4"));
            }
            let (length_bytes, recipe) = (fields.u64()?, (fields.u64()?, fields.u64()?));
            self.files.push(StoredFile { name, length_bytes, recipe });
        }
        let bytes = self.blocks.last().map_or(0, |block| block.length_bytes);
        for file in &self.files {
            if file.recipe.0.checked_add(file.recipe.1).is_none_or(|end| end > bytes) {
                return Err((format!("the recipe of file {:?} is outside of the image", file.name), "§6"));
            }
        }
        fields.end()
    }

    fn decode_tables(&mut self, mut rest: &[u8], extent_bytes: u32) -> Result<(), Rule> {
        for (number, block) in self.blocks.iter().enumerate() {
            let is_layer = self.inherits(number);
            let entry = ExtentTable::entry_bytes_of(extent_bytes, is_layer) as u64;
            let length = Self::extents_of(block, extent_bytes).checked_mul(entry);
            let split = length.and_then(|length| rest.split_at_checked(usize::try_from(length).ok()?));
            let Some((table, more)) = split else {
                return Err((format!("the extents of block {:?} are missing", block.name), "§5"));
            };
            self.extents.push(ExtentTable::decode(table, extent_bytes, is_layer));
            rest = more;
        }
        match rest.len() {
            0 => Ok(()),
            more => Err((format!("{more} bytes after the extents belong to no block"), "§5")),
        }
    }

    fn check(&self, extent_bytes: u32) -> Result<(), Rule> {
        let mut digests = HashSet::with_capacity(self.frames.len());
        let mut end = (0, 0);
        let most = extent_bytes as usize / PAGE_BYTES;
        for (number, frame) in self.frames.iter().enumerate() {
            if (frame.pack, frame.offset) < end {
                return Err((
                    format!("frame {number} overlaps the frame before it, or is not in order"),
                    "§5",
                ));
            }
            end = (frame.pack, frame.offset + u64::from(frame.stored_bytes));
            if frame.pages == 0 || usize::from(frame.pages) > most {
                return Err((
                    format!("frame {number} has {} pages, and an extent has {most}", frame.pages),
                    "§5",
                ));
            }
            if frame.pack as usize >= self.packs.len().max(1) {
                return Err((
                    format!("frame {number} is in pack {}, which does not exist", frame.pack),
                    "§5",
                ));
            }
            if !digests.insert(frame.digest) {
                return Err((format!("frame {number} has the digest of an earlier one"), "§5"));
            }
        }
        let pages_of = |frame: u32| self.frames.get(frame as usize).map(|frame| frame.pages);
        let mut used = vec![false; self.frames.len()];
        for (block, table) in self.blocks.iter().zip(&self.extents) {
            for extent in 0..table.extents() {
                let pages = block.pages() - extent * most as u64;
                let checked = table.check(extent, pages.min(most as u64) as usize, pages_of);
                checked
                    .map_err(|(rule, paragraph)| (format!("block {:?}: {rule}", block.name), paragraph))?;
                let frame = table.get(extent).frame;
                if frame != NO_FRAME {
                    used[frame as usize] = true;
                }
            }
        }
        match used.iter().position(|used| !used) {
            Some(frame) => Err((format!("frame {frame} belongs to no extent"), "§5")),
            None => Ok(()),
        }
    }
}

fn packs(body: &[u8]) -> Result<Vec<[u8; 16]>, Rule> {
    let mut fields = Fields::new(body, "the section of the packs");
    let mut packs = Vec::new();
    while !fields.is_empty() {
        packs.push(fields.array()?);
    }
    Ok(packs)
}

fn frames(body: &[u8]) -> Result<Vec<FrameEntry>, Rule> {
    let mut fields = Fields::new(body, "the section of the frames");
    let mut frames = Vec::with_capacity(body.len() / FRAME_BYTES);
    while !fields.is_empty() {
        let (place, stored, pack) = (fields.u64()?, fields.u32()?, fields.u32()?);
        frames.push(FrameEntry {
            pack,
            offset: place & ((1 << OFFSET_BITS) - 1),
            stored_bytes: stored & !RAW,
            is_raw: stored & RAW != 0,
            pages: (place >> OFFSET_BITS) as u16,
            digest: Digest(fields.array()?),
        });
    }
    Ok(frames)
}
