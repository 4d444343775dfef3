//! Taking memory out of an image: a block, a range of physical addresses, or a core file.
//!
//! What comes out is sparse: pages of zeros are holes. Where the file system can share blocks between files it
//! does. A core has the shape of QEMU's own `dump-guest-memory` (see [`elf`](super::elf)).

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

/// What is taken out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A RAM block, by its name.
    Block(String),
    /// A range of guest physical addresses; what is not RAM there is zeros.
    Range {
        /// First address.
        start: u64,
        /// Length in bytes.
        length_bytes: u64,
    },
    /// An ELF core of all memory with a known address.
    Core {
        /// Whether a processor's page tables are followed, so that virtual addresses work without a kernel's help.
        is_virtual: bool,
    },
}

/// How it is taken out.
#[derive(Debug, Clone, Default)]
pub struct ExtractOptions {
    /// Replace a file that is there.
    pub replace: bool,
    /// Physical addresses of blocks, by name, where the user knows them.
    pub placed: Vec<(String, u64)>,
    /// What processors the machine has, where the user knows it better than the image tells.
    pub architecture: Option<Architecture>,
    /// Threads that copy; 0 for one per processor.
    pub threads: usize,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Extracted {
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes of pages with data in it.
    pub data_bytes: u64,
    /// Of these, bytes that share their place on the disk with the image.
    pub shared_bytes: u64,
    /// Loadable segments of a core.
    pub segments: usize,
    /// Processors with registers in a core.
    pub processors: usize,
    /// What processors a core is of; empty for anything else.
    pub architecture: &'static str,
    /// What a user should know.
    pub notes: Vec<String>,
}

/// Takes `part` out of `image` into a new file `to`, which is whole or absent.
///
/// # Errors
/// [`ImageError::Request`] for a block that is not there, a range without RAM; [`ImageError::SameFile`];
/// [`ImageError::NoBitmaps`]; [`ImageError::File`]; what is wrong with the image.
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
    // Before the time that a spool takes.
    let create = CreateOptions { direct: Direct::Wanted, replace: options.replace, keep_bytes: 0 };
    let file = Arc::new(PageFile::create(to, create)?);
    let plan = Planner { image, options }.plan(part)?;
    let spool = spool::for_random_access(image, spool::beside(to))?;
    let source = spool.as_ref().unwrap_or(image);
    let Some(pages) = source.mapped() else {
        return Err(ImageError::Request(format!("{} has no pages at known places", image.path_name())));
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
    extracted.notes = plan.notes;
    Ok(extracted)
}
