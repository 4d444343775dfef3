//! `sterna restore --lazy` into a QEMU that it starts or that waits. The connection may break, or the
//! operator interrupts the command.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sterna_interop::{Failure, Qemu, Root, sterna, ticks};

use super::{NOTICED, builder, has_every_page_of, recover, report, saved, serve, still};

/// Time after which a command has certainly handled a second Ctrl-C.
const GIVES_UP: Duration = Duration::from_secs(2);

#[test]
fn lazy_restore_with_a_command_line_starts_it_and_its_guest_goes_on() -> Result<(), Failure> {
    let test = "lazy_restore_with_a_command_line_starts_it_and_its_guest_goes_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = builder(&root);
    let (source, image) = saved(&builder)?;
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let qemu = builder.command_in(directory.path())?;
    let mut command = sterna();
    command
        .arg("restore")
        .arg(&image)
        .args(["--lazy", "--json", "--"])
        .arg(qemu.get_program())
        .args(qemu.get_args());
    command.envs(qemu.get_envs().filter_map(|(name, value)| Some((name, value?))));

    let output = command.output().map_err(|error| error.to_string())?;

    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    let _started = Started::of(&told);
    assert_eq!(
        (&told["lazy"], &told["preempt"], &told["is_running"]),
        (&json!(true), &json!(true), &json!(true))
    );
    assert!(told["time_until_guest"].as_f64() <= told["total_time"].as_f64(), "{told}");
    let serial = directory.path().join("serial");
    let said = || std::fs::read_to_string(&serial).unwrap_or_default();
    let begin = Instant::now();
    while said().matches("checksum OK").count() < 2 {
        assert!(begin.elapsed() < NOTICED, "the guest says only: {}", said());
        std::thread::sleep(Duration::from_millis(10));
    }
    ticks::unbroken_serials(&[&source.serial(), &said()]).map(drop)
}

#[test]
fn lazy_restore_survives_a_break_and_puts_settings_back() -> Result<(), Failure> {
    let test = "lazy_restore_survives_a_break_and_puts_settings_back";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 256)?;
    let mut target = builder.incoming_defer().spawn()?;
    let before = target.capabilities_on()?;

    let restoring = restore(&image, &target)?;
    interrupt(&mut target)?;
    let told = report(restoring)?;

    assert_eq!(told["recoveries"], 1, "{told}");
    assert_eq!(target.capabilities_on()?, before);
    has_every_page_of(&mut target, &image)
}

#[test]
fn lazy_restore_that_is_given_up_leaves_the_guest_paused_for_another_server() -> Result<(), Failure> {
    let test = "lazy_restore_that_is_given_up_leaves_the_guest_paused_for_another_server";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 256)?;
    let mut target = builder.incoming_defer().spawn()?;
    let mut restoring = restore(&image, &target)?;
    wait_for_postcopy(&mut target)?;

    // The stopped QEMU receives no pages, so its guest lacks some.
    signal(target.pid(), Signal::STOP)?;
    let mut said = BufReader::new(restoring.stderr.take().ok_or("no stderr")?);
    let mut heard = String::new();
    signal(restoring.id(), Signal::INT)?;
    while !heard.contains("Ctrl-C again") {
        if said.read_line(&mut heard).map_err(|error| error.to_string())? == 0 {
            return Err(format!("it ended at the first Ctrl-C: {heard}"));
        }
    }
    signal(restoring.id(), Signal::INT)?;
    // The command has stopped serving, and asks the stopped QEMU for its state.
    let begin = Instant::now();
    while begin.elapsed() < GIVES_UP && restoring.try_wait().map_err(|error| error.to_string())?.is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    signal(target.pid(), Signal::CONT)?;
    said.read_to_string(&mut heard).map_err(|error| error.to_string())?;
    let status = restoring.wait().map_err(|error| error.to_string())?;
    let address = format!("unix:{}/again", target.directory().display());
    recover(&mut target, &address)?;
    let report = report(serve(&image, &[&address, "--preempt", "--recover"])?)?;

    assert_eq!(status.code(), Some(5), "{heard}");
    assert!(heard.contains("stays paused") && heard.contains("--recover --preempt"), "{heard}");
    assert_eq!(report["guests"][0]["completed"], true, "{report}");
    has_every_page_of(&mut target, &image)
}

