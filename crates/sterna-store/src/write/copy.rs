//! Copies an image into a new one: other extents, level, key, base or place.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::{ImageWriter, Written};
use crate::error::StoreError;
use crate::layout::PAGE_BYTES;
use crate::read::StoredImage;

/// Limit of the bytes that are not pages, which are in memory while they are copied.
const BYTES_MOST: u64 = 8 << 30;

impl StoredImage {
    /// Writes RAM and files of this image, with the pages of its bases, to `writer`, with `threads` threads.
    ///
    /// The writer must have the blocks of this image.
    ///
    /// # Errors
    /// [`StoreError`]: nothing is visible.
    pub fn copy(&self, writer: ImageWriter, threads: usize) -> Result<Written, StoreError> {
        self.check_alike(writer.sink.name(), writer.blocks())?;
        let extent_bytes = u64::from(writer.extent_bytes());
        let of = |(block, length): (usize, u64)| {
            (0..length.div_ceil(extent_bytes)).map(move |extent| (block, extent))
        };
        let lengths = self.blocks().iter().map(|block| block.length_bytes).enumerate();
        let units: Vec<(usize, u64)> = lengths.flat_map(of).collect();
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            let done = self.copy_units(&writer, &units, &next);
            if let Err(error) = done {
                // After an error, the other threads claim no further units.
                next.store(units.len(), Ordering::Relaxed);
                failed.lock().get_or_insert(error);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(units.len()) {
                // If the host refuses a thread, the others do its work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let last = self.index().blocks.len() - 1;
        let length = self.index().blocks[last].length_bytes;
        if length > BYTES_MOST {
            return Err(StoreError::TooLarge { name: self.name().to_owned(), limit_bytes: BYTES_MOST });
        }
        let mut bytes = vec![0; length as usize];
        self.read(last, 0, &mut bytes)?;
        {
            let mut state = writer.state.lock();
            state.bytes = bytes;
            state.working_set = self.working_set().to_vec();
        }
        writer.complete_with(self.files().to_vec())
    }

    fn copy_units(
        &self,
        writer: &ImageWriter,
        units: &[(usize, u64)],
        next: &AtomicUsize,
    ) -> Result<(), StoreError> {
        let mut lane = writer.lane()?;
        let mut content = Vec::new();
        let extent_bytes = u64::from(writer.extent_bytes());
        while let Some((block, extent)) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = extent * extent_bytes;
            let length = extent_bytes.min(self.blocks()[*block].length_bytes - start) as usize;
            content.clear();
            content.resize(length.next_multiple_of(PAGE_BYTES), 0);
            self.read(*block, start, &mut content[..length])?;
            lane.put(*block, *extent, &content)?;
        }
        Ok(())
    }
}
