//! Writes images: extents from several threads, then files and the index.

mod backlog;
mod copy;
mod level;
mod object;
mod order;
mod record;
mod sink;
mod tail;

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use level::Chooser;
use object::ObjectSink;
use order::{sort, used_packs};
pub use record::put_working_set;
pub(crate) use record::with_working_set;
pub use sink::publish;
pub(crate) use sink::{FileSink, FrameSink, sync_directory};
use tail::tail;

use crate::digest::Digest;
use crate::error::StoreError;
use crate::frame::{self, Packed, Packer};
use crate::key::{Crypt, Key};
use crate::layout::{
    Block, EXTENT_LEAST, EXTENT_MOST, ExtentTable, FOOTER_BYTES, FRAME_BYTES, FrameEntry, HEADER_BYTES,
    Header, INDEX_MOST, Index, PAGE_BYTES, PageRange, StoredFile, features,
};
use crate::objects::Objects;
use crate::read::StoredImage;
use crate::recipe::{Piece, Recipe};

/// No frame was stored for a claimed digest yet.
const UNWRITTEN: u64 = u64::MAX;
/// Name of the block of bytes: no block of RAM has an empty name.
const BYTES: &str = "";

/// Options of a new image.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Bytes of an extent: a power of two from 64 KiB (default) to 2 MiB.
    pub extent_bytes: u32,
    /// zstd's level, 1 (default) to 22; 0 stores pages without compression.
    pub level: i32,
    /// The level changes while the image is written, so that neither the disk nor the processors wait. It begins with
    /// [`level`](Self::level).
    pub adapts: bool,
    /// The key of an encrypted image.
    pub key: Option<Key>,
    /// What made the machine's files: `qemu` (default), `firecracker`, `cloud-hypervisor`, `sterna`.
    pub kind: String,
    /// The image becomes a layer over this one, and holds only the pages that differ.
    pub base: Option<Arc<StoredImage>>,
    /// Replace an existing image.
    pub replace: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let kind = "qemu".to_owned();
        let (level, adapts) = (1, false);
        Self { extent_bytes: EXTENT_LEAST, level, adapts, key: None, kind, base: None, replace: false }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Length of the image in bytes; in a store, of its index and of the frames that were new.
    pub bytes: u64,
    /// Digest of the image.
    pub digest: Digest,
    /// Number of frames.
    pub frames: u64,
    /// Pages that the frames hold: RAM's, and those of the files' bytes.
    pub held_pages: u64,
    /// Pages of RAM that the image holds; equal ones count each time.
    pub ram_pages: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
    /// zstd's level at the end; it differs from the requested one only if it changed while the image was written.
    pub level: i32,
}

/// Writes an image. It is absent from its place until [`complete`](Self::complete).
///
/// All methods take `&self`, except the last, so that threads share the writer.
pub struct ImageWriter {
    sink: Box<dyn FrameSink>,
    header: Header,
    crypt: Crypt,
    options: WriteOptions,
    blocks: Vec<Block>,
    name: String,
    state: Mutex<State>,
    /// Chooses the level, if it changes.
    chooser: Option<Mutex<Chooser>>,
}

struct State {
    /// Number of the frame with a digest.
    known: HashMap<Digest, u32>,
    frames: Vec<FrameEntry>,
    extents: Vec<ExtentTable>,
    /// The bytes of files that are not pages yet.
    bytes: Vec<u8>,
    working_set: Vec<PageRange>,
}

impl ImageWriter {
    /// Starts an image of RAM `blocks` in a file at `path`.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the file exists and may not be replaced; [`StoreError::Request`] for options without meaning,
    /// or if the layer would replace one of its own bases; [`StoreError::BaseUnlike`] if the base has other blocks.
    pub fn create(path: &Path, blocks: Vec<Block>, options: WriteOptions) -> Result<Self, StoreError> {
        if let Some(base) = options.base.as_ref().filter(|_| options.replace) {
            base.check_kept(path)?;
        }
        let mut sink = FileSink::create(path, options.replace, HEADER_BYTES as u64)?;
        if options.adapts {
            sink.bound_backlog()?;
        }
        Self::with_sink(Box::new(sink), blocks, options, String::new(), 0)
    }

