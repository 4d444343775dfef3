//! `sterna convert` converts QEMU's images into other forms. QEMU loads each of them, and the guest
//! continues.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};

use sterna_image::Format;
use sterna_interop::{Builder, Failure, Guest, Qemu, Root, machines_for, sterna_does, unbroken};

/// libvirt would refuse it; Sterna keeps it as it is.
const XML: &str = "<domain type='qemu'><name>judge</name></domain>\n";

#[test]
fn image_of_every_machine_converted_is_loaded_by_qemu() -> Result<(), Failure> {
    let test = "image_of_every_machine_converted_is_loaded_by_qemu";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };

    for machine in machines_for(&root, test) {
        there_and_back(&machine.builder).map_err(|why| format!("{}: {why}", machine.name))?;
    }
    Ok(())
}

/// Converts QEMU's mapped-ram image into a legacy stream, which a second QEMU loads. Converts that QEMU's
/// legacy stream into a mapped-ram image, which a third QEMU loads.
fn there_and_back(builder: &Builder) -> Result<(), Failure> {
    let mut first = builder.clone().spawn()?;
    first.wait_for_ticks(2)?;
    let (mapped, legacy) = (first.directory().join("mapped"), first.directory().join("legacy"));
    first.capabilities(&["mapped-ram"])?;
    first.migrate(&uri(&mapped))?;
    sterna_does(&["verify".as_ref(), mapped.as_os_str()])?;
    convert(&mapped, &legacy, "legacy", None)?;
    let mut second = loaded(builder, &legacy, &[])?;

    let (legacy, mapped) = (second.directory().join("legacy"), second.directory().join("mapped"));
    second.migrate(&uri(&legacy))?;
    sterna_does(&["verify".as_ref(), legacy.as_os_str()])?;
    convert(&legacy, &mapped, "mapped-ram", None)?;
    sterna_does(&["verify".as_ref(), mapped.as_os_str()])?;
    let third = loaded(builder, &mapped, &["mapped-ram", "multifd"])?;

    unbroken(&[&first, &second, &third]).map(drop)
}

#[test]
fn image_of_linux_converted_through_every_form_and_back_is_restored_by_qemu() -> Result<(), Failure> {
    let test = "image_of_linux_converted_through_every_form_and_back_is_restored_by_qemu";
    let Some(root) = Root::qemu_for(test).filter(|root| Guest::Linux.available_for(root, test)) else {
        return Ok(());
    };
    let builder = Qemu::builder(&root).machine("q35").memory_mib(128).guest(Guest::Linux);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(10)?;
    let directory = source.directory().to_path_buf();
    let saved = directory.join("saved");
    source.capabilities(&["mapped-ram", "multifd"])?;
    source.migrate(&uri(&saved))?;
    let xml = directory.join("xml");
    std::fs::write(&xml, XML).map_err(|error| error.to_string())?;

    // Converts from each form to the next, and from the last to a form that QEMU loads.
    let mut image = saved.clone();
    let contained = Format::ALL.iter().filter(|format| format.is_libvirt());
    for format in [Format::Legacy].iter().chain(contained) {
        let next = directory.join(format.name());
        convert(&image, &next, format.name(), format.is_libvirt().then_some(&xml))?;
        if image != saved {
            std::fs::remove_file(&image).map_err(|error| error.to_string())?;
        }
        image = next;
    }
    let (back, stream) = (directory.join("back"), directory.join("stream"));
    convert(&image, &back, "mapped-ram", None)?;
    convert(&image, &stream, "legacy", None)?;

    for (image, capabilities) in
        [(&back, &["mapped-ram"][..]), (&back, &["mapped-ram", "multifd"]), (&stream, &[])]
    {
        unbroken(&[&source, &loaded(&builder, image, capabilities)?])?;
    }
    Ok(())
}

#[test]
fn image_compressed_in_every_way_and_decompressed_is_loaded_by_qemu() -> Result<(), Failure> {
    let test = "image_compressed_in_every_way_and_decompressed_is_loaded_by_qemu";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = Qemu::builder(&root).memory_mib(16).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    let saved = source.directory().join("saved");
    source.migrate(&uri(&saved))?;

    let mut image = saved;
    for format in Format::ALL.iter().filter(|format| !format.is_libvirt() && format.is_compressed()) {
        let next = source.directory().join(format.name());
        convert(&image, &next, format.name(), None)?;
        sterna_does(&["verify".as_ref(), next.as_os_str()]).map_err(|why| format!("{format}: {why}"))?;
        image = next;
    }
    let back = source.directory().join("back");
    convert(&image, &back, "mapped-ram", None)?;

    unbroken(&[&source, &loaded(&builder, &back, &["mapped-ram"])?])?;
    Ok(())
}

#[test]
fn devices_of_a_converted_image_are_bit_for_bit_what_qemu_wrote() -> Result<(), Failure> {
    let test = "devices_of_a_converted_image_are_bit_for_bit_what_qemu_wrote";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = Qemu::builder(&root).memory_mib(32).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    let place = |name: &str| source.directory().join(name);
    let [first, middle, back] = ["first", "middle", "back"].map(place);
    source.migrate(&uri(&first))?;

    convert(&first, &middle, "mapped-ram", None)?;
    convert(&middle, &back, "legacy", None)?;

    let devices = behind_ram(&back)?;
    let written = read(&first)?;
    assert!(written.ends_with(&devices), "not what QEMU wrote");
    Ok(())
}

/// Devices, EOF and description of a legacy stream of Sterna's. The END of RAM in it contains no page.
fn behind_ram(image: &Path) -> Result<Vec<u8>, Failure> {
    const COMMAND_11: [u8; 5] = [8, 0, 11, 0, 0];
    // END and its id, the flag of its end, the footer.
    const END_BYTES: usize = 5 + 8 + 5;
    let bytes = read(image)?;
    let at = bytes.windows(5).rposition(|window| window == COMMAND_11).ok_or("no command 11")?;
    let devices = bytes[at + COMMAND_11.len() + END_BYTES..].to_vec();
    if devices.len() < 10_000 || devices[0] != 4 {
        return Err(format!("{} bytes behind RAM, the first {}", devices.len(), devices[0]));
    }
    Ok(devices)
}

fn read(image: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(image).map_err(|error| format!("{}: {error}", image.display()))
}

fn uri(image: &Path) -> String {
    format!("file:{}", image.display())
}

fn convert(from: &Path, to: &Path, format: &str, xml: Option<&PathBuf>) -> Result<(), Failure> {
    let mut arguments =
        vec!["convert".as_ref(), from.as_os_str(), to.as_os_str(), "--format".as_ref(), format.as_ref()];
    if let Some(xml) = xml {
        arguments.extend(["--xml".as_ref(), xml.as_os_str()]);
    }
    sterna_does(&arguments).map(drop)
}

/// A new machine that has loaded the image and runs.
fn loaded(builder: &Builder, image: &Path, capabilities: &[&str]) -> Result<Qemu, Failure> {
    let mut machine = builder.clone().incoming_defer().spawn()?;
    machine.capabilities(capabilities)?;
    machine.incoming(&uri(image))?;
    machine.resume()?;
    machine.wait_for_ticks(2)?;
    Ok(machine)
}
