//! Writes the missing bitmaps of a background snapshot.
//!
//! QEMU 11.1 writes the bitmaps together with RAM's END section. A background snapshot has no END section. Its file
//! has all pages and a complete tail, but no bit is set (specs/mapped-ram.md §4.9).
//!
//! The bitmaps can be written afterwards, because such a snapshot writes each page at most once. Every page that is
//! not zero in the file is valid. In any other image, this would restore stale pages. Therefore the repair refuses
//! other images (§7.5).
//!
//! An interrupted repair in place leaves an image that every reader refuses, until the next repair completes it
//! (`in_place`). If such an image has RAM's END, only its magic can be wrong, and only the magic is repaired.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use sterna_transport::{CreateOptions, Direct, IoPart, PageFile};
use sterna_wire::main::FileHeader;

mod in_place;

#[doc(hidden)]
pub use in_place::Medium;

use super::finding::Severity;
use super::verify::{self, VerifyOptions};
use crate::ImageError;
use crate::read::half_repaired::{self, WithMagic};
use crate::read::open::{open_file, open_frames};
use crate::read::{Access, Image, MappedBlock};

/// The target of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepairTo {
    /// Into another file, which is complete or absent.
    File {
        /// Path of the new file.
        path: PathBuf,
        /// Whether an existing file is replaced.
        replace: bool,
    },
    /// Into the image itself. After an interruption, the image is refused until it is repaired again.
    Itself,
}

/// The result of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Number of pages whose bit was set by the repair.
    pub pages: u64,
    /// Number of bitmaps that were written.
    pub bitmaps: usize,
}

/// Repairs the background snapshot at `image`.
///
/// # Errors
/// [`ImageError::Request`] if the image is not a background snapshot, or has other damage. Then nothing is written.
pub fn repair(image: &Path, to: &RepairTo, options: &VerifyOptions) -> Result<Repaired, ImageError> {
    repair_with(image, to, options, &Access::default())
}

/// Like [`repair`], with the key of an encrypted image, or with the places of a layer's bases.
///
/// An image in Sterna's own format is only checked: a background snapshot never becomes one, so that nothing in it can be
/// repaired.
///
/// # Errors
/// The errors of [`repair`].
pub fn repair_with(
    image: &Path,
    to: &RepairTo,
    options: &VerifyOptions,
    access: &Access,
) -> Result<Repaired, ImageError> {
    if open_frames(image, access)?.is_some() {
        let verdict = verify::verify_with(image, options, access)?;
        let name = image.display();
        let errors = verdict.findings.iter().filter(|finding| finding.severity == Severity::Error);
        return Err(ImageError::Request(match errors.map(ToString::to_string).next() {
            None => format!("{name} is sound: nothing to repair"),
            Some(error) => format!(
                "{name} cannot be repaired, because the content of its damaged frames is nowhere else: {error}; take another copy"
            ),
        }));
    }
    let (opened, bitmaps, repaired) = examine(image, options)?;
    match to {
        RepairTo::Itself => write_into(&opened, &bitmaps)?,
        RepairTo::File { path, replace } => write_copy(&opened, path, *replace, &bitmaps)?,
    }
    Ok(repaired)
}

/// Like [`repair`] with [`RepairTo::Itself`], but writes to `medium` instead of the image's file. Only for tests.
///
/// # Errors
/// The errors of [`repair`], and the errors of `medium`.
#[doc(hidden)]
pub fn repair_onto(
    image: &Path,
    medium: &dyn Medium,
    options: &VerifyOptions,
) -> Result<Repaired, ImageError> {
    let (opened, bitmaps, repaired) = examine(image, options)?;
    in_place::write(medium, opened.stream_offset(), &bitmaps)
        .map_err(|error| ImageError::io(opened.path_name(), "write", error))?;
    Ok(repaired)
}

/// Bitmaps with their offsets in the file.
type Bitmaps = Vec<(u64, Vec<u8>)>;

