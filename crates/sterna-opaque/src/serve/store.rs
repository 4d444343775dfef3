//! Random access to the pages of an image.

use std::path::Path;

use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna_image::tools::verify::refuse_damage;
use sterna_image::{Access as Opening, Form, Image, ImageError, PageRange, Shape};
use sterna_ram::{PageBitmap, RamSlice};
use sterna_transport::{Direct, OpenOptions, PageFile};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use crate::failure::image_failed;

/// How an image's pages were made readable at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// The format gives each page a fixed place in the image.
    Places,
    /// The stream was read once, and the position of each page was recorded.
    Index,
    /// The image is compressed, or has pages as differences: it was unpacked into a temporary file.
    Spool,
}

/// An image whose pages can be read in any order.
pub(crate) struct ImageStore {
    image: Image,
    /// The file with the pages; none for an image in Sterna's own format, whose pages are in frames.
    file: Option<PageFile>,
    access: Access,
    shape: Shape,
}

impl ImageStore {
    /// Opens the image at `path`. An image without random access is unpacked into `spool`, or into its own
    /// directory.
    ///
    /// # Errors
    /// The image's error; [`ImageError::Damaged`] for a damaged image unless `force_damaged`.
    pub(crate) fn open(
        path: &Path,
        opening: &Opening,
        direct: Direct,
        spool: Option<&Path>,
        force_damaged: bool,
    ) -> Result<Self, ImageError> {
        let mut image = Image::open_indexed(path, opening)?;
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
        // Pages of a stream have arbitrary offsets, which direct I/O does not support.
        let direct = if access == Access::Index { Direct::Off } else { direct };
        let file = if image.stored().is_some() { None } else { Some(page_file(&image, direct)?) };
        let shape = image.shape().for_form(Form::Legacy);
        Ok(Self { image, file, access, shape })
    }

    /// The machine as a legacy stream describes it.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How the pages are read.
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Whether reads of pages bypass the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.file.as_ref().is_some_and(PageFile::is_direct)
    }

    /// The opened image, which is the unpacked one if it was spooled.
    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// The pages of block `block` that the file contains. All others are zero.
    pub(crate) fn held(&self, block: usize) -> &PageBitmap {
        match (self.image.mapped(), self.image.places()) {
            (Some(mapped), _) => &mapped.blocks()[block].bitmap,
            (None, Some(places)) => places.held(block),
            (None, None) => unreachable!("an image without places was spooled"),
        }
    }

    /// Block indices in the order in which their pages are stored in the file.
    pub(crate) fn sequence(&self) -> Vec<usize> {
        let mut blocks: Vec<usize> = (0..self.shape.ram.blocks.len()).collect();
        if let Some(mapped) = self.image.mapped() {
            blocks.sort_by_key(|block| mapped.blocks()[*block].pages_offset);
        }
        blocks
    }

    /// The pages that the image names as those that a guest touches first.
    pub(crate) fn working_set(&self) -> Vec<PageRun> {
        let stored = self.image.stored().map(|stored| stored.working_set()).unwrap_or_default();
        let run = |range: &PageRange| PageRun {
            block: range.block as usize,
            first: range.first,
            count: range.count.into(),
        };
        stored.iter().map(run).collect()
    }

    /// Reads the pages of `run` that the file contains to their places in `to`. The others are left unchanged.
    ///
    /// # Errors
    /// The file's error, and [`ImageError::Changed`] if the image was written to since it was opened.
    pub(crate) fn read(&self, run: PageRun, to: RamSlice<'_>) -> Result<(), MigrationError> {
        let held = self.held(run.block);
        let mut at = run.first;
        while let Some(next) = held.next_run(at, run.end(), u64::MAX) {
            let offset = (next.first - run.first) as usize * PAGE_SIZE;
            let to = part(to, offset, next.count as usize * PAGE_SIZE)?;
            self.read_held(run.block, next.first, to)?;
            at = next.end();
        }
        // Checked after the read, so that the pages are those of the image as it was opened.
        self.image.check_unchanged().map_err(image_failed)
    }

    fn read_held(&self, block: usize, first: u64, to: RamSlice<'_>) -> Result<(), MigrationError> {
        let Some(file) = &self.file else { return self.read_frames(block, first, to) };
        if let Some(mapped) = self.image.mapped() {
            let place = mapped.blocks()[block].pages_offset + (first << PAGE_SHIFT);
            return file.read_at(place, &[to]).map_err(MigrationError::storage);
        }
        for index in 0..to.len() / PAGE_SIZE {
            let place = self.image.places().and_then(|places| places.offset(block, first + index as u64));
            let place =
                place.ok_or_else(|| MigrationError::Internal("a held page without a place".into()))?;
            let to = part(to, index * PAGE_SIZE, PAGE_SIZE)?;
            file.read_at(place, &[to]).map_err(MigrationError::storage)?;
        }
        Ok(())
    }

    /// Reads pages of frames. Each frame is checked before any of its pages arrives in `to`.
    fn read_frames(&self, block: usize, first: u64, to: RamSlice<'_>) -> Result<(), MigrationError> {
        let Some(mapped) = self.image.mapped() else {
            return Err(MigrationError::Internal("frames without a view".into()));
        };
        let mut content = vec![0; to.len()];
        mapped.read(block, first, &mut content).map_err(image_failed)?;
        let copied = to.copy_from(&content);
        copied
            .map_err(|fault| MigrationError::Internal(format!("the page buffer cannot be written: {fault}")))
    }
}

/// Opens the image's file for queued or direct reads.
fn page_file(image: &Image, direct: Direct) -> Result<PageFile, ImageError> {
    let source = image.mapped().map_or(image.source(), |mapped| mapped.source());
    let Some(file) = source.file() else {
        return Err(ImageError::Request(format!("{} is not in a file", image.path_name())));
    };
    // Opened through the descriptor, because the path may name another file by now.
    Ok(PageFile::open_again(file, image.path_name(), OpenOptions { direct })?)
}

fn part(of: RamSlice<'_>, offset: usize, bytes: usize) -> Result<RamSlice<'_>, MigrationError> {
    of.part(offset, bytes).ok_or_else(|| MigrationError::Internal("pages beyond their buffer".into()))
}
