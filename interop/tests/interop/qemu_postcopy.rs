//! Images that are served to real QEMUs, whose guests run before their memory has arrived.
#![allow(missing_docs)]

mod cut;
mod lazy;
mod recover;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use cut::Cut;
use serde_json::{Value, json};
use sterna_interop::{
    Accelerator, Builder, Failure, Guest, Qemu, Ram, Root, fill, sterna, sterna_does, unbroken,
};

/// Time limit until a QEMU notices that its connection is lost.
const NOTICED: Duration = Duration::from_secs(60);

/// A guest that rewrites and checks half of its RAM.
fn builder(root: &Root) -> Builder {
    Qemu::builder(root).machine("pc").memory_mib(64).guest(Guest::Boot)
}

/// Saves a guest with a QEMU into a mapped-ram image. Also returns the QEMU, whose output has the earlier
/// part of the count.
fn saved(builder: &Builder) -> Result<(Qemu, PathBuf), Failure> {
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(3)?;
    let image = source.directory().join("image");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;
    Ok((source, image))
}

/// A QEMU that listens for a guest by postcopy.
fn waiting(builder: &Builder, capabilities: &[&str]) -> Result<(Qemu, String), Failure> {
    let mut target = builder.clone().incoming_defer().spawn()?;
    target.capabilities(&[&["postcopy-ram"], capabilities].concat())?;
    let address = target.listen_on_unix()?;
    Ok((target, address))
}

/// Starts `sterna serve` and keeps its output.
fn serve(image: &Path, more: &[&str]) -> Result<Child, Failure> {
    let mut command = sterna();
    command.arg("serve").arg(image).args(more).arg("--json");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().map_err(|error| format!("sterna: {error}"))
}

/// The report of `serve`, if it has succeeded.
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

#[test]
fn requested_pages_have_a_channel_of_their_own_with_preempt() -> Result<(), Failure> {
    let test = "requested_pages_have_a_channel_of_their_own_with_preempt";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = builder(&root);
    let (source, image) = saved(&builder)?;
    let (mut target, address) = waiting(&builder, &["postcopy-preempt"])?;

    let serving = serve(&image, &[&address, "--preempt"])?;
    let report = report(serving)?;
    target.wait_for_migration()?;
    target.resume()?;
    target.wait_for_ticks(3)?;

    assert_eq!(report["guests"][0]["completed"], true, "{report}");
    unbroken(&[&source, &target]).map(drop)
}

/// A machine that executes no instruction, in a mapped-ram image. Its RAM has pages of every kind, and each
/// can be compared.
fn still(root: &Root, memory_mib: u64) -> Result<(Builder, Qemu, PathBuf), Failure> {
    let builder = Qemu::builder(root).memory_mib(memory_mib).accelerator(Accelerator::Nothing).ram(Ram::File);
    let mut source = builder.clone().spawn()?;
    source.stop()?;
    fill(&source.directory().join("ram"), 17)?;
    let image = source.directory().join("image");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;
    Ok((builder.ram(Ram::Object), source, image))
}

/// Checks that the arrived machine, saved again, has the same pages as the image.
fn has_every_page_of(target: &mut Qemu, image: &Path) -> Result<(), Failure> {
    target.wait_for_migration()?;
    target.stop()?;
    let again = target.directory().join("again");
    target.capabilities_off(&["postcopy-preempt", "postcopy-ram"])?;
    target.capabilities(&["mapped-ram"])?;
    target.migrate(&format!("file:{}", again.display()))?;
    let output = sterna()
        .arg("diff")
        .args([image, &again])
        .arg("--json")
        .output()
        .map_err(|error| error.to_string())?;
    let differences: serde_json::Value =
        serde_json::from_slice(&output.stdout).map_err(|error| format!("sterna diff: {error}"))?;
    let difference = &differences["difference"];
    // Clocks have advanced, but pages must be the same.
    if difference["blocks"] != serde_json::json!([]) || difference["compared_pages"].as_u64() == Some(0) {
        return Err(format!("not what the image has: {differences:#}"));
    }
    Ok(())
}

