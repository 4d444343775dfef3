//! What a disk is, as an operator says it.

use std::path::PathBuf;

/// In what a disk counts, bytes.
pub const SECTOR: u64 = 512;

/// A disk to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptions {
    /// The file or device.
    pub path: PathBuf,
    /// How the disk lies in it. It is never found out from the bytes, which a guest may have written.
    pub format: Format,
    /// Of a qcow2 file: where that content is which the file itself does not have. It is only read. The name in the file's header
    /// is not followed, since a guest may have written that, too.
    pub backing: Option<(PathBuf, Format)>,
    /// Of a qcow2 file whose content is in another one: the other one. The name in the header is not followed.
    pub data_file: Option<PathBuf>,
    /// Nothing is written.
    pub is_read_only: bool,
    /// Reads and writes pass by the host's page cache (`O_DIRECT`).
    pub is_direct: bool,
}

impl ImageOptions {
    /// A raw disk that is read and written.
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

/// How a disk lies in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// The file's bytes are the disk's, whatever they look like.
    Raw,
    /// QEMU's format, which grows as it is written. Requests are carried out one after the other.
    Qcow2,
}

impl Format {
    /// As command lines and QEMU's monitor call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}