/// A save with dirty bitmaps contains a POSTCOPY_ADVISE. It also contains a section that is live in addition
/// to RAM.
#[test]
fn lazy_restore_of_an_image_with_dirty_bitmaps_brings_the_bitmap() -> Result<(), Failure> {
    let test = "lazy_restore_of_an_image_with_dirty_bitmaps_brings_the_bitmap";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let disk = directory.path().join("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).map_err(|error| error.to_string())?;
    let node = format!("driver=file,filename={},node-name=disk,locking=off", disk.display());
    let builder =
        builder(&root).args(&["-blockdev", &node, "-device", "virtio-blk-pci,drive=disk,share-rw=on"]);
    let mut source = builder.clone().spawn()?;
    source.execute("block-dirty-bitmap-add", json!({"node": "disk", "name": "backup"}))?;
    source.execute("human-monitor-command", json!({"command-line": "qemu-io disk \"write 0 64k\""}))?;
    let before = bitmaps(&mut source)?;
    let image = directory.path().join("image");
    source.capabilities(&["mapped-ram", "dirty-bitmaps"])?;
    source.migrate(&format!("file:{}", image.display()))?;
    let mut target = builder.incoming_defer().spawn()?;

    report(restore(&image, &target)?)?;

    assert_eq!(target.status()?, "running");
    assert_eq!(bitmaps(&mut target)?, before);
    assert_eq!(before[0]["count"], 65536, "{before}");
    Ok(())
}

/// The dirty bitmaps of the node `disk`.
fn bitmaps(qemu: &mut Qemu) -> Result<Value, Failure> {
    let nodes = qemu.execute("query-named-block-nodes", json!({"flat": true}))?;
    let disk = nodes.as_array().into_iter().flatten().find(|node| node["node-name"] == "disk");
    Ok(disk.ok_or("there is no node `disk`")?["dirty-bitmaps"].clone())
}

fn restore(image: &Path, target: &Qemu) -> Result<Child, Failure> {
    let mut command = sterna();
    command.arg("restore").arg(image).arg(target.operator_socket()).args(["--lazy", "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().map_err(|error| format!("sterna: {error}"))
}

fn signal(process: u32, signal: Signal) -> Result<(), Failure> {
    let id = Pid::from_raw(process.cast_signed()).ok_or("no process")?;
    kill_process(id, signal).map_err(|error| error.to_string())
}

/// Waits until the connection can be lost: the guest runs here or is paused here, and its pages follow.
pub(super) fn wait_for_postcopy(target: &mut Qemu) -> Result<(), Failure> {
    let begin = Instant::now();
    while target.execute("query-migrate", Value::Null)?["status"] != "postcopy-active" {
        assert!(begin.elapsed() < NOTICED, "postcopy does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Until it has loaded its devices, a QEMU that loses the connection ends.
    while target.status()? == "inmigrate" {
        assert!(begin.elapsed() < NOTICED, "the devices are not loaded");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Breaks the connection at QEMU's end while pages are sent.
fn interrupt(target: &mut Qemu) -> Result<(), Failure> {
    wait_for_postcopy(target)?;
    target.execute("migrate-pause", Value::Null).map(drop)
}

/// A VM that `sterna restore` has started and left running.
struct Started {
    process: u64,
    monitor: PathBuf,
}

impl Started {
    fn of(told: &Value) -> Self {
        let monitor = told["monitor"].as_str().unwrap_or_default().into();
        Self { process: told["process"].as_u64().expect("its process"), monitor }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The calls fail if the process has ended, and that is the goal.
        let _ = Command::new("kill").args(["-9", &self.process.to_string()]).status();
        if let Some(place) = self.monitor.parent() {
            let _ = std::fs::remove_dir_all(place);
        }
    }
}
