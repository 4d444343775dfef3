//! Images served to real QEMUs whose guests run before their memory is there.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use sterna_interop::{Builder, Failure, Guest, Qemu, Root, sterna, unbroken};

/// A guest that rewrites and checks half of its RAM.
fn builder(root: &Root) -> Builder {
    Qemu::builder(root).machine("pc").memory_mib(64).guest(Guest::Boot)
}

/// A guest in a mapped-ram image that a QEMU wrote, and the QEMU, whose count goes before.
fn saved(builder: &Builder) -> Result<(Qemu, PathBuf), Failure> {
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(3)?;
    let image = source.directory().join("image");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;
    Ok((source, image))
}

/// A QEMU that listens for a guest that comes by postcopy.
fn waiting(builder: &Builder, capabilities: &[&str]) -> Result<(Qemu, String), Failure> {
    let mut target = builder.clone().incoming_defer().spawn()?;
    target.capabilities(&[&["postcopy-ram"], capabilities].concat())?;
    let address = target.listen_on_unix()?;
    Ok((target, address))
}

/// `sterna serve` with its output kept.
fn serve(image: &Path, more: &[&str]) -> Result<Child, Failure> {
    let mut command = sterna();
    command.arg("serve").arg(image).args(more).arg("--json");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().map_err(|error| format!("sterna: {error}"))
}

/// Its report, if it has done its work.
fn report(serving: Child) -> Result<serde_json::Value, Failure> {
    let Output { status, stdout, stderr } = serving.wait_with_output().map_err(|error| error.to_string())?;
    if !status.success() {
        return Err(format!("sterna serve: {status}: {}", String::from_utf8_lossy(&stderr)));
    }
    serde_json::from_slice(&stdout).map_err(|error| error.to_string())
}

#[test]
fn image_served_to_a_qemu_lets_its_guest_go_on_with_every_page() -> Result<(), Failure> {
    let test = "image_served_to_a_qemu_lets_its_guest_go_on_with_every_page";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = builder(&root);
    let (source, image) = saved(&builder)?;
    let (mut target, address) = waiting(&builder, &[])?;

    let serving = serve(&image, &[&address])?;
    let report = report(serving)?;
    target.wait_for_migration()?;
    target.resume()?;
    target.wait_for_ticks(3)?;

    assert_eq!(report["guests"][0]["completed"], true, "{report}");
    assert_eq!(report["guests"][0]["missing_pages"], 0, "{report}");
    unbroken(&[&source, &target]).map(drop)
}