    /// Starts an image in the object `key` of an object storage. It is uploaded while it is written.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the object exists and may not be replaced; otherwise as [`create`](Self::create).
    pub fn create_object(
        objects: Arc<dyn Objects>,
        key: &str,
        blocks: Vec<Block>,
        options: WriteOptions,
    ) -> Result<Self, StoreError> {
        let sink = ObjectSink::create(&objects, key, options.replace)?;
        Self::with_sink(Box::new(sink), blocks, options, String::new(), 0)
    }

    /// Whether [`read_extent`](Self::read_extent) works only after [`keep_in`](Self::keep_in).
    pub fn needs_keeping(&self) -> bool {
        self.sink.needs_keeping()
    }

    /// Keeps a copy of the frames in `file`, so that extents can be read back before the image is complete.
    ///
    /// No effect on a place that can be read itself. Call it before the first extent is written.
    pub fn keep_in(&self, file: File) {
        self.sink.keep_in(file);
    }

    pub(crate) fn with_sink(
        sink: Box<dyn FrameSink>,
        blocks: Vec<Block>,
        options: WriteOptions,
        name: String,
        feature: u64,
    ) -> Result<Self, StoreError> {
        let extent = options.extent_bytes;
        if !extent.is_power_of_two() || !(EXTENT_LEAST..=EXTENT_MOST).contains(&extent) {
            let text =
                format!("an extent of {extent} bytes is refused: choose a power of two from 64 KiB to 2 MiB");
            return Err(StoreError::Request(text));
        }
        if !(0..=22).contains(&options.level) {
            let text =
                format!("compression level {} is refused: choose 1 to 22, or 0 for none", options.level);
            return Err(StoreError::Request(text));
        }
        let entry = ExtentTable::entry_bytes_of(extent, true) as u64 + FRAME_BYTES as u64;
        let extents = blocks.iter().map(|block| Index::extents_of(block, extent));
        if extents.fold(0u64, u64::saturating_add).saturating_mul(entry) > INDEX_MOST {
            let text =
                format!("{}: the index of this RAM is above 1 GiB: choose longer extents", sink.name());
            return Err(StoreError::Request(text));
        }
        if let Some(base) = &options.base {
            base.check_alike(sink.name(), &blocks)?;
        }
        let crypt = Crypt::new(options.key.as_ref());
        let mut incompatible = feature;
        let mut salt = [0; 32];
        if crypt.is_on() {
            incompatible |= features::ENCRYPTED;
            random(&mut salt, sink.name())?;
        }
        if options.base.is_some() {
            incompatible |= features::LAYER;
        }
        let key_check = crypt.check(&salt);
        let header = Header { incompatible, compatible: 0, extent_bytes: extent, salt, key_check };
        let tables = |block: &Block| {
            ExtentTable::new(Index::extents_of(block, extent), extent, options.base.is_some())
        };
        let extents = blocks.iter().map(tables).collect();
        sink.begin(&header.encode())?;
        let state = State {
            known: HashMap::new(),
            frames: Vec::new(),
            extents,
            bytes: Vec::new(),
            working_set: Vec::new(),
        };
        let chooser = options.adapts.then(|| Mutex::new(Chooser::new(options.level)));
        Ok(Self { sink, header, crypt, options, blocks, name, state: Mutex::new(state), chooser })
    }

    /// Adds frames that are stored already, and that extents may name.
    pub(crate) fn preload(&self, frames: Vec<FrameEntry>) {
        let mut state = self.state.lock();
        for frame in frames {
            let next = state.frames.len() as u32;
            if *state.known.entry(frame.digest).or_insert(next) == next {
                state.frames.push(frame);
            }
        }
    }

    /// Bytes of an extent.
    pub fn extent_bytes(&self) -> u32 {
        self.header.extent_bytes
    }

    /// Whether the image becomes a layer over a base.
    pub fn is_layer(&self) -> bool {
        self.options.base.is_some()
    }

