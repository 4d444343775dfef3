//! The hardware of a machine, except its vCPUs.

pub(crate) mod acpi;
pub(crate) mod bus;
pub(crate) mod caps;
pub(crate) mod console;
pub(crate) mod cpuid;
pub(crate) mod external;
pub(crate) mod memory;
pub(crate) mod virtio;
pub(crate) mod vm;

use std::sync::Arc;

use kvm_bindings::kvm_cpuid_entry2;

use bus::Bus;
use caps::Caps;
use external::ExternalDevices;
use virtio::VirtioDevices;
use vm::KvmVm;

/// All hardware of one machine, fixed when the machine is built.
pub(crate) struct Hardware {
    pub(crate) vm: Arc<KvmVm>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) caps: Caps,
    /// The TSC frequency that guests see, in kHz.
    pub(crate) tsc_khz: u32,
    /// The CPUID entries that are equal for all vCPUs.
    pub(crate) cpuid: Vec<kvm_cpuid_entry2>,
    /// MSRs that this kernel knows and that are part of the guest's state.
    pub(crate) msrs: Vec<u32>,
    pub(crate) virtio: Arc<VirtioDevices>,
    pub(crate) external: ExternalDevices,
}
