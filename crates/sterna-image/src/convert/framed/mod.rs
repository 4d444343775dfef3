//! Writes images in Sterna's own format (`specs/image.md`).
//!
//! | from | how |
//! | --- | --- |
//! | mapped-ram | several threads read extents; the file's other bytes become its recipe |
//! | legacy | pages are gathered to extents in one pass; the stream's other bytes become a second recipe |
//! | Sterna's format | frames are decompressed and compressed again; recipes stay |

pub(super) mod bytes;
mod gather;
pub(super) mod options;
mod record;
pub(super) mod verbatim;
pub(super) mod writer;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sterna_ram::PageBitmap;
use sterna_store::{Block, ImageWriter, Piece, Recipe, StoredImage};
use sterna_transport::{Direct, PageFile};
use sterna_wire::PAGE_SHIFT;

use super::check::{Check, check_whole};
use super::counts::Counts;
use crate::ImageError;
use crate::crew;
use crate::model::{IGNORE_SHARED, Shape};
use crate::read::begun::Begun;
use crate::read::framed::{STREAM, VIEW};
use crate::read::tee::Tee;
use crate::read::{Image, MappedPages};
use crate::tools::finding::Finding;
use crate::tools::spool;
use crate::write::view::{ViewPart, view};
use crate::write::{Envelope, failed};
use bytes::push_bytes;
use gather::Gather;
pub use options::FrameOptions;
use record::Recorder;

/// Bytes of one read from the parts of a file that are not pages.
const STRIDE: u64 = 1 << 20;

/// Copies a mapped-ram image.
pub(super) fn of_mapped(
    image: &Image,
    writer: ImageWriter,
    threads: usize,
    counts: &Counts,
) -> Result<u64, ImageError> {
    let Some(mapped) = image.mapped() else {
        return Err(ImageError::Request(format!("{} has no pages at fixed places", image.path_name())));
    };
    let extent_pages = u64::from(writer.extent_bytes()) >> PAGE_SHIFT;
    let units: Vec<(usize, u64)> = mapped
        .blocks()
        .iter()
        .enumerate()
        .filter(|(_, block)| !block.is_skipped)
        .flat_map(|(index, block)| {
            (0..block.pages().div_ceil(extent_pages)).map(move |extent| (index, extent))
        })
        .collect();
    let next = AtomicUsize::new(0);
    crew::share(threads.min(units.len()), || {
        let mut lane = writer.lane()?;
        let mut content = Vec::new();
        while let Some((block, extent)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let done = extent_of(mapped, *block, *extent, extent_pages, &mut content, counts)
                .and_then(|()| Ok(lane.put(*block, *extent, &content)?));
            if done.is_err() {
                // After an error, the other threads claim no further units.
                next.store(units.len(), Ordering::Relaxed);
            }
            done?;
        }
        Ok::<(), ImageError>(())
    })?;
    let recipe = recipe_of_mapped(image, mapped, &writer)?;
    image.check_unchanged()?;
    Ok(writer.complete(&[(VIEW, recipe)])?.bytes)
}

fn extent_of(
    mapped: &MappedPages,
    block: usize,
    extent: u64,
    extent_pages: u64,
    content: &mut Vec<u8>,
    counts: &Counts,
) -> Result<(), ImageError> {
    let place = &mapped.blocks()[block];
    let first = extent * extent_pages;
    let count = extent_pages.min(place.pages() - first);
    content.resize((count << PAGE_SHIFT) as usize, 0);
    let held = place.bitmap.count_range(first, count);
    counts.data.fetch_add(held, Ordering::Relaxed);
    counts.zero.fetch_add(count - held, Ordering::Relaxed);
    match held {
        0 => content.fill(0),
        _ => mapped.read(block, first, content)?,
    }
    Ok(())
}

/// The file's bytes around its pages, up to the end of the stream.
fn recipe_of_mapped(image: &Image, mapped: &MappedPages, writer: &ImageWriter) -> Result<Recipe, ImageError> {
    let mut places: Vec<(u64, usize, u64)> = mapped
        .blocks()
        .iter()
        .enumerate()
        .filter(|(_, block)| !block.is_skipped && block.length_bytes > 0)
        .map(|(index, block)| (block.pages_offset, index, block.length_bytes))
        .collect();
    places.sort_unstable();
    let (mut recipe, mut at) = (Recipe::default(), 0);
    for (offset, block, length) in places {
        copy_bytes(image, at, offset, writer, &mut recipe)?;
        recipe.push(Piece::Copy { block: block as u32, offset: 0, length });
        at = offset + length;
    }
    copy_bytes(image, at, image.stream_end(), writer, &mut recipe)?;
    Ok(recipe)
}

