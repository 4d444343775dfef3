//! The frames that an image read last.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::StoreError;

/// Bytes of pages that an image keeps.
const CACHE_BYTES: usize = 4 << 20;

/// A few decompressed frames, the one used last at the end.
pub(super) struct FrameCache {
    frames: Mutex<Vec<(u32, Arc<Vec<u8>>)>>,
    most: usize,
}

impl FrameCache {
    pub(super) fn new(extent_bytes: usize) -> Self {
        Self { frames: Mutex::new(Vec::new()), most: (CACHE_BYTES / extent_bytes).max(4) }
    }

    /// The frame, from the cache or from `read`. Two threads may read the same frame at the same time.
    pub(super) fn get(
        &self,
        frame: u32,
        read: impl FnOnce() -> Result<Vec<u8>, StoreError>,
    ) -> Result<Arc<Vec<u8>>, StoreError> {
        {
            let mut frames = self.frames.lock();
            if let Some(at) = frames.iter().position(|(number, _)| *number == frame) {
                frames[at..].rotate_left(1);
                return Ok(Arc::clone(&frames[frames.len() - 1].1));
            }
        }
        let content = Arc::new(read()?);
        let mut frames = self.frames.lock();
        if frames.len() >= self.most {
            frames.remove(0);
        }
        frames.push((frame, Arc::clone(&content)));
        Ok(content)
    }
}
