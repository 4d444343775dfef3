//! Arguments for images in Sterna's own format.

use std::path::{Path, PathBuf};

use sterna_image::convert::FrameOptions;
use sterna_image::{Access, ImagePlace, Key};

use crate::exit::Stop;
use crate::units;

/// The compression of an image in Sterna's own format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// zstd's level, or 0 for none.
    Fixed(i32),
    /// A level that the speed of disk and processors decides.
    Auto,
}

/// Parses `--level`.
pub fn level(text: &str) -> Result<Level, String> {
    if text == "auto" {
        return Ok(Level::Auto);
    }
    let number = text.parse().ok().filter(|level| (0..=22).contains(level));
    number.map(Level::Fixed).ok_or_else(|| format!("`{text}` is no level: 0 to 22, or auto"))
}

/// How an image in Sterna's own format is written.
#[derive(Debug, Clone, clap::Args)]
pub struct Frames {
    /// Compression level of zstd, 1 to 22; 0: none; auto: changes during the command, so that neither the disk nor the
    /// processors wait
    #[arg(long, default_value = "1", value_name = "N|auto", value_parser = level)]
    pub level: Level,
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
        let (level, adapts) = match self.level {
            Level::Fixed(level) => (level, false),
            Level::Auto => (1, true),
        };
        let base = self.base.clone();
        Ok(FrameOptions { extent_bytes, level, adapts, key, base, only_changes: false })
    }
}

/// How an image in Sterna's own format is read.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Opened {
    /// File with the key of an encrypted image
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Where the base of a layer may be: an image, or a directory of images. Bases in the layer's directory are found without
    #[arg(long, value_name = "PATH")]
    pub base: Vec<PathBuf>,
}

impl Opened {
    /// The access for the library.
    pub fn access(&self) -> Result<Access, Stop> {
        Ok(Access { key: self.key.as_deref().map(key).transpose()?, bases: self.base.clone() })
    }
}

/// How the source of a command is read that writes an image in Sterna's own format.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Source {
    /// File with the key of an encrypted source
    #[arg(long, value_name = "FILE")]
    pub source_key: Option<PathBuf>,
    /// Where the base of a source that is a layer may be: an image, or a directory of images. Bases in the layer's directory
    /// are found without
    #[arg(long, value_name = "PATH")]
    pub source_base: Vec<PathBuf>,
}

impl Source {
    /// The access for the library.
    pub fn access(&self) -> Result<Access, Stop> {
        Ok(Access { key: self.source_key.as_deref().map(key).transpose()?, bases: self.source_base.clone() })
    }
}

/// Reads the file of `--key`.
pub fn key(path: &Path) -> Result<Key, Stop> {
    Key::read(path).map_err(|error| Stop::unreadable(error.to_string()))
}

/// Whether a path names an image in Sterna's own format.
pub fn is_place(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "sterna") || ImagePlace::is_elsewhere(path)
}
