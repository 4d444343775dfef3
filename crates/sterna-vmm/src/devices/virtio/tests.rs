//! Tests that load virtio states into devices without KVM.

use std::io;

use sterna_ram::{Backing, GuestRam, RamBlock};
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_DRIVER_OK;
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_DRIVER_FEATURES, VIRTIO_MMIO_STATUS};

use super::*;
use crate::config::MachineConfig;
use crate::hardware::console::Console;
use crate::hardware::memory::VmRam;
use crate::hardware::virtio::VirtioDevices;
use crate::layout::{Range, virtio_address};

fn devices() -> VirtioDevices {
    let ram = GuestRam::new(vec![RamBlock::new("ram", 0x1000, Backing::Memfd).unwrap()]).unwrap();
    let ram = Arc::new(VmRam::new(ram, vec![Range { block: 0, start: 0, len_bytes: 0x1000 }]).unwrap());
    let config = MachineConfig { entropy: true, ..MachineConfig::new("state") };
    VirtioDevices::new(&config, &ram, &[], &Console::at_gate(Box::new(io::sink()), None)).unwrap()
}

fn taken(devices: &VirtioDevices, body: &[u8]) -> Result<(), StateError> {
    load(&devices.all()[0], &mut Fields::parse(body)?)
}

/// If such a state were refused, a guest could make every migration fail.
#[test]
fn features_that_are_not_offered_are_taken_as_long_as_they_are_not_agreed_on() {
    let (devices, other) = (devices(), devices());
    let set = |register: u32, value: u32| {
        devices.write(virtio_address(0) + u64::from(register), &value.to_le_bytes());
    };
    set(VIRTIO_MMIO_DRIVER_FEATURES, u32::MAX);
    set(VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK);
    let body = save(&devices.all()[0]);

    taken(&other, &body).unwrap();

    assert_eq!(save(&other.all()[0]), body);
    let mut state = devices.all()[0].state();
    state.status |= VIRTIO_CONFIG_S_FEATURES_OK;
    devices.all()[0].set_state(&state).unwrap();
    let refused = taken(&other, &save(&devices.all()[0]));
    assert!(matches!(refused, Err(StateError::Mismatch { .. })), "{refused:?}");
}
