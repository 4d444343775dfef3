//! The guest goes on in a VM of this process.

use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_image::Shape;
use sterna_ram::{Custody, CustodyClaim, GuestRam, PAGE_SIZE};
use sterna_wire::extension::COMPATIBILITY_SECTION;
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::replica::{CheckpointSummary, EpochSection, Output};

use super::held::{HeldDevice, HeldGuest};
use super::survivor::Survivor;
use crate::device_stream::DeviceStream;
use crate::error::{MigrationError, VmError};
use crate::hooks::Hook;
use crate::incoming::vm_target::emptied;
use crate::pages::RamSink;
use crate::start_error::StartError;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};
use crate::threads::{call, caught, tried};
use crate::vm::{Device, TargetVm};

/// Lets the guest go on in a VM that waits for it.
///
/// Where the VM's memory is a shared file, checkpoints lie there from the beginning, so a takeover copies nothing. Other memory is
/// filled when the takeover is prepared. From [`VmSurvivor::new`] on nothing else may arrive in the VM, until the protection ends.
pub struct VmSurvivor {
    vm: Arc<dyn TargetVm>,
    ram: GuestRam,
    custody: CustodyClaim,
    say_again: SayAgain,
    state: Mutex<State>,
}

/// Says what the guest had said when nobody may have heard it, and how many bytes it had said before.
type SayAgain = Box<dyn Fn(u64, &[u8]) + Send + Sync>;

#[derive(Default)]
struct State {
    /// For each block of the machine: its index here, and whether its pages lie here already.
    places: Vec<(usize, bool)>,
    /// Whether the guest wants to run.
    is_running: bool,
    /// Until it is said again; a start that failed may have done so.
    unsaid: Option<Output>,
    seized: Vec<Arc<dyn Hook>>,
    /// Devices whose streams came, with the guest.
    streams: Vec<Streamed>,
    has_started: bool,
}

impl VmSurvivor {
    /// Claims the place in `vm`.
    ///
    /// # Errors
    /// [`StartError::Guest`] where a guest is, or another one comes.
    pub fn new(vm: Arc<dyn TargetVm>) -> Result<Self, StartError> {
        let ram = vm.ram();
        let arriving = Custody::Arriving { is_free: false };
        let custody = ram.claim_custody(arriving, Custody::may_arrive).map_err(StartError::Guest)?;
        Ok(Self { vm, ram, custody, say_again: Box::new(|_, _| {}), state: Mutex::default() })
    }

    /// Calls `say` when the guest starts, with what it had said when the checkpoint was taken and had not left, and how many bytes it had said
    /// before ([`ByteGate::say_again`](super::ByteGate::say_again)).
    #[must_use]
    pub fn saying_again(self, say: impl Fn(u64, &[u8]) + Send + Sync + 'static) -> Self {
        Self { say_again: Box::new(say), ..self }
    }

    /// Whether the guest runs here, or stands here as it stood at the primary.
    pub fn has_started(&self) -> bool {
        self.state.lock().has_started
    }

    fn place_of(&self, name: &str, length: u64) -> Result<usize, VmError> {
        let found = self.ram.blocks().iter().position(|block| block.name() == name);
        match found {
            Some(index) if self.ram.block(index).len_bytes() == length => Ok(index),
            Some(index) => {
                let ours = self.ram.block(index).len_bytes();
                Err(unfit(format!("block {name:?} has {length} bytes at the primary and {ours} here")))
            }
            None => Err(unfit(format!("this machine has no block {name:?}"))),
        }
    }

    /// The block's memory, if another mapping of it may be made.
    fn shared(&self, index: usize) -> Result<Option<File>, VmError> {
        let block = self.ram.block(index);
        let Some(shared) = block.shared_file().filter(|shared| shared.offset == 0) else { return Ok(None) };
        if self.vm.may_hold_bytes(index) || block.is_read_only() {
            return Ok(None);
        }
        let file = shared.file.try_clone();
        let file = file.map_err(|error| VmError::new(format!("memory of {:?}", block.name()), error))?;
        Ok(Some(file))
    }

    /// Memory reads as zero, as at the beginning.
    fn empty(&self) -> Result<(), VmError> {
        let blocks = self.ram.blocks().len();
        let may_hold = (0..blocks).map(|block| self.vm.may_hold_bytes(block)).collect();
        let sink = RamSink::new(&self.ram, may_hold).map_err(|error| VmError::new("memory", error))?;
        let left = emptied(&sink, &self.ram);
        if left.is_empty() { Ok(()) } else { Err(VmError::new("memory", left.join("; "))) }
    }

