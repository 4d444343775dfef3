//! `sterna save listen:ch:SOCKET` and `sterna serve IMAGE ch:SOCKET`, with a peer that speaks Cloud Hypervisor's side.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use sterna_uffd_peer::cloud_hypervisor::{ERROR, Machine, OK, Receiver, Sender, command};

const MIB: u64 = 1 << 20;

/// A directory, and a machine.
struct World {
    directory: tempfile::TempDir,
    machine: Machine,
}

impl World {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), machine: Machine::new(2 * MIB, MIB) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("ch.sock")
    }

    /// Starts a save, and waits until it listens.
    fn save(&self, image: &Path, more: &[&str]) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.arg("save").arg(format!("listen:ch:{}", self.socket().display())).arg(image).args(more);
        Running::start(command, Some("listening at"))
    }

    /// Sends the machine, and returns the answer to its end.
    fn send(&self) -> Option<u16> {
        let vmm = Sender::connect(&self.socket()).unwrap();
        vmm.begin(&self.machine).unwrap();
        vmm.request(command::COMPLETE, &[], &[]).unwrap()
    }

    /// An image of the machine.
    fn saved(&self) -> PathBuf {
        let image = self.path("vm.sterna");
        let save = self.save(&image, &[]);
        assert_eq!(self.send(), Some(OK));
        assert_eq!(save.end().status, Some(0));
        image
    }

    fn serve(&self, image: &Path, more: &[&str]) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.arg("serve").arg(image).arg(format!("ch:{}", self.socket().display())).args(more);
        Running::start(command, None)
    }
}

/// A command, which is killed on drop.
struct Running {
    child: Child,
    errors: Option<std::thread::JoinHandle<String>>,
}

/// What a command said.
struct Ended {
    status: Option<i32>,
    output: String,
    errors: String,
}

impl Running {
    /// Starts it. `first`: the first line on standard error contains this.
    fn start(mut command: Command, first: Option<&str>) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        if let Some(first) = first {
            errors.read_line(&mut line).unwrap();
            assert!(line.contains(first), "{line}");
        }
        let errors = std::thread::spawn(move || {
            let _ = errors.read_to_string(&mut line);
            line
        });
        Self { child, errors: Some(errors) }
    }

    fn interrupt(&self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }

    fn end(mut self) -> Ended {
        let mut output = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        let errors = self.errors.take().unwrap().join().unwrap();
        Ended { status: self.child.wait().unwrap().code(), output, errors }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Errors mean that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sterna(arguments: &[&str]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(arguments);
    Running::start(command, None).end()
}

#[test]
fn machine_is_saved_converted_and_restored() {
    let world = World::new();
    let image = world.path("vm.sterna");
    let save = world.save(&image, &["--json"]);
    assert_eq!(world.send(), Some(OK));
    let saved = save.end();
    assert_eq!(saved.status, Some(0), "{}", saved.errors);
    let report: Value = serde_json::from_str(&saved.output).unwrap();
    assert_eq!(report["ram_total_bytes"], world.machine.memory.len());
    assert_eq!((&report["was_running"], &report["acknowledged"]), (&Value::Bool(true), &Value::Bool(true)));
    // The VMM's own form, and back.
    let directory = world.path("directory");
    let converted = sterna(&["convert", image.to_str().unwrap(), directory.to_str().unwrap()]);
    assert_eq!(converted.status, Some(0), "{}", converted.errors);
    assert!(std::fs::read(directory.join("memory-ranges")).unwrap() == world.machine.memory);
    let again = world.path("again.sterna");
    let converted = sterna(&["convert", directory.to_str().unwrap(), again.to_str().unwrap()]);
    assert_eq!(converted.status, Some(0), "{}", converted.errors);
    for image in [image, again] {
        let vmm = Receiver::bind(&world.socket(), false).unwrap();
        let serve = world.serve(&image, &["--json", "--paused"]);
        let arrived = vmm.accept().unwrap();
        let served = serve.end();
        assert_eq!(served.status, Some(0), "{}", served.errors);
        assert_eq!(arrived.last, command::COMPLETE_PAUSED);
        assert!(arrived.memory_of(&world.machine).unwrap() == world.machine.memory);
        assert_eq!(arrived.config, world.machine.config());
        let report: Value = serde_json::from_str(&served.output).unwrap();
        assert_eq!((&report["guests"][0]["end"], &report["access"]), (&"completed".into(), &"filled".into()));
        std::fs::remove_file(world.socket()).unwrap();
    }
}

#[test]
fn image_in_a_store_is_served_lazily() {
    let world = World::new();
    let image = format!("store:{}#vm", world.path("store").display());
    let save = world.save(image.as_ref(), &[]);
    assert_eq!(world.send(), Some(OK));
    assert_eq!(save.end().status, Some(0));
    let vmm = Receiver::bind(&world.socket(), true).unwrap();

    let serve = world.serve(image.as_ref(), &["--lazy", "--json", "--fill-rate", "max"]);
    // A host that makes huge pages of memfds refuses at the start.
    let settings =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    if ["[always]", "[within_size]", "[force]"].iter().any(|setting| settings.contains(setting)) {
        let served = serve.end();
        assert_eq!(served.status, Some(1));
        assert!(served.errors.contains("shmem_enabled"), "{}", served.errors);
        return;
    }
    let mut arrived = vmm.accept().unwrap();
    assert_eq!(arrived.walk(&world.machine).unwrap(), Some(OK));
    assert!(arrived.memory_of(&world.machine).unwrap() == world.machine.memory);
    arrived.faults = None;

    let served = serve.end();
    assert_eq!(served.status, Some(0), "{}", served.errors);
    let report: Value = serde_json::from_str(&served.output).unwrap();
    assert_eq!(report["access"], "page-requests");
    assert_eq!(
        report["guests"][0]["faults"],
        report["guests"][0]["ram_total_bytes"].as_u64().unwrap() / 4096
    );
    assert_eq!(report["guests"][0]["missing_pages"], 0);
}

#[test]
fn interrupted_save_leaves_no_image_and_lets_the_guest_continue() {
    let world = World::new();
    let image = world.path("vm.sterna");
    let save = world.save(&image, &[]);
    let vmm = Sender::connect(&world.socket()).unwrap();
    vmm.begin(&world.machine).unwrap();

    save.interrupt();
    assert_eq!(vmm.answer().unwrap(), None, "the connection ends");

    let saved = save.end();
    assert_eq!(saved.status, Some(130), "{}", saved.errors);
    assert!(saved.errors.contains("there is no image"), "{}", saved.errors);
    assert!(!image.exists() && !world.socket().exists());
}

/// A limit of the file's length has the effect of a full disk.
#[test]
fn full_disk_leaves_no_image_and_answers_with_an_error() {
    let world = World::new();
    let image = world.path("vm.sterna");
    let mut shell = Command::new("sh");
    // Units of 512 or 1024 bytes.
    shell.args([
        "-c",
        "trap '' XFSZ; ulimit -f 200; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_sterna"),
        "save",
    ]);
    shell.arg(format!("listen:ch:{}", world.socket().display())).arg(&image).args(["--level", "0"]);
    let save = Running::start(shell, Some("listening at"));

    assert_eq!(world.send(), Some(ERROR));

    let saved = save.end();
    assert_eq!(saved.status, Some(1), "{}", saved.errors);
    assert!(saved.errors.contains("vm.sterna"), "{}", saved.errors);
    assert_eq!(world.directory.path().read_dir().unwrap().count(), 0);
}

