//! A guest in an image as the source of a migration: its pages are read from the file.

use std::sync::Arc;

use sterna::error::MigrationError;
use sterna::internals::PageReader;
use sterna_image::{Form, Image, MappedPages};
use sterna_ram::{
    DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, RamBlock, RamError, SyncReport,
};
use sterna_transport::PageFile;

use super::failure::image_failed;
use super::machine::{OpaqueMachine, Pages};
use super::window::Window;

/// The pages of a machine in an image.
pub(super) struct ImagePages {
    image: Arc<Image>,
    file: Arc<PageFile>,
}

/// Creates the machine of `image`, whose pages must have fixed places. `file` is the same file. `uuid`: the VM's UUID
/// at its new host.
pub(super) fn stored_machine(
    image: Arc<Image>,
    file: PageFile,
    uuid: Option<[u8; 16]>,
) -> Result<OpaqueMachine<ImagePages>, MigrationError> {
    let shape = image.shape().for_form(Form::Legacy);
    let blocks = shape.ram.blocks.iter().map(|b| RamBlock::without_memory(&*b.name, b.length_bytes));
    let ram = GuestRam::new(blocks.collect::<Result<_, _>>()?)?;
    let writes = StoredPages(Arc::clone(&image));
    Ok(OpaqueMachine::new(ImagePages { image, file: Arc::new(file) }, shape, ram, uuid, writes))
}

impl Pages for ImagePages {
    fn is_in_memory(&self) -> bool {
        false
    }

    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        let blocks = mapped(&self.image)?.blocks().iter();
        let places = blocks.map(|block| block.pages_offset).collect();
        Ok(Arc::new(Window::new(Arc::clone(&self.file), places)?))
    }

    fn check_unchanged(&self) -> Result<(), MigrationError> {
        self.image.check_unchanged().map_err(image_failed)
    }
}

fn mapped(image: &Image) -> Result<&MappedPages, MigrationError> {
    let missing = || MigrationError::Internal("an image without fixed places for its pages".to_owned());
    image.mapped().ok_or_else(missing)
}

/// Dirty source of an image, which is never written. Pages that the image does not contain are zero.
struct StoredPages(Arc<Image>);

impl DirtySource for StoredPages {
    fn start(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn sync(&self, _: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        Ok(SyncReport::default())
    }

    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }

    fn mark_absent(
        &self,
        _: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        let Some(held) = self.0.mapped().and_then(|pages| pages.blocks().get(block)) else { return Ok(()) };
        let (mut next, end) = (first, first + count);
        while next < end {
            let run = held.bitmap.next_run(next, end, end - next);
            let (from, until) = run.map_or((end, end), |run| (run.first, run.end()));
            if from > next {
                absent.set_range(next, from - next);
            }
            next = until;
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        "image"
    }
}
