//! Tests of drivers and states that break rules, on a device without KVM.

use std::sync::Arc;

use sterna_ram::{Backing, GuestRam, RamBlock};
use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK};
use virtio_bindings::virtio_mmio::*;
use vm_memory::{Bytes, GuestAddress};

use super::Transport;
use crate::hardware::memory::VmRam;
use crate::hardware::virtio::entropy::Entropy;
use crate::layout::Range;

const RAM_BYTES: u64 = 0x4000;
/// Address of the used ring: its flags, then the number of returned chains.
const USED: u32 = 0x2000;

fn device() -> (Transport, Arc<VmRam>) {
    let ram = GuestRam::new(vec![RamBlock::new("ram", RAM_BYTES, Backing::Memfd).unwrap()]).unwrap();
    let ram = Arc::new(VmRam::new(ram, vec![Range { block: 0, start: 0, len_bytes: RAM_BYTES }]).unwrap());
    let device = Transport::new(&ram, "entropy".to_owned(), Box::new(Entropy::new().unwrap())).unwrap();
    (device, ram)
}

fn set(device: &Transport, register: u32, value: u32) {
    device.write(register.into(), &value.to_le_bytes());
}

fn choose(device: &Transport, features: u64) {
    for select in [0, 1] {
        set(device, VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
        set(device, VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * select)) as u32);
    }
}

/// Sets up a queue of one entry with a request for 16 bytes.
fn ask(device: &Transport, ram: &VmRam) {
    let put = |at, bytes: &[u8]| ram.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    put(0, &[&0x3000u64.to_le_bytes()[..], &16u32.to_le_bytes(), &2u16.to_le_bytes()].concat());
    put(0x1000, &[0, 0, 1, 0, 0, 0]);
    set(device, VIRTIO_MMIO_QUEUE_NUM, 1);
    set(device, VIRTIO_MMIO_QUEUE_AVAIL_LOW, 0x1000);
    set(device, VIRTIO_MMIO_QUEUE_USED_LOW, USED);
    set(device, VIRTIO_MMIO_QUEUE_READY, 1);
}

/// Pauses the device and returns the number of chains that it has returned.
fn returned(device: &Transport, ram: &VmRam) -> u16 {
    device.pause();
    ram.memory().read_obj(GuestAddress(u64::from(USED) + 2)).unwrap()
}

#[test]
fn device_works_once_features_are_agreed_on_and_the_driver_is_ready_in_any_order() {
    let bits = [VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_DRIVER_OK];
    for [first, second] in [bits, [bits[1], bits[0]]] {
        let (device, ram) = device();
        choose(&device, device.identity.features());
        ask(&device, &ram);
        set(&device, VIRTIO_MMIO_STATUS, first);
        device.run();
        assert_eq!(returned(&device, &ram), 0, "it works with {first}");

        set(&device, VIRTIO_MMIO_STATUS, second);

        assert_eq!(returned(&device, &ram), 1, "{first}, then {second}");
    }
}

#[test]
fn device_whose_driver_chose_what_is_not_offered_does_nothing_here_or_elsewhere() {
    let (device, ram) = device();
    choose(&device, u64::MAX);
    ask(&device, &ram);
    set(&device, VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK);
    let state = device.state();
    assert_eq!(state.status, VIRTIO_CONFIG_S_DRIVER_OK);

    device.set_state(&state).unwrap();
    device.run();

    assert_eq!(returned(&device, &ram), 0);
}

/// If the rings overlapped, each returned chain would be the next request, without end.
#[test]
fn state_that_returned_more_than_it_took_is_refused() {
    let (device, _ram) = device();
    let mut state = device.state();
    for (taken, returned, is_right) in
        [(0, 1, false), (5, 6, false), (65535, 63, false), (5000, 0, true), (2, 65535, true)]
    {
        (state.queues[0].next_avail, state.queues[0].next_used) = (taken, returned);
        let loaded = device.set_state(&state);
        assert_eq!(loaded.is_ok(), is_right, "{taken} and {returned}: {loaded:?}");
    }
}