    /// Copies a block that lies elsewhere.
    fn fill(&self, guest: &HeldGuest, from: usize, to: usize) -> Result<(), MigrationError> {
        let block = self.ram.block(to);
        block.zero_present_pages(0, block.pages())?;
        guest.visit_pages(from, |page, content| {
            block.write(page * PAGE_SIZE as u64, content).map_err(MigrationError::from)
        })
    }

    fn find(&self, section: &HeldDevice) -> Result<Arc<dyn Device>, VmError> {
        let HeldDevice { name, instance, version, .. } = section;
        let devices = self.vm.devices();
        let device =
            devices.into_iter().find(|device| device.name() == *name && device.instance() == *instance);
        let Some(device) = device else {
            return Err(unfit(format!("this machine has no device {name:?}, instance {instance}")));
        };
        let (oldest, newest) = (device.oldest_version(), device.version());
        if !(oldest..=newest).contains(version) {
            let what = format!(
                "the version of device {name:?} is {version}, and this side knows {oldest} to {newest}"
            );
            return Err(unfit(what));
        }
        Ok(device)
    }

    /// Whether the guest wants to run, and what it has not said yet.
    fn load(&self, sections: &[HeldDevice]) -> Result<(bool, Output), VmError> {
        let (mut wants_to_run, mut unsaid) = (true, Output::default());
        for section in sections {
            let what = format!("device {:?}", section.name);
            if section.name == global_state::SECTION_NAME {
                let state = GlobalState::decode(&section.body).map_err(|error| VmError::new(&what, error))?;
                wants_to_run = state.wants_to_run();
                continue;
            }
            if section.name == Output::SECTION_NAME {
                unsaid = Output::decode(unframed(section)?).map_err(|error| VmError::new(&what, error))?;
                continue;
            }
            if !is_device(&section.name) {
                continue;
            }
            let device = self.find(section)?;
            let body = unframed(section)?;
            call(format!("Device::load of {:?}", section.name), || device.load(section.version, body))?;
        }
        Ok((wants_to_run, unsaid))
    }

    /// A device whose stream comes.
    fn streamed(&self, device: &str, instance: u32) -> Result<Streamed, VmError> {
        let found =
            self.state.lock().streams.iter().find(|of| of.name == device && of.instance == instance).cloned();
        found.ok_or_else(|| {
            unfit(format!("the stream of device {device:?}, instance {instance}, never began"))
        })
    }

    /// Whatever becomes of the guest, no more of its streams comes.
    fn end_streams(&self) -> Vec<MigrationError> {
        let streams = std::mem::take(&mut self.state.lock().streams);
        failed_in_parallel(&streams, "end loading", |stream| stream.end_load())
    }

    fn seize(&self, state: &mut State) -> Result<(), VmError> {
        for hook in self.vm.hooks().into_iter().skip(state.seized.len()) {
            call(format!("Hook::seize of {}", hook.name()), || hook.seize())?;
            state.seized.push(hook);
        }
        Ok(())
    }
}

impl Survivor for VmSurvivor {
    fn memory(&self, blocks: &[(&str, u64)]) -> Result<Vec<Option<File>>, VmError> {
        if blocks.len() != self.ram.blocks().len() {
            let (theirs, ours) = (blocks.len(), self.ram.blocks().len());
            return Err(unfit(format!(
                "the primary has {theirs} blocks of memory, and this machine has {ours}"
            )));
        }
        self.empty()?;
        // Of a guest that did not come whole.
        self.end_streams();
        let mut state = self.state.lock();
        state.places.clear();
        let mut files = Vec::new();
        for (name, length) in blocks {
            let index = self.place_of(name, *length)?;
            let file = self.shared(index)?;
            state.places.push((index, file.is_some()));
            files.push(file);
        }
        Ok(files)
    }

    fn begin_stream(&self, device: &str, instance: u32) -> Result<(), VmError> {
        let streamed = Streamed::of(&self.vm.devices());
        let found = streamed.into_iter().find(|of| of.name == device && of.instance == instance);
        let Some(found) = found else {
            return Err(unfit(format!(
                "the primary copies device {device:?}, instance {instance}, which this machine has not or does not take \
                 (migrate=copy)"
            )));
        };
        self.state.lock().streams.push(found.clone());
        found
            .call("begin to load", |stream| stream.begin_load())
            .map_err(|error| VmError::new("a disk", error))
    }

