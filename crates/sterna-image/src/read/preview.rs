//! What an image is, from its first bytes alone.

use std::path::Path;

use super::begun::Begun;
use super::image::open_file;
use crate::ImageError;
use crate::model::{ImageKind, Shape};

/// The head of an image: enough to know its kind, machine and RAM blocks. A legacy stream would have to be read to
/// its end, and a compressed one decompressed, to know more ([`Image`](super::Image)).
#[derive(Debug, Clone)]
pub struct Preview {
    /// How it is wrapped.
    pub kind: ImageKind,
    /// Where the stream, or what it is compressed into, starts in the file.
    pub stream_offset: u64,
    /// Configuration, early sections and blocks; nothing after RAM's start, and nobody knows yet which blocks are
    /// left out.
    pub shape: Shape,
}

impl Preview {
    /// Reads the head of the image at `path`.
    ///
    /// # Errors
    /// [`ImageError`]: no image, or a broken rule in its head.
    pub fn open(path: &Path) -> Result<Preview, ImageError> {
        let begun = Begun::of_source(&open_file(path)?, &path.display().to_string(), None)?;
        Ok(Preview { kind: begun.kind, stream_offset: begun.stream_offset, shape: begun.head.shape })
    }
}