    /// The blocks of RAM.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Makes a lane for one thread.
    ///
    /// # Errors
    /// [`StoreError::Io`] if zstd has no memory.
    pub fn lane(&self) -> Result<WriteLane<'_>, StoreError> {
        let packer = Packer::new(self.options.level);
        let packer = packer.map_err(|error| StoreError::io(self.sink.name(), "zstd", error))?;
        let times = Times::new(self.options.level);
        Ok(WriteLane { writer: self, packer, held: Vec::new(), base: Vec::new(), times })
    }

    /// Fills `to` with the current content of an extent, zeros where no content was given.
    ///
    /// # Errors
    /// [`StoreError::Io`], [`StoreError::Request`] if the image goes to a place that cannot be read before the end.
    pub fn read_extent(&self, block: usize, extent: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let (held, entry) = {
            let state = self.state.lock();
            let entry = state.extents[block].get(extent);
            let pages = to.len().div_ceil(PAGE_BYTES);
            let held: Vec<bool> = (0..pages).map(|page| entry.holds(page)).collect();
            (held, state.frames.get(entry.frame as usize).copied())
        };
        let pages = match entry {
            Some(entry) => {
                let mut stored = vec![0; entry.stored_bytes as usize];
                self.sink.read_back(entry.pack, entry.offset, &mut stored)?;
                let unpacked = frame::unpack(&self.crypt, &entry, stored);
                unpacked.map_err(|reason| StoreError::Request(format!("{}: {reason}", self.sink.name())))?
            }
            None => Vec::new(),
        };
        let mut content = pages.chunks_exact(PAGE_BYTES);
        for (page, to) in to.chunks_mut(PAGE_BYTES).enumerate() {
            match content.next_if_held(held[page]) {
                Some(page) => to.copy_from_slice(&page[..to.len()]),
                None => to.fill(0),
            }
        }
        Ok(())
    }

    /// Stores bytes of a file that are not pages, and returns the piece for the file's recipe.
    ///
    /// Bytes stay in memory until the completion.
    pub fn bytes(&self, bytes: &[u8]) -> Piece {
        let mut state = self.state.lock();
        let offset = state.bytes.len() as u64;
        state.bytes.extend_from_slice(bytes);
        Piece::Copy { block: self.blocks.len() as u32, offset, length: bytes.len() as u64 }
    }

    /// Completes the image: stores the files' bytes, writes the index, and makes the image visible.
    ///
    /// # Errors
    /// [`StoreError`]: nothing is visible, and an existing image is unchanged.
    pub fn complete(self, files: &[(&str, Recipe)]) -> Result<Written, StoreError> {
        let files: Vec<StoredFile> = files
            .iter()
            .map(|(name, recipe)| {
                let mut state = self.state.lock();
                let (at, encoded) = (state.bytes.len() as u64, recipe.encode());
                state.bytes.extend_from_slice(&encoded);
                let recipe = (at, encoded.len() as u64);
                StoredFile { name: (*name).to_owned(), length_bytes: recipe_length(files, name), recipe }
            })
            .collect();
        self.complete_with(files)
    }

    /// Completes the image with files whose recipes are in the bytes already.
    fn complete_with(mut self, files: Vec<StoredFile>) -> Result<Written, StoreError> {
        self.store_bytes()?;
        let packs = self.sink.flush()?;
        let mut state = self.state.into_inner();
        sort(&mut state.frames, &mut state.extents);
        let packs = used_packs(&packs, &mut state.frames);
        let made = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let level = self.chooser.map_or(self.options.level, |chooser| chooser.into_inner().level());
        let base = self.options.base.as_ref().map(|base| (base.digest(), base.base_hint()));
        let ram = &state.extents[..state.extents.len() - 1];
        let ram_pages = ram.iter().map(ExtentTable::held_pages).sum();
        let held_pages = state.frames.iter().map(|frame| u64::from(frame.pages)).sum();
        let index = Index {
            kind: self.options.kind,
            name: self.name,
            made,
            blocks: self.blocks,
            files,
            base,
            packs,
            frames: state.frames,
            extents: state.extents,
            working_set: state.working_set,
        };
        let header = self.header.encode();
        let (tail, digest) = tail(&index, &self.crypt, &header, self.sink.end());
        let bytes = self.sink.complete(&header, &tail)?;
        let index_bytes = (tail.len() - FOOTER_BYTES) as u64;
        let frames = index.frames.len() as u64;
        Ok(Written { bytes, digest, frames, held_pages, ram_pages, index_bytes, level })
    }

    /// Stores the block of bytes as the last block.
    fn store_bytes(&mut self) -> Result<(), StoreError> {
        let extent_bytes = self.header.extent_bytes;
        let bytes = std::mem::take(&mut self.state.get_mut().bytes);
        let block = Block { name: BYTES.to_owned(), length_bytes: bytes.len() as u64, address: None };
        let table = ExtentTable::new(Index::extents_of(&block, extent_bytes), extent_bytes, false);
        self.state.get_mut().extents.push(table);
        self.blocks.push(block);
        let last = self.blocks.len() - 1;
        let mut lane = self.lane()?;
        for (extent, bytes) in (0..).zip(bytes.chunks(extent_bytes as usize)) {
            let mut content = bytes.to_vec();
            content.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
            lane.put_own(last, extent, &content)?;
        }
        Ok(())
    }
}

