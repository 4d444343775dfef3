//! Giving a background snapshot its bitmaps.
//!
//! QEMU 11.1 writes the bitmaps when it writes RAM's END, which a background snapshot does not have: the file has
//! all pages, a whole tail, and no bit is set (specs/mapped-ram.md §4.9). The bitmaps can be written afterwards, since
//! such a snapshot writes each page at most once: what is not zero in the file is the page. For any other save that
//! would bring back stale pages, so nothing else is touched (§7.5).
//!
//! A repair in place that is interrupted leaves an image that nobody reads, until the next repair finishes it
//! (`in_place`). Where such an image has RAM's END, only its magic can have been wrong, and only that is repaired.

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
use crate::read::image::open_file;
use crate::read::{Image, MappedBlock};

/// Where the repaired image goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepairTo {
    /// Into another file, which is whole or absent.
    File {
        /// Its path.
        path: PathBuf,
        /// Whether one that is there is replaced.
        replace: bool,
    },
    /// Into the image itself. If that is interrupted, the image is refused until it is repaired again.
    Itself,
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Pages that are in the image now and were not before.
    pub pages: u64,
    /// Bitmaps that were written.
    pub bitmaps: usize,
}

/// Repairs the background snapshot at `image`.
///
/// # Errors
/// [`ImageError::Request`] if it is none, or something else is wrong with it: then nothing is written.
pub fn repair(image: &Path, to: &RepairTo, options: &VerifyOptions) -> Result<Repaired, ImageError> {
    let (opened, bitmaps, repaired) = examine(image, options)?;
    match to {
        RepairTo::Itself => write_into(&opened, &bitmaps)?,
        RepairTo::File { path, replace } => write_copy(&opened, path, *replace, &bitmaps)?,
    }
    Ok(repaired)
}

/// As [`repair`] with [`RepairTo::Itself`], and writes to `medium` what belongs into the image's file: for tests alone.
///
/// # Errors
/// As [`repair`]; those of `medium`.
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

/// Looks at the image and works out its bitmaps.
fn examine(image: &Path, options: &VerifyOptions) -> Result<(Image, Bitmaps, Repaired), ImageError> {
    // One file from here on, whatever comes to lie at its path.
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
    // That the bitmaps are lost says less than whatever else is wrong.
    let errors = verdict
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error && finding.code != "background-snapshot");
    let other = errors.min_by_key(|finding| finding.code == "bitmaps-lost");
    if let Some(other) = other {
        return Err(ImageError::Request(format!(
            "{name} cannot be repaired. Only the bitmaps of a background snapshot can be written afterwards \
             (specs/mapped-ram.md §7.5), and here something else is damaged: {other}"
        )));
    }
    let opened = Image::open_source(source, name)?;
    let Some(pages) = opened.mapped() else {
        return Err(ImageError::Request(format!("{name} has no bitmaps")));
    };
    // With an END it is no background snapshot, whatever its magic says: pages with data under clear bits are stale.
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

/// The bitmap of `block` with the pages of `data`, as it stands in a file.
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
    // The file that was looked at, by its descriptor.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = OpenOptions::new().write(true).open(path).map_err(io("open"))?;
    in_place::write(&file, image.stream_offset(), bitmaps).map_err(io("write"))
}

/// Copies the image with its holes, sharing what can be shared, and writes the bitmaps into the copy.
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
    // A repair that was interrupted has taken it away.
    to.write_at(image.stream_offset(), &[IoPart::Bytes(&FileHeader::MAGIC)])?;
    image.check_unchanged()?;
    Ok(to.complete()?)
}
