//! Loads a guest image into RAM and sets the vCPUs to its entry.

mod flat;
mod linux;
mod long_mode;

use kvm_bindings::kvm_regs;

use crate::config::GuestImage;
use crate::error::VmmError;
use crate::hardware::Hardware;
use crate::layout;
use crate::vcpus::Vcpus;

const PAGE: u64 = 4096;

/// Loads `image` and prepares every vCPU for it. The vCPUs must be parked.
pub(super) fn load(hardware: &Hardware, vcpus: &Vcpus, image: &GuestImage) -> Result<(), VmmError> {
    match image {
        GuestImage::BootSector(code) => {
            hardware.vm.ram().block(0).write(layout::BOOT_SECTOR, code)?;
            start_real_mode(vcpus)
        }
        GuestImage::Flat64 { code, parameters } => flat::load(hardware, vcpus, code, parameters),
        GuestImage::Linux(image) => linux::load(hardware, vcpus, image),
    }
}

fn start_real_mode(vcpus: &Vcpus) -> Result<(), VmmError> {
    let fd = vcpus.fd(0);
    let mut sregs = fd.get_sregs().map_err(|error| VmmError::kvm("KVM_GET_SREGS", "vcpu 0", error))?;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss, &mut sregs.fs, &mut sregs.gs]
    {
        (segment.base, segment.selector) = (0, 0);
    }
    fd.set_sregs(&sregs).map_err(|error| VmmError::kvm("KVM_SET_SREGS", "vcpu 0", error))?;
    let regs = kvm_regs {
        rip: layout::BOOT_SECTOR,
        rsp: layout::BOOT_SECTOR,
        rdx: 0x80,
        rflags: 2,
        ..Default::default()
    };
    fd.set_regs(&regs).map_err(|error| VmmError::kvm("KVM_SET_REGS", "vcpu 0", error))
}
