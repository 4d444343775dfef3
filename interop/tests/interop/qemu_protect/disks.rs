//! A disk whose writes the primary also sends to the standby.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use sterna_interop::{
    DONE_ADDRESS, Failure, Guest, NUMBER_ADDRESS, Qemu, Ram, Root, SCRIBE_BYTES, scribe_devices,
    scribe_disks, scribed, sterna, sterna_does,
};

use super::command::{Protect, Started};
use super::lab::{Lab, wait, word_in};

/// A guest that writes its disk, and the commands of both sides.
struct Sides {
    lab: Lab,
    standby: Started,
    protect: Protect,
    name: String,
}

fn words(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}

impl Sides {
    fn at(&self, what: &str) -> PathBuf {
        self.lab.directory.path().join(format!("{what}{}", self.name))
    }

    /// The standby's file with the disk.
    fn file(&self) -> PathBuf {
        self.at("disk")
    }

    fn begin(lab: Lab, name: &str, more_standby: &[&str], more: &[&str]) -> Result<Self, Failure> {
        let (standby, arbiter, socket) = standby(&lab, name, more_standby)?;
        let at = |what: &str| lab.directory.path().join(format!("{what}{name}")).display().to_string();
        let qemu = lab.primary.operator_socket().display().to_string();
        let mut command = sterna();
        command.args(["protect", &qemu, &socket, &arbiter, "--lease=3s", "--json", "--disk=q0=data"]);
        command.arg(format!("--qmp=unix:{}", at("control"))).args(more);
        let mut process = command.stdout(Stdio::piped()).spawn().map_err(words)?;
        let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
        let protect = Protect { process, lines, socket: at("control") };
        Ok(Self { lab, standby, protect, name: name.to_owned() })
    }

    fn primary_disk(&self) -> PathBuf {
        let [_, data] = scribe_disks(self.lab.primary.directory());
        data
    }

    /// Checks that the standby's file is the disk of the guest in the image. The guest must continue from
    /// there.
    fn goes_on(&self, root: &Root) -> Result<(), Failure> {
        let image = self.at("image");
        let (begun, done) = (word_in(&image, NUMBER_ADDRESS)?, word_in(&image, DONE_ADDRESS)?);
        let last = scribed(&self.file())?;
        if done < 50 || !(done..=begun).contains(&last) {
            return Err(format!(
                "the guest had written up to {done} and begun {begun}, and its disk has {last}"
            ));
        }
        let [boot, _] = scribe_disks(self.lab.primary.directory());
        let file = format!("file,node-name=f0,filename={}", self.file().display());
        let mut survivor = Qemu::builder(root)
            .memory_mib(32)
            .args(&["-blockdev", &file, "-blockdev", "raw,node-name=q0,file=f0"])
            .args(&scribe_devices(&boot, "q0").iter().map(String::as_str).collect::<Vec<_>>())
            .incoming_defer()
            .spawn()?;
        survivor.capabilities(&["mapped-ram"])?;
        survivor.incoming(&format!("file:{}", image.display()))?;
        survivor.wait_for_status("running")?;
        writes_on(&self.file(), 300)
    }
}

/// Starts a standby with a disk. Returns it with the arbiter of both sides and its address.
fn standby(lab: &Lab, name: &str, more: &[&str]) -> Result<(Started, String, String), Failure> {
    let at = |what: &str| lab.directory.path().join(format!("{what}{name}")).display().to_string();
    let claims = lab.directory.path().join("claims");
    std::fs::create_dir_all(&claims).map_err(words)?;
    let (arbiter, socket) = (format!("--arbiter=file:{}", claims.display()), at("both"));
    // The file's earlier content must be replaced.
    std::fs::write(at("disk"), vec![0xaa; SCRIBE_BYTES as usize]).map_err(words)?;
    let mut command = sterna();
    command.args(["standby", &format!("listen:unix:{socket}"), "--image", &at("image"), &arbiter]);
    command.args(["--fence=/bin/true", "--json", &format!("--qmp=unix:{}", at("standby"))]);
    command.args(["--disk", &format!("data={}", at("disk"))]).args(more);
    let said = std::fs::File::create(at("said")).map_err(words)?;
    let standby =
        Started(command.stdout(said.try_clone().map_err(words)?).stderr(said).spawn().map_err(words)?);
    wait("the standby's socket", || sterna_interop::is_listening(Path::new(&socket)).then_some(()))?;
    Ok((standby, arbiter, format!("unix:{socket}")))
}

