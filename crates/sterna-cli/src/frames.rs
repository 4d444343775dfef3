//! Arguments for images in Sterna's own format.

use std::path::{Path, PathBuf};

use sterna_image::convert::FrameOptions;
use sterna_image::{Access, Key};

use crate::exit::Stop;
use crate::units;

/// How an image in Sterna's own format is written.
#[derive(Debug, Clone, clap::Args)]
pub struct Frames {
    /// Compression level of zstd, 1 to 22; 0: none
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(i32).range(0..=22))]
    pub level: i32,
    /// Bytes of memory in a frame: a power of two from 64k to 2M. Short extents are faster to read at random and share
    /// more, long ones compress better
    #[arg(long, default_value = "64k", value_name = "SIZE", value_parser = units::parse_size)]
    pub extent: u64,
    /// Encrypt the image with the key in this file: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Write a layer that holds only the pages that differ from this image
    #[arg(long, value_name = "IMAGE")]
    pub base: Option<PathBuf>,
}

impl Frames {
    /// The options for the library.
    pub fn options(&self) -> Result<FrameOptions, Stop> {
        let extent_bytes = u32::try_from(self.extent).unwrap_or(u32::MAX);
        let key = self.key.as_deref().map(key).transpose()?;
        Ok(FrameOptions { extent_bytes, level: self.level, key, base: self.base.clone() })
    }
}

/// How an image in Sterna's own format is read.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Opened {
    /// File with the key of an encrypted image
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Image that may be the base of a layer. Bases in the layer's directory are found without
    #[arg(long, value_name = "IMAGE")]
    pub base: Vec<PathBuf>,
}

impl Opened {
    /// The access for the library.
    pub fn access(&self) -> Result<Access, Stop> {
        Ok(Access { key: self.key.as_deref().map(key).transpose()?, bases: self.base.clone() })
    }
}

/// Reads the file of `--key`.
pub fn key(path: &Path) -> Result<Key, Stop> {
    Key::read(path).map_err(|error| Stop::unreadable(error.to_string()))
}

/// Whether a path names an image in Sterna's own format.
pub fn is_place(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "sterna")
        || path.to_str().is_some_and(|text| text.starts_with("store:"))
}
