//! `examples/c-vmm`: a KVM machine in C, built against the installed library, that migrates between two processes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::certificates::good_directory;
use crate::installed::{self, Installed, crate_directory, exists, run};

#[test]
fn guest_of_the_c_example_counts_on_in_another_process() {
    let test = "guest_of_the_c_example_counts_on_in_another_process";
    let (Some(installed), true) = (installed::or_skip(test), kvm_or_skip(test)) else { return };
    let home = tempfile::tempdir().expect("a directory");
    let program = build(installed, home.path(), |command| {
        installed.with_flags(command);
    });
    let certificates = good_directory();
    let tls = format!("tls={}", certificates.path().display());
    let secure: &[&str] = &[&tls, "+multifd", "multifd-channels=2", "multifd-compression=zstd"];

    for settings in [&[][..], secure] {
        migrate(installed, &program, home.path(), settings);
    }
}

#[test]
fn c_example_is_built_with_the_flags_of_pkg_config() {
    let test = "c_example_is_built_with_the_flags_of_pkg_config";
    let Some(installed) = installed::or_skip(test) else { return };
    if !exists("pkg-config") {
        eprintln!("SKIPPED {test}: there is no pkg-config");
        return;
    }
    let home = tempfile::tempdir().expect("a directory");

    let program = build(installed, home.path(), |command| {
        installed.visible_to(command).env_remove("STERNA_CFLAGS").env_remove("STERNA_LIBS");
    });

    let refused = installed.visible_to(&mut Command::new(&program)).output().expect("the program runs");
    assert_eq!(refused.status.code(), Some(2));
    let mut version = Command::new("pkg-config");
    let version = run(installed.visible_to(&mut version).args(["--modversion", "sterna"]));
    assert_eq!(version.trim(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn run_to_an_address_without_a_destination_fails_with_the_address() {
    let test = "run_to_an_address_without_a_destination_fails_with_the_address";
    let (Some(installed), true) = (installed::or_skip(test), kvm_or_skip(test)) else { return };
    let home = tempfile::tempdir().expect("a directory");
    let program = build(installed, home.path(), |command| {
        installed.with_flags(command);
    });
    let address = format!("unix:{}", home.path().join("nothing").display());

    let done = command(installed, &program, home.path()).args(["run", &address]).output().expect("it runs");

    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("nothing"), "{done:?}");
}

#[test]
fn c_example_is_shorter_than_400_lines() {
    let text = std::fs::read_to_string(source().join("vmm.c")).expect("a text");

    assert!(text.lines().count() <= 400, "{} lines", text.lines().count());
}

/// Migrates the guest from one process to another, and checks that it counts on.
fn migrate(installed: &Installed, program: &Path, home: &Path, settings: &[&str]) {
    let mut receive = command(installed, program, home);
    receive.args(["receive", "tcp:127.0.0.1:0"]).args(settings).stdout(Stdio::piped());
    let mut receiver = Killed(receive.spawn().expect("it runs"));
    let mut lines = BufReader::new(receiver.0.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.strip_prefix("target: listening at ")?.to_owned()));

    let mut send = command(installed, program, home);
    let sent = run(send.args(["run", &address.expect("an address")]).args(settings));

    let (_, last) = sent.lines().filter_map(printed).next_back().expect("the source printed");
    assert!(last >= 20, "{sent}");
    let statistics = sent.lines().find_map(|line| line.strip_prefix("statistics: ")).expect("statistics");
    let statistics: serde_json::Value = serde_json::from_str(statistics).expect("JSON");
    assert_eq!(statistics["status"], "completed");
    let arrived: Vec<_> = lines.filter_map(|line| Some(printed(&line)?.1)).take(5).collect();
    assert_eq!(arrived, (last + 1..last + 6).collect::<Vec<_>>(), "{settings:?}");
}

fn source() -> PathBuf {
    crate_directory().join("../../examples/c-vmm")
}

fn build(installed: &Installed, home: &Path, prepare: impl FnOnce(&mut Command)) -> PathBuf {
    let program = home.join("c-vmm");
    let mut build = Command::new(source().join("build.sh"));
    prepare(&mut build);
    run(build.arg(&program));
    assert!(installed.library().is_file());
    program
}

/// The example, with a lock file of its own.
fn command(installed: &Installed, program: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    installed.visible_to(&mut command).env("TMPDIR", home);
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
