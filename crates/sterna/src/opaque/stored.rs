//! A guest that lies in an image, as the source of a migration: paused, its pages in the file, its devices opaque.

use std::sync::Arc;

use sterna_image::{Form, Image, MappedPages, Shape};
use sterna_ram::{
    DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, RamBlock, RamError, SyncReport,
};
use sterna_transport::PageFile;
use sterna_wire::main::{Configuration, encode_end};
use sterna_wire::ram::{BlockEntry, BlockList};
use sterna_wire::vmdesc;

use super::window::Window;
use crate::error::{MigrationError, VmError};
use crate::outgoing::guest_source::{GuestSource, PageReader};
use crate::outgoing::main_stream::MainStream;
use crate::vm::{Device, RunState, SourceVm, Vm};

/// Number for sections of this side's own: far from those that QEMU counts up from 0.
const OWN_SECTIONS: u32 = 0x5354_0000;

/// A machine in an image.
pub(super) struct StoredMachine {
    image: Arc<Image>,
    /// As the stream states it.
    shape: Shape,
    file: Arc<PageFile>,
    vm: Arc<dyn SourceVm>,
    ram: GuestRam,
}

impl StoredMachine {
    /// The machine of `image`, which must have its pages at fixed places; `file` is the same file. `uuid`: the
    /// VM's, as its new host knows it.
    pub(super) fn new(
        image: Arc<Image>,
        file: PageFile,
        uuid: Option<[u8; 16]>,
    ) -> Result<Self, MigrationError> {
        let shape = image.shape().for_form(Form::Legacy);
        let blocks = shape.ram.blocks.iter().map(|b| RamBlock::without_memory(&*b.name, b.length_bytes));
        let ram = GuestRam::new(blocks.collect::<Result<_, _>>()?)?;
        let vm = Paused {
            machine_type: shape.configuration.machine_type.clone(),
            uuid: uuid.or(shape.configuration.uuid),
            pages: StoredPages(Arc::clone(&image)),
            ram: ram.clone(),
        };
        Ok(Self { image, shape, file: Arc::new(file), vm: Arc::new(vm), ram })
    }
}

impl GuestSource for StoredMachine {
    fn vm(&self) -> &Arc<dyn SourceVm> {
        &self.vm
    }

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn configuration(&self) -> Configuration {
        self.shape.configuration.clone()
    }

    fn blocks(&self) -> BlockList {
        let blocks = self.shape.ram.blocks.iter().map(|block| BlockEntry {
            name: block.name.clone(),
            length_bytes: block.length_bytes,
            address: block.address,
        });
        BlockList { blocks: blocks.collect() }
    }

    fn section_ids(&self) -> (u32, u32) {
        (self.shape.ram.section_id, OWN_SECTIONS)
    }

    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        let blocks = mapped(&self.image)?.blocks().iter();
        let places = blocks.map(|block| block.pages_offset).collect();
        Ok(Arc::new(Window::new(Arc::clone(&self.file), places)?))
    }

    fn leave_out(&self, pages: &DirtyBitmaps) {
        for (index, block) in self.shape.ram.blocks.iter().enumerate() {
            if block.is_skipped {
                pages.block(index).clear_all();
            }
        }
    }

    fn knows_absent(&self) -> bool {
        true
    }

    fn send_early(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        send(stream, &self.shape.early)
    }

    fn send_setup(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        send(stream, &self.shape.setup)
    }

    fn send_switchover_start(&self, stream: &mut MainStream) -> Result<bool, MigrationError> {
        send(stream, &self.shape.between)?;
        Ok(self.shape.has_end)
    }

    fn send_devices(&self, stream: &mut MainStream, _: &str) -> Result<(), MigrationError> {
        // Before anybody acts on what was read from it.
        self.image.check_unchanged()?;
        send(stream, &self.shape.devices)
    }

    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        // A receiver waits for a description, and QEMU does not look into it.
        let text = self.shape.description.as_deref().unwrap_or_default();
        stream.send(|out| {
            encode_end(out);
            vmdesc::encode(text, out)
        })
    }
}

fn send(stream: &mut MainStream, bytes: &[u8]) -> Result<(), MigrationError> {
    stream.send(|out| {
        out.extend_from_slice(bytes);
        Ok(())
    })
}

fn mapped(image: &Image) -> Result<&MappedPages, MigrationError> {
    let missing = || MigrationError::Internal("an image without fixed places for its pages".to_owned());
    image.mapped().ok_or_else(missing)
}

/// The guest in the image, as far as a migration has to do with it.
struct Paused {
    machine_type: String,
    uuid: Option<[u8; 16]>,
    ram: GuestRam,
    pages: StoredPages,
}

impl Vm for Paused {
    fn machine_type(&self) -> String {
        self.machine_type.clone()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.uuid
    }

    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
}

impl SourceVm for Paused {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.pages
    }

    fn run_state(&self) -> RunState {
        RunState::Paused
    }

    fn stop(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&self) -> Result<(), VmError> {
        Ok(())
    }
}

/// Nobody writes an image; the pages that it does not hold are zero.
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
