//! Conversion of streams that QEMU writes only on request: differences (XBZRLE), background snapshots, and
//! streams without shared memory. The guest must continue as if nothing had happened.
#![allow(missing_docs)]

use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_interop::{Builder, Failure, Guest, Qemu, Ram, Root, sterna_does, unbroken};

#[test]
fn live_save_with_differences_converted_is_the_same_guest() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("live_save_with_differences_converted_is_the_same_guest") else {
        return Ok(());
    };
    let builder = Qemu::builder(&root).memory_mib(32).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    let saved = source.directory().join("saved");
    source.capabilities(&["xbzrle"])?;
    // The limit is so low that the guest writes its memory several times during the save.
    source.parameters(json!({ "max-bandwidth": 16 << 20, "xbzrle-cache-size": 64 << 20 }))?;
    source.start_migration(&uri(&saved))?;
    let state = wait_until(&mut source, |state| state["xbzrle-cache"]["pages"].as_u64() > Some(20))?;
    source.parameters(json!({ "max-bandwidth": 0, "downtime-limit": 10_000 }))?;
    source.wait_for_migration().map_err(|why| format!("{why}\n{state}"))?;

    for format in ["mapped-ram", "legacy-lzop"] {
        let (there, back) = (source.directory().join(format), source.directory().join("back"));
        convert(&saved, &there, format)?;
        // A legacy stream keeps the differences, so its loader needs the capability.
        let mapped = source.directory().join("mapped");
        convert(&there, &mapped, "mapped-ram")?;
        convert(&mapped, &back, "legacy")?;
        unbroken(&[&source, &loaded(&builder, &mapped, &["mapped-ram", "multifd"])?])?;
        unbroken(&[&source, &loaded(&builder, &back, &[])?])?;
        for file in [mapped, back] {
            std::fs::remove_file(file).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

#[test]
fn background_snapshot_converted_to_mapped_ram_is_loaded() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("background_snapshot_converted_to_mapped_ram_is_loaded") else {
        return Ok(());
    };
    let builder = Qemu::builder(&root).memory_mib(32).guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    let (saved, mapped) = (source.directory().join("saved"), source.directory().join("mapped"));
    source.capabilities(&["background-snapshot"])?;
    source.migrate(&uri(&saved))?;
    convert(&saved, &mapped, "mapped-ram")?;

    let target = loaded(&builder, &mapped, &["mapped-ram"])?;

    // The source continued for a while. The snapshot is of a moment in the middle, and each of both counts is
    // complete.
    unbroken(&[&source])?;
    let ticks = target.ticks();
    assert!(ticks.len() >= 2, "{ticks:?}");
    Ok(())
}

#[test]
fn image_without_shared_memory_converted_finds_it_again() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("image_without_shared_memory_converted_finds_it_again") else {
        return Ok(());
    };
    // Both machines map the same file, so the target has the source's memory.
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let memory = directory.path().join("memory");
    let object = format!("memory-backend-file,id=shared,size=32M,mem-path={},share=on", memory.display());
    let builder = Qemu::builder(&root)
        .machine("pc,memory-backend=shared")
        .memory_mib(32)
        .ram(Ram::Anonymous)
        .args(&["-object", &object])
        .guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    let (saved, mapped) = (source.directory().join("saved"), source.directory().join("mapped"));
    source.capabilities(&["x-ignore-shared"])?;
    source.migrate(&uri(&saved))?;
    convert(&saved, &mapped, "mapped-ram")?;
    let length = std::fs::metadata(&mapped).map_err(|error| error.to_string())?.len();
    assert!(length < 16 << 20, "no room for what is left out, and {length} bytes");

    unbroken(&[&source, &loaded(&builder, &mapped, &["x-ignore-shared", "mapped-ram"])?]).map(drop)
}

fn wait_until(machine: &mut Qemu, reached: impl Fn(&Value) -> bool) -> Result<Value, Failure> {
    for _ in 0..600 {
        let state = machine.execute("query-migrate", Value::Null)?;
        if reached(&state) || state["status"] != "active" {
            return Ok(state);
        }
        thread::sleep(Duration::from_millis(100));
    }
    Err("the save does not get so far".to_owned())
}

fn uri(image: &Path) -> String {
    format!("file:{}", image.display())
}

fn convert(from: &Path, to: &Path, format: &str) -> Result<(), Failure> {
    let arguments =
        ["convert".as_ref(), from.as_os_str(), to.as_os_str(), "--format".as_ref(), format.as_ref()];
    sterna_does(&[&arguments[..], &["--force".as_ref()]].concat()).map(drop)
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
