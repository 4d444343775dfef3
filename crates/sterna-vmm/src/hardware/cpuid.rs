//! Builds the guest's CPUID from KVM's supported features. The topology is fixed, and values that differ by
//! host CPU are removed.
//!
//! The topology is one socket of n cores, one thread per core. Nested virtualisation is hidden, because its
//! state does not migrate.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm, VcpuFd};

use crate::error::VmmError;

const INDEXED: u32 = kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;

/// The entries that are equal for all vCPUs. [`set`] adds each vCPU's APIC id.
pub(crate) fn template(kvm: &Kvm, vcpus: usize) -> Result<Vec<kvm_cpuid_entry2>, VmmError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| VmmError::kvm("KVM_GET_SUPPORTED_CPUID", "/dev/kvm", error))?;
    let deadline_timer = kvm.check_extension(Cap::TscDeadlineTimer);
    let mut entries: Vec<_> = supported
        .as_slice()
        .iter()
        .filter(|entry| !matches!(entry.function, 0xb | 0x1f | 0x8000_0026))
        .copied()
        .collect();
    for entry in &mut entries {
        match entry.function {
            1 => {
                entry.ebx = entry.ebx & 0x0000_ffff | (vcpus as u32) << 16;
                entry.ecx &= !(1 << 5); // no VMX
                entry.ecx |= 1 << 31; // hypervisor
                if deadline_timer {
                    entry.ecx |= 1 << 24;
                }
                entry.edx = entry.edx & !(1 << 28) | u32::from(vcpus > 1) << 28;
            }
            // Caches of levels 1 and 2 are shared by one core, those of level 3 by all cores; n cores per
            // socket.
            4 if entry.eax & 0x1f != 0 => {
                let sharing = if entry.eax >> 5 & 7 >= 3 { vcpus as u32 - 1 } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14 | (vcpus as u32 - 1) << 26;
            }
            0x8000_0001 => entry.ecx &= !(1 << 2), // no SVM
            0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | (vcpus as u32 - 1),
            0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (0, 0, 0),
            _ => {}
        }
    }
    if entries.iter().any(|entry| entry.function == 0 && entry.eax >= 0xb) {
        entries.extend(topology(vcpus));
    }
    entries.sort_by_key(|entry| (entry.function, entry.index));
    Ok(entries)
}

/// Sets the CPUID of a new vCPU.
pub(crate) fn set(fd: &VcpuFd, template: &[kvm_cpuid_entry2], index: usize) -> Result<(), VmmError> {
    let id = index as u32;
    let mut entries = template.to_vec();
    for entry in &mut entries {
        match entry.function {
            1 => entry.ebx |= id << 24,
            0xb => entry.edx = id,
            0x8000_001e => (entry.eax, entry.ebx) = (id, id),
            _ => {}
        }
    }
    let cpuid = CpuId::from_entries(&entries).map_err(|error| VmmError::Config {
        what: "cpuid",
        why: format!("{} entries: {error:?}", entries.len()),
    })?;
    fd.set_cpuid2(&cpuid).map_err(|error| VmmError::kvm("KVM_SET_CPUID2", format!("vcpu {index}"), error))
}

/// Leaf 0xb: one thread per core, n cores per socket.
fn topology(vcpus: usize) -> [kvm_cpuid_entry2; 3] {
    let shift = usize::BITS - (vcpus - 1).leading_zeros();
    let level = |index, eax, ebx, kind: u32| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: INDEXED,
        eax,
        ebx,
        ecx: index | kind << 8,
        ..Default::default()
    };
    [level(0, 0, 1, 1), level(1, shift, vcpus as u32, 2), level(2, 0, 0, 0)]
}
