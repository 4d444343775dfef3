//! Reads images: the index when an image is opened, then pages and files at random.

mod cache;
mod chain;
mod check;
mod source;
mod stored_file;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub(crate) use chain::link;
pub use chain::{Bases, FileBases, NoBases};
pub use check::{Checked, Damage};
pub(crate) use source::{FrameSource, PlainSource};
pub use stored_file::FileReader;

use crate::blob::{Blob, FileBlob};
use crate::digest::Digest;
use crate::error::StoreError;
use crate::frame;
use crate::key::{Crypt, Key};
use crate::layout::header::HeaderError;
use crate::layout::{
    Block, Extent, FOOTER_BYTES, Footer, FrameEntry, HEADER_BYTES, Header, INDEX_MOST, Index, PAGE_BYTES,
    Rule, StoredFile, features,
};
use crate::recipe::Recipe;
use cache::FrameCache;

/// Bytes of the end of a remote image that are read first, because they contain footer and index of a small image.
const TAIL_BYTES: u64 = 256 << 10;
/// Limit of a file's recipe in bytes.
const RECIPE_MOST: u64 = 256 << 20;

/// An open image with its bases. Several threads may read.
pub struct StoredImage {
    source: Box<dyn FrameSource>,
    header: Header,
    digest: Digest,
    index: Index,
    crypt: Crypt,
    base: Option<Arc<StoredImage>>,
    cache: FrameCache,
}

impl fmt::Debug for StoredImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredImage")
            .field("name", &self.name())
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

/// Where the content of a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagePlace {
    /// The page has only zeros.
    Zero,
    /// The page is in a frame.
    Frame {
        /// Layer that has the frame: 0 is the image itself, 1 its base, and so on.
        layer: usize,
        /// Number of the frame in the layer.
        frame: u32,
        /// Position of the page in the frame.
        position: usize,
    },
}

