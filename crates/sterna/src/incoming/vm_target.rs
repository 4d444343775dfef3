//! Receives a guest in a VM whose machine, RAM and devices are known.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::{GuestRam, RamError};
use sterna_wire::extension::{COMPATIBILITY_SECTION, HandedOver};
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::main::{Configuration, Expectations, SectionKind, SectionKnowledge};
use sterna_wire::multifd::BlockTable;

use super::checkpoints;
use super::memory_files::handed::{self, Taken};
use super::sections::{Sections, all_came};
use super::target::{Layout, RamStart, RamStarted, Section, Target};
use crate::error::{MachineDifference, MemoryDifference, MigrationError, Untimely};
use crate::hooks::Hook;
use crate::pages::{PageSink, RamSink};
use crate::params::Capabilities;
use crate::threads::{call, caught};
use crate::vm::{Device, TargetVm};

const CHANNEL: &str = "main channel";

pub(super) struct VmTarget {
    vm: Arc<dyn TargetVm>,
    /// The VM's RAM when the listener started.
    ram: GuestRam,
    sections: Sections,
    sink: Arc<RamSink>,
    loaded: Mutex<Loaded>,
    /// Memory of the source's process, if it arrives instead of pages.
    taken: Mutex<Taken>,
    #[cfg(feature = "planted-faults")]
    pub(super) fault: Option<super::fault::SharingFault>,
}

/// The loader's results so far.
#[derive(Default, Clone)]
struct Loaded {
    /// RAM's END section was read.
    ram: bool,
    /// From the global state section. `None` until it was read.
    run: Option<bool>,
    /// Name and instance of the devices that were loaded.
    devices: Vec<(String, u32)>,
}

impl VmTarget {
    /// # Errors
    /// The memory for pages of unwritable blocks cannot be allocated.
    pub(super) fn new(vm: Arc<dyn TargetVm>) -> Result<Self, RamError> {
        let ram = vm.ram();
        let blocks = ram.blocks().len();
        let may_hold_bytes = (0..blocks).map(|block| vm.may_hold_bytes(block)).collect();
        Ok(Self {
            sections: Sections::new(vm.as_ref()),
            sink: Arc::new(RamSink::new(&ram, may_hold_bytes)?),
            loaded: Mutex::default(),
            taken: Mutex::default(),
            #[cfg(feature = "planted-faults")]
            fault: None,
            ram,
            vm,
        })
    }

    /// Checks that the machines were compared before RAM is transferred. Only a Sterna source that receives
    /// this side's answers can have sent its record. For any other source a warning reports that nothing was
    /// compared.
    fn demand_compatibility(&self, is_sterna: bool) -> Result<RamStarted, MigrationError> {
        let compared = |came: &(String, u32)| came.0 == COMPATIBILITY_SECTION;
        if self.vm.compatibility().is_none() || self.loaded.lock().devices.iter().any(compared) {
            return Ok(RamStarted::default());
        }
        if is_sterna {
            return Err(MachineDifference::NoRecord.into());
        }
        let warning = "the source sent no compatibility record (it is not a Sterna, or its return path is off): \
                       CPUID and TSC were not compared";
        Ok(RamStarted { layout: None, warning: Some(warning.to_owned()) })
    }
}

impl Target for VmTarget {
    fn is_in_memory(&self) -> bool {
        true
    }

    fn keeps_pages(&self) -> bool {
        true
    }

    fn forget_devices(&self) -> Result<bool, MigrationError> {
        let mut loaded = self.loaded.lock();
        // The record is kept, because the machines stay the same.
        let compared = |(name, _): &(String, u32)| name == COMPATIBILITY_SECTION;
        let has_devices = loaded.devices.iter().any(|device| !compared(device));
        loaded.devices.retain(compared);
        (loaded.ram, loaded.run) = (false, None);
        drop(loaded);
        if has_devices {
            caught("TargetVm::reset", || self.vm.reset())?;
        }
        Ok(has_devices)
    }

    fn ram_sink(&self) -> Option<&RamSink> {
        Some(&self.sink)
    }

    fn guest(&self) -> Option<&GuestRam> {
        Some(&self.ram)
    }

    fn can_run_early(&self) -> bool {
        true
    }

    fn shares_ram_with(&self) -> Option<String> {
        self.vm.shares_ram_with()
    }

    fn threads_of_vcpus(&self) -> Vec<u32> {
        self.vm.threads_of_vcpus()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        Some(self.vm.uuid().unwrap_or_default())
    }

    fn expectations(&self, capabilities: &Capabilities) -> Expectations {
        let blocks = self.ram.blocks().iter();
        Expectations {
            machine_type: Some(self.vm.machine_type()),
            uuid: self.vm.uuid(),
            blocks: Some(blocks.map(|block| (block.name().to_owned(), block.len_bytes())).collect()),
            // In a file, multifd channels are threads, and the file's bytes do not show them.
            multifd: capabilities.multifd && !capabilities.mapped_ram,
            mapped_ram: capabilities.mapped_ram,
            postcopy: capabilities.postcopy_ram,
            accept_legacy_flush: crate::machine_type::flushes_silently(&self.vm.machine_type()),
            device_state_bytes: self.sections.most_bytes(),
            ..Expectations::default()
        }
    }

    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send> {
        Box::new(Sections::new(self.vm.as_ref()))
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.vm.devices()
    }