/// Waits until a guest has written this many further sectors.
fn writes_on(disk: &Path, count: u32) -> Result<(), Failure> {
    // A disk that is read while it is written may contain the state of two moments. Such reads are repeated.
    let last = || scribed(disk).ok();
    let first = wait("a disk of one moment", last)?;
    wait("more writes", || last().filter(|last| *last >= first + count)).map(drop)
}

fn scribe(root: &Root) -> Result<Lab, Failure> {
    scribe_with(root, &[])
}

fn scribe_with(root: &Root, arguments: &[&str]) -> Result<Lab, Failure> {
    let lab = Lab::new(root, Guest::Scribe, arguments)?;
    let [_, data] = scribe_disks(lab.primary.directory());
    writes_on(&data, 300)?;
    Ok(lab)
}

/// The settings of a QEMU's disks that an operator can see.
fn nodes(primary: &mut Qemu) -> Result<[Value; 2], Failure> {
    let mut named = primary.execute("query-named-block-nodes", json!({"flat": true}))?;
    for node in named.as_array_mut().into_iter().flatten() {
        // These values change with the guest's writes.
        node["image"]["actual-size"] = Value::Null;
        node["image"]["dirty-flag"] = Value::Null;
    }
    Ok([named, primary.execute("query-jobs", Value::Null)?])
}

#[test]
fn disk_of_a_killed_qemu_is_that_of_the_last_held_checkpoint() -> Result<(), Failure> {
    let test = "disk_of_a_killed_qemu_is_that_of_the_last_held_checkpoint";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for (delay, channels, is_planned) in
        [("50", None, false), ("10", Some("--channels=2"), false), ("200", None, true)]
    {
        let both = Vec::from_iter(channels);
        let protect = [&both[..], &["--checkpoint-delay", delay]].concat();
        let mut sides = Sides::begin(scribe(&root)?, "first", &both, &protect)?;
        sides.protect.until_protected()?;
        writes_on(&sides.primary_disk(), 300)?;

        if is_planned {
            sterna_does(&["takeover", &sides.at("standby").display().to_string(), "--planned"])?;
        } else {
            sides.lab.primary.kill();
        }

        assert_eq!(sides.protect.end()?.code(), Some(if is_planned { 0 } else { 1 }));
        let status = wait("the standby's end", || sides.standby.0.try_wait().ok().flatten())?;
        assert!(status.success(), "{status}");
        sides.goes_on(&root).map_err(|why| format!("delay {delay}: {why}"))?;
    }
    Ok(())
}

