//! What the guest runs on besides its vCPUs.

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

/// All of it, as one machine has it from its making on.
pub(crate) struct Hardware {
    pub(crate) vm: Arc<KvmVm>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) caps: Caps,
    /// The frequency that guests see.
    pub(crate) tsc_khz: u32,
    /// The entries that all vCPUs have in common.
    pub(crate) cpuid: Vec<kvm_cpuid_entry2>,
    /// MSRs that this kernel knows and that are the guest's state.
    pub(crate) msrs: Vec<u32>,
    pub(crate) virtio: Arc<VirtioDevices>,
    pub(crate) external: ExternalDevices,
}
