//! An open image: its properties, and where its pages are.

use std::fmt;
use std::sync::Arc;

use super::cache::FrameCache;
use super::source::FrameSource;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::key::Crypt;
use crate::layout::{Block, ExtentTable, Header, Index, PAGE_BYTES, PageRange, StoredFile, features};

/// An open image with its bases. Several threads may read.
pub struct StoredImage {
    pub(super) source: Box<dyn FrameSource>,
    pub(super) header: Header,
    pub(super) digest: Digest,
    pub(super) index: Index,
    /// Offset of the index in the blob.
    pub(super) index_offset: u64,
    pub(super) crypt: Crypt,
    pub(super) base: Option<Arc<StoredImage>>,
    pub(super) cache: FrameCache,
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
        tables.iter().map(ExtentTable::held_pages).sum()
    }

    /// The pages that guests touched first when the image was served to them, in the order of the touches.
    ///
    /// They are those of the nearest layer with a record. Empty if none was recorded.
    pub fn working_set(&self) -> &[PageRange] {
        let layers = std::iter::successors(Some(self), |image| image.base.as_deref());
        layers.map(|image| &image.index.working_set[..]).find(|ranges| !ranges.is_empty()).unwrap_or_default()
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

    /// Whether block and page have content, without a read: false means zeros.
    pub fn is_held(&self, block: usize, page: u64) -> bool {
        self.place(block, page) != PagePlace::Zero
    }

    /// The pages of block `block` that are not zero, as a bitmap: page *p* is bit *p* % 64 of word *p* / 64.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn held_words(&self, block: usize) -> Vec<u64> {
        let pages = self.index.blocks[block].pages();
        let mut words = match &self.base {
            Some(base) => base.held_words(block),
            None => vec![0; pages.div_ceil(64) as usize],
        };
        let extent_pages = u64::from(self.header.extent_bytes) / PAGE_BYTES as u64;
        let table = &self.index.extents[block];
        for number in 0..table.extents() {
            let extent = table.get(number);
            if extent.is_empty() {
                continue;
            }
            let first = number * extent_pages;
            for page in first..pages.min(first + extent_pages) {
                let (word, bit) = (&mut words[(page / 64) as usize], 1 << (page % 64));
                let inside = (page - first) as usize;
                match (extent.holds(inside), self.base.is_some() && extent.is_of_base(inside)) {
                    (true, _) => *word |= bit,
                    (false, true) => {}
                    (false, false) => *word &= !bit,
                }
            }
        }
        words
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

    pub(crate) fn into_parts(self) -> (Header, Crypt, Index, u64) {
        (self.header, self.crypt, self.index, self.index_offset)
    }

    pub(crate) fn with_source(mut self, source: Box<dyn FrameSource>) -> Self {
        self.source = source;
        self
    }
}