#[test]
fn image_of_every_form_is_served_page_by_page() -> Result<(), Failure> {
    let test = "image_of_every_form_is_served_page_by_page";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 32)?;
    let directory = image.parent().ok_or("an image lies in a directory")?;
    let xml = directory.join("xml");
    std::fs::write(&xml, "<domain type='qemu'><name>judge</name></domain>\n")
        .map_err(|error| error.to_string())?;

    for (format, access) in [
        ("mapped-ram", "places"),
        ("libvirt-sparse", "places"),
        ("legacy", "index"),
        ("libvirt-raw", "index"),
        ("legacy-zstd", "spool"),
        ("legacy-gzip", "spool"),
        ("libvirt-zstd", "spool"),
    ] {
        let form = directory.join(format);
        let (from, to) = (image.as_os_str(), form.as_os_str());
        let mut convert = vec!["convert".as_ref(), from, to, "--format".as_ref(), format.as_ref()];
        if format.starts_with("libvirt") {
            convert.extend(["--xml".as_ref(), xml.as_os_str()]);
        }
        sterna_does(&convert)?;
        let (mut target, address) = waiting(&builder, &[])?;

        let report = report(serve(&form, &[&address])?).map_err(|why| format!("{format}: {why}"))?;

        assert_eq!(report["access"], access, "{format}");
        has_every_page_of(&mut target, &image).map_err(|why| format!("{format}: {why}"))?;
        std::fs::remove_file(&form).map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[test]
fn two_qemus_are_served_from_one_image_at_once() -> Result<(), Failure> {
    let test = "two_qemus_are_served_from_one_image_at_once";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 64)?;
    let (mut first, one) = waiting(&builder, &["postcopy-preempt"])?;
    let (mut second, two) = waiting(&builder, &["postcopy-preempt"])?;

    // With the smallest cache, the two guests compete for its chunks.
    let report = report(serve(&image, &[&one, &two, "--preempt", "--cache-limit", "1M"])?)?;

    assert_eq!(report["guests"].as_array().map(Vec::len), Some(2), "{report}");
    has_every_page_of(&mut first, &image)?;
    has_every_page_of(&mut second, &image)
}

