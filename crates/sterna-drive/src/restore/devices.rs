//! Compares a waiting VM's processors and devices with those whose state is in an image.
//!
//! QEMU detects a missing device in the middle of loading, when nothing else can be loaded into it. If the image
//! lacks a device, QEMU starts the device without state. So the parts that can be known before are compared. These
//! are the number of processors, the devices in PCI slots and at USB ports, and a few devices of the board. They are
//! read from `info qtree`, because `query-pci` does not show devices below a bridge until firmware has run.

use std::collections::BTreeMap;

/// The devices of a machine, as far as their place identifies their section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct MachineDevices {
    /// Device types by place: `0000:00:06.0:00.0` in a PCI slot, `0000:00:08.0/1` at a USB port.
    places: BTreeMap<String, String>,
    /// Number of devices of each type.
    types: BTreeMap<String, usize>,
}

/// (section, type): sections of the board's devices. Their number is compared with the number of devices of the type.
const BOARD: [(&str, &str); 3] =
    [("serial", "isa-serial"), ("parallel_isa", "isa-parallel"), ("hpet", "hpet")];
/// Section names of virtio devices. The type of such a device begins with the section's name.
const VIRTIO: [&str; 5] = ["virtio-net", "virtio-blk", "virtio-rng", "virtio-balloon", "virtio-scsi"];
/// PCI's main root. Places below other roots are not compared.
const ROOT: &str = "0000:00";

/// A line of the tree with lines below it.
struct Branch {
    indent: usize,
    /// The type of a device. None for a bus.
    device: Option<String>,
    /// Whether it is a bus with PCI slots.
    is_pci: bool,
    /// Prefix of the places below.
    place: Option<String>,
}

impl MachineDevices {
    /// Parses the table of `info qtree`. `None` for any other text.
    pub(super) fn parse(table: &str) -> Option<Self> {
        table.trim_start().starts_with("bus: ").then_some(())?;
        let mut found = Self::default();
        let mut branches: Vec<Branch> = Vec::new();
        for line in table.lines() {
            let text = line.trim_start();
            let indent = line.len() - text.len();
            while branches.last().is_some_and(|branch| branch.indent >= indent) {
                branches.pop();
            }
            let place = branches.last().and_then(|branch| branch.place.clone());
            if let Some(rest) = text.strip_prefix("dev: ") {
                let device = rest.split(',').next().unwrap_or_default().trim().to_owned();
                *found.types.entry(device.clone()).or_default() += 1;
                let is_host = device.ends_with("pcihost");
                let place = if is_host { Some(ROOT.to_owned()) } else { place };
                branches.push(Branch { indent, device: Some(device), is_pci: false, place });
            } else if text.starts_with("bus: ") {
                branches.push(Branch { indent, device: None, is_pci: false, place });
            } else if let Some(kind) = text.strip_prefix("type ")
                && let Some(bus) = branches.last_mut().filter(|branch| branch.device.is_none())
            {
                bus.is_pci = matches!(kind.trim(), "PCI" | "PCIE");
            } else {
                found.property(text, &mut branches);
            }
        }
        Some(found)
    }

    /// Reads a device's slot or port from a property line.
    fn property(&mut self, text: &str, branches: &mut [Branch]) {
        let [.., bus, device] = branches else { return };
        let (Some(name), Some(above)) = (&device.device, &bus.place) else { return };
        let place = if let Some(slot) = text.strip_prefix("addr = ").filter(|_| bus.is_pci) {
            format!("{above}:{}", slot.trim())
        } else if let Some(port) = usb_port(text) {
            let controller = above.split('/').next().unwrap_or(above);
            format!("{controller}/{port}")
        } else {
            return;
        };
        self.places.insert(place.clone(), name.clone());
        device.place = Some(place);
    }

    /// The reason why the state of `sections` cannot be loaded here, as a clause. None if it can.
    pub(super) fn lacks(&self, sections: &[(String, u32)]) -> Option<String> {
        for (section, _) in sections {
            let Some(place) = place_of(section) else { continue };
            let kind = section.rsplit('/').next().unwrap_or_default();
            let Some(device) = self.places.get(place) else {
                let more = self.not_in(sections);
                let more = if more.is_empty() {
                    String::new()
                } else {
                    format!(" (it also has {})", more.join(", "))
                };
                return Some(format!(
                    "the image has a device `{section}`, but there is no device at {place}{more}"
                ));
            };
            if VIRTIO.contains(&kind) && !device.starts_with(&format!("{kind}-")) {
                return Some(format!(
                    "the image has a device `{section}`, but at {place} there is a {device}"
                ));
            }
        }
        BOARD.iter().find_map(|(section, device)| {
            let saved = sections.iter().filter(|(name, _)| name == section).count();
            let there = self.types.get(*device).copied().unwrap_or(0);
            (saved > there).then(|| {
                format!("the image has {saved} devices `{section}`, but there are {there} ({device})")
            })
        })
    }

    /// Devices in PCI slots and at USB ports whose state is not in `sections`.
    pub(super) fn not_in(&self, sections: &[(String, u32)]) -> Vec<String> {
        let saved: Vec<&str> = sections.iter().filter_map(|(section, _)| place_of(section)).collect();
        let is_saved = |place: &str| saved.contains(&place);
        self.places
            .iter()
            .filter(|(place, _)| !is_saved(place))
            .map(|(place, device)| format!("{device} at {place}"))
            .collect()
    }
}

/// Processors whose state is in `sections`.
pub(super) fn processors(sections: &[(String, u32)]) -> usize {
    sections.iter().filter(|(name, _)| name == "cpu_common").count()
}

