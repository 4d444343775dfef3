//! The QEMU releases that users run besides sid's: Debian 12's 7.2 and Debian 13's 10.0.
//!
//! A few cases of each: saves in every kind of form that the release supports, a live migration to sid's
//! QEMU, and a stream into an image. Also the stream of 10.0 for a machine with virtio-mem.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::Value;
use sterna_interop::qemu::Builder;
use sterna_interop::{Failure, Guest, Qemu, Root, sterna, sterna_does, unbroken};

const DOMAIN: &str = "<domain type='qemu'><name>counting</name></domain>\n";

/// A release, with its newest machine type.
#[derive(Clone, Copy)]
struct Release {
    root: fn(&str) -> Option<Root>,
    machine: &'static str,
    /// The form that `auto` selects, and other forms to test.
    forms: &'static [(&'static str, &'static str)],
}

const BOOKWORM: Release = Release {
    root: Root::qemu_bookworm_for,
    machine: "pc-i440fx-7.2",
    forms: &[
        ("auto", "legacy"),
        ("legacy", "legacy"),
        ("libvirt-raw", "libvirt-raw"),
        ("legacy-gzip", "legacy-gzip"),
    ],
};
const TRIXIE: Release = Release {
    root: Root::qemu_trixie_for,
    machine: "pc-i440fx-10.0",
    forms: &[("auto", "mapped-ram"), ("legacy", "legacy"), ("libvirt-sparse", "libvirt-sparse")],
};

