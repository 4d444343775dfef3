//! Checks that a mapped-ram image's parts are in the file and do not overlap (§8).

use std::sync::Arc;

use sterna_wire::mapped_ram::bitmap_bytes;

use super::head::Head;
use crate::error::ImageError;

const RULES: &str = "specs/mapped-ram.md §8";

/// Compares the places of all bitmaps and pages with each other and with the file.
///
/// The container (the first `container_bytes`) and the stream are included.
pub(super) fn check(
    head: &Head,
    container_bytes: u64,
    file: &Arc<str>,
    file_bytes: u64,
) -> Result<(), ImageError> {
    let mut regions: Vec<(u64, u64, String)> =
        head.regions.iter().map(|(start, end)| (*start, *end, "the stream".to_owned())).collect();
    regions.push((0, container_bytes, "libvirt's header and texts".to_owned()));
    // The stream continues after START up to the end of the file. No block may be placed there.
    if let Some((_, end)) = head.regions.last() {
        regions.push((*end, file_bytes, "the devices".to_owned()));
    }
    for (block, header) in head.shape.ram.blocks.iter().zip(&head.placed).filter(|pair| !pair.0.is_skipped) {
        // If an end would exceed 2^64, the start exceeds any file. Therefore the reduced start still fails the check.
        let bitmap = header.bitmap_offset.min(u64::MAX - bitmap_bytes(block.length_bytes));
        let end_of_bitmap = bitmap + bitmap_bytes(block.length_bytes);
        regions.push((bitmap, end_of_bitmap, format!("the bitmap of block {:?}", block.name)));
        let end_of_pages = header.end_of_pages(block.length_bytes);
        regions.push((header.pages_offset, end_of_pages, format!("the pages of block {:?}", block.name)));
    }
    regions.retain(|(start, end, _)| start < end);
    regions.sort_unstable();
    let broken = |offset: u64, rule: String| {
        Err(ImageError::Broken { file: file.to_string(), offset, rule, paragraph: RULES })
    };
    for (start, end, what) in &regions {
        if *end > file_bytes {
            let rule =
                format!("{what}, {start:#x} to {end:#x}, reach beyond the file of {file_bytes:#x} bytes");
            return broken(*start, rule);
        }
    }
    for pair in regions.windows(2) {
        let ((_, end, first), (start, _, second)) = (&pair[0], &pair[1]);
        if start < end {
            return broken(*start, format!("{second} overlap {first}"));
        }
    }
    Ok(())
}