/// The place in a section's name below PCI's main root: `0000:00:08.0/1` from `0000:00:08.0/1/usb-ptr`.
fn place_of(section: &str) -> Option<&str> {
    section.strip_prefix(ROOT)?.strip_prefix(':')?;
    let slot = section.split('/').next()?;
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_slot =
        |part: &str| part.split_once('.').is_some_and(|(slot, function)| is_hex(slot) && is_hex(function));
    if !slot[ROOT.len() + 1..].split(':').all(is_slot) {
        return None;
    }
    let mut rest = section[slot.len()..].trim_start_matches('/').split('/');
    let port =
        rest.next().filter(|port| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit() || b == b'.'));
    // The last part of a section's name is the device's own name, so a port must be followed by another part.
    Some(match port.filter(|_| rest.next().is_some()) {
        Some(port) => &section[..slot.len() + 1 + port.len()],
        None => slot,
    })
}

/// The port in a line: `1.2` from `addr 0.0, port 1.2, speed 480, …`.
fn usb_port(text: &str) -> Option<&str> {
    let rest = text.strip_prefix("addr ")?;
    let port = rest.split(", ").find_map(|part| part.strip_prefix("port "))?;
    Some(port.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table as QEMU 7.2 and 11.1 print it.
    const TREE: &str = "bus: main-system-bus\r
  type System\r
  dev: hpet, id \"\"\r
  dev: q35-pcihost, id \"\"\r
    bus: pcie.0\r
      type PCIE\r
      dev: pci-bridge, id \"br\"\r
        addr = 0a.0\r
        bus: br\r
          type PCI\r
          dev: virtio-rng-pci, id \"\"\r
            addr = 03.0\r
            bus: virtio-bus\r
              type virtio-pci-bus\r
              dev: virtio-rng-device, id \"\"\r
      dev: qemu-xhci, id \"x\"\r
        addr = 08.0\r
        bus: x.0\r
          type usb-bus\r
          dev: usb-tablet, id \"\"\r
            addr 0.0, port 1, speed 480, name QEMU USB Tablet, attached\r
      dev: ICH9-SMB, id \"\"\r
        addr = 1f.3\r
        bus: i2c\r
          type i2c-bus\r
          dev: smbus-eeprom, id \"\"\r
            address = 80 (0x50)\r
      dev: ICH9-LPC, id \"\"\r
        addr = 1f.0\r
        bus: isa.0\r
          type ISA\r
          dev: isa-serial, id \"\"\r
";

    fn sections(names: &[&str]) -> Vec<(String, u32)> {
        names.iter().map(|name| ((*name).to_owned(), 0)).collect()
    }

    const ALL: [&str; 8] = [
        "cpu_common",
        "0000:00:0a.0/pci_bridge",
        "0000:00:0a.0:03.0/virtio-rng",
        "0000:00:08.0/xhci",
        "0000:00:08.0/1/usb-ptr",
        "0000:00:1f.3/ich9_smb",
        "0000:00:1f.0/ICH9LPC",
        "serial",
    ];

    #[test]
    fn devices_of_the_same_machine_fit_and_none_is_left_over() {
        let machine = MachineDevices::parse(TREE).unwrap();

        assert_eq!(machine.lacks(&sections(&ALL)), None);
        assert_eq!(machine.not_in(&sections(&ALL)), Vec::<String>::new());
    }

    #[test]
    fn devices_that_are_missing_or_others_are_named_with_their_place() {
        let machine = MachineDevices::parse(TREE).unwrap();
        for (section, words) in [
            ("0000:00:05.0/virtio-net", ["`0000:00:05.0/virtio-net`", "there is no device at 0000:00:05.0"]),
            ("0000:00:0a.0:04.0/e1000", ["e1000", "there is no device at 0000:00:0a.0:04.0"]),
            ("0000:00:08.0/2/usb-kbd", ["usb-kbd", "there is no device at 0000:00:08.0/2"]),
            ("0000:00:0a.0:03.0/virtio-net", ["virtio-net", "there is a virtio-rng-pci"]),
            ("serial", ["2 devices `serial`", "there are 1"]),
        ] {
            let saved = [&ALL[..], &[section]].concat();

            let why = machine.lacks(&sections(&saved)).unwrap();

            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
    }

    #[test]
    fn devices_that_the_image_lacks_are_named() {
        let machine = MachineDevices::parse(TREE).unwrap();

        let more = machine.not_in(&sections(&[&ALL[..2], &ALL[3..4], &ALL[5..]].concat()));

        assert_eq!(more, ["usb-tablet at 0000:00:08.0/1", "virtio-rng-pci at 0000:00:0a.0:03.0"]);
    }

    #[test]
    fn sections_without_a_place_are_not_compared() {
        for section in ["apic", "0000:20:00.0/pxb", "0000:00", "0000:00:zz/x", "pcie.0/x", "/0000:00:01.0/x"]
        {
            assert_eq!(place_of(section), None, "{section}");
        }
        assert_eq!(place_of("0000:00:02.0:00.0/1.2/usb-hub"), Some("0000:00:02.0:00.0/1.2"));
        assert_eq!(place_of("0000:00:02.0/virtio-net"), Some("0000:00:02.0"));
        assert_eq!(MachineDevices::parse("unknown command: 'info qtree'"), None);
    }

    #[test]
    fn processors_are_counted_by_their_common_section() {
        assert_eq!(processors(&sections(&["cpu_common", "cpu", "apic", "cpu_common", "cpu"])), 2);
    }
}
