//! The program `virsh` in place of a socket.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sterna_libvirt::{Access, DomainAddress, LibvirtError};
use sterna_transport::CancelFlag;

use crate::daemon::Daemon;

/// A program that writes its arguments into a file, and then does what `script` says.
fn program(directory: &Path, script: &str) -> String {
    let path = directory.join("virsh");
    let text = format!("#!/bin/sh\necho \"$@\" >> {}/calls\n{script}\n", directory.display());
    // Another process writes the file: a program that this one has open for writing cannot be run.
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(&path).stdin(Stdio::piped());
    let mut writer = writer.spawn().unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
    path.display().to_string()
}

fn nowhere(directory: &Path) -> DomainAddress {
    format!("libvirt+qemu:///system?socket={}/no:web1", directory.display()).parse().unwrap()
}

const RUNNING: &str = "case \"$*\" in *domstate*) echo running;; *dumpxml*) echo '<domain/>';;\n\
    *--pass-fds*) cat >&2; exit 3;;\n\
    *) echo '{\"return\":{\"status\":\"running\"},\"id\":\"libvirt-3\"}';; esac";

#[test]
fn domain_whose_socket_cannot_be_reached_is_used_through_virsh() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), RUNNING);
    let address = nowhere(directory.path());

    let mut access = Access::open_with(&address, &program, &CancelFlag::new()).unwrap();
    let status = access.execute("query-status", Value::Null, &[]).unwrap();

    assert_eq!(status, json!({"status": "running"}));
    assert!(access.passes_files());
    assert_eq!(access.xml().unwrap(), "<domain/>\n");
    let calls = std::fs::read_to_string(directory.path().join("calls")).unwrap();
    let uri = format!("--quiet --connect qemu:///system?socket={}/no", directory.path().display());
    assert_eq!(calls.lines().next(), Some(format!("{uri} domstate -- web1").as_str()));
    assert!(calls.contains("qemu-monitor-command -- web1 {\"execute\":\"query-status\"}"), "{calls}");
}

#[test]
fn descriptor_is_the_standard_input_of_virsh() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), RUNNING);
    let file: PathBuf = directory.path().join("file");
    std::fs::write(&file, "passed").unwrap();
    let file = std::fs::File::open(file).unwrap();
    let mut access = Access::open_with(&nowhere(directory.path()), &program, &CancelFlag::new()).unwrap();

    let error = access.execute("add-fd", json!({}), &[file.as_fd()]).unwrap_err();

    // The program prints its standard input as its error.
    assert!(matches!(&error, LibvirtError::Virsh { message, .. } if message == "passed"), "{error}");
}

#[test]
fn daemon_on_another_host_gets_no_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), RUNNING);
    let address: DomainAddress = "libvirt+qemu+ssh://host/system:web1".parse().unwrap();

    let mut access = Access::open_with(&address, &program, &CancelFlag::new()).unwrap();

    assert!(!access.passes_files());
    let error = access.execute("add-fd", json!({}), &[std::io::stdin().as_fd()]);
    assert!(matches!(error, Err(LibvirtError::OtherHost { .. })));
}

#[test]
fn failure_of_virsh_is_its_message_with_the_command() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), "echo 'error: Domain not found' >&2; exit 1");

    let error = Access::open_with(&nowhere(directory.path()), &program, &CancelFlag::new()).err().unwrap();

    let LibvirtError::Virsh { command, message } = error else { panic!("{error}") };
    assert_eq!(message, "Domain not found");
    assert!(command.starts_with("virsh -c ") && command.ends_with(" domstate web1"), "{command}");
}

#[test]
fn daemon_that_wants_authentication_is_used_through_virsh() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), RUNNING);
    let daemon = Daemon::start(|mood| mood.authentications = vec![2]);

    assert!(Access::open_with(&daemon.address(), &program, &CancelFlag::new()).is_ok());
    let error = Access::open_with(&daemon.address(), "/no/virsh", &CancelFlag::new()).err().unwrap();

    let LibvirtError::Unreachable { tried, .. } = &error else { panic!("{error}") };
    assert!(tried.len() == 1 && tried[0].1.contains("types [2]"), "{error}");
}

#[test]
fn refusal_of_the_daemon_is_not_tried_again_with_virsh() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), RUNNING);
    let daemon = Daemon::start(|_| {});

    let error = Access::open_with(&daemon.address_of("nope"), &program, &CancelFlag::new()).err().unwrap();

    assert!(matches!(error, LibvirtError::Refused { code: 42, .. }));
    assert!(!directory.path().join("calls").exists());
}
