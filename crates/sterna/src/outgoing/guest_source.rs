//! What a migration sends: a live VM whose devices are saved ([`LiveVm`]), or an image whose device state is sent
//! as it is ([`crate::opaque`]).
//!
//! Rounds, lanes and the handover are the same for both. What differs: what the stream says of the machine, and
//! where a lane reads a page.

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

/// What a migration sends.
pub(crate) trait GuestSource: Send + Sync {
    /// Whether the guest's RAM is memory of this process, so that it can be saved to a file from where it is.
    fn is_in_memory(&self) -> bool {
        false
    }
    /// The guest: the shape of its RAM, who tells which pages are dirty, how it stops and runs on.
    fn vm(&self) -> &Arc<dyn SourceVm>;
    /// The guest's RAM as it was when the migration began.
    fn ram(&self) -> &GuestRam;
    /// What the stream's configuration says.
    fn configuration(&self) -> Configuration;
    /// The block list.
    fn blocks(&self) -> BlockList;
    /// The number of RAM's section, and the first free number for sections of this side's own.
    fn section_ids(&self) -> (u32, u32);
    /// A reader of pages, for one lane.
    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError>;
    /// Takes pages that must not be sent out of the first round.
    fn leave_out(&self, pages: &DirtyBitmaps);
    /// Whether pages that the dirty source calls absent must not be read, whatever the operator wants to be sent
    /// as data.
    fn knows_absent(&self) -> bool;
    /// Sections that stand before RAM.
    fn send_early(&self, stream: &mut MainStream) -> Result<(), MigrationError>;
    /// What stands between RAM's START and its pages: in a stream that carries no pages in START.
    fn send_setup(&self, _: &mut MainStream) -> Result<(), MigrationError> {
        Ok(())
    }
    /// What stands between RAM's last PART and its END. False: there is no END.
    fn send_switchover_start(&self, stream: &mut MainStream) -> Result<bool, MigrationError>;
    /// Devices; `run_state`: the guest's before it was stopped.
    fn send_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError>;
    /// EOF, and the description after it.
    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError>;
}

/// Reads pages for one lane. What it gave stays valid until at least a packet's worth of pages more were asked for.
pub(crate) trait PageReader: Send + Sync {
    /// How many of the first pages of `run` are had at once.
    fn together(&self, run: PageRun) -> u64 {
        run.count
    }
    /// The content of `run`, at most a packet's worth of pages, which are [had at once](PageReader::together).
    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError>;
    /// Whether what it gives stays as it is until it is sent.
    fn is_copy(&self) -> bool {
        false
    }
}

/// Guest RAM, where it is.
pub(crate) struct RamReader(pub GuestRam);

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
