//! The guest that a migration sends: a live VM, or an image.
//!
//! The devices of a live VM are saved ([`LiveVm`]). The device state of an image is sent unchanged
//! (`sterna-opaque`).
//!
//! Rounds, lanes and the handover are the same for both. The differences are the machine's sections in the
//! stream, and the memory from which a lane reads a page.

use std::sync::Arc;

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE, RamSlice};
use sterna_wire::WireError;
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::main::{Command, Configuration, encode_end};
use sterna_wire::ram::{BlockEntry, BlockList};
use sterna_wire::vmdesc;

use super::main_stream::MainStream;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::threads::call;
use crate::vm::SourceVm;

/// The guest that a migration sends.
pub trait GuestSource: Send + Sync {
    /// Whether the guest's RAM is memory of this process.
    ///
    /// Then it can be saved to a file without a copy.
    fn is_in_memory(&self) -> bool {
        false
    }
    /// The guest's VM: the layout of its RAM, its dirty source, stop and resume.
    fn vm(&self) -> &Arc<dyn SourceVm>;
    /// The guest's RAM at the beginning of the migration.
    fn ram(&self) -> &GuestRam;
    /// The stream's configuration section.
    fn configuration(&self) -> Configuration;
    /// The block list for RAM's START section.
    fn blocks(&self) -> BlockList;
    /// The id of RAM's section, and the first free id for further sections.
    fn section_ids(&self) -> (u32, u32);
    /// A reader of pages for one lane.
    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError>;
    /// Removes pages that must not be sent from the first round.
    fn leave_out(&self, pages: &DirtyBitmaps);
    /// Whether absent pages of the dirty source must not be read.
    ///
    /// This holds even if the operator's setting asks for their data.
    fn knows_absent(&self) -> bool;
    /// Writes the sections that precede RAM.
    fn send_early(&self, stream: &mut MainStream) -> Result<(), MigrationError>;
    /// Writes the data between RAM's START and its pages.
    ///
    /// Only streams without pages in START have such data.
    fn send_setup(&self, _: &mut MainStream) -> Result<(), MigrationError> {
        Ok(())
    }
    /// Writes the data between RAM's last PART and its END. False: there is no END.
    fn send_switchover_start(&self, stream: &mut MainStream) -> Result<bool, MigrationError>;
    /// Writes the devices. `run_state` is the guest's run state before it was stopped.
    fn send_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError>;
    /// Writes EOF, and the description after it.
    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError>;
}

/// Reads pages for one lane.
///
/// The content stays valid until at least a packet's worth of further pages were requested.
pub trait PageReader: Send + Sync {
    /// How many of the first pages of `run` can be read in one call.
    fn together(&self, run: PageRun) -> u64 {
        run.count
    }
    /// The content of `run`: at most a packet's worth of pages, which are [together](PageReader::together).
    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError>;
    /// Whether the content does not change before it is sent.
    fn is_copy(&self) -> bool {
        false
    }
}

/// Reads guest RAM in place.
pub struct RamReader(pub GuestRam);

impl PageReader for RamReader {
    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let block = self.0.block(run.block);
        Ok(block.slice(run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?)
    }
}

/// A VM of this process.
pub(super) struct LiveVm {
    vm: Arc<dyn SourceVm>,
    ram: GuestRam,
}

impl LiveVm {
    pub(super) fn new(vm: Arc<dyn SourceVm>) -> Self {
        Self { ram: vm.ram(), vm }
    }
}

impl GuestSource for LiveVm {
    fn is_in_memory(&self) -> bool {
        true
    }

    fn vm(&self) -> &Arc<dyn SourceVm> {
        &self.vm
    }

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn configuration(&self) -> Configuration {
        Configuration { machine_type: self.vm.machine_type(), ..Configuration::default() }
    }

    fn blocks(&self) -> BlockList {
        let blocks = self.ram.blocks().iter();
        BlockList { blocks: blocks.map(|b| BlockEntry::new(b.name(), b.len_bytes())).collect() }
    }

    fn section_ids(&self) -> (u32, u32) {
        (1, 2)
    }

    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        Ok(Arc::new(RamReader(self.ram.clone())))
    }

    fn leave_out(&self, _: &DirtyBitmaps) {}

    fn knows_absent(&self) -> bool {
        false
    }

    fn send_early(&self, _: &mut MainStream) -> Result<(), MigrationError> {
        Ok(())
    }

    fn send_switchover_start(&self, stream: &mut MainStream) -> Result<bool, MigrationError> {
        stream.commands(&[Command::SwitchoverStart])?;
        Ok(true)
    }

    fn send_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError> {
        let state = GlobalState { run_state: run_state.to_owned(), suspended: Some(false) };
        let body = state.encode().map_err(MigrationError::wire("main channel"))?;
        let header =
            (global_state::SECTION_NAME, global_state::SECTION_INSTANCE, global_state::SECTION_VERSION);
        stream.full_section(header, &body, false)?;
        for device in self.vm.devices() {
            let name = device.name();
            let body = call(format!("Device::save of {name:?}"), || device.save())?;
            stream.full_section((name.as_str(), device.instance(), device.version()), &body, true)?;
        }
        Ok(())
    }

    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        let description = stream.description();
        stream.send(|out: &mut Vec<u8>| -> Result<(), WireError> {
            encode_end(out);
            vmdesc::encode(&description, out)
        })
    }
}
