//! The example migrates its guest in one process and between two, and stays shorter than 300 lines.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

#[test]
fn demo_guest_counts_on_at_the_target() {
    if !kvm_or_skip("demo_guest_counts_on_at_the_target") {
        return;
    }
    let home = tempfile::tempdir().unwrap();

    let done = minimal_vmm(home.path(), &["demo"]).output().unwrap();

    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
    let printed: Vec<_> = text.lines().filter_map(printed).collect();
    assert!(printed.iter().map(|(_, number)| *number).eq(1..=printed.len() as u32), "{text}");
    let moved = printed.iter().position(|(who, _)| *who == "target").expect("the target printed");
    assert!(moved >= 20 && printed[moved..].iter().all(|(who, _)| *who == "target"), "{text}");
}

#[test]
fn run_to_another_process_guest_counts_on_there() {
    if !kvm_or_skip("run_to_another_process_guest_counts_on_there") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", home.path().join("socket").display());
    let mut receiver =
        Killed(minimal_vmm(home.path(), &["receive", &address]).stdout(Stdio::piped()).spawn().unwrap());
    // The file exists before the socket listens, and the socket accepts only one connection. So the
    // kernel's list is read.
    while !sterna_testing::is_listening(&home.path().join("socket")) {
        assert!(receiver.0.try_wait().unwrap().is_none(), "the receiver ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }

    let sent = minimal_vmm(home.path(), &["run", "--to", &address]).output().unwrap();

    let text = String::from_utf8_lossy(&sent.stdout);
    assert!(sent.status.success(), "{text}{}", String::from_utf8_lossy(&sent.stderr));
    let (_, last) = text.lines().filter_map(printed).next_back().expect("the source printed");
    let lines = BufReader::new(receiver.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let arrived: Vec<_> = lines.filter_map(|line| printed(&line).map(|(_, number)| number)).take(5).collect();
    assert_eq!(arrived, (last + 1..last + 6).collect::<Vec<_>>());
}

#[test]
fn run_that_nobody_receives_fails() {
    if !kvm_or_skip("run_that_nobody_receives_fails") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", home.path().join("nobody").display());

    let done = minimal_vmm(home.path(), &["run", "--to", &address]).output().unwrap();

    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("nobody"));
}

#[test]
fn source_is_shorter_than_300_lines() {
    let sources = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();

    let lines: usize =
        sources.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap().lines().count()).sum();

    assert!(lines < 300, "{lines} lines");
}

/// The command `minimal-vmm`, with a lock file of its own.
fn minimal_vmm(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_minimal-vmm"));
    command.args(arguments).env("TMPDIR", home);
    command
}

/// The process name and the number in a line that reports a printed number.
fn printed(line: &str) -> Option<(&str, u32)> {
    let (who, number) = line.split_once(": the guest printed ")?;
    Some((who, number.parse().ok()?))
}

fn kvm_or_skip(test: &str) -> bool {
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    kvm.inspect_err(|error| eprintln!("SKIPPED {test}: /dev/kvm: {error}")).is_ok()
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
