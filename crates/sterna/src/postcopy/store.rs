//! The pages of an image, read at random.

use std::os::fd::AsRawFd;
use std::path::Path;

use sterna_image::tools::verify::refuse_damage;
use sterna_image::{Form, Image, ImageError, Shape};
use sterna_ram::{PageBitmap, RamSlice};
use sterna_transport::{Direct, OpenOptions, PageFile};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use crate::error::MigrationError;
use crate::order::PageRun;

/// How an image's pages were made readable at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Each page has its place in the image.
    Places,
    /// The stream was read once, and where each page lies was noted.
    Index,
    /// The image is compressed, or has pages as differences: it was unpacked into a temporary file.
    Spool,
}

/// An image whose pages can be read in any order.
pub(crate) struct ImageStore {
    image: Image,
    file: PageFile,
    access: Access,
    shape: Shape,
}

impl ImageStore {
    /// Opens the image at `path`. One that cannot be read at random is spooled into `spool`, or beside the image.
    ///
    /// # Errors
    /// What is wrong with it; [`ImageError::Damaged`] unless `force_damaged`.
    pub(crate) fn open(
        path: &Path,
        direct: Direct,
        spool: Option<&Path>,
        force_damaged: bool,
    ) -> Result<Self, ImageError> {
        let mut image = Image::open_indexed(path)?;
        if !force_damaged {
            refuse_damage(&image)?;
        }
        let access = match (image.mapped(), image.places()) {
            (Some(_), _) => Access::Places,
            (None, Some(_)) => Access::Index,
            (None, None) => Access::Spool,
        };
        if access == Access::Spool {
            let beside = path.parent().filter(|beside| !beside.as_os_str().is_empty());
            image = image.spool(spool.or(beside).unwrap_or(Path::new(".")))?;
        }
        let source = image.mapped().map_or(image.source(), |mapped| mapped.source());
        let Some(file) = source.file() else {
            return Err(ImageError::Request(format!("{} is not in a file", path.display())));
        };
        // By the descriptor: another file may lie at the path by now.
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        // Pages of a stream lie at any offset, which direct I/O does not take.
        let direct = if access == Access::Index { Direct::Off } else { direct };
        let file = PageFile::open(name, OpenOptions { direct })?;
        let shape = image.shape().for_form(Form::Legacy);
        Ok(Self { image, file, access, shape })
    }

    /// The machine as a stream states it.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How it is read.
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Whether pages go past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    /// The image itself.
    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// The pages of block `block` that the file holds; all others are zero.
    pub(crate) fn held(&self, block: usize) -> &PageBitmap {
        match (self.image.mapped(), self.image.places()) {
            (Some(mapped), _) => &mapped.blocks()[block].bitmap,
            (None, Some(places)) => places.held(block),
            (None, None) => unreachable!("an image without places was spooled"),
        }
    }

    /// The blocks as their pages follow each other in the file.
    pub(crate) fn sequence(&self) -> Vec<usize> {
        let mut blocks: Vec<usize> = (0..self.shape.ram.blocks.len()).collect();
        if let Some(mapped) = self.image.mapped() {
            blocks.sort_by_key(|block| mapped.blocks()[*block].pages_offset);
        }
        blocks
    }

    /// Reads the pages of `run` that the file holds to their places in `to`; the others are left as they are.
    ///
    /// # Errors
    /// The file's, and [`ImageError::Changed`] if the image was written to since it was opened.
    pub(crate) fn read(&self, run: PageRun, to: RamSlice<'_>) -> Result<(), MigrationError> {
        let held = self.held(run.block);
        let mut at = run.first;
        while let Some(next) = held.next_run(at, run.end(), u64::MAX) {
            let offset = (next.first - run.first) as usize * PAGE_SIZE;
            let to = part(to, offset, next.count as usize * PAGE_SIZE)?;
            self.read_held(run.block, next.first, to)?;
            at = next.end();
        }
        // After the pages: what was read is of the image as it was opened.
        Ok(self.image.check_unchanged()?)
    }

    fn read_held(&self, block: usize, first: u64, to: RamSlice<'_>) -> Result<(), MigrationError> {
        if let Some(mapped) = self.image.mapped() {
            let place = mapped.blocks()[block].pages_offset + (first << PAGE_SHIFT);
            return self.file.read_at(place, &[to]).map_err(MigrationError::storage);
        }
        for index in 0..to.len() / PAGE_SIZE {
            let place = self.image.places().and_then(|places| places.offset(block, first + index as u64));
            let place =
                place.ok_or_else(|| MigrationError::Internal("a held page without a place".into()))?;
            let to = part(to, index * PAGE_SIZE, PAGE_SIZE)?;
            self.file.read_at(place, &[to]).map_err(MigrationError::storage)?;
        }
        Ok(())
    }
}

fn part(of: RamSlice<'_>, offset: usize, bytes: usize) -> Result<RamSlice<'_>, MigrationError> {
    of.part(offset, bytes).ok_or_else(|| MigrationError::Internal("pages beyond their buffer".into()))
}