#[test]
fn qemu_that_waits_goes_on_with_the_standbys_disk() -> Result<(), Failure> {
    let test = "qemu_that_waits_goes_on_with_the_standbys_disk";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let place = tempfile::tempdir().map_err(words)?;
    let (ram, waits) = (place.path().join("primary"), place.path().join("waits"));
    std::fs::create_dir(&waits).map_err(words)?;
    let backend = format!("memory-backend-file,id=ram0,size=32M,share=on,mem-path={}", ram.display());
    let lab = scribe_with(&root, &["-object", &backend, "-machine", "memory-backend=ram0"])?;
    let [boot, _] = scribe_disks(lab.primary.directory());
    let file = lab.directory.path().join("disk");
    let node = format!("file,node-name=f0,filename={}", file.display());
    let command = Qemu::builder(&root)
        .memory_mib(32)
        .ram(Ram::File)
        .args(&["-blockdev", &node, "-blockdev", "raw,node-name=q0,file=f0"])
        .args(&scribe_devices(&boot, "q0").iter().map(String::as_str).collect::<Vec<_>>())
        .command_in(&waits)?;
    let words_of = std::iter::once(command.get_program()).chain(command.get_args());
    let words_of: Vec<_> = words_of.map(|word| word.to_string_lossy().into_owned()).collect();
    let directory = format!("--ram-dir={}", waits.display());
    let mut more = vec![directory.as_str(), "--"];
    more.extend(words_of.iter().map(String::as_str));
    let mut sides = Sides::begin(lab, "", &more, &[])?;
    sides.protect.until_protected()?;
    let said = || std::fs::read_to_string(sides.at("said")).unwrap_or_default();
    wait("the VM that waits", || said().contains("\"waiting_vm\":\"waits\"").then_some(()))?;
    writes_on(&sides.primary_disk(), 300)?;

    sides.lab.primary.kill();

    let status = wait("the standby's end", || sides.standby.0.try_wait().ok().flatten())?;
    assert!(status.success(), "{status}");
    let text = std::fs::read_to_string(sides.at("said")).map_err(words)?;
    let end: Value =
        serde_json::from_str(text.lines().rfind(|line| line.starts_with('{')).unwrap_or_default())
            .map_err(words)?;
    let process = end["process"].as_u64().ok_or_else(|| format!("no process in {end}"))?;
    let ours = Ours(process as u32);
    writes_on(&file, 300)?;
    drop(ours);
    let messages = PathBuf::from(end["messages"].as_str().ok_or("no log")?);
    let _ = std::fs::remove_dir_all(messages.ancestors().nth(2).ok_or("no directory")?);
    Ok(())
}

/// A VM that this test must end.
struct Ours(u32);