fn copy_bytes(
    image: &Image,
    from: u64,
    to: u64,
    writer: &ImageWriter,
    recipe: &mut Recipe,
) -> Result<(), ImageError> {
    let mut at = from;
    while at < to {
        let mut bytes = vec![0; (to - at).min(STRIDE) as usize];
        let read = image.source().read_at(at, &mut bytes);
        let count = read.map_err(|error| ImageError::io(image.path_name(), "read", error))?;
        if count == 0 {
            let file = image.path_name().to_owned();
            return Err(ImageError::Torn { file, offset: at, what: "the parts around RAM's pages" });
        }
        push_bytes(writer, recipe, &bytes[..count]);
        at += count as u64;
    }
    Ok(())
}

/// Copies a legacy stream in one pass. `envelope` is libvirt's container of the view. `base`: pages that are not in the stream are
/// this image's.
pub(super) fn of_legacy(
    begun: Begun,
    tee: &Tee,
    envelope: Option<&Envelope>,
    (writer, base): (ImageWriter, Option<&StoredImage>),
    threads: usize,
    counts: &Counts,
    check: &Check<'_>,
) -> Result<(Shape, Vec<Finding>, u64), ImageError> {
    let file = begun.file_name().to_owned();
    // A later page of an extent that was stored already brings the extent back.
    if writer.needs_keeping() {
        let kept = PageFile::temporary(spool::default_directory(), Direct::Off)?;
        writer.keep_in(kept.reopened()?);
    }
    let recorder = Recorder::new(&begun);
    tee.to(Box::new(recorder.clone())).map_err(|error| failed(&file, error))?;
    if base.is_some() {
        // The stream is no whole one, and nothing may read it as such.
        recorder.give_up();
    }
    let gathered = gather::run(&writer, threads, counts, &recorder, base, |gather: &mut Gather<'_>| {
        let (mut shape, end) = begun.finish(gather)?;
        check_whole(&shape, &file, end)?;
        let damage = check(&shape, end)?;
        tee.release().map_err(|error| failed(&file, error))?;
        tee.off();
        if shape.has_capability(IGNORE_SHARED) {
            gather.mark_skipped(&mut shape);
        }
        Ok((shape, damage))
    })?;
    let ((shape, damage), held, is_live) = gathered;
    let mut files = vec![(VIEW, recipe_of_view(&shape, envelope, &held, &writer)?)];
    // In a stream with several contents of a page, the image has only the last one. Its bytes cannot be written again.
    if !is_live && base.is_none() {
        files.push((STREAM, recorder.finish(&writer)));
    }
    let bytes = writer.complete(&files)?.bytes;
    Ok((shape, damage, bytes))
}

fn recipe_of_view(
    shape: &Shape,
    envelope: Option<&Envelope>,
    held: &[PageBitmap],
    writer: &ImageWriter,
) -> Result<Recipe, ImageError> {
    let mut recipe = Recipe::default();
    let hole = |recipe: &mut Recipe, offset: u64| {
        let length = offset.saturating_sub(recipe.length());
        recipe.push(Piece::Hole { length });
    };
    for part in view(shape, envelope, held)? {
        match part {
            ViewPart::Bytes(offset, bytes) => {
                hole(&mut recipe, offset);
                push_bytes(writer, &mut recipe, &bytes);
            }
            ViewPart::Pages(offset, block) => {
                hole(&mut recipe, offset);
                let length = shape.ram.blocks[block].length_bytes;
                recipe.push(Piece::Copy { block: block as u32, offset: 0, length });
            }
        }
    }
    Ok(recipe)
}

/// Copies an image in Sterna's format with all its files.
pub(super) fn of_stored(
    stored: &Arc<StoredImage>,
    writer: ImageWriter,
    threads: usize,
    counts: &Counts,
) -> Result<u64, ImageError> {
    let written = stored.copy(writer, threads)?;
    let pages: u64 = stored.blocks().iter().map(Block::pages).sum();
    counts.data.fetch_add(written.ram_pages, Ordering::Relaxed);
    counts.zero.fetch_add(pages - written.ram_pages.min(pages), Ordering::Relaxed);
    Ok(written.bytes)
}
