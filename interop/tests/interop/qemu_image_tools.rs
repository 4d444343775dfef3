//! Sterna's tools on QEMU's images, and QEMU on the images that the tools make.
#![allow(missing_docs)]

use std::path::Path;
use std::process::Command;

use sterna_image::Image;
use sterna_image::tools::diff::{DiffOptions, diff};
use sterna_image::tools::extract::{ExtractOptions, Part, extract};
use sterna_image::tools::repair::{RepairTo, repair};
use sterna_image::tools::verify::{Verdict, VerifyOptions, verify};
use sterna_interop::{Builder, Failure, Guest, Qemu, Ram, Root, machines_for, skip};

fn words(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}

fn verdict(image: &Path) -> Result<Verdict, Failure> {
    verify(image, &VerifyOptions::default()).map_err(words)
}

/// A guest that has run, saved with these capabilities.
fn saved(builder: Builder, capabilities: &[&str], name: &str) -> Result<Qemu, Failure> {
    let mut source = builder.spawn()?;
    source.wait_for_ticks(2)?;
    source.capabilities(capabilities)?;
    source.migrate(&format!("file:{}", source.directory().join(name).display()))?;
    Ok(source)
}

#[test]
fn verify_images_of_every_machine_are_sound() -> Result<(), Failure> {
    let test = "verify_images_of_every_machine_are_sound";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };

    for machine in machines_for(&root, test) {
        for capabilities in [&["mapped-ram"][..], &["mapped-ram", "multifd"], &[]] {
            let source = saved(machine.builder.clone(), capabilities, "image")?;
            let verdict = verdict(&source.directory().join("image"))?;
            let (name, found) = (machine.name, &verdict.findings);
            assert!(verdict.is_sound(), "{name} {capabilities:?}: {found:#?}");
            assert!(verdict.data_pages > 0, "{name} {capabilities:?}");
        }
    }
    Ok(())
}

#[test]
fn verify_shared_memory_that_is_left_out_is_noted() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("verify_shared_memory_that_is_left_out_is_noted") else { return Ok(()) };
    let builder = Qemu::builder(&root).ram(Ram::File).guest(Guest::Boot);

    for capabilities in [&["mapped-ram", "x-ignore-shared"][..], &["x-ignore-shared"]] {
        let source = saved(builder.clone(), capabilities, "image")?;
        let verdict = verdict(&source.directory().join("image"))?;
        assert!(verdict.is_sound() && verdict.has("skipped"), "{capabilities:?}: {:#?}", verdict.findings);
    }
    Ok(())
}

#[test]
fn verify_cancelled_save_is_damaged() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("verify_cancelled_save_is_damaged") else { return Ok(()) };
    let mut source = Qemu::builder(&root).guest(Guest::Boot).spawn()?;
    source.wait_for_ticks(2)?;
    let image = source.directory().join("image");
    source.capabilities(&["mapped-ram"])?;
    source.parameters(serde_json::json!({ "max-bandwidth": 1 << 20 }))?;
    source.start_migration(&format!("file:{}", image.display()))?;
    // The bandwidth is so low that the save does not end by itself.
    while image.metadata().map_or(0, |metadata| std::os::unix::fs::MetadataExt::blocks(&metadata)) < 512 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    source.execute("migrate_cancel", serde_json::json!({}))?;
    while source.execute("query-migrate", serde_json::json!({}))?["status"] != "cancelled" {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    let verdict = verdict(&image)?;

    assert!(!verdict.is_sound() && verdict.has("cancelled"), "{:#?}", verdict.findings);
    let refused = repair(&image, &RepairTo::Itself, &VerifyOptions::default());
    assert!(refused.is_err());
    Ok(())
}

#[test]
fn background_snapshot_that_qemu_cannot_load_is_mended_and_counts_on() -> Result<(), Failure> {
    let test = "background_snapshot_that_qemu_cannot_load_is_mended_and_counts_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = Qemu::builder(&root).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(3)?;
    if let Err(why) = source.capabilities(&["mapped-ram", "background-snapshot"]) {
        skip(test, &why);
        return Ok(());
    }
    let image = source.directory().join("image");
    source.migrate(&format!("file:{}", image.display()))?;
    assert!(verdict(&image)?.has("background-snapshot"));

    let mended = source.directory().join("mended");
    let to = RepairTo::File { path: mended.clone(), replace: false };
    let repaired = repair(&image, &to, &VerifyOptions::default()).map_err(words)?;

    assert!(repaired.pages > 0);
    let verdict = verdict(&mended)?;
    assert!(verdict.is_sound() && verdict.data_pages == repaired.pages, "{:#?}", verdict.findings);
    for capabilities in [&["mapped-ram"][..], &["mapped-ram", "multifd"]] {
        let mut target = builder.clone().incoming_defer().spawn()?;
        target.capabilities(capabilities)?;
        target.incoming(&format!("file:{}", mended.display()))?;
        // Each tick is a checksum of the guest's memory; a wrong one is an error.
        target.wait_for_ticks(3)?;
    }
    Ok(())
}