    fn known_layout(&self, lanes: usize) -> Result<Option<Layout>, MigrationError> {
        let blocks = self.ram.blocks().iter();
        let blocks = blocks.map(|block| (block.name().to_owned(), block.len_bytes()));
        let sink: Arc<dyn PageSink> = self.sink.clone();
        Ok(Some(Layout {
            ram: self.sink.ram().clone(),
            table: BlockTable::new(blocks).map_err(MigrationError::wire("RAM of this side"))?,
            sinks: vec![sink; lanes + 1],
        }))
    }

    fn configuration(&self, _: &Configuration) -> Result<(), MigrationError> {
        Ok(())
    }

    fn command(&self, _: &[u8]) -> Result<(), MigrationError> {
        Ok(())
    }

    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError> {
        self.demand_compatibility(start.is_sterna)
    }

    fn take_memory(&self, table: &[HandedOver], descriptors: Vec<OwnedFd>) -> Result<(), MigrationError> {
        if let Some(device) = self.vm.cannot_follow() {
            return Err(MemoryDifference::MappedByDevice { device }.into());
        }
        let mut taken = self.taken.lock();
        *taken = handed::take(&self.ram, table, &self.vm.host_descriptors(), descriptors)?;
        #[cfg(feature = "planted-faults")]
        if let Some(fault) = self.fault {
            taken.keep()?;
            if fault == super::fault::SharingFault::Empties {
                return Ok(());
            }
        }
        // No page may be written from now on.
        self.sink.close();
        Ok(())
    }

    fn keep_memory(&self) -> Result<(), MigrationError> {
        self.taken.lock().keep()
    }

    fn ram_section_ended(&self, kind: SectionKind) {
        self.loaded.lock().ram |= kind == SectionKind::End;
    }

    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError> {
        let Section { name, instance, version, body, .. } = *section;
        if name == global_state::SECTION_NAME {
            let state = GlobalState::decode(body).map_err(MigrationError::wire(CHANNEL))?;
            self.loaded.lock().run = Some(state.wants_to_run());
            return Ok(());
        }
        if checkpoints::section(name).is_some() {
            // These sections are in an image of a checkpoint. They describe output and pages of that time, and
            // are not needed now.
            return Ok(());
        }
        let Some(device) = self.sections.find(name, instance) else {
            return Err(MigrationError::Internal(format!("section {name:?} passed and has no device")));
        };
        let loaded = call(format!("Device::load of {name:?}"), || device.load(version, body));
        if let Err(error) = loaded {
            // A refused record describes how the machines differ. A device that cannot load is an error of this
            // side.
            return Err(if name == COMPATIBILITY_SECTION {
                MachineDifference::Record(error).into()
            } else {
                error.into()
            });
        }
        self.loaded.lock().devices.push((name.to_owned(), instance));
        Ok(())
    }

    fn finish_loading(&self) -> Result<bool, MigrationError> {
        let loaded = self.loaded.lock().clone();
        if !loaded.ram {
            return Err(Untimely::EndBeforeRam.into());
        }
        all_came(self.vm.as_ref(), &loaded.devices)?;
        MigrationError::check_same_ram(&call("Vm::ram", || self.vm.ram()), &self.ram)?;
        self.sink.finish()?;
        // A source without a global state section runs its guest. All machine types of QEMU 11 send one.
        Ok(loaded.run.unwrap_or(true))
    }

    fn finish_devices(&self) -> Result<bool, MigrationError> {
        let loaded = self.loaded.lock().clone();
        all_came(self.vm.as_ref(), &loaded.devices)?;
        MigrationError::check_same_ram(&call("Vm::ram", || self.vm.ram()), &self.ram)?;
        Ok(loaded.run.unwrap_or(true))
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.vm.hooks()
    }

    fn shares_memory(&self) -> bool {
        self.taken.lock().has_memory()
    }

    fn prepare_start(&self) -> Result<(), MigrationError> {
        Ok(self.vm.prepare_start()?)
    }

    fn start(&self) -> Result<(), MigrationError> {
        Ok(self.vm.start()?)
    }

    fn runs_guests(&self) -> bool {
        true
    }

    fn take_over_paused(&self) -> Result<(), MigrationError> {
        Ok(self.vm.take_over_paused()?)
    }

    fn reset(&self) -> Vec<String> {
        let reset = caught("TargetVm::reset", || self.vm.reset());
        let left = if self.sink.is_closed() {
            self.taken.lock().give_back()
        } else {
            emptied(&self.sink, &self.ram)
        };
        reset.err().map(|error| error.to_string()).into_iter().chain(left).collect()
    }

    fn cleared_pages(&self) -> u64 {
        self.sink.cleared_pages()
    }
}

/// Gives the received memory back to the host, and forgets which pages were received. Returns the errors.
pub fn emptied(sink: &RamSink, ram: &GuestRam) -> Vec<String> {
    let left = ram.blocks().iter().enumerate().filter_map(|(index, block)| {
        let name = block.name();
        match sink.empty(index) {
            Ok(None) => None,
            Ok(Some(why)) => Some(format!("memory of {name:?} was filled with zeros and not freed: {why}")),
            Err(error) => Some(format!(
                "memory of {name:?} still contains pages of this migration ({error}); the next one checks each \
                 page before it takes it for zero"
            )),
        }
    });
    left.collect()
}
