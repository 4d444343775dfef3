//! Where a standby starts the guest: in an image, or in a VM that waits for it.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna::error::VmError;
use sterna_drive::waiting::WaitingVm;
use sterna_image::Shape;
use sterna_standby::{HeldCheckpoint, HeldDevice, HeldGuest, ImageSurvivor, StandbyDisk, Survivor};

/// The checkpoint that was made ready, for the output.
#[derive(Debug, Clone)]
pub struct Ready {
    pub checkpoint: HeldCheckpoint,
    pub machine: String,
    pub ram_bytes: u64,
}

/// The guest's place after a takeover.
pub struct Place {
    image: ImageSurvivor,
    vm: Option<WaitingVm>,
    disks: Vec<StandbyDisk>,
    /// The operator wants an image although a VM waits.
    wants_image: AtomicBool,
    /// The guest that was made ready last. An image is made from it if the operator requests one later.
    guest: Mutex<Option<HeldGuest>>,
    has_image: AtomicBool,
}

impl Place {
    pub fn new(image: ImageSurvivor, vm: Option<WaitingVm>, disks: Vec<StandbyDisk>) -> Self {
        let (wants_image, guest, has_image) = Default::default();
        Self { image, vm, disks, wants_image, guest, has_image }
    }

    /// The VM, if it is to run the guest.
    pub fn vm(&self) -> Option<&WaitingVm> {
        self.vm.as_ref().filter(|_| !self.wants_image.load(Ordering::Acquire))
    }

    /// Sets whether the guest becomes an image although a VM waits. Returns the previous setting.
    pub fn want_image(&self, is_wanted: bool) -> bool {
        self.wants_image.swap(is_wanted, Ordering::AcqRel)
    }

    /// The guest that was made ready last.
    pub fn ready(&self) -> Option<Ready> {
        self.guest.lock().as_ref().map(|guest| Ready {
            checkpoint: guest.checkpoint(),
            machine: guest.shape().configuration.machine_type.clone(),
            ram_bytes: guest.shape().ram_bytes(),
        })
    }

    fn make_image(&self, guest: &HeldGuest) -> Result<(), VmError> {
        if let Some(vm) = &self.vm {
            vm.give_up()?;
        }
        self.image.prepare(guest)?;
        self.has_image.store(true, Ordering::Release);
        Ok(())
    }
}

impl Survivor for Place {
    fn memory(&self, blocks: &[(&str, u64)]) -> Result<Vec<Option<File>>, VmError> {
        match &self.vm {
            Some(vm) => vm.memory(blocks),
            None => self.image.memory(blocks),
        }
    }

    fn disks(&self) -> Vec<StandbyDisk> {
        self.disks.clone()
    }

    fn check(&self, machine: &Shape, devices: &[HeldDevice]) -> Result<(), VmError> {
        match &self.vm {
            Some(vm) => vm.check(machine, devices),
            None => self.image.check(machine, devices),
        }
    }

    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        *self.guest.lock() = Some(guest.clone());
        match self.vm() {
            Some(vm) => vm.prepare(guest),
            None => self.make_image(guest),
        }
    }

    fn start(&self) -> Result<(), VmError> {
        if let Some(vm) = self.vm() {
            return vm.start();
        }
        // The VM could not start the guest, and the operator has requested an image since then.
        if !self.has_image.load(Ordering::Acquire) {
            let guest = self.guest.lock().clone();
            let guest = guest.ok_or_else(|| VmError::new("the image", "no checkpoint was prepared"))?;
            self.make_image(&guest)?;
        }
        self.image.start()
    }

    fn discard(&self) {
        *self.guest.lock() = None;
        self.image.discard();
        if let Some(vm) = &self.vm {
            vm.discard();
        }
    }
}
