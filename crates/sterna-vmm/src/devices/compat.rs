//! Section `sterna/compatibility`, version 1: the properties that both sides must share, sent before any RAM.
//!
//! | field | content |
//! | --- | --- |
//! | `cpus` | number of vCPUs, u64 |
//! | `tkhz` | TSC frequency in kHz, u64; this side's must be within 250 ppm, or scalable |
//! | `rams` | each piece of RAM: guest-physical address u64, length u64 |
//! | `virt` | only with virtio devices. For each device: how it moves u8 (0 no disk, 1 shared, 2 copied, 3 not at all, 4 and 5 vhost-user with and without a state of its own), kind u32, features u64, number of queues u16, length of the configuration space u16, configuration space |
//! | `cpid` | every CPUID entry without the vCPU's own ids: function, index, flags, eax, ebx, ecx, edx, u32 each |
//!
//! *Compatibility rule*: the values are equal, with two exceptions. A virtio device of the destination may
//! offer more features. A vhost-user device that is handed over with the guest (`mode` `cpr-transfer`) has
//! the source's properties, unless this side's options contradict them. The guest has already read CPUID.
//! Therefore a destination with more or fewer bits is refused, and the error names the leaf, the register and
//! its bits.

use std::sync::Arc;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use sterna::{Device, VmError};

use super::codec::{Body, Fields, StateError, length};
use super::context::Context;
use super::cpu::check_khz;
use super::virtio;

const RANGE_BYTES: usize = 16;
const ENTRY_BYTES: usize = 28;

pub(crate) struct Compatibility(pub(crate) Arc<Context>);

impl Device for Compatibility {
    fn name(&self) -> String {
        "sterna/compatibility".into()
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let mut body = Body::default();
        body.u64(*b"cpus", self.0.vcpus.count() as u64);
        body.u64(*b"tkhz", self.0.hardware.tsc_khz.into());
        body.bytes(*b"rams", &ranges(&self.0));
        if !self.0.hardware.virtio.all().is_empty() {
            body.bytes(*b"virt", &virtio::record::identities(&self.0));
        }
        body.bytes(*b"cpid", &self.0.hardware.cpuid.iter().flat_map(entry_bytes).collect::<Vec<_>>());
        Ok(body.finish())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let compare = || {
            let mut fields = Fields::parse(body)?;
            compare(&self.0, &mut fields)?;
            fields.finish()
        };
        compare().map_err(|error: StateError| VmError::new("compatibility with the source", error))
    }

    fn body_limit(&self) -> usize {
        64 << 10
    }
}

fn compare(context: &Context, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let (theirs, ours) = (fields.u64(*b"cpus")?, context.vcpus.count() as u64);
    if theirs != ours {
        return Err(mismatch("number of vCPUs", theirs, ours));
    }
    check_khz(context, fields.u64(*b"tkhz")?)?;
    let theirs = fields.bytes(*b"rams")?;
    if !theirs.len().is_multiple_of(RANGE_BYTES) {
        return Err(length(*b"rams", theirs.len(), "a multiple of 16"));
    }
    if theirs != ranges(context) {
        let ours = ranges(context);
        return Err(mismatch("RAM layout (start+length)", show_ranges(theirs), show_ranges(&ours)));
    }
    virtio::record::compare(context, fields.optional(*b"virt").unwrap_or_default())?;
    let bytes = fields.bytes(*b"cpid")?;
    if !bytes.len().is_multiple_of(ENTRY_BYTES) || bytes.len() > KVM_MAX_CPUID_ENTRIES * ENTRY_BYTES {
        return Err(length(*b"cpid", bytes.len(), "a multiple of 28, at most 256 entries"));
    }
    compare_cpuid(&bytes.chunks_exact(ENTRY_BYTES).map(entry_of).collect::<Vec<_>>(), &context.hardware.cpuid)
}

/// Reports the first difference between two CPUID tables, by leaf.
fn compare_cpuid(theirs: &[kvm_cpuid_entry2], ours: &[kvm_cpuid_entry2]) -> Result<(), StateError> {
    let find = |table: &[kvm_cpuid_entry2], key: &kvm_cpuid_entry2| {
        table.iter().find(|entry| (entry.function, entry.index) == (key.function, key.index)).copied()
    };
    for key in theirs.iter().chain(ours) {
        let leaf = format!("CPUID leaf {:#x} subleaf {:#x}", key.function, key.index);
        let (Some(there), Some(here)) = (find(theirs, key), find(ours, key)) else {
            let says = |known| if known { "it" } else { "none" };
            return Err(mismatch(leaf, says(find(theirs, key).is_some()), says(find(ours, key).is_some())));
        };
        let registers = [
            ("eax", there.eax, here.eax),
            ("ebx", there.ebx, here.ebx),
            ("ecx", there.ecx, here.ecx),
            ("edx", there.edx, here.edx),
            ("flags", there.flags, here.flags),
        ];
        if let Some((register, theirs, ours)) = registers.into_iter().find(|(_, theirs, ours)| theirs != ours)
        {
            let bits: Vec<_> =
                (0..32).filter(|bit| (theirs ^ ours) >> bit & 1 == 1).map(|bit| bit.to_string()).collect();
            let what = format!("{leaf} {register}, bits {}", bits.join(" "));
            return Err(mismatch(what, format!("{theirs:#010x}"), format!("{ours:#010x}")));
        }
    }
    if theirs.len() != ours.len() {
        return Err(mismatch("number of CPUID entries", theirs.len(), ours.len()));
    }
    Ok(())
}

fn ranges(context: &Context) -> Vec<u8> {
    context
        .hardware
        .vm
        .ranges()
        .iter()
        .flat_map(|range| [range.start, range.len_bytes])
        .flat_map(u64::to_le_bytes)
        .collect()
}

fn show_ranges(bytes: &[u8]) -> String {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let show = |range: &[u8]| format!("{:#x}+{:#x}", word(&range[..8]), word(&range[8..]));
    bytes.chunks_exact(RANGE_BYTES).map(show).collect::<Vec<_>>().join(", ")
}

fn entry_bytes(entry: &kvm_cpuid_entry2) -> Vec<u8> {
    [entry.function, entry.index, entry.flags, entry.eax, entry.ebx, entry.ecx, entry.edx]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect()
}

fn entry_of(bytes: &[u8]) -> kvm_cpuid_entry2 {
    let word = |at: usize| u32::from_le_bytes(bytes[at * 4..at * 4 + 4].try_into().unwrap_or_default());
    kvm_cpuid_entry2 {
        function: word(0),
        index: word(1),
        flags: word(2),
        eax: word(3),
        ebx: word(4),
        ecx: word(5),
        edx: word(6),
        ..Default::default()
    }
}

fn mismatch(what: impl Into<String>, theirs: impl ToString, ours: impl ToString) -> StateError {
    StateError::Mismatch { what: what.into(), theirs: theirs.to_string(), ours: ours.to_string() }
}