impl Drop for Ours {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0 as i32) {
            // An error means that the process has ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

#[test]
fn protection_with_a_disk_leaves_qemus_block_nodes_as_they_were() -> Result<(), Failure> {
    let test = "protection_with_a_disk_leaves_qemus_block_nodes_as_they_were";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = scribe(&root)?;
    let before = nodes(&mut lab.primary)?;
    for name in ["unprotected", "lost"] {
        let mut sides = Sides::begin(lab, name, &[], &[])?;
        sides.protect.until_protected()?;
        assert_ne!(nodes(&mut sides.lab.primary)?, before);

        if name == "lost" {
            sides.standby.0.kill().map_err(words)?;
        } else {
            sterna_does(&["unprotect", &sides.protect.socket])?;
        }

        let end = sides.protect.line(|line| line["state"] == "alone")?;
        assert_eq!((&end["runs_here"], &end["left"]), (&json!(true), &json!([])));
        assert_eq!(sides.protect.end()?.code(), Some(if name == "lost" { 1 } else { 0 }));
        assert_eq!(nodes(&mut sides.lab.primary)?, before);
        writes_on(&sides.primary_disk(), 300)?;
        lab = sides.lab;
    }
    Ok(())
}

#[test]
fn disk_that_is_lost_ends_the_protection_by_name() -> Result<(), Failure> {
    let test = "disk_that_is_lost_ends_the_protection_by_name";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = scribe(&root)?;
    let before = nodes(&mut lab.primary)?;
    // In order: the operator removes the disk from QEMU; removes only the child, so that its connection
    // stays; the guest writes more than the buffer limit; the operator puts a snapshot over the disk.
    let [taken, left, snapshot] = ["taken", "left", "snapshot"].map(|name| (name, "1G", "50", 6));
    for (name, limit, delay, status) in [taken, left, ("full", "64K", "5000", 1), snapshot] {
        let limit = format!("--disk-limit={limit}");
        let mut sides = Sides::begin(lab, name, &[&limit], &["--checkpoint-delay", delay])?;
        if name != "full" {
            sides.protect.until_protected()?;
        }
        let primary = &mut sides.lab.primary;
        if ["taken", "left"].contains(&name) {
            primary.execute("x-blockdev-change", json!({"parent": "q0", "child": "children.1"}))?;
        }
        match name {
            "taken" => drop(primary.execute("blockdev-del", json!({"node-name": "sterna-disk0"}))?),
            "snapshot" => {
                let overlay = primary.directory().join("overlay");
                let overlay = json!({"node-name": "q0", "snapshot-file": overlay, "format": "qcow2",
                    "snapshot-node-name": "overlay", "mode": "absolute-paths"});
                drop(primary.execute("blockdev-snapshot-sync", overlay)?);
            }
            _ => {}
        }

        let end = sides.protect.line(|line| line.get("runs_here").is_some())?;

        assert_eq!(end["runs_here"], json!(true), "{end}");
        let why = end["lost_because"].as_str().unwrap_or_default();
        // A failing standby closes all of its connections, and any of them may be noticed first.
        let said = match name {
            // QEMU disconnects from the standby, which may close all of its connections before this side
            // looks.
            "taken" => &[
                "for a disk",
                "the disk q0 is not replicated any more",
                "the standby has closed",
                "the connection between primary and standby",
            ][..],
            "left" => &["the disk q0 is not replicated any more"],
            "snapshot" => &["has put the node overlay over it"],
            _ => &["standby"],
        };
        assert!(said.iter().any(|said| why.contains(said)), "{name}: {end}");
        assert_eq!(sides.protect.end()?.code(), Some(1));
        let ended = wait("the standby's end", || sides.standby.0.try_wait().ok().flatten())?;
        assert_eq!(ended.code(), Some(status), "{name}");
        if name == "snapshot" {
            return Ok(());
        }
        assert_eq!(nodes(&mut sides.lab.primary)?, before, "{name}");
        writes_on(&sides.primary_disk(), 300)?;
        lab = sides.lab;
    }
    Ok(())
}

#[test]
fn protect_that_was_killed_can_be_given_again_with_its_disk() -> Result<(), Failure> {
    let test = "protect_that_was_killed_can_be_given_again_with_its_disk";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let lab = scribe(&root)?;
    let mut sides = Sides::begin(lab, "killed", &[], &[])?;
    sides.protect.until_protected()?;
    // Otherwise, the standby would take the guest over.
    sides.standby.0.kill().map_err(words)?;
    sides.protect.process.kill().map_err(words)?;
    sides.protect.process.wait().map_err(words)?;
    let mut lab = sides.lab;
    lab.primary.execute("x-colo-lost-heartbeat", Value::Null)?;
    lab.primary.wait_for_status("running")?;

    let mut sides = Sides::begin(lab, "again", &[], &[])?;
    sides.protect.until_protected()?;
    sides.lab.primary.kill();

    assert_eq!(sides.protect.end()?.code(), Some(1));
    let status = wait("the standby's end", || sides.standby.0.try_wait().ok().flatten())?;
    assert!(status.success(), "{status}");
    sides.goes_on(&root)
}

#[test]
fn disk_that_cannot_go_to_the_standby_is_refused_in_one_sentence() -> Result<(), Failure> {
    let test = "disk_that_cannot_go_to_the_standby_is_refused_in_one_sentence";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = scribe(&root)?;
    let before = nodes(&mut lab.primary)?;
    let (_standby, arbiter, socket) = standby(&lab, "", &[])?;
    let qemu = lab.primary.operator_socket().display().to_string();
    for (disk, word) in [
        ("--disk=p0=data", "quorum"),
        ("--disk=nothing=data", "no block node nothing"),
        ("--disk=q0=other", "the name other"),
    ] {
        let refused = sterna_does(&["protect", &qemu, &socket, disk, &arbiter]).unwrap_err();
        assert!(refused.contains(word), "{disk}: {refused}");
        assert_eq!(nodes(&mut lab.primary)?, before, "{disk}");
    }
    // A guest whose disk is not sent is refused.
    let refused = sterna_does(&["protect", &qemu, &socket, &arbiter]).unwrap_err();
    assert!(refused.contains("continues to run here"), "{refused}");
    assert_eq!(nodes(&mut lab.primary)?, before);
    let [_, data] = scribe_disks(lab.primary.directory());
    writes_on(&data, 300)
}
