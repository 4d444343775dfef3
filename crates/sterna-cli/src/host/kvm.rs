//! The reference KVM machine, and the guests that it can boot.

use std::path::PathBuf;
use std::sync::Arc;

use sterna::VmError;
use sterna_guests::tide::Tide;
use sterna_guests::tide::boot::boot_sector;
use sterna_qmp::{Announcing, BlockDevice};
use sterna_standby::EpochGate;
use sterna_vmm::{
    AnnounceOptions, DiskOptions, EndReason, GuestImage, KvmMachine, LinuxImage, MachineConfig,
};

use super::build::cannot_build;
use super::config::Config;
use super::machine::{Guest, GuestEnd, Machine, Parts};
use super::protection::Console;
use super::tide::{BootTide, TideGuest};
use crate::exit::Stop;

/// The program that boots in the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestChoice {
    /// The guest that writes its memory by rules.
    Tide,
    /// The same guest as a boot sector.
    BootTide,
    /// A 512-byte boot sector, in real mode.
    BootSector(PathBuf),
    /// A file with flat 64-bit code.
    Flat(PathBuf),
    /// A Linux kernel, booted by the 64-bit boot protocol.
    Linux(LinuxImage),
}

impl std::str::FromStr for GuestChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "tide" => Ok(Self::Tide),
            None if text == "boot-tide" => Ok(Self::BootTide),
            Some(("boot-sector", file)) if !file.is_empty() => Ok(Self::BootSector(file.into())),
            Some(("flat", file)) if !file.is_empty() => Ok(Self::Flat(file.into())),
            _ => Err(format!("unknown guest `{text}`: use tide, boot-tide, boot-sector:FILE or flat:FILE")),
        }
    }
}

/// Builds the machine; a guest that boots here is still paused.
pub fn kvm_machine(config: Config, choice: &GuestChoice, console: Console) -> Result<Parts, Stop> {
    let tide = match choice {
        GuestChoice::Tide => Some(TideGuest::plan(&config).map_err(|why| cannot_build("KVM", why))?),
        _ => None,
    };
    let Config { machine, load } = config;
    let is_booted = !machine.incoming;
    let guest = if is_booted { Some(image(choice, tide.as_ref())?) } else { None };
    let machine = KvmMachine::new(MachineConfig {
        guest,
        serial_gate: Some(console.gate()),
        serial: Box::new(console),
        ..machine
    })
    .map_err(|error| cannot_build("KVM", error))?;
    let guest: Option<Arc<dyn Guest>> = match (tide, choice) {
        (Some(tide), _) => {
            let guest = TideGuest::new(tide, &machine, is_booted.then_some(load.rate));
            Some(Arc::new(guest.map_err(|why| cannot_build("KVM", why))?))
        }
        (None, GuestChoice::BootTide) => Some(Arc::new(BootTide::new(&machine))),
        _ => None,
    };
    Ok(Parts { machine, guest })
}

fn image(choice: &GuestChoice, tide: Option<&Tide>) -> Result<GuestImage, Stop> {
    let read = |file: &PathBuf| {
        std::fs::read(file).map_err(|error| {
            Stop::unreadable(format!(
                "cannot read the guest {}: {error}. Give a file with the guest's code.",
                file.display()
            ))
        })
    };
    let flat = |code| GuestImage::Flat64 { code, parameters: Vec::new() };
    Ok(match (choice, tide) {
        (GuestChoice::BootSector(file), _) => GuestImage::BootSector(read(file)?),
        (GuestChoice::Flat(file), _) => flat(read(file)?),
        (GuestChoice::Linux(image), _) => GuestImage::Linux(image.clone()),
        (_, Some(tide)) => flat(tide.image()),
        (_, None) => GuestImage::BootSector(boot_sector().to_vec()),
    })
}

impl Machine for KvmMachine {
    fn pause(&self) -> Result<(), VmError> {
        KvmMachine::pause(self);
        Ok(())
    }
    fn cont(&self) -> Result<(), VmError> {
        Ok(KvmMachine::cont(self)?)
    }
    fn end(&self) {
        KvmMachine::quit(self);
    }
    fn vcpu_threads(&self) -> Vec<i32> {
        KvmMachine::vcpu_threads(self)
    }
    fn ended(&self) -> Option<GuestEnd> {
        KvmMachine::ended(self).map(|reason| {
            let cause = match reason {
                EndReason::PoweredOff => GuestEnd::POWERED_OFF,
                EndReason::Reset => "guest-reset",
                EndReason::Panicked => "guest-panic",
                _ => "host-error",
            };
            GuestEnd { why: reason.to_string(), cause }
        })
    }
    fn has_guest(&self) -> bool {
        KvmMachine::has_guest(self)
    }
    fn name(&self) -> String {
        KvmMachine::name(self).to_owned()
    }
    fn type_in(&self, bytes: &[u8]) -> usize {
        KvmMachine::type_in(self, bytes)
    }
    fn packet_gate(&self) -> Option<Arc<dyn EpochGate>> {
        KvmMachine::packet_gate(self)
    }
    fn uses_kvm(&self) -> bool {
        true
    }
    fn disks(&self) -> Vec<BlockDevice> {
        let device = |(disk, len_bytes): (DiskOptions, u64)| BlockDevice {
            file: disk.path.display().to_string(),
            format: disk.format.as_str(),
            len_bytes,
            is_read_only: disk.is_read_only,
            backing_file: disk.backing.map(|(file, _)| file.display().to_string()),
        };
        KvmMachine::disks(self).into_iter().map(device).collect()
    }
    fn resize_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmError> {
        Ok(self.grow_disk(index, len_bytes)?)
    }
    fn set_announcing(&self, announcing: Announcing) {
        KvmMachine::set_announcing(self, announce_options(announcing));
    }
    fn announce(&self, announcing: Announcing, cards: &[usize], id: &str) -> Result<(), VmError> {
        Ok(KvmMachine::announce(self, announce_options(announcing), cards, id)?)
    }
}

fn announce_options(Announcing { initial, max, rounds, step }: Announcing) -> AnnounceOptions {
    AnnounceOptions { initial, max, rounds, step }
}

/// Whether this host can run it: /dev/kvm exists and can be opened. The error tells the reason if not.
pub fn kvm_usable() -> Result<(), String> {
    let path = "/dev/kvm";
    match std::fs::OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{path}: {error}")),
    }
}