    fn write_stream(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        let found = self.streamed(device, instance)?;
        found.call("write", |stream| stream.write(bytes)).map_err(|error| VmError::new("a disk", error))
    }

    fn check_stream(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        let found = self.streamed(device, instance)?;
        let check = |stream: &dyn DeviceStream| match stream.epochs() {
            Some(epochs) => epochs.check_epoch(bytes),
            None => Err(VmError::new("its stream", "it ends with the seeding")),
        };
        found.call("check an epoch", check).map_err(|error| VmError::new("a disk", error))
    }

    fn check(&self, machine: &Shape, devices: &[HeldDevice]) -> Result<(), VmError> {
        let (theirs, ours) = (&machine.configuration.machine_type, self.vm.machine_type());
        if *theirs != ours {
            return Err(unfit(format!("the primary's machine is {theirs:?}, and this one is {ours:?}")));
        }
        let record = devices.iter().find(|section| section.name == COMPATIBILITY_SECTION);
        if let Some((record, ours)) = record.zip(self.vm.compatibility()) {
            call("the compatibility record", || ours.load(record.version, unframed(record)?))?;
        }
        for section in devices.iter().filter(|section| is_device(&section.name)) {
            self.find(section)?;
            unframed(section)?;
        }
        for device in self.vm.devices() {
            let (name, instance) = (device.name(), device.instance());
            if !devices.iter().any(|section| section.name == name && section.instance == instance) {
                return Err(unfit(format!("the primary has no device {name:?}, instance {instance}")));
            }
            if device.stream().is_some() {
                self.streamed(&name, instance)?;
            }
        }
        Ok(())
    }

    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        let mut state = self.state.lock();
        caught("TargetVm::reset", || self.vm.reset()).map_err(|error| VmError::new("the machine", error))?;
        for (from, (to, is_here)) in state.places.iter().enumerate() {
            if !is_here {
                let filled = self.fill(guest, from, *to);
                filled.map_err(|error| VmError::new("memory of the checkpoint", error))?;
            }
        }
        let (is_running, unsaid) = self.load(guest.devices())?;
        // What the guest has made durable is durable here.
        in_parallel(&state.streams, "finish loading", |stream| stream.finish_load(&[]))
            .map_err(|error| VmError::new("disks of the checkpoint", error))?;
        (state.is_running, state.unsaid) = (is_running, Some(unsaid));
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        let mut state = self.state.lock();
        self.seize(&mut state)?;
        // Before it says anything new.
        if let Some(Output { position, bytes }) = state.unsaid.take() {
            (self.say_again)(position, &bytes);
        }
        if state.is_running {
            call("TargetVm::start", || self.vm.start())?;
        } else {
            call("TargetVm::take_over_paused", || self.vm.take_over_paused())?;
        }
        state.has_started = true;
        self.custody.set(Custody::Arrived);
        for hook in &state.seized {
            if let Err(error) = tried("Hook::announce", || hook.announce()) {
                tracing::warn!("{} was not announced: {error}", hook.name());
            }
        }
        Ok(())
    }

    fn discard(&self) {
        let reset = caught("TargetVm::reset", || self.vm.reset()).err().map(|error| error.to_string());
        let emptied = self.empty().err().map(|error| error.to_string());
        for why in reset.into_iter().chain(emptied) {
            tracing::warn!("a guest that never runs here was not discarded whole: {why}");
        }
        for error in self.end_streams() {
            tracing::warn!(%error, "a device's stream");
        }
        self.custody.set(Custody::NoGuest);
    }
}

/// The body of a device of Sterna's, which stands after its length.
fn unframed(section: &HeldDevice) -> Result<&[u8], VmError> {
    let length = section.body.first_chunk().map(|length| u32::from_be_bytes(*length) as usize);
    match length {
        Some(length) if length == section.body.len() - 4 => Ok(&section.body[4..]),
        _ => Err(unfit(format!("the state of device {:?} does not have its length before it", section.name))),
    }
}

/// Whether a section of that name is a device's state.
fn is_device(name: &str) -> bool {
    let summary = CheckpointSummary::SECTION_NAME;
    let others = [global_state::SECTION_NAME, Output::SECTION_NAME, COMPATIBILITY_SECTION, summary];
    !others.contains(&name) && EpochSection::device_of(name).is_none()
}

fn unfit(what: String) -> VmError {
    VmError::new("the standby's machine", format!("{what}: give both machines the same memory and devices"))
}
