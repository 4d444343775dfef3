//! Save images between libvirt and Sterna, in every format. Each reads the images of the other, and libvirt
//! restores the images that Sterna saved of a running domain.
#![allow(missing_docs)]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use sterna_interop::ticks::unbroken_serials;
use sterna_interop::{Failure, Libvirt, save_formats, sterna, sterna_does};

#[test]
fn image_saved_by_libvirt_in_every_format_is_converted_and_restored() -> Result<(), Failure> {
    let test = "image_saved_by_libvirt_in_every_format_is_converted_and_restored";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "q35", 32)?;

    for format in save_formats() {
        one_round(&libvirt, format).map_err(|why| format!("{format}: {why}"))?;
    }

    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

/// libvirt saves in this format. Sterna moves the stream from the container into the container of the next
/// format. libvirt restores that image.
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

    // The container with the run state was replaced. `--running` is needed because libvirt stops a guest
    // before it saves it.
    libvirt.virsh(&["restore", to, "--running"])?;
    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

#[test]
fn domain_saved_by_sterna_through_a_monitor_is_restored_by_libvirt() -> Result<(), Failure> {
    let test = "domain_saved_by_sterna_through_a_monitor_is_restored_by_libvirt";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "q35", 32)?;
    let monitor = libvirt.operator_socket("judge");

    for format in save_formats() {
        let image = libvirt.directory().join(format);
        let (xml, form) = (definition(&libvirt)?, format!("libvirt-{format}"));
        libvirt.wait_for_ticks("judge", 2)?;

        sterna_does(&["save", path(&monitor)?, path(&image)?, "--format", &form, "--xml", path(&xml)?])?;

        goes_on_from(&libvirt, &image, &xml).map_err(|why| format!("{format}: {why}"))?;
    }

    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

#[test]
fn domain_that_migrates_to_sterna_is_restored_by_libvirt() -> Result<(), Failure> {
    let test = "domain_that_migrates_to_sterna_is_restored_by_libvirt";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("judge", "pc", 32)?;

    // sparse is last, because after its restore libvirt leaves mapped-ram on, and that QEMU then writes no
    // stream.
    for format in ["raw", "zstd", "sparse"] {
        let [image, socket] =
            ["image", "socket"].map(|name| libvirt.directory().join(format!("{format}-{name}")));
        let (xml, form) = (definition(&libvirt)?, format!("libvirt-{format}"));
        libvirt.wait_for_ticks("judge", 2)?;
        let listen = format!("listen:unix:{}", path(&socket)?);
        let mut save = sterna();
        save.args(["save", &listen, path(&image)?, "--format", &form, "--xml", path(&xml)?]);
        let mut save =
            save.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|e| e.to_string())?;
        let mut lines = BufReader::new(save.stderr.take().ok_or("no standard error")?);
        let mut said = String::new();
        lines.read_line(&mut said).map_err(|error| error.to_string())?;

        // On a busy host, QEMU cannot send this guest's writes within the default downtime limit.
        let longer = "migrate_set_parameter downtime-limit 10000";
        libvirt.virsh(&["qemu-monitor-command", "judge", "--hmp", longer])?;
        let migrate = format!("migrate -d unix:{}", path(&socket)?);
        let told = libvirt.virsh(&["qemu-monitor-command", "judge", "--hmp", &migrate]);
        if !told.as_ref().is_ok_and(|said| said.trim().is_empty()) {
            // QEMU refused the migration, so `save` would wait without end.
            save.kill().map_err(|error| error.to_string())?;
        }

        lines.read_to_string(&mut said).map_err(|error| error.to_string())?;
        let status = save.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("{format}: {status}: {said}; libvirt: {told:?}"));
        }
        goes_on_from(&libvirt, &image, &xml).map_err(|why| format!("{format}: {why}"))?;
    }

    libvirt.wait_for_ticks("judge", 2)?;
    unbroken_serials(&[&libvirt.serial("judge")])?;
    Ok(())
}

/// Writes the running domain's XML into a file.
fn definition(libvirt: &Libvirt) -> Result<PathBuf, Failure> {
    let xml = libvirt.directory().join("definition");
    let text = libvirt.virsh(&["dumpxml", "judge", "--migratable", "--inactive"])?;
    std::fs::write(&xml, text).map_err(|error| error.to_string())?;
    Ok(xml)
}

/// Ends the domain whose QEMU was saved without libvirt's knowledge. Restores a running domain from the
/// image.
fn goes_on_from(libvirt: &Libvirt, image: &Path, xml: &Path) -> Result<(), Failure> {
    sterna_does(&["verify", path(image)?])?;
    libvirt.virsh(&["destroy", "judge"])?;
    let told = libvirt.virsh(&["save-image-dumpxml", path(image)?])?;
    let given = std::fs::read_to_string(xml).map_err(|error| error.to_string())?;
    // libvirt adds default devices, such as a keyboard. The domain is the same, but its text differs.
    let uuid = given.lines().find(|line| line.contains("<uuid>")).ok_or("a domain without a UUID")?;
    assert!(told.contains(uuid) && told.contains("<name>judge</name>"), "{told}");
    libvirt.virsh(&["restore", path(image)?])?;
    // The domain ran when it was saved, so the restore needs no option to run it.
    assert_eq!(libvirt.virsh(&["domstate", "judge"])?.trim(), "running");
    Ok(())
}

/// The next format in a cycle. Every format is a source and a target once.
fn after(format: &str) -> &'static str {
    let formats = save_formats();
    let at = formats.iter().position(|known| *known == format).unwrap_or(0);
    formats[(at + 1) % formats.len()]
}

fn convert(from: &Path, to: &Path, format: &str) -> Result<(), Failure> {
    sterna_does(&["convert", path(from)?, path(to)?, "--format", format]).map(drop)
}

fn path(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| format!("{} is no text", path.display()))
}