fn recipe_length(files: &[(&str, Recipe)], name: &str) -> u64 {
    files.iter().find(|(other, _)| *other == name).map_or(0, |(_, recipe)| recipe.length())
}

/// Writes extents from one thread.
pub struct WriteLane<'a> {
    writer: &'a ImageWriter,
    packer: Packer,
    held: Vec<u8>,
    base: Vec<u8>,
    times: Times,
}

/// How long a thread worked and waited since its last frame.
struct Times {
    level: i32,
    /// The end of the last frame.
    since: Instant,
    /// The end of the last call.
    left: Instant,
    waited: Duration,
}

impl Times {
    fn new(level: i32) -> Self {
        let now = Instant::now();
        Self { level, since: now, left: now, waited: Duration::ZERO }
    }
}

impl WriteLane<'_> {
    /// Stores the content of an extent: whole pages, all of the extent, or up to the end of the block.
    ///
    /// Pages of zeros take no room. In a layer, pages that the base has take none, too. A second call for the same extent
    /// replaces the first.
    ///
    /// # Errors
    /// [`StoreError`], such as a full disk, or a damaged base.
    ///
    /// # Panics
    /// If the content is not what the extent has.
    pub fn put(&mut self, block: usize, extent: u64, content: &[u8]) -> Result<(), StoreError> {
        // Between two calls the thread waited for pages.
        self.times.waited += self.times.left.elapsed();
        let done = self.put_as(block, extent, content);
        self.times.left = Instant::now();
        done
    }

    fn put_as(&mut self, block: usize, extent: u64, content: &[u8]) -> Result<(), StoreError> {
        let writer = self.writer;
        let Some(base) = &writer.options.base else { return self.put_own(block, extent, content) };
        let pages = content.len() / PAGE_BYTES;
        let mut old = std::mem::take(&mut self.base);
        old.resize(content.len(), 0);
        base.read(block, extent * u64::from(writer.extent_bytes()), &mut old)?;
        let (mut held, mut zero) = ([0; MASK_MOST], [0; MASK_MOST]);
        for (page, (new, old)) in content.chunks(PAGE_BYTES).zip(old.chunks(PAGE_BYTES)).enumerate() {
            let bit = 1 << (page % 8);
            match (new == old, is_zero(new)) {
                (true, _) => {}
                (false, true) => zero[page / 8] |= bit,
                (false, false) => held[page / 8] |= bit,
            }
        }
        self.base = old;
        self.store(block, extent, content, pages, &held, &zero)
    }

    /// Stores the changed pages of an extent in a layer. Bit *i* of byte *i* / 8 of `changed` is page *i* of the extent; all other
    /// pages are the base's, which is not read.
    ///
    /// # Errors
    /// [`StoreError`], such as a full disk; [`StoreError::Request`] if the image is no layer.
    ///
    /// # Panics
    /// If the content is not what the extent has, or `changed` has fewer bits than the extent has pages.
    pub fn put_changes(
        &mut self,
        block: usize,
        extent: u64,
        content: &[u8],
        changed: &[u8],
    ) -> Result<(), StoreError> {
        if !self.writer.is_layer() {
            let text =
                format!("{} has no base, so that it cannot hold changes only", self.writer.sink.name());
            return Err(StoreError::Request(text));
        }
        let (mut held, mut zero) = ([0; MASK_MOST], [0; MASK_MOST]);
        for (page, content) in content.chunks(PAGE_BYTES).enumerate() {
            let bit = changed[page / 8] & 1 << (page % 8);
            let mask = if is_zero(content) { &mut zero } else { &mut held };
            mask[page / 8] |= bit;
        }
        self.store(block, extent, content, content.len() / PAGE_BYTES, &held, &zero)
    }

    fn put_own(&mut self, block: usize, extent: u64, content: &[u8]) -> Result<(), StoreError> {
        let mut held = [0; MASK_MOST];
        for (page, content) in content.chunks(PAGE_BYTES).enumerate() {
            held[page / 8] |= u8::from(!is_zero(content)) << (page % 8);
        }
        self.store(block, extent, content, content.len() / PAGE_BYTES, &held, &[0; MASK_MOST])
    }

    fn store(
        &mut self,
        block: usize,
        extent: u64,
        content: &[u8],
        pages: usize,
        held: &[u8; MASK_MOST],
        zero: &[u8; MASK_MOST],
    ) -> Result<(), StoreError> {
        assert!(content.len().is_multiple_of(PAGE_BYTES), "an extent has whole pages");
        let is_held = |page: usize| held[page / 8] >> (page % 8) & 1 == 1;
        let count = (0..pages).filter(|page| is_held(*page)).count();
        let mut frame = u32::MAX;
        if count > 0 {
            let mut pages_held = std::mem::take(&mut self.held);
            let whole = match count == pages {
                true => content,
                false => {
                    pages_held.clear();
                    let chunks = content.chunks_exact(PAGE_BYTES).enumerate();
                    chunks
                        .filter(|(page, _)| is_held(*page))
                        .for_each(|(_, page)| pages_held.extend_from_slice(page));
                    &pages_held
                }
            };
            frame = self.frame(whole, count as u16)?;
            self.held = pages_held;
        }
        self.writer.state.lock().extents[block].set(extent, frame, held, zero);
        Ok(())
    }

    /// The number of the frame with these pages; stores it if it is new.
    fn frame(&mut self, pages: &[u8], count: u16) -> Result<u32, StoreError> {
        let writer = self.writer;
        let digest = writer.crypt.digest(&[pages]);
        let number = {
            let mut state = writer.state.lock();
            if let Some(number) = state.known.get(&digest) {
                return Ok(*number);
            }
            let number = state.frames.len() as u32;
            // The claim comes before the compression, so that no other thread stores the same frame.
            state.known.insert(digest, number);
            let entry = FrameEntry {
                pack: 0,
                offset: UNWRITTEN,
                stored_bytes: 0,
                is_raw: false,
                pages: count,
                digest,
            };
            state.frames.push(entry);
            number
        };
        let failed = |error| StoreError::io(writer.sink.name(), "zstd", error);
        self.adapt().map_err(failed)?;
        let packed = self.packer.pack(&writer.crypt, digest, pages).map_err(failed)?;
        let packed_at = Instant::now();
        let (pack, offset) = writer.sink.append(&packed.stored)?;
        self.note(packed_at, &packed);
        let entry = &mut writer.state.lock().frames[number as usize];
        (entry.pack, entry.offset) = (pack, offset);
        (entry.stored_bytes, entry.is_raw) = (packed.stored.len() as u32, packed.is_raw);
        Ok(number)
    }
}

