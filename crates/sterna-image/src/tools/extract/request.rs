//! What is extracted, with which options, and the result.

use serde::Serialize;

use crate::tools::architecture::Architecture;

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
