//! Stores the recorded working set in an image that is complete (`specs/image.md §4.1, §11`).

use std::path::Path;
use std::sync::Arc;

use super::sink::{FileSink, FrameSink};
use super::tail::tail;
use crate::blob::{Blob, FileBlob};
use crate::digest::Digest;
use crate::error::StoreError;
use crate::key::Key;
use crate::layout::{Block, HEADER_BYTES, PageRange, working_set};
use crate::read::StoredImage;

/// Stores `ranges` as the working set of the image with `digest` in the file at `path`. Its digest stays the same.
///
/// The image is copied to a temporary file with another index, and renamed. Readers that have opened it keep the earlier
/// one.
///
/// # Errors
/// [`StoreError::Changed`] if the file has another image by now; [`StoreError::Request`] for ranges that are not in its RAM;
/// [`StoreError::Io`]. Then the image is unchanged.
pub fn put_working_set(
    path: &Path,
    key: Option<&Key>,
    digest: Digest,
    ranges: &[PageRange],
) -> Result<(), StoreError> {
    let name = path.display().to_string();
    // A link must lead to the new image, too, and is not replaced by it.
    let path = path.canonicalize().map_err(|error| StoreError::io(&name, "realpath", error))?;
    let blob: Arc<FileBlob> = Arc::new(FileBlob::open(&path)?);
    let image = StoredImage::open_one(Arc::clone(&blob) as Arc<dyn Blob>, key)?;
    if image.digest() != digest {
        return Err(StoreError::Changed { name });
    }
    let (header, tail, end) = with_working_set(image, ranges)?;
    let mut sink = FileSink::create(&path, true, HEADER_BYTES as u64)?;
    if let Some(file) = blob.file() {
        sink.take(file, end)?;
    }
    sink.complete(&header, &tail)?;
    Ok(())
}

/// Header, index with footer, and offset of the index of an image that gets another working set.
pub(crate) fn with_working_set(
    image: StoredImage,
    ranges: &[PageRange],
) -> Result<(Vec<u8>, Vec<u8>, u64), StoreError> {
    let name = image.name().to_owned();
    let pages: Vec<u64> = image.blocks().iter().map(Block::pages).collect();
    working_set::check(ranges, &pages).map_err(|(rule, _)| StoreError::Request(format!("{name}: {rule}")))?;
    let (header, crypt, mut index, end) = image.into_parts();
    index.working_set = ranges.to_vec();
    let header = header.encode();
    let (tail, _) = tail(&index, &crypt, &header, end);
    Ok((header.to_vec(), tail, end))
}