impl WriteLane<'_> {
    /// Takes the level that was chosen for the next frame.
    fn adapt(&mut self) -> std::io::Result<()> {
        let Some(chooser) = &self.writer.chooser else { return Ok(()) };
        let level = chooser.lock().level();
        if level != self.times.level {
            self.packer.set_level(level)?;
            self.times.level = level;
        }
        Ok(())
    }

    /// Notes the times of a frame that was compressed until `packed_at`, and is stored now.
    fn note(&mut self, packed_at: Instant, packed: &Packed) {
        let Some(chooser) = &self.writer.chooser else { return };
        let now = Instant::now();
        let waited = self.times.waited + (now - packed_at);
        let worked = (now - self.times.since).saturating_sub(waited);
        chooser.lock().note(worked, waited, packed.stored.len() as u64, packed.is_raw);
        (self.times.since, self.times.waited) = (now, Duration::ZERO);
    }
}

/// Bytes of the longest mask of an extent's pages.
const MASK_MOST: usize = EXTENT_MOST as usize / PAGE_BYTES / 8;

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Wide words: the compiler makes vector instructions of them.
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

pub(crate) fn random(to: &mut [u8], name: &str) -> Result<(), StoreError> {
    let mut done = 0;
    while done < to.len() {
        match rustix::rand::getrandom(&mut to[done..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(StoreError::io(name, "getrandom", error.into())),
        }
    }
    Ok(())
}

/// Takes the next held page.
trait NextIfHeld<'a> {
    fn next_if_held(&mut self, is_held: bool) -> Option<&'a [u8]>;
}

impl<'a> NextIfHeld<'a> for std::slice::ChunksExact<'a, u8> {
    fn next_if_held(&mut self, is_held: bool) -> Option<&'a [u8]> {
        if is_held { self.next() } else { None }
    }
}
