//! Opens a single image: its header, footer and index, without its base.

use std::path::Path;
use std::sync::Arc;

use super::cache::FrameCache;
use super::image::StoredImage;
use super::source::PlainSource;
use crate::blob::{Blob, FileBlob};
use crate::error::StoreError;
use crate::frame;
use crate::key::{Crypt, Key};
use crate::layout::header::{HeaderError, MAGIC};
use crate::layout::{
    FOOTER_BYTES, Footer, FrameEntry, HEADER_BYTES, Header, INDEX_MOST, Index, Rule, Sections, features,
};

/// Bytes of the end of a remote image that are read first, because they contain footer and index of a small image.
const TAIL_BYTES: u64 = 256 << 10;

impl StoredImage {
    /// Whether these first bytes of a file are those of an image in Sterna's format.
    pub fn is_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
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
        let sections = Sections::split(&text).map_err(|rule| broken(rule, "the index"))?;
        if sections.digest(&crypt, &encoded) != footer.digest {
            return Err(broken(("its digest is not the footer's".to_owned(), "§3"), "the index"));
        }
        sections.check_seals(&crypt, footer.digest).map_err(|rule| broken(rule, "the index"))?;
        let index =
            Index::decode(&sections, header.extent_bytes).map_err(|rule| broken(rule, "the index"))?;
        if (header.incompatible & features::LAYER != 0) != index.base.is_some() {
            return Err(broken(("header and index disagree about a base".to_owned(), "§9"), "the index"));
        }
        let is_packed = header.incompatible & features::PACKS != 0;
        check_frames(&index, &crypt, (!is_packed).then_some(footer.index_offset))
            .map_err(|rule| broken(rule, "the index"))?;
        let cache = FrameCache::new(header.extent_bytes as usize);
        let source = Box::new(PlainSource::new(blob));
        let (digest, index_offset) = (footer.digest, footer.index_offset);
        Ok(Self { source, header, digest, index, index_offset, crypt, base: None, cache })
    }
}

/// Reads the header, checks the key, and reads the end of the image.
fn open_header(blob: &dyn Blob, key: Option<&Key>) -> Result<(Header, Crypt, Vec<u8>), StoreError> {
    let (name, length) = (blob.name().to_owned(), blob.len_bytes());
    let mut bytes = [0; HEADER_BYTES];
    let first = length.min(HEADER_BYTES as u64) as usize;
    blob.read_exact_at(0, &mut bytes[..first])?;
    if !bytes.starts_with(MAGIC) {
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
