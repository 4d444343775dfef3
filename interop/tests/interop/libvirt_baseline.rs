//! A control without Sterna: libvirt alone saves and restores in every format that it has.
#![allow(missing_docs)]

use sterna_interop::ticks::unbroken_serials;
use sterna_interop::{Failure, Libvirt, save_formats};

#[test]
fn domain_saved_and_restored_by_libvirt_in_every_format_counts_on() -> Result<(), Failure> {
    let test = "domain_saved_and_restored_by_libvirt_in_every_format_counts_on";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "q35", 32)?;

    for format in save_formats() {
        libvirt.wait_for_ticks("judge", 2)?;
        let image = libvirt.directory().join(format).display().to_string();
        libvirt.virsh(&["save", "judge", &image, "--image-format", format])?;
        libvirt.virsh(&["restore", &image])?;
    }

    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}
