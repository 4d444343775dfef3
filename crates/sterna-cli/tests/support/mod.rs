//! Helpers for several tests of the command.

pub mod protection;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Versions that a host's programs print, and the newest libvirt format that both QEMU and libvirt know.
pub const MACHINES: [(&[(&str, &str)], &str); 6] = [
    (&[], "libvirt-raw"),
    (&[("virsh", "9.0.0"), ("qemu-system-x86_64", "QEMU emulator version 11.1.3")], "libvirt-raw"),
    (&[("virsh", "11.1.0"), ("qemu-system-x86_64", "QEMU emulator version 11.1.3")], "libvirt-raw"),
    (&[("virsh", "11.2.0"), ("qemu-system-x86_64", "QEMU emulator version 8.2.2")], "libvirt-raw"),
    (&[("virsh", "11.2.0"), ("qemu-system-x86_64", "QEMU emulator version 9.0.0")], "libvirt-sparse"),
    // The daemon reads the image, so its version matters more than the shell's.
    (
        &[
            ("virsh", "12.8.0"),
            ("libvirtd", "libvirtd (libvirt) 9.0.0"),
            ("qemu-system-x86_64", "QEMU emulator version 11.1.3"),
        ],
        "libvirt-raw",
    ),
];

/// A directory for `PATH` that contains only these programs, which print these versions.
pub fn programs(within: &Path, versions: &[(&str, &str)]) -> PathBuf {
    let directory = within.join("programs");
    std::fs::create_dir(&directory).unwrap();
    for (name, version) in versions {
        let program = directory.join(name);
        std::fs::write(&program, format!("#!/bin/sh\necho '{version}'\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    directory
}
