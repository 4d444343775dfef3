//! Continues a guest, after a takeover, in a VM of this process.

use std::fs::File;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::StartError;
use sterna::device_stream::DeviceStream;
use sterna::error::{MigrationError, VmError};
use sterna::hooks::Hook;
use sterna::internals::RamSink;
use sterna::internals::emptied;
use sterna::internals::streams::{Streamed, failed_in_parallel, in_parallel};
use sterna::internals::threads::{call, caught, tried};
use sterna::vm::{Device, TargetVm};
use sterna_image::Shape;
use sterna_ram::{Custody, CustodyClaim, GuestRam, PAGE_SIZE};
use sterna_wire::extension::COMPATIBILITY_SECTION;
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::replica::{CheckpointSummary, EpochSection, Output};

use super::held::{HeldDevice, HeldGuest};
use super::survivor::Survivor;

/// Starts the guest, at takeover, in a VM that waits for it.
///
/// If the VM's memory is a shared file, checkpoints are placed there from the beginning, so a takeover copies no
/// memory. Other memory is filled when the takeover is prepared. From [`VmSurvivor::new`] on no other guest may
/// arrive in the VM, until the protection ends.
pub struct VmSurvivor {
    vm: Arc<dyn TargetVm>,
    ram: GuestRam,
    custody: CustodyClaim,
    say_again: SayAgain,
    state: Mutex<State>,
}

/// Repeats output that the primary may not have released. Arguments: number of bytes output before, and the bytes.
type SayAgain = Box<dyn Fn(u64, &[u8]) + Send + Sync>;

#[derive(Default)]
struct State {
    /// For each block of the primary's machine: its index here, and whether its pages are already in place.
    places: Vec<(usize, bool)>,
    /// Whether the guest must run, or stay paused.
    is_running: bool,
    /// Output to repeat. Taken when it is repeated, even if the start then fails.
    unsaid: Option<Output>,
    seized: Vec<Arc<dyn Hook>>,
    /// Devices whose streams the primary sends.
    streams: Vec<Streamed>,
    has_started: bool,
}

impl VmSurvivor {
    /// Claims the custody of `vm` for the protected guest.
    ///
    /// # Errors
    /// [`StartError::Guest`] if the VM has a guest, or another one is arriving.
    pub fn new(vm: Arc<dyn TargetVm>) -> Result<Self, StartError> {
        let ram = vm.ram();
        let arriving = Custody::Arriving { is_free: false };
        let custody = ram.claim_custody(arriving, Custody::may_arrive).map_err(StartError::Guest)?;
        Ok(Self { vm, ram, custody, say_again: Box::new(|_, _| {}), state: Mutex::default() })
    }

    /// Sets the callback that repeats output when the guest starts. The checkpoint contains this output, and the
    /// primary may not have released it. The callback also gets the number of bytes output before it
    /// ([`ByteGate::say_again`](super::ByteGate::say_again)).
    #[must_use]
    pub fn saying_again(self, say: impl Fn(u64, &[u8]) + Send + Sync + 'static) -> Self {
        Self { say_again: Box::new(say), ..self }
    }

    /// Whether the guest was started here, or is paused here as it was paused at the primary.
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

    /// The block's file, if another mapping of it is allowed.
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

    /// Makes memory read as zero, as at the beginning.
    fn empty(&self) -> Result<(), VmError> {
        let blocks = self.ram.blocks().len();
        let may_hold = (0..blocks).map(|block| self.vm.may_hold_bytes(block)).collect();
        let sink = RamSink::new(&self.ram, may_hold).map_err(|error| VmError::new("memory", error))?;
        let left = emptied(&sink, &self.ram);
        if left.is_empty() { Ok(()) } else { Err(VmError::new("memory", left.join("; "))) }
    }

    /// Copies a block of the held checkpoint into the VM's memory.
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

    /// Loads the devices. Returns whether the guest must run, and its output to repeat.
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

    /// Finds a device whose stream has begun.
    fn streamed(&self, device: &str, instance: u32) -> Result<Streamed, VmError> {
        let found =
            self.state.lock().streams.iter().find(|of| of.name == device && of.instance == instance).cloned();
        found.ok_or_else(|| {
            unfit(format!("the stream of device {device:?}, instance {instance}, never began"))
        })
    }

    /// Ends the loading of all streams.
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
        // Streams of an earlier guest that did not arrive completely.
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
        // Now, because disk content that the guest made durable must be durable here.
        in_parallel(&state.streams, "finish loading", |stream| stream.finish_load(&[]))
            .map_err(|error| VmError::new("disks of the checkpoint", error))?;
        (state.is_running, state.unsaid) = (is_running, Some(unsaid));
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        let mut state = self.state.lock();
        self.seize(&mut state)?;
        // Repeated first, so that it precedes new output.
        if let Some(Output { position, bytes }) = state.unsaid.take() {
            (self.say_again)(position, &bytes);
        }
        if state.is_running {
            call("TargetVm::prepare_start", || self.vm.prepare_start())?;
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

/// The body of a Sterna device's section, without the length in front.
fn unframed(section: &HeldDevice) -> Result<&[u8], VmError> {
    let length = section.body.first_chunk().map(|length| u32::from_be_bytes(*length) as usize);
    match length {
        Some(length) if length == section.body.len() - 4 => Ok(&section.body[4..]),
        _ => Err(unfit(format!("the state of device {:?} does not have its length before it", section.name))),
    }
}

/// Whether the section contains a device's state.
fn is_device(name: &str) -> bool {
    let summary = CheckpointSummary::SECTION_NAME;
    let others = [global_state::SECTION_NAME, Output::SECTION_NAME, COMPATIBILITY_SECTION, summary];
    !others.contains(&name) && EpochSection::device_of(name).is_none()
}

fn unfit(what: String) -> VmError {
    VmError::new("the standby's machine", format!("{what}: give both machines the same memory and devices"))
}
