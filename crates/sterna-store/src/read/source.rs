//! Where the stored frames of an image are.

use std::sync::Arc;

use crate::blob::Blob;
use crate::error::StoreError;
use crate::layout::FrameEntry;

/// Reads stored frames: from the image's file, or from packs.
pub(crate) trait FrameSource: Send + Sync {
    /// Path or address of the image.
    fn name(&self) -> &str;

    /// Fills `to` with the stored bytes of a frame.
    fn read(&self, entry: &FrameEntry, to: &mut [u8]) -> Result<(), StoreError>;

    /// Length of the blob with the index, in bytes.
    fn len_bytes(&self) -> u64;
}

/// A plain file or object, which has all frames.
pub(crate) struct PlainSource {
    blob: Arc<dyn Blob>,
}

impl PlainSource {
    pub(crate) fn new(blob: Arc<dyn Blob>) -> Self {
        Self { blob }
    }
}

impl FrameSource for PlainSource {
    fn name(&self) -> &str {
        self.blob.name()
    }

    fn read(&self, entry: &FrameEntry, to: &mut [u8]) -> Result<(), StoreError> {
        self.blob.read_exact_at(entry.offset, to)
    }

    fn len_bytes(&self) -> u64 {
        self.blob.len_bytes()
    }
}
