//! An opaque machine as the source of a migration. It is paused, and its devices are sent unchanged.

use std::sync::Arc;

use sterna::error::{MigrationError, VmError};
use sterna::internals::MainStream;
use sterna::internals::{GuestSource, PageReader};
use sterna::vm::{Device, RunState, SourceVm, Vm};
use sterna_image::Shape;
use sterna_ram::{DirtyBitmaps, DirtySource, GuestRam};
use sterna_wire::main::{Configuration, encode_end};
use sterna_wire::ram::{BlockEntry, BlockList};
use sterna_wire::vmdesc;

/// First section id for this side's own sections: far from QEMU's ids, which count from 0.
const OWN_SECTIONS: u32 = 0x5354_0000;

/// Access to the pages of an opaque machine.
pub(super) trait Pages: Send + Sync {
    /// Whether the pages are in memory of this process.
    fn is_in_memory(&self) -> bool;
    /// Creates a reader of the pages, for one lane.
    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError>;
    /// Checks that the pages are the same as when the migration began. Called before the destination acts on them.
    fn check_unchanged(&self) -> Result<(), MigrationError>;
}

/// A machine whose devices are unknown to this host.
pub(super) struct OpaqueMachine<P> {
    pages: P,
    /// The machine's description, as in the stream.
    shape: Shape,
    vm: Arc<dyn SourceVm>,
    ram: GuestRam,
}

impl<P: Pages> OpaqueMachine<P> {
    /// `uuid`: the VM's UUID at its new host. `writes`: finds the pages that were never written.
    pub(super) fn new(
        pages: P,
        shape: Shape,
        ram: GuestRam,
        uuid: Option<[u8; 16]>,
        writes: impl DirtySource + 'static,
    ) -> Self {
        let vm = Paused {
            machine_type: shape.configuration.machine_type.clone(),
            uuid: uuid.or(shape.configuration.uuid),
            writes: Box::new(writes),
            ram: ram.clone(),
        };
        Self { pages, shape, vm: Arc::new(vm), ram }
    }
}

impl<P: Pages> GuestSource for OpaqueMachine<P> {
    fn is_in_memory(&self) -> bool {
        self.pages.is_in_memory()
    }

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
        self.pages.reader()
    }

    fn leave_out(&self, pages: &DirtyBitmaps) {
        for (index, block) in self.shape.ram.blocks.iter().enumerate() {
            if block.is_skipped {
                pages.block(index).clear_all();
            }
        }
    }

    fn knows_absent(&self) -> bool {
        !self.pages.is_in_memory()
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
        self.pages.check_unchanged()?;
        send(stream, &self.shape.devices)
    }

    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        // A receiver waits for a description, so an empty one is sent if the image has none. QEMU does not read it.
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

/// The guest, with the properties that a migration needs.
struct Paused {
    machine_type: String,
    uuid: Option<[u8; 16]>,
    ram: GuestRam,
    writes: Box<dyn DirtySource>,
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
        self.writes.as_ref()
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
