//! Extracts memory from an image: a block, a physical range, or a core file.
//!
//! The output file is sparse: zero pages become holes. Blocks are shared with the image if the file system supports
//! it. A core has the format of QEMU's own `dump-guest-memory` (see [`elf`](super::elf)).

mod plan;
mod request;
mod write;

use std::path::Path;
use std::sync::Arc;

use sterna_transport::{CreateOptions, Direct, PageFile};

use super::architecture::Architecture;
use super::spool;
use crate::ImageError;
use crate::read::Image;
use plan::Planner;
pub use request::{ExtractOptions, Extracted, Part};
use write::write;

/// Extracts `part` of `image` into a new file `to`, which is complete or absent.
///
/// # Errors
/// - [`ImageError::Request`] for an unknown block, a range without RAM, or missing RAM ([`ExtractOptions::partial`])
/// - [`ImageError::SameFile`]
/// - [`ImageError::NoBitmaps`]
/// - [`ImageError::File`]
/// - the error of a damaged image
pub fn extract(
    image: &Image,
    part: &Part,
    to: &Path,
    options: &ExtractOptions,
) -> Result<Extracted, ImageError> {
    image.check_bitmaps()?;
    if image.is_at(to) {
        return Err(ImageError::SameFile { file: to.display().to_string() });
    }
    // Create the file before the spool, because a spool takes long and this call may fail.
    let create = CreateOptions { direct: Direct::Wanted, replace: options.replace, keep_bytes: 0 };
    let file = Arc::new(PageFile::create(to, create)?);
    let plan = Planner { image, options }.plan(part)?;
    let spool = spool::for_random_access(image, spool::beside(to))?;
    let source = spool.as_ref().unwrap_or(image);
    let Some(pages) = source.mapped() else {
        return Err(ImageError::Request(format!(
            "{} is not an image with pages at known positions",
            image.path_name()
        )));
    };
    let plan = match plan.is_virtual {
        true => plan.with_virtual_addresses(pages)?,
        false => plan,
    };
    let mut extracted = write(source, pages, &file, &plan, options)?;
    image.check_unchanged()?;
    file.complete()?;
    extracted.segments = plan.loads.len();
    extracted.processors = plan.processors.len();
    extracted.architecture = plan.architecture.map_or("", Architecture::name);
    extracted.missing_bytes = plan.missing_bytes;
    extracted.notes = plan.notes;
    Ok(extracted)
}
