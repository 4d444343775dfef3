//! The settings with which an operator describes a disk.

use std::path::PathBuf;

/// Bytes per sector: the unit of a disk's length.
pub const SECTOR: u64 = 512;

/// The settings to open a disk with [`Image::open`](crate::Image::open).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptions {
    /// Path of the file or block device.
    pub path: PathBuf,
    /// Format of the file. It is never detected from the content, because a guest may have written that.
    pub format: Format,
    /// For a qcow2 file: the backing file, which is only read. The name in the file's header is ignored,
    /// because a guest may have written it.
    pub backing: Option<(PathBuf, Format)>,
    /// For a qcow2 file with an external data file: that file. The name in the header is ignored.
    pub data_file: Option<PathBuf>,
    /// Refuse every write, and open the file for reading only.
    pub is_read_only: bool,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub is_direct: bool,
}

impl ImageOptions {
    /// Returns the settings of a writable raw disk that uses the page cache.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let format = Format::Raw;
        Self {
            path: path.into(),
            format,
            backing: None,
            data_file: None,
            is_read_only: false,
            is_direct: false,
        }
    }
}

/// The format of a disk's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// The bytes of the file are the bytes of the disk, whatever they contain.
    Raw,
    /// QEMU's qcow2 format; the file grows on writes. Requests are carried out one after the other.
    Qcow2,
}

impl Format {
    /// Returns the format's name on command lines and in QEMU's monitor.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}
