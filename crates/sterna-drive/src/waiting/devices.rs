//! Checks that the waiting VM has the guest's PCI devices, before anything is loaded.
//!
//! QEMU names the section of a PCI device by its place, as in `0000:00:03.0/virtio-net`. If the device of a section is
//! missing, the load fails, and at that time the primary may have failed, too. Devices behind a bridge and devices
//! that are not on PCI are not compared.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{DriveError, Vm};

/// PCI vendor id of virtio devices.
const VIRTIO: u64 = 0x1af4;
/// PCI device id of modern virtio devices, to which the number of the kind is added.
const MODERN: u64 = 0x1040;

/// Kinds of virtio devices: name of the section, transitional device id, number of the kind.
const KINDS: &[(&str, u64, u64)] = &[
    ("virtio-net", 0x1000, 1),
    ("virtio-blk", 0x1001, 2),
    ("virtio-balloon", 0x1002, 5),
    ("virtio-console", 0x1003, 3),
    ("virtio-scsi", 0x1004, 8),
    ("virtio-rng", 0x1005, 4),
    ("virtio-9p", 0x1009, 9),
    ("virtio-vsock", 0x1012, 19),
];

/// PCI vendor id and device id.
type Id = (u64, u64);

/// Refuses a VM in which a PCI device of the guest is missing or has another kind.
pub(super) fn check(vm: &mut Vm, sections: &[String]) -> Result<(), DriveError> {
    let buses = vm.execute("query-pci", Value::Null)?;
    match missing(sections, &devices(&buses)) {
        Some(why) => Err(DriveError::Unfit(why)),
        None => Ok(()),
    }
}

/// The devices of the first bus, by (slot, function).
fn devices(buses: &Value) -> BTreeMap<(u64, u64), Id> {
    let first = buses.as_array().into_iter().flatten().find(|bus| bus["bus"] == 0);
    let all = first.and_then(|bus| bus["devices"].as_array()).into_iter().flatten();
    all.filter_map(|device| {
        let number = |value: &Value| value.as_u64();
        let place = (number(&device["slot"])?, number(&device["function"])?);
        Some((place, (number(&device["id"]["vendor"])?, number(&device["id"]["device"])?)))
    })
    .collect()
}

fn missing(sections: &[String], there: &BTreeMap<(u64, u64), Id>) -> Option<String> {
    sections.iter().find_map(|section| {
        let (place, device) = section.split_once('/')?;
        let at = slot(place)?;
        let advice = "start it with the primary's devices, in the same places";
        match there.get(&at) {
            None => Some(format!("it has no device at {place}, where the guest has a {device}: {advice}")),
            Some(id) if !is_kind(device, *id) => {
                Some(format!("its device at {place} is not the guest's {device}: {advice}"))
            }
            Some(_) => None,
        }
    })
}

/// Slot and function in `0000:00:SS.F`. None for another bus, or for a path through bridges.
fn slot(place: &str) -> Option<(u64, u64)> {
    let (slot, function) = place.strip_prefix("0000:00:")?.split_once('.')?;
    Some((u64::from_str_radix(slot, 16).ok()?, u64::from_str_radix(function, 16).ok()?))
}

/// Whether a device with this id can have a section of this name. True for unknown kinds.
fn is_kind(section: &str, (vendor, device): Id) -> bool {
    match KINDS.iter().find(|(name, ..)| *name == section) {
        Some((_, transitional, kind)) => {
            vendor == VIRTIO && (device == *transitional || device == MODERN + kind)
        }
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn there() -> BTreeMap<(u64, u64), Id> {
        let device = |slot, function, vendor, device| json!({"bus": 0, "slot": slot, "function": function, "id": {"vendor": vendor, "device": device}});
        devices(&json!([{"bus": 0, "devices": [
            device(0, 0, 0x8086, 0x1237), device(1, 3, 0x8086, 0x7113), device(3, 0, 0x1af4, 0x1000), device(4, 0, 0x1af4, 0x1044),
        ]}]))
    }

    fn why(section: &str) -> Option<String> {
        missing(&["timer".to_owned(), section.to_owned()], &there())
    }

    #[test]
    fn device_that_the_waiting_vm_lacks_is_named_with_its_place() {
        let why = why("0000:00:05.0/virtio-blk").expect("there is no such disk");
        assert!(why.contains("0000:00:05.0") && why.contains("virtio-blk"), "{why}");
    }

    #[test]
    fn device_of_another_kind_is_found() {
        assert!(
            why("0000:00:03.0/virtio-blk").expect("it is a card").contains("is not the guest's virtio-blk")
        );
        assert!(why("0000:00:04.0/virtio-net").is_some());
    }

    #[test]
    fn devices_that_are_there_or_cannot_be_compared_are_let_through() {
        for section in [
            "0000:00:03.0/virtio-net",
            "0000:00:04.0/virtio-rng",
            "0000:00:01.3/piix4_pm",
            "0000:00:1e.0:00.0/virtio-blk",
            "0000:01:05.0/e1000",
            "serial",
        ] {
            assert_eq!(why(section), None, "{section}");
        }
    }
}
