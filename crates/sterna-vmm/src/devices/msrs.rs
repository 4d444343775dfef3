//! Selects the MSRs that are part of the guest's state. These are the MSRs that the kernel lists, and those
//! that some kernel versions store without listing them (MTRRs, PAT, machine check).
//!
//! The TSC and the LAPIC's deadline are not included. They depend on time and are saved separately
//! ([`super::tsc`]).

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use super::codec::{StateError, Tag, kernel, length};
use crate::kvm;

pub(crate) const TSC: u32 = 0x10;
pub(crate) const TSC_DEADLINE: u32 = 0x6e0;

/// Length of one MSR in a body: index u32, value u64.
const ENTRY_BYTES: usize = 12;

/// The MSRs that this vCPU's kernel can read. The kernel stores nothing for the others, so they are dropped.
pub(crate) fn known(fd: &VcpuFd, listed: &[u32]) -> Vec<u32> {
    let mtrrs = (0x200..0x210).chain([0x250, 0x258, 0x259]).chain(0x268..0x270).chain([0x277, 0x2ff]);
    let machine_check = [0x17a, 0x17b].into_iter().chain(0x400..0x400 + 4 * 32);
    let mut indices: Vec<u32> = listed.iter().copied().chain(mtrrs).chain(machine_check).collect();
    indices.sort_unstable();
    indices.dedup();
    indices.retain(|index| {
        let kept = !matches!(*index, TSC | TSC_DEADLINE) && kvm::read_msr(fd, *index).is_some();
        if !kept {
            tracing::debug!("MSR {index:#x} is not saved: the kernel cannot read it");
        }
        kept
    });
    indices
}

/// Reads the MSRs named by `indices`.
pub(crate) fn save(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<u8>, StateError> {
    let mut bytes = Vec::with_capacity(indices.len() * ENTRY_BYTES);
    for batch in indices.chunks(KVM_MAX_MSR_ENTRIES) {
        let mut rest = batch;
        while !rest.is_empty() {
            let entries: Vec<_> =
                rest.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
            let mut msrs = Msrs::from_entries(&entries).unwrap_or_else(|_| unreachable!("a batch fits"));
            let count = fd.get_msrs(&mut msrs).map_err(kernel("KVM_GET_MSRS"))?;
            for entry in &msrs.as_slice()[..count] {
                bytes.extend(entry.index.to_le_bytes());
                bytes.extend(entry.data.to_le_bytes());
            }
            if count < rest.len() {
                // The MSR was readable when the vCPU was created, and is not now: it depends on a feature
                // that the guest switched off.
                tracing::debug!("MSR {:#x} is not saved: the kernel cannot read it now", rest[count]);
            }
            rest = &rest[(count + 1).min(rest.len())..];
        }
    }
    Ok(bytes)
}

/// Sets the MSRs that [`save`] read. Fails if this kernel refuses an MSR, unless the MSR already has the
/// value.
pub(crate) fn load(fd: &VcpuFd, tag: Tag, bytes: &[u8], ours: &[u32]) -> Result<(), StateError> {
    if !bytes.len().is_multiple_of(ENTRY_BYTES) || bytes.len() > 4 * KVM_MAX_MSR_ENTRIES * ENTRY_BYTES {
        return Err(length(tag, bytes.len(), "a multiple of 12"));
    }
    let mut entries: Vec<kvm_msr_entry> = Vec::new();
    for chunk in bytes.chunks_exact(ENTRY_BYTES) {
        let (index, data) = chunk.split_at(4);
        let index = u32::from_le_bytes(index.try_into().unwrap_or_default());
        let data = u64::from_le_bytes(data.try_into().unwrap_or_default());
        if matches!(index, TSC | TSC_DEADLINE) || entries.iter().any(|known| known.index == index) {
            return Err(StateError::value(
                tag,
                format!("MSR {index:#x} is not one of the saved MSRs, or occurs twice"),
            ));
        }
        if ours.binary_search(&index).is_ok() {
            entries.push(kvm_msr_entry { index, data, ..Default::default() });
        } else if data != 0 {
            return Err(StateError::value(
                tag,
                format!("MSR {index:#x} = {data:#x} is unknown to this kernel"),
            ));
        }
    }
    let mut rest = entries.as_slice();
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(KVM_MAX_MSR_ENTRIES)];
        let msrs = Msrs::from_entries(batch).unwrap_or_else(|_| unreachable!("a batch fits"));
        let count = fd.set_msrs(&msrs).map_err(kernel("KVM_SET_MSRS"))?;
        let Some(refused) = batch.get(count) else {
            rest = &rest[count..];
            continue;
        };
        if kvm::read_msr(fd, refused.index) != Some(refused.data) {
            return Err(StateError::value(
                tag,
                format!("MSR {:#x} = {:#x} is refused by this kernel", refused.index, refused.data),
            ));
        }
        rest = &rest[count + 1..];
    }
    Ok(())
}