impl Release {
    fn machine(&self, root: &Root) -> Builder {
        Qemu::builder(root).machine(self.machine).guest(Guest::Boot)
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn does_json(arguments: &[&str]) -> Result<Value, Failure> {
    serde_json::from_str(&sterna_does(&[arguments, &["--json"]].concat())?).map_err(|error| error.to_string())
}

fn saves_and_restores(test: &str, release: Release) -> Result<(), Failure> {
    let Some(root) = (release.root)(test) else { return Ok(()) };
    let mut machines = vec![release.machine(&root).spawn()?];
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let xml = directory.path().join("domain.xml");
    std::fs::write(&xml, DOMAIN).map_err(|error| error.to_string())?;
    for (form, becomes) in release.forms {
        let source = machines.last_mut().expect("there is one from the start");
        source.wait_for_ticks(1)?;
        let (image, socket) = (directory.path().join(form), source.operator_socket());
        let mut save = vec!["save", text(&socket), text(&image), "--format", form];
        if form.starts_with("libvirt") {
            save.extend(["--xml", text(&xml)]);
        }
        let before = source.capabilities_on()?;

        let saved = does_json(&save).map_err(|why| format!("{form}: {why}"))?;

        assert_eq!((&saved["format"], &saved["was_running"]), (&Value::from(*becomes), &Value::from(true)));
        assert_eq!(source.capabilities_on()?, before, "{form}");
        sterna_does(&["verify", text(&image)])?;
        let target = release.machine(&root).incoming_defer().spawn()?;
        let restored = does_json(&["restore", text(&image), text(&target.operator_socket())])
            .map_err(|why| format!("{form}: {why}"))?;
        assert_eq!(restored["is_running"], true, "{form}");
        machines.push(target);
    }
    machines.last_mut().expect("there are many").wait_for_ticks(2)?;
    unbroken(&machines.iter().collect::<Vec<_>>()).map(drop)
}

#[test]
fn save_and_restore_work_on_qemu_7_2_in_every_form_that_it_has() -> Result<(), Failure> {
    saves_and_restores("save_and_restore_work_on_qemu_7_2_in_every_form_that_it_has", BOOKWORM)
}

#[test]
fn save_and_restore_work_on_qemu_10_0_in_every_form_that_it_has() -> Result<(), Failure> {
    saves_and_restores("save_and_restore_work_on_qemu_10_0_in_every_form_that_it_has", TRIXIE)
}

#[test]
fn migrate_from_older_releases_to_the_newest_keeps_the_guest_counting() -> Result<(), Failure> {
    let test = "migrate_from_older_releases_to_the_newest_keeps_the_guest_counting";
    let Some(newest) = Root::qemu_for(test) else { return Ok(()) };
    for release in [BOOKWORM, TRIXIE] {
        let Some(root) = (release.root)(test) else { continue };
        let mut source = release.machine(&root).spawn()?;
        source.wait_for_ticks(2)?;
        let mut target = release.machine(&newest).incoming_defer().spawn()?;
        let (from, to) = (source.operator_socket(), target.operator_socket());
        let mut migrate = vec!["migrate", text(&from), "tcp:127.0.0.1:0", "--dest-qmp", text(&to)];
        migrate.extend([
            "--cap",
            "multifd",
            "--set",
            "multifd-channels=2",
            "--set",
            "max-bandwidth=0",
            "--set",
            "downtime-limit=10000",
        ]);

        let record = does_json(&migrate).map_err(|why| format!("{}: {why}", release.machine))?;

        assert_eq!(record["statistics"]["status"], "completed", "{}", release.machine);
        target.wait_for_ticks(2)?;
        unbroken(&[&source, &target])?;
    }
    Ok(())
}

/// Starts `sterna save listen:`, and returns its address.
fn listening(image: &Path) -> Result<(Child, String), Failure> {
    let mut command = sterna();
    command.args(["save", "listen:tcp:127.0.0.1:0", text(image), "--cap", "multifd"]);
    command.args(["--set", "multifd-channels=2", "--json"]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let mut said = BufReader::new(child.stderr.take().ok_or("no standard error")?);
    let mut line = String::new();
    said.read_line(&mut line).map_err(|error| error.to_string())?;
    // A thread reads the rest of the output, because a closed pipe would end the process.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::stderr()));
    let at = line.trim().strip_prefix("listening at ").map(str::to_owned);
    at.map(|at| (child, at)).ok_or(line)
}

#[test]
fn save_listens_to_multifd_of_older_releases() -> Result<(), Failure> {
    let test = "save_listens_to_multifd_of_older_releases";
    for release in [BOOKWORM, TRIXIE] {
        let Some(root) = (release.root)(test) else { continue };
        let mut source = release.machine(&root).spawn()?;
        source.wait_for_ticks(1)?;
        let image = source.directory().join("vm.img");
        let (child, at) = listening(&image)?;
        source.capabilities(&["multifd"])?;
        source.parameters(serde_json::json!({"multifd-channels": 2}))?;

        let migrated = source.migrate(&at).map(drop);

        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        migrated.map_err(|why| format!("{}: {why}", release.machine))?;
        assert!(output.status.success(), "{}: {}", release.machine, output.status);
        sterna_does(&["verify", text(&image)])?;
        // 7.2 cannot load mapped-ram.
        let legacy = source.directory().join("legacy.img");
        sterna_does(&["convert", text(&image), text(&legacy), "--format", "legacy"])?;
        let mut target = release.machine(&root).incoming_defer().spawn()?;
        sterna_does(&["restore", text(&legacy), text(&target.operator_socket())])?;
        target.wait_for_ticks(2)?;
        unbroken(&[&source, &target])?;
    }
    Ok(())
}

/// 10.0 writes the early section of virtio-mem between RAM's START and its first PART; 11.1 writes it before
/// START.
#[test]
fn images_of_virtio_mem_of_qemu_10_0_keep_their_ram() -> Result<(), Failure> {
    let test = "images_of_virtio_mem_of_qemu_10_0_keep_their_ram";
    let Some(root) = Root::qemu_trixie_for(test) else { return Ok(()) };
    let machine = || {
        TRIXIE.machine(&root).memory_mib(32).args(&[
            "-m",
            "maxmem=1G",
            "-object",
            "memory-backend-memfd,id=plug,size=64M,share=on",
            "-device",
            "virtio-mem-pci,memdev=plug,requested-size=16M",
        ])
    };
    let mut source = machine().spawn()?;
    source.wait_for_ticks(1)?;
    let (saved, mapped) = (source.directory().join("vm.img"), source.directory().join("mapped.img"));
    sterna_does(&["save", text(&source.operator_socket()), text(&saved), "--format", "legacy"])?;

    sterna_does(&["verify", text(&saved)])?;
    sterna_does(&["convert", text(&saved), text(&mapped)])?;
    let mut target = machine().incoming_defer().spawn()?;
    sterna_does(&["restore", text(&mapped), text(&target.operator_socket())])?;

    target.wait_for_ticks(2)?;
    unbroken(&[&source, &target]).map(drop)
}
