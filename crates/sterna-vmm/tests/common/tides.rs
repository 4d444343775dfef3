//! Machines that run a tide, a guest whose memory shows whether a copy is consistent.

use std::sync::Arc;

use sterna_guests::tide::{RamRange, Tide, TideConfig};
use sterna_vmm::{GuestImage, KvmMachine, MachineConfig, VmmError};

pub const RAM: u64 = 64 << 20;

pub fn tide(config: TideConfig) -> Tide {
    let ranges: Vec<RamRange> = sterna_vmm::layout::ranges(RAM)
        .iter()
        .map(|range| RamRange { block: range.block, guest_address: range.start, len_bytes: range.len_bytes })
        .collect();
    Tide::new(config, &ranges).unwrap()
}

/// A stopped machine with this tide, or a machine that waits for the tide.
pub fn machine(tide: &Tide, dirty_ring_size: Option<u32>, incoming: bool) -> Arc<KvmMachine> {
    let config = |dirty_ring_size| MachineConfig {
        vcpus: tide.config().vcpus as u8,
        ram_bytes: RAM,
        dirty_ring_size,
        guest: Some(GuestImage::Flat64 { code: tide.image(), parameters: vec![] }),
        incoming,
        ..MachineConfig::new("tide")
    };
    let machine = match KvmMachine::new(config(dirty_ring_size)) {
        // 256 entries are too few for a processor that logs pages in hardware.
        Err(VmmError::Dirty(_)) if dirty_ring_size == Some(256) => {
            KvmMachine::new(config(Some(1024))).unwrap()
        }
        machine => machine.unwrap(),
    };
    if !incoming {
        tide.prepare(machine.ram()).unwrap();
    }
    machine
}

/// Number of steps of each vCPU so far.
pub fn steps(tide: &Tide, machine: &KvmMachine) -> Vec<u64> {
    tide.progress(machine.ram()).unwrap().steps
}

/// Checks that the memory of the paused guest is one consistent cut.
pub fn assert_consistent(tide: &Tide, machine: &KvmMachine) {
    let verdict = tide.check(machine.ram()).unwrap();
    assert!(verdict.is_consistent(), "{verdict}");
}
