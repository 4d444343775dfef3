//! `sterna info`, `plan` and `save` of a domain of a real libvirt, by its name.
#![allow(missing_docs)]

#[path = "../../../crates/sterna-libvirt/tests/rpc/refusals.rs"]
mod refusals;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};
use sterna_drive::save::{Domain, SaveRequest, save};
use sterna_drive::{Progress, Vm, Watch, Wish};
use sterna_image::Direct;
use sterna_interop::ticks::unbroken_serials;
use sterna_interop::{Failure, Libvirt, sterna, sterna_does};
use sterna_libvirt::{Access, DomainAddress, Door};
use sterna_qmp::Client;
use sterna_transport::CancelFlag;

fn address(libvirt: &Libvirt, name: &str) -> String {
    format!("libvirt+qemu:///system?socket={}:{name}", libvirt.socket().display())
}

fn access(libvirt: &Libvirt, name: &str) -> Result<Access, Failure> {
    let address: DomainAddress = address(libvirt, name).parse()?;
    Access::open(&address, &CancelFlag::new()).map_err(|error| error.to_string())
}

/// Labels of the character devices in the domain's QEMU.
fn devices(libvirt: &Libvirt, name: &str) -> Result<Vec<String>, Failure> {
    let devices = access(libvirt, name)?.execute("query-chardev", Value::Null, &[]);
    let devices = devices.map_err(|error| error.to_string())?;
    let labels = devices.as_array().into_iter().flatten();
    Ok(labels.map(|device| device["label"].as_str().unwrap_or_default().to_owned()).collect())
}

#[test]
fn domain_is_forecast_saved_and_restored_by_its_name() -> Result<(), Failure> {
    let test = "domain_is_forecast_saved_and_restored_by_its_name";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("web1", "pc", 32)?;
    libvirt.wait_for_ticks("web1", 2)?;
    let (at, before) = (address(&libvirt, "web1"), devices(&libvirt, "web1")?);

    let info = sterna_does(&["info", &at])?;
    let plan = sterna_does(&["plan", &at, "--bandwidth", "1GB/s", "--intervals", "100ms"])?;

    assert!(info.contains("web1") && info.contains("running"), "{info}");
    assert!(plan.contains("no limit of the bandwidth") && !plan.contains("raise `max-bandwidth`"), "{plan}");
    assert!(libvirt.virsh(&["dominfo", "web1"])?.contains("custom monitor control commands"));
    let mut uri = std::path::PathBuf::new();
    for (format, more) in [("auto", None), ("mapped-ram", Some("--resume-after"))] {
        let image = libvirt.directory().join(format!("{format}.image"));
        let mut arguments = vec!["save", &at, image.to_str().ok_or("path")?, "--format", format];
        arguments.extend(more);
        let said = sterna_does(&arguments)?;
        let state = libvirt.virsh(&["domstate", "web1"])?;
        if more.is_none() {
            assert!(said.contains("libvirt shows it as paused") && said.contains("resume web1`"), "{said}");
            assert_eq!(state.trim(), "paused");
            libvirt.virsh(&["resume", "web1"])?;
            uri = image;
        }
        assert_eq!(libvirt.virsh(&["domstate", "web1"])?.trim(), "running");
        libvirt.wait_for_ticks("web1", 2)?;
    }
    assert_eq!(devices(&libvirt, "web1")?, before, "a monitor was left in QEMU");

    // The image of `auto` has libvirt's XML.
    libvirt.virsh(&["destroy", "web1"])?;
    let ticks = libvirt.serial("web1");
    libvirt.virsh(&["restore", &uri.display().to_string()])?;
    libvirt.wait_for_ticks("web1", 2)?;
    assert!(libvirt.serial("web1").len() > ticks.len());
    Ok(())
}

#[test]
fn migrate_and_restore_of_a_domain_name_the_command_of_virsh() -> Result<(), Failure> {
    // These refusals need no libvirt.
    for (arguments, says) in [
        (
            ["migrate", "libvirt+qemu:///system:web1", "tcp:dst:4444"],
            "virsh -c qemu:///system migrate --live",
        ),
        (["restore", "/no/image", "libvirt+qemu:///system:web1"], "virsh -c qemu:///system restore OUT"),
        (["cancel", "libvirt+qemu:///system:web1", "--no-wait"], "virsh -c qemu:///system domjobabort web1"),
        (["decide", "libvirt:web1", "source"], "is a domain of libvirt"),
    ] {
        let output = sterna().args(arguments).output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(says), "{arguments:?}: {said}");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    }
    Ok(())
}

#[test]
fn libvirt_refuses_what_the_daemon_of_the_unit_tests_refuses() -> Result<(), Failure> {
    let test = "libvirt_refuses_what_the_daemon_of_the_unit_tests_refuses";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("web1", "pc", 32)?;

    refusals::check(&libvirt.socket())
}

