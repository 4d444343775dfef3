//! Save images between libvirt and Sterna, in every format: each reads what the other wrote.
#![allow(missing_docs)]

use std::path::Path;

use sterna_interop::ticks::unbroken_serials;
use sterna_interop::{Failure, Libvirt, SAVE_FORMATS, sterna_does};

#[test]
fn image_saved_by_libvirt_in_every_format_is_converted_and_restored() -> Result<(), Failure> {
    let test = "image_saved_by_libvirt_in_every_format_is_converted_and_restored";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "q35", 32)?;

    for format in SAVE_FORMATS {
        one_round(&libvirt, format).map_err(|why| format!("{format}: {why}"))?;
    }

    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

/// libvirt saves in this format; Sterna takes the stream out of the container and puts it into the next
/// format's; libvirt restores that.
fn one_round(libvirt: &Libvirt, format: &str) -> Result<(), Failure> {
    let place = |name: &str| libvirt.directory().join(format!("{format}-{name}"));
    libvirt.wait_for_ticks("judge", 2)?;
    let saved = place("saved");
    libvirt.virsh(&["save", "judge", path(&saved)?, "--image-format", format])?;

    sterna_does(&["verify", path(&saved)?])?;
    let inspected = sterna_does(&["inspect", "--json", path(&saved)?])?;
    let converted = place("converted");
    convert(&saved, &converted, &format!("libvirt-{}", after(format)))?;
    sterna_does(&["verify", path(&converted)?])?;

    let inspected: serde_json::Value = serde_json::from_str(&inspected).map_err(|error| error.to_string())?;
    assert_eq!(inspected["libvirt"]["domain"], "judge", "{inspected}");
    let before = libvirt.virsh(&["save-image-dumpxml", path(&saved)?])?;
    assert_eq!(libvirt.virsh(&["save-image-dumpxml", path(&converted)?])?, before);
    libvirt.virsh(&["restore", path(&converted)?])?;
    Ok(())
}

#[test]
fn sparse_image_of_sterna_is_restored_with_every_option() -> Result<(), Failure> {
    let test = "sparse_image_of_sterna_is_restored_with_every_option";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "pc", 32)?;

    for options in [&[][..], &["--parallel-channels", "2"], &["--bypass-cache"], &["--paused"]] {
        libvirt.wait_for_ticks("judge", 2)?;
        let saved = libvirt.directory().join("saved");
        let sparse = libvirt.directory().join(format!("sparse{}", options.concat()));
        libvirt.virsh(&["save", "judge", path(&saved)?])?;
        convert(&saved, &sparse, "libvirt-sparse")?;
        let mut command = vec!["restore", path(&sparse)?];
        command.extend(options);
        libvirt.virsh(&command).map_err(|why| format!("{options:?}: {why}"))?;
        if options.contains(&"--paused") {
            libvirt.virsh(&["resume", "judge"])?;
        }
    }

    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

#[test]
fn stream_taken_out_of_a_container_and_put_into_one_again_is_restored() -> Result<(), Failure> {
    let test = "stream_taken_out_of_a_container_and_put_into_one_again_is_restored";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "q35", 32)?;
    libvirt.wait_for_ticks("judge", 2)?;
    let [xml, saved, bare, wrapped] =
        ["xml", "saved", "bare", "wrapped"].map(|name| libvirt.directory().join(name));
    let definition = libvirt.virsh(&["dumpxml", "judge", "--migratable", "--inactive"])?;
    std::fs::write(&xml, definition).map_err(|error| error.to_string())?;
    libvirt.virsh(&["save", "judge", path(&saved)?, "--image-format", "zstd"])?;

    convert(&saved, &bare, "mapped-ram")?;
    let (from, to) = (path(&bare)?, path(&wrapped)?);
    sterna_does(&["convert", from, to, "--format", "libvirt-sparse", "--xml", path(&xml)?])?;

    // The container that said so is gone: libvirt stops a guest before it saves it.
    libvirt.virsh(&["restore", to, "--running"])?;
    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

/// Every format follows one and is followed by one.
fn after(format: &str) -> &'static str {
    let at = SAVE_FORMATS.iter().position(|known| *known == format).unwrap_or(0);
    SAVE_FORMATS[(at + 1) % SAVE_FORMATS.len()]
}

fn convert(from: &Path, to: &Path, format: &str) -> Result<(), Failure> {
    sterna_does(&["convert", path(from)?, path(to)?, "--format", format]).map(drop)
}

fn path(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| format!("{} is no text", path.display()))
}
