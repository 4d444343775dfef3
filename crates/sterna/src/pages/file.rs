//! A lane into a file: every page at its place in a mapped-ram image, no packets.

use std::sync::Arc;

use sterna_image::{ImageError, MappedRam};
use sterna_ram::{GuestRam, PAGE_SIZE};

use super::PageWriter;
use crate::error::MigrationError;
use crate::order::PageRun;

/// Writes pages into an image; lanes share it.
pub struct FileWriter {
    image: Arc<MappedRam>,
    ram: GuestRam,
}

impl FileWriter {
    /// A lane that writes pages of `ram` into `image`.
    pub fn new(image: Arc<MappedRam>, ram: GuestRam) -> Self {
        Self { image, ram }
    }
}

impl PageWriter for FileWriter {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        let block = self.ram.block(run.block);
        let content = block.slice(run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?;
        Ok(self.image.write(run.block, run.first, content)?)
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.image.zero(run.block, run.first, run.count);
        Ok(())
    }

    /// Writes return when the kernel has the bytes: nothing can overtake them.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Nobody waits: dropping the image removes what was written.
    fn abort(&mut self) {}
}

impl From<ImageError> for MigrationError {
    fn from(error: ImageError) -> Self {
        Self::System(error.to_string())
    }
}