impl StoredImage {
    /// Whether these first bytes of a file are those of an image in Sterna's format.
    pub fn is_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(crate::layout::header::MAGIC)
    }

    /// Whether the file at `path` is an encrypted image. False for another file.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Io`].
    pub fn is_encrypted_at(path: &Path) -> Result<bool, StoreError> {
        let (blob, mut bytes) = (FileBlob::open(path)?, [0; HEADER_BYTES]);
        if blob.len_bytes() < HEADER_BYTES as u64 {
            return Ok(false);
        }
        blob.read_exact_at(0, &mut bytes)?;
        Ok(Header::decode(&bytes).is_ok_and(|header| header.incompatible & features::ENCRYPTED != 0))
    }

    /// Opens the image in the file at `path`. Bases are searched next to it, under the names that the layers contain.
    ///
    /// # Errors
    /// [`StoreError`]: the image is damaged, the key is wrong, or a base is missing.
    pub fn open(path: &Path, key: Option<&Key>) -> Result<Arc<Self>, StoreError> {
        Self::open_blob(Arc::new(FileBlob::open(path)?), key, &FileBases::beside(path))
    }

    /// Opens the image in `blob`, and the chain of its bases.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_blob(
        blob: Arc<dyn Blob>,
        key: Option<&Key>,
        bases: &dyn Bases,
    ) -> Result<Arc<Self>, StoreError> {
        chain::open(blob, key, bases)
    }

    /// Opens a single image without its base.
    pub(crate) fn open_one(blob: Arc<dyn Blob>, key: Option<&Key>) -> Result<Self, StoreError> {
        let name = blob.name().to_owned();
        let (header, crypt, tail) = open_header(&*blob, key)?;
        let length = blob.len_bytes();
        let broken =
            |(rule, paragraph): Rule, part| StoreError::Broken { name: name.clone(), part, rule, paragraph };
        let footer_at = tail.len() - FOOTER_BYTES;
        let mut footer = [0; FOOTER_BYTES];
        footer.copy_from_slice(&tail[footer_at..]);
        let footer = Footer::decode(&footer).map_err(|rule| broken(rule, "the footer"))?;
        let end = length - FOOTER_BYTES as u64;
        let is_placed = footer.index_offset >= HEADER_BYTES as u64
            && footer.index_offset.checked_add(footer.index_bytes) == Some(end)
            && footer.index_bytes <= INDEX_MOST;
        if !is_placed {
            let rule = ("the index is not between the frames and the footer".to_owned(), "§3");
            return Err(broken(rule, "the footer"));
        }
        let index_bytes = footer.index_bytes as usize;
        let stored = match footer_at.checked_sub(index_bytes) {
            Some(start) => tail[start..footer_at].to_vec(),
            None => {
                let mut stored = vec![0; index_bytes];
                blob.read_exact_at(footer.index_offset, &mut stored)?;
                stored
            }
        };
        let encoded = header.encode();
        let text = crypt.unseal(stored, &encoded);
        let text = text.ok_or_else(|| broken(("it does not decrypt".to_owned(), "§8"), "the index"))?;
        if crypt.digest(&[&encoded, &text]) != footer.digest {
            return Err(broken(("its digest is not the footer's".to_owned(), "§3"), "the index"));
        }
        let index = Index::decode(&text, header.extent_bytes).map_err(|rule| broken(rule, "the index"))?;
        if (header.incompatible & features::LAYER != 0) != index.base.is_some() {
            return Err(broken(("header and index disagree about a base".to_owned(), "§9"), "the index"));
        }
        let is_packed = header.incompatible & features::PACKS != 0;
        check_frames(&index, &crypt, (!is_packed).then_some(footer.index_offset))
            .map_err(|rule| broken(rule, "the index"))?;
        let cache = FrameCache::new(header.extent_bytes as usize);
        let source = Box::new(PlainSource::new(blob));
        Ok(Self { source, header, digest: footer.digest, index, crypt, base: None, cache })
    }

    /// The path or address.
    pub fn name(&self) -> &str {
        self.source.name()
    }

    /// The digest, which names the image as a base.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What made the machine's files: `qemu`, `firecracker`, `cloud-hypervisor`, `sterna`.
    pub fn kind(&self) -> &str {
        &self.index.kind
    }

    /// Seconds since 1970 when the image was made.
    pub fn made(&self) -> u64 {
        self.index.made
    }

    /// Bytes of an extent.
    pub fn extent_bytes(&self) -> u32 {
        self.header.extent_bytes
    }

    /// Whether frames and index are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.crypt.is_on()
    }

    /// The blocks of RAM, without the block of the files' bytes.
    pub fn blocks(&self) -> &[Block] {
        &self.index.blocks[..self.index.blocks.len() - 1]
    }

    /// The files that the image can write again.
    pub fn files(&self) -> &[StoredFile] {
        &self.index.files
    }

    /// The base of a layer; none for a complete image.
    pub fn base(&self) -> Option<&Arc<StoredImage>> {
        self.base.as_ref()
    }

    /// The digest and the name of the base in the index.
    pub fn named_base(&self) -> Option<(Digest, &str)> {
        self.index.base.as_ref().map(|(digest, hint)| (*digest, hint.as_str()))
    }

    /// Number of layers, including the image itself.
    pub fn layers(&self) -> usize {
        std::iter::successors(Some(self), |image| image.base.as_deref()).count()
    }

    /// Number of frames of this layer.
    pub fn frames(&self) -> u32 {
        self.index.frames.len() as u32
    }

    /// Number of pages of RAM that this layer holds itself.
    pub fn held_pages(&self) -> u64 {
        let tables = &self.index.extents[..self.index.extents.len() - 1];
        tables.iter().map(crate::layout::ExtentTable::held_pages).sum()
    }

    /// Length of the blob in bytes; in a store, of the index object.
    pub fn stored_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    /// Bytes of all frames that this layer names.
    pub fn frame_bytes(&self) -> u64 {
        self.index.frames.iter().map(|frame| u64::from(frame.stored_bytes)).sum()
    }

    /// Where page `page` of block `block` is.
    ///
    /// # Panics
    /// If the block does not have the page.
    pub fn place(&self, block: usize, page: u64) -> PagePlace {
        let pages = u64::from(self.header.extent_bytes) / PAGE_BYTES as u64;
        let extent = self.index.extents[block].get(page / pages);
        let inside = (page % pages) as usize;
        if extent.holds(inside) {
            return PagePlace::Frame { layer: 0, frame: extent.frame, position: extent.rank(inside) };
        }
        match &self.base {
            Some(base) if extent.is_of_base(inside) => match base.place(block, page) {
                PagePlace::Zero => PagePlace::Zero,
                PagePlace::Frame { layer, frame, position } => {
                    PagePlace::Frame { layer: layer + 1, frame, position }
                }
            },
            _ => PagePlace::Zero,
        }
    }

    /// Reads, decrypts, decompresses and checks frame `frame` of layer `layer`. The cache is not asked.
    ///
    /// # Errors
    /// [`StoreError::Frame`] if the frame is damaged; the errors of reads.
    ///
    /// # Panics
    /// If the layer or the frame does not exist.
    pub fn frame(&self, layer: usize, frame: u32) -> Result<Vec<u8>, StoreError> {
        if let (Some(below), Some(base)) = (layer.checked_sub(1), &self.base) {
            return base.frame(below, frame);
        }
        let entry = &self.index.frames[frame as usize];
        let mut stored = vec![0; entry.stored_bytes as usize];
        self.source.read(entry, &mut stored).map_err(|error| self.at_frame(frame, error))?;
        self.unpacked(frame, stored)
    }

    /// Decrypts, decompresses and checks the stored bytes of a frame of this layer.
    ///
    /// # Errors
    /// [`StoreError::Frame`].
    pub fn unpacked(&self, frame: u32, stored: Vec<u8>) -> Result<Vec<u8>, StoreError> {
        let entry = &self.index.frames[frame as usize];
        let unpacked = frame::unpack(&self.crypt, entry, stored);
        unpacked.map_err(|reason| self.frame_error(frame, reason))
    }

    /// The place of a frame's stored bytes in the file: offset and length. In a store, the place in its pack.
    pub fn stored_at(&self, frame: u32) -> (u64, u32) {
        let entry = &self.index.frames[frame as usize];
        (entry.offset, entry.stored_bytes)
    }

    /// Digest of a frame's pages: the name of the frame in caches that images share.
    pub fn frame_digest(&self, frame: u32) -> Digest {
        self.index.frames[frame as usize].digest
    }

    /// Fills `to` with the bytes of block `block` from `offset`.
    ///
    /// # Errors
    /// The errors of [`frame`](Self::frame).
    ///
    /// # Panics
    /// If the bytes are not in the block.
    pub fn read(&self, block: usize, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let extent_bytes = u64::from(self.header.extent_bytes);
        let (mut at, mut rest) = (offset, to);
        while !rest.is_empty() {
            let count = ((extent_bytes - at % extent_bytes) as usize).min(rest.len());
            let (part, more) = rest.split_at_mut(count);
            self.read_in_extent(block, at, part)?;
            at += count as u64;
            rest = more;
        }
        Ok(())
    }

    fn read_in_extent(&self, block: usize, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let extent_bytes = u64::from(self.header.extent_bytes);
        let extent = self.index.extents[block].get(offset / extent_bytes);
        let inside = (offset % extent_bytes) as usize;
        let (mut frame, mut at, mut rest) = (None, inside, to);
        while !rest.is_empty() {
            let (page, byte) = (at / PAGE_BYTES, at % PAGE_BYTES);
            let (part, more) = {
                let count = (PAGE_BYTES - byte).min(rest.len());
                rest.split_at_mut(count)
            };
            if extent.holds(page) {
                let content = match &frame {
                    Some(content) => content,
                    None => frame.insert(self.cached(extent.frame)?),
                };
                let start = extent.rank(page) * PAGE_BYTES + byte;
                part.copy_from_slice(&content[start..start + part.len()]);
            } else {
                self.read_below(block, &extent, page, offset - inside as u64 + at as u64, part)?;
            }
            at += part.len();
            rest = more;
        }
        Ok(())
    }

    fn read_below(
        &self,
        block: usize,
        extent: &Extent<'_>,
        page: usize,
        offset: u64,
        to: &mut [u8],
    ) -> Result<(), StoreError> {
        match &self.base {
            Some(base) if extent.is_of_base(page) => base.read_in_extent_of(block, offset, to),
            _ => {
                to.fill(0);
                Ok(())
            }
        }
    }

    /// Like [`read`](Self::read), from a layer above, whose extents may have another length.
    fn read_in_extent_of(&self, block: usize, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        self.read(block, offset, to)
    }

    fn cached(&self, frame: u32) -> Result<Arc<Vec<u8>>, StoreError> {
        self.cache.get(frame, || self.frame(0, frame))
    }

    /// Whether block and page have content, without a read: false means zeros.
    pub fn is_held(&self, block: usize, page: u64) -> bool {
        self.place(block, page) != PagePlace::Zero
    }

    /// Opens a file of the image for reads at random; none if the image has no file of this name.
    ///
    /// # Errors
    /// [`StoreError::Broken`] if the file's recipe breaks a rule; the errors of [`frame`](Self::frame).
    pub fn file(self: &Arc<Self>, name: &str) -> Result<Option<FileReader>, StoreError> {
        let Some(file) = self.index.files.iter().find(|file| file.name == name) else { return Ok(None) };
        let broken = |rule: Rule| StoreError::Broken {
            name: self.name().to_owned(),
            part: "a recipe",
            rule: rule.0,
            paragraph: rule.1,
        };
        let (offset, length) = file.recipe;
        if length > RECIPE_MOST {
            return Err(broken((format!("the recipe of {name:?} has {length} bytes"), "§6")));
        }
        let mut bytes = vec![0; length as usize];
        self.read(self.index.blocks.len() - 1, offset, &mut bytes)?;
        let blocks: Vec<u64> = self.index.blocks.iter().map(|block| block.length_bytes).collect();
        let recipe = Recipe::decode(&bytes, &blocks).map_err(broken)?;
        if recipe.length() != file.length_bytes {
            let rule =
                format!("the recipe of {name:?} makes {} bytes, not {}", recipe.length(), file.length_bytes);
            return Err(broken((rule, "§6")));
        }
        Ok(Some(FileReader::new(Arc::clone(self), recipe)))
    }

    /// Refuses an image whose blocks differ from `blocks`, for a layer `name`.
    pub(crate) fn check_alike(&self, name: &str, blocks: &[Block]) -> Result<(), StoreError> {
        let ours = self.blocks();
        let unlike = |what| StoreError::BaseUnlike { name: name.to_owned(), digest: self.digest, what };
        if ours.len() != blocks.len() {
            return Err(unlike(format!("{} blocks instead of {}", ours.len(), blocks.len())));
        }
        match ours.iter().zip(blocks).find(|(ours, theirs)| ours != theirs) {
            Some((ours, theirs)) => Err(unlike(format!(
                "block {:?} of {} bytes instead of {:?} of {}",
                ours.name, ours.length_bytes, theirs.name, theirs.length_bytes
            ))),
            None => Ok(()),
        }
    }

    /// The name under which a layer remembers this image: its file name, or its name in the store.
    pub(crate) fn base_hint(&self) -> String {
        let name = self.name();
        name.rsplit(['/', '#']).next().unwrap_or(name).to_owned()
    }

    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn is_packed(&self) -> bool {
        self.header.incompatible & features::PACKS != 0
    }

    pub(crate) fn with_source(mut self, source: Box<dyn FrameSource>) -> Self {
        self.source = source;
        self
    }

    fn at_frame(&self, frame: u32, error: StoreError) -> StoreError {
        match error {
            StoreError::Torn { .. } => self.frame_error(frame, "the file ends inside of it".to_owned()),
            error => error,
        }
    }

    fn frame_error(&self, frame: u32, reason: String) -> StoreError {
        StoreError::Frame { name: self.name().to_owned(), frame, pages: self.pages_of(frame), reason }
    }

    /// The first extent that names a frame, in words.
    fn pages_of(&self, frame: u32) -> String {
        let pages = u64::from(self.header.extent_bytes) / PAGE_BYTES as u64;
        for (block, table) in self.index.blocks.iter().zip(&self.index.extents) {
            if let Some(extent) = (0..table.extents()).find(|extent| table.get(*extent).frame == frame) {
                let (first, end) = (extent * pages, ((extent + 1) * pages).min(block.pages()));
                return match block.name.as_str() {
                    "" => "bytes of the machine's files".to_owned(),
                    name => format!("block {name}, pages {first:#x} to {:#x}", end - 1),
                };
            }
        }
        "of no page".to_owned()
    }
}

