//! Machines whose streams differ: the rows of the tests' tables.
//!
//! All run [`Guest::Boot`]. A comment at each row names its purpose: the features of specs/mapped-ram.md that
//! it touches.

use crate::{Builder, Guest, Qemu, Ram, Root};

/// A machine, and its name in a test's messages.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Name of the machine in messages.
    pub name: &'static str,
    /// Builder that starts it. A clone of the builder makes a machine that can take over its state.
    pub builder: Builder,
}

/// Every kind of machine that is available here; and the names of the others, with the reasons.
pub fn machines(root: &Root) -> (Vec<Machine>, Vec<(&'static str, String)>) {
    let base = || Qemu::builder(root).memory_mib(32).guest(Guest::Boot);
    let mut machines = vec![
        Machine { name: "pc", builder: base() },
        // Another id of RAM's section, and PCI Express.
        Machine { name: "q35", builder: base().machine("q35") },
        // An unversioned machine without PCI, whose RAM has another name.
        Machine { name: "microvm", builder: base().machine("microvm") },
        // Before 10.0, command 11 does not exist.
        Machine { name: "pc-i440fx-9.2", builder: base().machine("pc-i440fx-9.2") },
        // Other devices, and other versions of their sections.
        Machine { name: "pc-q35-6.2", builder: base().machine("pc-q35-6.2") },
        // The block of RAM has the name of the object.
        Machine { name: "pc, an object", builder: base().ram(Ram::Object) },
        // Shared memory, which x-ignore-shared leaves out.
        Machine { name: "q35, a memfd", builder: base().machine("q35").ram(Ram::Memfd) },
        Machine { name: "pc, a file", builder: base().ram(Ram::File) },
        // A second block for video memory, several for option ROMs, vmdesc with many devices.
        Machine {
            name: "q35 with devices",
            builder: base().machine("q35").args(&[
                "-device",
                "VGA",
                "-device",
                "virtio-rng-pci",
                "-device",
                "virtio-serial-pci",
                "-netdev",
                "user,id=n,restrict=on",
                "-device",
                "virtio-net-pci,netdev=n",
                "-device",
                "qemu-xhci",
                "-device",
                "usb-tablet",
            ]),
        },
        // A second block of RAM that was plugged.
        Machine {
            name: "pc with a DIMM",
            builder: base().args(&[
                "-m",
                "slots=2,maxmem=256M",
                "-object",
                "memory-backend-memfd,id=dimm,size=32M,share=on",
                "-device",
                "pc-dimm,memdev=dimm",
            ]),
        },
        // A section before RAM's, and a block that is mostly not plugged.
        Machine {
            name: "q35 with virtio-mem",
            builder: base().machine("q35").args(&[
                "-m",
                "maxmem=1G",
                "-object",
                "memory-backend-memfd,id=plug,size=64M,share=on",
                "-device",
                "virtio-mem-pci,memdev=plug,requested-size=16M",
            ]),
        },
        // No description after EOF.
        Machine { name: "pc without vmdesc", builder: base().machine("pc,suppress-vmdesc=on") },
    ];
    let mut missing = Vec::new();
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    match free.map(|text| text.trim().parse::<u64>().unwrap_or(0)) {
        // Huge pages for source and target at the same time.
        Ok(pages) if pages >= 32 => {
            machines.push(Machine { name: "pc, huge pages", builder: base().ram(Ram::Hugetlb) });
        }
        Ok(pages) => missing.push(("pc, huge pages", format!("{pages} huge pages are free, not 32"))),
        Err(error) => missing.push(("pc, huge pages", format!("no huge pages: {error}"))),
    }
    (machines, missing)
}

/// Returns [`machines`], and reports each unavailable one as a skipped row of `test`.
pub fn machines_for(root: &Root, test: &str) -> Vec<Machine> {
    let (machines, missing) = machines(root);
    for (name, why) in missing {
        crate::skip(&format!("{test} ({name})"), &why);
    }
    machines
}
