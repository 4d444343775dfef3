//! Compares the RAM blocks of two machines by name and size.

use super::MachineBlock;

/// The use of a block, guessed from its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Flash,
    Firmware,
    Rom,
    Table,
    Video,
    Memory,
}

impl Purpose {
    fn of(name: &str) -> Self {
        let last = name.rsplit('/').next().unwrap_or(name);
        if last.contains("flash") {
            Self::Flash
        } else if name.contains("/rom@etc/") || name.starts_with("etc/") {
            Self::Table
        } else if matches!(last, "pc.bios" | "isa-bios") {
            Self::Firmware
        } else if last.ends_with(".rom") {
            Self::Rom
        } else if last.contains("vram") || last.contains("vga") || last.contains("qxl") {
            Self::Video
        } else {
            Self::Memory
        }
    }
}

/// The change to the waiting VM that makes its block `name` fit, as an imperative.
pub(super) fn advice(name: &str) -> &'static str {
    match Purpose::of(name) {
        Purpose::Flash => {
            "start it with flash images (firmware and its variables, such as OVMF) of the same size as in the guest's \
             machine"
        }
        Purpose::Firmware => "start it with the firmware of the guest's machine (`-bios`)",
        Purpose::Rom => {
            "start it with the device's ROM of the guest's machine (the device's property `romfile` or `romsize`)"
        }
        Purpose::Table => "start it with the devices and the firmware of the guest's machine",
        Purpose::Video => "start it with the video device of the guest's machine and the same video memory",
        Purpose::Memory => {
            "start it with the memory of the guest's machine (`-m`, memory backends and their ids)"
        }
    }
}

/// Whether the block maps memory of a host device. Such blocks are in no stream.
fn is_of_host(name: &str) -> bool {
    name.contains(" mmaps[") || name.contains(" BAR ")
}

/// The reason why a guest cannot migrate between machines with the blocks `leaves` and `arrives`. It is a clause that
/// ends with advice. `from` and `to` are the names of the machines in the text.
pub(super) fn misfit(
    leaves: &[MachineBlock],
    arrives: &[MachineBlock],
    from: &str,
    to: &str,
) -> Option<String> {
    let of_stream = |blocks: &[MachineBlock]| -> Vec<MachineBlock> {
        blocks.iter().filter(|block| !is_of_host(&block.name)).cloned().collect()
    };
    let (leaves, arrives) = (of_stream(leaves), of_stream(arrives));
    for block in &leaves {
        let Some(other) = arrives.iter().find(|other| other.name == block.name) else {
            return Some(format!(
                "{from} has a RAM block `{}`, and {to} has none: {}",
                block.name,
                advice(&block.name)
            ));
        };
        let can_grow = other.most_bytes > other.used_bytes && other.most_bytes >= block.used_bytes;
        if other.used_bytes != block.used_bytes && !can_grow {
            return Some(format!(
                "the RAM block `{}` has {} bytes at {from} and {} at {to}: {}",
                block.name,
                block.used_bytes,
                other.used_bytes,
                advice(&block.name)
            ));
        }
    }
    let more = arrives.iter().find(|other| leaves.iter().all(|block| block.name != other.name))?;
    Some(format!(
        "{to} has a RAM block `{}` of {} bytes, and {from} has none: start it without that memory or device",
        more.name, more.used_bytes
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, used_bytes: u64, most_bytes: u64) -> MachineBlock {
        MachineBlock { name: name.into(), used_bytes, most_bytes }
    }

    #[test]
    fn advice_names_what_the_block_is_made_of() {
        for (name, word) in [
            ("system.flash0", "flash"),
            ("pc.ram", "memory"),
            ("/objects/mem1", "memory"),
            ("0000:00:03.0/virtio-net-pci.rom", "romfile"),
            ("pc.bios", "-bios"),
            ("0000:00:01.0/vga.vram", "video"),
            ("/rom@etc/acpi/tables", "devices"),
        ] {
            assert!(advice(name).contains(word), "{name}: {}", advice(name));
        }
    }

    #[test]
    fn misfit_is_found_in_both_directions_by_name_and_size() {
        let machine = [block("pc.ram", 64, 64), block("/rom@etc/acpi/tables", 2, 8)];
        let more = [&machine[..], &[block("dimm0", 32, 32)]].concat();
        let larger = [block("pc.ram", 128, 128), block("/rom@etc/acpi/tables", 4, 8)];
        let grown = [block("pc.ram", 64, 64), block("/rom@etc/acpi/tables", 8, 8)];
        let host = [&machine[..], &[block("0000:3b:00.0 BAR 0 mmaps[0]", 4, 4)]].concat();

        let misfit = |from: &[MachineBlock], to: &[MachineBlock]| misfit(from, to, "A", "B");

        for (from, to, words) in [
            (&more[..], &machine[..], ["`dimm0`", "B has none"]),
            (&machine, &more, ["`dimm0`", "A has none"]),
            (&machine, &larger, ["`pc.ram`", "64 bytes at A and 128 at B"]),
        ] {
            let why = misfit(from, to).unwrap();
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
        for to in [&machine[..], &grown, &host] {
            assert_eq!(misfit(&machine, to).filter(|_| to != grown), None);
        }
        assert_eq!(misfit(&grown, &machine), None, "a block that can grow is resized");
        assert_eq!(misfit(&host, &machine), None, "a host's device is in no stream");
    }
}