/// Reads the header, checks the key, and reads the end of the image.
fn open_header(blob: &dyn Blob, key: Option<&Key>) -> Result<(Header, Crypt, Vec<u8>), StoreError> {
    let (name, length) = (blob.name().to_owned(), blob.len_bytes());
    let mut bytes = [0; HEADER_BYTES];
    let first = length.min(HEADER_BYTES as u64) as usize;
    blob.read_exact_at(0, &mut bytes[..first])?;
    let magic = crate::layout::header::MAGIC;
    if !bytes.starts_with(magic) {
        return Err(StoreError::NotAnImage { name });
    }
    if length < (HEADER_BYTES + FOOTER_BYTES) as u64 {
        return Err(StoreError::Torn { name, length_bytes: length });
    }
    let header = Header::decode(&bytes).map_err(|error| match error {
        HeaderError::NotAnImage => StoreError::NotAnImage { name: name.clone() },
        HeaderError::Unsupported(what) => StoreError::Unsupported { name: name.clone(), what },
        HeaderError::Broken((rule, paragraph)) => {
            StoreError::Broken { name: name.clone(), part: "the header", rule, paragraph }
        }
    })?;
    let crypt = Crypt::new(key);
    match (header.incompatible & features::ENCRYPTED != 0, crypt.is_on()) {
        (true, false) => return Err(StoreError::KeyNeeded { name }),
        (false, true) => return Err(StoreError::NotEncrypted { name }),
        _ => {}
    }
    if crypt.check(&header.salt) != header.key_check {
        return Err(StoreError::WrongKey { name });
    }
    let want = if blob.is_remote() { TAIL_BYTES } else { FOOTER_BYTES as u64 };
    let mut tail = vec![0; want.min(length) as usize];
    blob.read_exact_at(length - tail.len() as u64, &mut tail)?;
    Ok((header, crypt, tail))
}

/// Checks the frames' places. `end` is the end of the frames in a plain file.
fn check_frames(index: &Index, crypt: &Crypt, end: Option<u64>) -> Result<(), Rule> {
    let is_outside = |entry: &FrameEntry| match end {
        Some(end) => entry.offset < HEADER_BYTES as u64 || entry.offset + u64::from(entry.stored_bytes) > end,
        None => false,
    };
    for (number, entry) in index.frames.iter().enumerate() {
        if is_outside(entry) {
            return Err((format!("frame {number} is outside of the part with the frames"), "§5"));
        }
        if entry.stored_bytes as usize > frame::stored_most(entry.pages, crypt) || entry.stored_bytes == 0 {
            return Err((
                format!("frame {number} has {} bytes for {} pages", entry.stored_bytes, entry.pages),
                "§5",
            ));
        }
    }
    match end {
        Some(_) if !index.packs.is_empty() => Err(("a plain file names packs".to_owned(), "§10")),
        _ => Ok(()),
    }
}
