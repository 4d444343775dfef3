//! Reads only the head of an image.

use std::path::Path;

use super::begun::Begun;
use super::framed::Access;
use super::open::open_with;
use crate::error::ImageError;
use crate::format::Format;
use crate::model::{LibvirtHeader, Shape};

/// The head of an image: its format, machine and RAM blocks.
///
/// More needs a full read of a legacy stream, and the decompression of a compressed one ([`Image`](super::Image)).
#[derive(Debug, Clone)]
pub struct Preview {
    /// The format: container, form and compression.
    pub format: Format,
    /// The header and the texts of libvirt's container; none for a bare image.
    pub libvirt_header: Option<LibvirtHeader>,
    /// File offset of the stream, compressed or not.
    pub stream_offset: u64,
    /// Configuration, early sections and blocks. The parts after RAM's START are empty, and the skipped blocks of a
    /// legacy stream are not known yet.
    pub shape: Shape,
}

impl Preview {
    /// Reads the head of the image at `path`.
    ///
    /// # Errors
    /// [`ImageError`]: the file is not an image, or its head breaks a rule.
    pub fn open(path: &Path) -> Result<Preview, ImageError> {
        Self::open_with(path, &Access::default())
    }

    /// Like [`open`](Self::open), with the key of an encrypted image, or with the places of a layer's bases.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_with(path: &Path, access: &Access) -> Result<Preview, ImageError> {
        let source = open_with(path, access)?;
        let begun = Begun::of_source(&source, &path.display().to_string(), None)?;
        Ok(Preview {
            format: if source.stored().is_some() { Format::Sterna } else { begun.format },
            libvirt_header: begun.header,
            stream_offset: begun.stream_offset,
            shape: begun.head.shape,
        })
    }
}