/// Makes a paused QEMU listen again.
fn recover(target: &mut Qemu, address: &str) -> Result<(), Failure> {
    let begin = Instant::now();
    while target.execute("query-migrate", Value::Null)?["status"] != "postcopy-paused" {
        if begin.elapsed() > NOTICED {
            return Err("QEMU does not notice that its connection broke".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    target.execute("migrate-recover", json!({ "uri": address })).map(drop)
}

#[test]
fn connection_that_breaks_is_replaced_and_no_page_is_lost() -> Result<(), Failure> {
    let test = "connection_that_breaks_is_replaced_and_no_page_is_lost";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 32)?;
    for preempt in [false, true] {
        let capabilities: &[&str] = if preempt { &["postcopy-preempt"] } else { &[] };
        let (mut target, address) = waiting(&builder, capabilities)?;
        let place = target.directory().join("way");
        let way = Cut::new(&place, &address, 3 << 20, true).map_err(|error| error.to_string())?;
        let mut arguments = vec![way.address()];
        arguments.extend(preempt.then_some("--preempt"));

        let serving = serve(&image, &arguments)?;
        way.wait();
        lazy::wait_for_postcopy(&mut target)?;
        way.cut();
        way.allow(4 << 20);
        way.wait();
        way.allow(u64::MAX);
        let report = report(serving)?;

        let guest = &report["guests"][0];
        assert_eq!((&guest["completed"], &guest["recoveries"]), (&json!(true), &json!(2)), "{report}");
        // Pages that had arrived were not sent again: half of the pages have content.
        let sent = guest["content_pages"].as_u64().unwrap_or(0) + guest["zero_pages"].as_u64().unwrap_or(0);
        let total = guest["ram_total_bytes"].as_u64().unwrap_or(0) / 4096;
        // A part of an interrupted write may have arrived without being counted.
        assert!((total - 256..total + total / 4).contains(&sent), "{sent} of {total}: {report}");
        has_every_page_of(&mut target, &image)?;
    }
    Ok(())
}

fn status(qemu: &mut Qemu) -> Result<String, Failure> {
    let told = qemu.execute("query-migrate", Value::Null)?;
    Ok(told["status"].as_str().unwrap_or_default().to_owned())
}

/// QEMU's own command to break the connection. It is refused outside of postcopy. The missing pages are sent
/// after the recovery.
#[test]
fn qemu_that_pauses_its_postcopy_is_served_on() -> Result<(), Failure> {
    let test = "qemu_that_pauses_its_postcopy_is_served_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 64)?;
    for preempt in [false, true] {
        let capabilities: &[&str] = if preempt { &["postcopy-preempt"] } else { &[] };
        let (mut target, address) = waiting(&builder, capabilities)?;
        let early = target.execute("migrate-pause", Value::Null).err().unwrap_or_default();
        // Sterna's monitor uses the same words.
        assert!(early.contains("only supported during postcopy"), "{early}");
        let way = Cut::new(&target.directory().join("way"), &address, 12 << 20, true)
            .map_err(|error| error.to_string())?;
        let mut arguments = vec![way.address()];
        arguments.extend(preempt.then_some("--preempt"));

        let serving = serve(&image, &arguments)?;
        way.wait();
        lazy::wait_for_postcopy(&mut target)?;
        assert_eq!(status(&mut target)?, "postcopy-active");
        target.execute("migrate-pause", Value::Null)?;
        let begin = Instant::now();
        while status(&mut target)? == "postcopy-active" && begin.elapsed() < NOTICED {
            std::thread::sleep(Duration::from_millis(5));
        }
        way.allow(u64::MAX);
        let report = report(serving)?;

        let guest = &report["guests"][0];
        assert_eq!(guest["completed"], true, "{report}");
        assert!(guest["recoveries"].as_u64() >= Some(1), "{report}");
        has_every_page_of(&mut target, &image)?;
    }
    Ok(())
}

#[test]
fn guest_that_runs_survives_the_death_of_its_server_and_is_served_by_another() -> Result<(), Failure> {
    let test = "guest_that_runs_survives_the_death_of_its_server_and_is_served_by_another";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = builder(&root);
    let (source, image) = saved(&builder)?;
    let (mut target, address) = waiting(&builder, &["postcopy-preempt"])?;
    let way = Cut::new(&target.directory().join("way"), &address, 300 << 10, true)
        .map_err(|error| error.to_string())?;

    let mut first = serve(&image, &[way.address(), "--preempt"])?;
    way.wait();
    lazy::wait_for_postcopy(&mut target)?;
    first.kill().and_then(|()| first.wait()).map_err(|error| error.to_string())?;
    way.allow(0);
    recover(&mut target, &address)?;
    let report = report(serve(&image, &[&address, "--preempt", "--recover"])?)?;
    target.wait_for_migration()?;
    target.resume()?;
    target.wait_for_ticks(3)?;

    assert_eq!(report["guests"][0]["recoveries"], 1, "{report}");
    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn qemus_that_are_handed_connections_are_served_at_one_address() -> Result<(), Failure> {
    let test = "qemus_that_are_handed_connections_are_served_at_one_address";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 32)?;
    let place = image.with_file_name("served");
    let mut targets = [builder.clone().incoming_defer().spawn()?, builder.incoming_defer().spawn()?];

    let serving = serve(&image, &[&format!("listen:unix:{}", place.display()), "--guests", "2"])?;
    for target in &mut targets {
        target.capabilities(&["postcopy-ram"])?;
        let begin = Instant::now();
        let connection = loop {
            match std::os::unix::net::UnixStream::connect(&place) {
                Ok(connection) => break connection,
                Err(error) if begin.elapsed() > NOTICED => return Err(error.to_string()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        target.qmp().send_fd("pages", connection.as_fd()).map_err(|error| error.to_string())?;
        target.start_incoming("fd:pages")?;
    }
    let report = report(serving)?;

    assert_eq!(report["guests"].as_array().map(Vec::len), Some(2), "{report}");
    targets.iter_mut().try_for_each(|target| has_every_page_of(target, &image))
}
