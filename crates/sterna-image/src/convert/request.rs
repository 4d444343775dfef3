//! What a conversion takes and returns.

use std::io::{Read, Write};
use std::path::PathBuf;

use sterna_transport::{CreateOptions, Direct};
use sterna_wire::mapped_ram::PAGES_ALIGNMENT;

use super::framed::options::FrameOptions;
use crate::format::Format;
use crate::read::Access;
use crate::tools::finding::Finding;

/// The source image of a conversion.
pub enum Input {
    /// An image file in any format.
    File(PathBuf),
    /// A pipe with a bare legacy stream, compressed or not.
    Pipe(Box<dyn Read + Send>),
}

/// The target of a conversion.
pub enum Output {
    /// A file. It is complete or absent at any time.
    File(PathBuf),
    /// A pipe, for bare legacy streams.
    Pipe(Box<dyn Write + Send>),
}

/// Options of a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertOptions {
    /// The target format. None selects mapped-ram, in libvirt's container if the source has one.
    pub target: Option<Format>,
    /// The domain's XML for libvirt's container; none keeps the source's XML.
    pub xml: Option<Vec<u8>>,
    /// The cookie for libvirt's container; none keeps the source's cookie.
    pub cookie: Option<Vec<u8>>,
    /// Replace an existing target file, and accept the XML of another machine.
    pub replace: bool,
    /// Whether reads and writes bypass the page cache.
    pub direct: Direct,
    /// Threads that copy, compress or write; 0 means one for each CPU, at most 16.
    pub threads: usize,
    /// Alignment of the pages of a mapped-ram image, in bytes.
    pub alignment: u64,
    /// Also convert a damaged image, as far as it can be read.
    ///
    /// Damaged parts are copied unchanged, except a truncated description, which is left out.
    pub force_damaged: bool,
    /// The key of an encrypted source, and the bases of a source that is a layer.
    pub access: Access,
    /// Options of a target in Sterna's own format.
    pub frames: FrameOptions,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            target: None,
            xml: None,
            cookie: None,
            replace: false,
            direct: Direct::Wanted,
            threads: 0,
            alignment: PAGES_ALIGNMENT,
            force_damaged: false,
            access: Access::default(),
            frames: FrameOptions::default(),
        }
    }
}

/// The result of a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// The format of the source.
    pub from: Format,
    /// The format of the result.
    pub to: Format,
    /// Sum of all RAM blocks, in bytes.
    pub ram_bytes: u64,
    /// Pages written to the target with their content. A page of a live stream can count several times.
    pub data_pages: u64,
    /// Pages written to the target as zero. In a stream that is copied byte for byte, these are its zero records.
    pub zero_pages: u64,
    /// Bytes of pages that the result shares with the source (reflinks).
    pub shared_bytes: u64,
    /// Length of the result in bytes; 0 for a pipe.
    pub target_bytes: u64,
    /// Damage of the source that was copied unchanged ([`ConvertOptions::force_damaged`]).
    pub damage: Vec<Finding>,
}

impl ConvertOptions {
    /// How the target's file is created.
    pub(super) fn create(&self) -> CreateOptions {
        CreateOptions { direct: self.direct, replace: self.replace, keep_bytes: 0 }
    }
}

/// The number of threads for `wanted`, where 0 means one for each CPU.
pub(super) fn threads(wanted: usize) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16);
    if wanted == 0 { all() } else { wanted.min(256) }
}