#[test]
fn own_monitor_is_removed_when_its_command_is_killed_at_any_step() -> Result<(), Failure> {
    let test = "own_monitor_is_removed_when_its_command_is_killed_at_any_step";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("web1", "pc", 32)?;
    let before = devices(&libvirt, "web1")?;
    let mut access = access(&libvirt, "web1")?;
    let mut execute = |name: &str, arguments: Value, end: Option<&UnixStream>| {
        let end = end.map(UnixStream::as_fd);
        access.execute(name, arguments, end.as_slice()).map_err(|error| error.to_string())
    };

    // What a command that is killed after each of its steps leaves: the end of its socket is closed.
    for steps in 1..=3 {
        let name = format!("sterna-door-0-{steps}");
        let (ours, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
        execute("getfd", json!({ "fdname": name }), Some(&theirs))?;
        drop(theirs);
        let socket = json!({"addr": {"type": "fd", "data": {"str": name}}, "server": false});
        let backend = json!({"type": "socket", "data": socket});
        execute("chardev-add", json!({"id": name, "backend": backend}), None)?;
        let object =
            json!({"qom-type": "monitor-qmp", "id": name, "chardev": name, "close-action": "delete"});
        match steps {
            1 => drop(ours),
            2 => {
                execute("object-add", object, None)?;
                drop(ours);
            }
            _ => {
                drop(ours);
                wait_until_closed(&mut execute, &name)?;
                execute("object-add", object, None)?;
            }
        }
    }
    sterna_does(&["info", &address(&libvirt, "web1")])?;

    assert_eq!(devices(&libvirt, "web1")?, before);
    let objects = execute("qom-list", json!({"path": "/objects"}), None)?;
    assert!(!objects.to_string().contains("sterna-door"), "{objects}");
    Ok(())
}

/// Waits until QEMU has noticed that the other end of the device is closed.
fn wait_until_closed(
    execute: &mut impl FnMut(&str, Value, Option<&UnixStream>) -> Result<Value, Failure>,
    name: &str,
) -> Result<(), Failure> {
    let begin = std::time::Instant::now();
    loop {
        let devices = execute("query-chardev", Value::Null, None)?;
        let device = devices.as_array().into_iter().flatten().find(|device| device["label"] == name).cloned();
        match device.as_ref().and_then(|device| device["filename"].as_str()) {
            Some(filename) if filename.starts_with("disconnected:") => return Ok(()),
            _ if begin.elapsed() > sterna_interop::qemu::PATIENCE => {
                return Err(format!("{device:?} stays open"));
            }
            _ => std::thread::sleep(std::time::Duration::from_millis(5)),
        }
    }
}

/// A watcher that only waits.
struct Still;

impl Watch for Still {
    fn show(&mut self, _: &Progress) {}

    fn note(&mut self, _: &str) {}

    fn wish(&mut self) -> Wish {
        Wish::Continue
    }
}

#[test]
fn domain_is_saved_through_libvirts_monitor_and_through_virsh() -> Result<(), Failure> {
    let test = "domain_is_saved_through_libvirts_monitor_and_through_virsh";
    let Some(libvirt) = Libvirt::start_for(test)? else { return Ok(()) };
    libvirt.create("web1", "pc", 32)?;
    libvirt.wait_for_ticks("web1", 2)?;
    let at: DomainAddress = address(&libvirt, "web1").parse()?;
    let cancel = CancelFlag::new();
    let domain = Domain::ask(&at, &cancel).map_err(|error| error.to_string())?;
    let virsh = libvirt.virsh_program()?;
    // An address whose socket cannot be reached by this program. virsh gets the real one.
    let nowhere: DomainAddress = "libvirt+qemu:///system?socket=/no/socket:web1".parse()?;
    let text = |error: &dyn std::fmt::Display| error.to_string();

    for (name, is_virsh) in [("daemon", false), ("virsh", true)] {
        let access = match is_virsh {
            false => Access::open(&at, &cancel),
            true => Access::open_with(&nowhere, &virsh, &cancel),
        };
        let (door, socket) = access.and_then(Door::to_libvirts_monitor).map_err(|error| text(&error))?;
        let client =
            Client::from_socket(socket, std::time::Duration::from_secs(60)).map_err(|error| text(&error))?;
        let mut vm = Vm::new(client, name);
        let path = libvirt.directory().join(format!("{name}.image"));
        let request = SaveRequest {
            path: path.clone(),
            format: "libvirt-sparse".parse()?,
            channels: None,
            direct: Direct::Off,
            domain: Some(domain.clone()),
            frames: Default::default(),
            replace: false,
            resume_after: false,
        };
        save(&mut vm, &request, &mut Still).map_err(|error| format!("{name}: {error}"))?;
        drop(vm);
        drop(door);

        libvirt.virsh(&["destroy", "web1"])?;
        libvirt.virsh(&["restore", &path.display().to_string()])?;
        libvirt.wait_for_ticks("web1", 2)?;
    }
    unbroken_serials(&[&libvirt.serial("web1")])?;
    Ok(())
}
