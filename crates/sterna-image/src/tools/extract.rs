//! Extracts memory from an image: a block, a physical range, or a core file.
//!
//! The output file is sparse: zero pages become holes. Blocks are shared with the image if the file system supports
//! it. A core has the format of QEMU's own `dump-guest-memory` (see [`elf`](super::elf)).

mod plan;
mod write;

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use sterna_transport::{CreateOptions, Direct, PageFile};

use super::architecture::Architecture;
use super::spool;
use crate::ImageError;
use crate::read::Image;
use plan::Planner;
use write::write;

/// The part of an image that is extracted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A RAM block, by its name.
    Block(String),
    /// A range of guest physical addresses. Addresses without RAM are written as zeros.
    Range {
        /// First guest physical address.
        start: u64,
        /// Length of the range in bytes.
        length_bytes: u64,
    },
    /// An ELF core of all memory with a known address.
    Core {
        /// Whether a processor's page tables are followed. Then virtual addresses work without a debugger's knowledge
        /// of the kernel.
        is_virtual: bool,
    },
}

/// Options of an extraction.
#[derive(Debug, Clone, Default)]
pub struct ExtractOptions {
    /// Replace an existing file.
    pub replace: bool,
    /// Physical addresses of blocks, by name, from the user.
    pub placed: Vec<(String, u64)>,
    /// The architecture from the user; it has precedence over the image's signs.
    pub architecture: Option<Architecture>,
    /// Threads that copy; 0 means one for each CPU.
    pub threads: usize,
    /// Writes the file even if some guest RAM is missing.
    ///
    /// Missing RAM is not in the image, or its address is unknown. Without this option, it causes an error.
    pub partial: bool,
}

/// The result of an extraction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Extracted {
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes of the pages with data.
    pub data_bytes: u64,
    /// Bytes among `data_bytes` that share their disk blocks with the image.
    pub shared_bytes: u64,
    /// Number of loadable segments of a core.
    pub segments: usize,
    /// Number of processors whose registers are in the core.
    pub processors: usize,
    /// The architecture of a core; empty for other parts.
    pub architecture: &'static str,
    /// Bytes of guest RAM that are left out; only with [`ExtractOptions::partial`].
    pub missing_bytes: u64,
    /// Assumptions and omissions that a user should know.
    pub notes: Vec<String>,
}

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