#[test]
fn end_before_complete_leaves_no_image() {
    let world = World::new();
    let image = world.path("vm.sterna");
    let save = world.save(&image, &[]);
    let vmm = Sender::connect(&world.socket()).unwrap();
    vmm.begin(&world.machine).unwrap();
    drop(vmm);

    let saved = save.end();

    assert_eq!(saved.status, Some(1));
    assert!(saved.errors.contains("there is no snapshot"), "{}", saved.errors);
    assert_eq!(world.directory.path().read_dir().unwrap().count(), 0);
}

#[test]
fn damaged_frame_is_named_and_the_vmm_gets_no_machine() {
    let world = World::new();
    let image = world.saved();
    let mut bytes = std::fs::read(&image).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let vmm = Receiver::bind(&world.socket(), false).unwrap();
    let serve = world.serve(&image, &[]);

    let arrived = vmm.accept().unwrap();

    let served = serve.end();
    assert_eq!(arrived.last, command::ABANDON);
    assert_eq!(served.status, Some(1));
    assert!(served.errors.contains("vm.sterna") && served.errors.contains("frame "), "{}", served.errors);
}

#[test]
fn options_and_images_of_others_are_refused() {
    let world = World::new();
    let image = world.saved();
    let image = image.to_str().unwrap();
    let refused = |arguments: &[&str], words: &str| {
        let ended = sterna(arguments);
        assert_eq!(ended.status, Some(2), "{arguments:?}: {}", ended.errors);
        assert!(ended.errors.contains(words), "{arguments:?}: {}", ended.errors);
    };

    refused(&["save", "listen:ch:", "a.sterna"], "path of a socket");
    refused(&["save", "listen:ch:/s", "a.sterna", "--channels", "2"], "--channels is not for listen:ch:");
    refused(&["save", "listen:ch:/s", "a.sterna", "--resume-after"], "preserve_source");
    refused(&["save", "listen:ch:/s", "a.sterna", "--format", "legacy"], "writes only the format sterna");
    refused(&["save", "listen:ch:/s", "a.img"], ".sterna");
    refused(&["save", "listen:ch:/s", image], "exists");
    refused(&["serve", image, "ch:/s", "unix:/t"], "cannot be combined");
    refused(&["serve", image, "ch:/s", "--fill-rate", "max"], "--lazy");
    refused(&["serve", image, "ch:/s", "--record", "f"], "--record is not for ch:");
    refused(&["serve", image, "unix:/s", "--lazy"], "--lazy is only for ch:");
    refused(&["serve", image, "uffd:/s", "--paused"], "--paused is only for ch:");
    let other = world.path("other.sterna");
    std::fs::write(&other, b"#!/bin/sh\n").unwrap();
    refused(&["serve", other.to_str().unwrap(), "ch:/s"], "other.sterna");
}