#[test]
fn core_of_a_guest_is_what_qemu_dumps_of_it() -> Result<(), Failure> {
    let test = "core_of_a_guest_is_what_qemu_dumps_of_it";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for machine in ["pc", "q35"] {
        let mut source =
            Qemu::builder(&root).machine(machine).args(&["-smp", "2"]).guest(Guest::Boot).spawn()?;
        source.wait_for_ticks(2)?;
        source.stop()?;
        let at = |name: &str| source.directory().join(name);
        let (dump, image, core) = (at("dump"), at("image"), at("core"));
        let protocol = format!("file:{}", dump.display());
        source.execute("dump-guest-memory", serde_json::json!({ "paging": false, "protocol": protocol }))?;
        source.capabilities(&["mapped-ram"])?;
        source.migrate(&format!("file:{}", image.display()))?;

        let opened = Image::open(&image).map_err(words)?;
        let part = Part::Core { is_virtual: false };
        let done = extract(&opened, &part, &core, &ExtractOptions::default()).map_err(words)?;

        assert_eq!(done.processors, 2, "{machine}: {:?}", done.notes);
        let ours = Core::read(&core)?;
        let theirs = Core::read(&dump)?;
        assert_eq!(ours.kind, theirs.kind, "{machine}");
        assert!(ours.notes == theirs.notes, "{machine}: the registers are QEMU's own");
        for (address, content) in &theirs.loads {
            let same = ours.loads.iter().any(|load| load.0 == *address && load.1 == *content);
            assert!(same, "{machine}: memory at {address:#x}");
        }
        gdb_reads(&core, test)?;
    }
    Ok(())
}

#[test]
fn diff_of_a_guest_that_went_on_names_pages_and_fields() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("diff_of_a_guest_that_went_on_names_pages_and_fields") else {
        return Ok(());
    };
    let mut source = Qemu::builder(&root).guest(Guest::Boot).spawn()?;
    source.wait_for_ticks(2)?;
    let at = |name: &str| source.directory().join(name);
    let (first, second, directory) = (at("first"), at("second"), source.directory().to_owned());
    source.migrate(&format!("file:{}", first.display()))?;
    source.resume()?;
    source.wait_for_ticks(2)?;
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", second.display()))?;
    let compare = |a: &Path, b: &Path| {
        let (a, b) = (Image::open(a).map_err(words)?, Image::open(b).map_err(words)?);
        diff(&a, &b, &directory, &DiffOptions::default()).map_err(words)
    };

    let same = compare(&first, &first)?;
    let difference = compare(&first, &second)?;

    assert!(same.is_same() && same.compared_pages > 16_000, "{same:#?}");
    assert_eq!(difference.kinds, ["legacy", "mapped-ram"]);
    assert!(difference.configuration.is_empty() && !difference.description, "{difference:#?}");
    assert!(
        difference.blocks.iter().any(|block| block.name == "pc.ram" && block.pages > 0),
        "{difference:#?}"
    );
    let timer = difference.sections.iter().find(|section| section.name == "timer");
    assert!(timer.is_some_and(|timer| !timer.fields.is_empty()), "{:#?}", difference.sections);
    for section in &difference.sections {
        assert_eq!(section.bytes[0], section.bytes[1], "{section:#?}");
    }
    Ok(())
}

/// The parts of a core file, without their positions in the file.
struct Core {
    kind: Vec<u8>,
    notes: Vec<u8>,
    loads: Vec<(u64, Vec<u8>)>,
}

impl Core {
    fn read(path: &Path) -> Result<Self, Failure> {
        let bytes = std::fs::read(path).map_err(words)?;
        let number = |at: usize, count: usize| {
            bytes[at..at + count].iter().rev().fold(0usize, |number, byte| number << 8 | usize::from(*byte))
        };
        let mut core = Self { kind: bytes[..20].to_vec(), notes: Vec::new(), loads: Vec::new() };
        for index in 0..number(56, 2) {
            let at = number(32, 8) + index * number(54, 2);
            let content = bytes[number(at + 8, 8)..number(at + 8, 8) + number(at + 32, 8)].to_vec();
            match number(at, 4) {
                1 => core.loads.push((number(at + 24, 8) as u64, content)),
                4 => core.notes = content,
                _ => {}
            }
        }
        Ok(core)
    }
}

/// Checks that gdb opens the core and shows the last bytes of the boot sector.
fn gdb_reads(core: &Path, test: &str) -> Result<(), Failure> {
    let gdb = Command::new("gdb").args(["-q", "-batch", "-ex", "x/2xb 0x7dfe", "-c"]).arg(core).output();
    let Ok(output) = gdb else {
        skip(test, "gdb is not installed");
        return Ok(());
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("0x55") && text.contains("0xaa"), "{text}");
    Ok(())
}
