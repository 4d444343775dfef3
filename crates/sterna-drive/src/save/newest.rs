//! Selects the newest format that the installed software can read.

use std::process::{Command, Stdio};

use sterna_image::Format;

use crate::Settings;

/// First version of libvirt that knows *sparse* (specs/libvirt-save.md §2).
const SPARSE_SINCE: (u64, u64) = (11, 2);
/// First version of QEMU that knows mapped-ram.
const MAPPED_RAM_SINCE: (u64, u64) = (9, 0);

/// The newest bare format that this VM can write and load again.
pub fn newest_format(settings: &Settings) -> Format {
    if settings.capability("mapped-ram").is_some() { Format::MappedRam } else { Format::Legacy }
}

/// The newest libvirt format that both this VM and the libvirt on this host know: *sparse*, else *raw*, which all
/// versions know. So older software can read the image unless the operator requests another format.
pub fn newest_libvirt_format(settings: &Settings) -> Format {
    newest_of(settings.capability("mapped-ram").is_some() && libvirt_knows_sparse())
}

/// Does the same as [`newest_libvirt_format`] without a VM, for an image that is converted or received from a peer.
/// Then the QEMU on this host must know mapped-ram.
pub fn newest_libvirt_format_here() -> Format {
    newest_of(libvirt_knows_sparse() && qemu_knows_mapped_ram())
}

fn newest_of(is_sparse_known: bool) -> Format {
    if is_sparse_known { Format::LibvirtSparse } else { Format::LibvirtRaw }
}

/// Asks libvirt's daemon for its version, because the daemon reads the images. Else asks its shell.
fn libvirt_knows_sparse() -> bool {
    version(&["virtqemud", "libvirtd", "virsh"]).is_some_and(|version| version >= SPARSE_SINCE)
}

/// Asks the QEMU on this host for its version, under the names that distributions use.
fn qemu_knows_mapped_ram() -> bool {
    let names = ["qemu-system-x86_64", "qemu-kvm", "/usr/libexec/qemu-kvm", "kvm"];
    version(&names).is_some_and(|version| version >= MAPPED_RAM_SINCE)
}

/// Version of the first of these programs that exists.
fn version(programs: &[&str]) -> Option<(u64, u64)> {
    programs.iter().find_map(|program| {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
        parse_version(&String::from_utf8_lossy(&output.stdout))
    })
}

/// The first `MAJOR.MINOR` in a text such as `virtqemud (libvirt) 12.8.0`.
fn parse_version(text: &str) -> Option<(u64, u64)> {
    text.split_whitespace().find_map(|word| {
        let mut numbers = word.split('.').map(str::parse::<u64>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_found_in_what_programs_say() {
        assert_eq!(parse_version("virtqemud (libvirt) 12.8.0\n"), Some((12, 8)));
        assert_eq!(parse_version("9.0.0\n"), Some((9, 0)));
        assert_eq!(parse_version("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\n"), Some((11, 1)));
        assert_eq!(parse_version("no version here"), None);
    }
}