/// Checks the image and computes its bitmaps.
fn examine(image: &Path, options: &VerifyOptions) -> Result<(Image, Bitmaps, Repaired), ImageError> {
    // All later steps use this open file, even if its path leads to another file by then.
    let mut source = open_file(image)?;
    let name = image.display().to_string();
    let broken_off =
        half_repaired::broken_off(&*source).map_err(|error| ImageError::io(&name, "read", error))?;
    if let Some(offset) = broken_off {
        source = Arc::new(WithMagic::new(source, offset));
    }
    let verdict = verify::verify_source(Arc::clone(&source), &name, options)?;
    let name = &verdict.file;
    if verdict.is_sound() && broken_off.is_none() {
        return Err(ImageError::Request(format!("{name} is sound: nothing to repair")));
    }
    // The loss of bitmaps is the least specific error. Any other error is reported first.
    let errors = verdict
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && finding.code != "background-snapshot");
    let other = errors.min_by_key(|finding| finding.code == "bitmaps-lost");
    if let Some(other) = other {
        return Err(ImageError::Request(format!(
            "{name} cannot be repaired. Only the bitmaps of a background snapshot can be written afterwards \
             (specs/mapped-ram.md §7.5), but here something else is damaged: {other}"
        )));
    }
    let opened = Image::open_source(source, name)?;
    let Some(pages) = opened.mapped() else {
        return Err(ImageError::Request(format!("{name} has no bitmaps")));
    };
    // An image with an END is not a background snapshot, whatever its magic is. Its data under clear bits is stale.
    let blocks = if opened.shape().has_end { &[] } else { pages.blocks() };
    let data = verify::data_pages(&**opened.source(), name, blocks, options)?;
    let mut repaired = Repaired::default();
    let mut bitmaps = Vec::new();
    for (block, data) in blocks.iter().zip(data).filter(|(block, _)| !block.is_skipped) {
        let bytes = merged(block, &data, &mut repaired);
        bitmaps.push((block.bitmap_offset, bytes));
    }
    opened.check_unchanged()?;
    Ok((opened, bitmaps, repaired))
}

/// The bitmap of `block` with the pages of `data` added, in the file's byte order.
fn merged(block: &MappedBlock, data: &[u64], repaired: &mut Repaired) -> Vec<u8> {
    repaired.bitmaps += 1;
    let word = |index: usize| {
        let held = block.bitmap.words()[index].load(std::sync::atomic::Ordering::Relaxed);
        (held, data.get(index).copied().unwrap_or(0))
    };
    let words = block.bitmap.words().len();
    let mut bytes = Vec::with_capacity(words * 8);
    for (held, data) in (0..words).map(word) {
        repaired.pages += u64::from((data & !held).count_ones());
        bytes.extend((held | data).to_le_bytes());
    }
    bytes
}

fn write_into(image: &Image, bitmaps: &[(u64, Vec<u8>)]) -> Result<(), ImageError> {
    let io = |call| move |error| ImageError::io(image.path_name(), call, error);
    let Some(file) = image.source().file() else {
        return Err(ImageError::Request("the image is not in a file".into()));
    };
    // Open the examined file by its descriptor, because its path may lead to another file.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = OpenOptions::new().write(true).open(path).map_err(io("open"))?;
    in_place::write(&file, image.stream_offset(), bitmaps).map_err(io("write"))
}

/// Copies the image with its holes, and writes the bitmaps into the copy.
///
/// Reflinks replace copies where the file system supports them.
fn write_copy(
    image: &Image,
    path: &Path,
    replace: bool,
    bitmaps: &[(u64, Vec<u8>)],
) -> Result<(), ImageError> {
    let to = PageFile::create(path, CreateOptions { direct: Direct::Off, replace, keep_bytes: 0 })?;
    let Some(from) = image.page_file(Direct::Off)? else {
        return Err(ImageError::Request("the image is not in a file".into()));
    };
    let length = from.len_bytes()?;
    to.set_len(length)?;
    let mut at = 0;
    while let Some(data) = from.next_data(at, length)? {
        let mut done = data.start;
        while done < data.end {
            match to.copy_range(done, &from, done, data.end - done)? {
                0 => return Err(ImageError::Changed { file: image.path_name().to_owned() }),
                copied => done += copied,
            }
        }
        at = data.end;
    }
    for (offset, bytes) in bitmaps {
        to.write_at(*offset, &[IoPart::Bytes(bytes)])?;
    }
    // An interrupted repair has changed the magic in the source.
    to.write_at(image.stream_offset(), &[IoPart::Bytes(&FileHeader::MAGIC)])?;
    image.check_unchanged()?;
    Ok(to.complete()?)
}
