//! Moves of a guest to another process of this host, as users run them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_drive::Vm;
use sterna_qmp::Endpoint;

/// A guest that writes its memory all the time, and the directory with the sockets of its processes.
struct Host {
    directory: tempfile::TempDir,
    running: Vec<Child>,
}

impl Drop for Host {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
        // A process that outlives `upgrade`.
        for name in ["b.qmp", "c.qmp"] {
            if let Some(mut vm) = connect(&self.at(name)) {
                let _ = vm.execute("quit", Value::Null);
            }
        }
    }
}

const MACHINE: [&str; 5] = ["--machine=process", "--ram=64M", "--rate=3000", "--fill=half", "--name=guest"];

impl Host {
    /// A host with a guest that runs in `a`.
    fn new(options: &[&str]) -> Self {
        let mut host = Self { directory: tempfile::tempdir().unwrap(), running: Vec::new() };
        let mut command = host.run("a.qmp");
        command.args(options);
        host.running.push(command.spawn().unwrap());
        eventually("the monitor", || connect(&host.at("a.qmp")).is_some());
        eventually("steps", || host.ask("a.qmp", "x-sterna-query-guest")["steps"][0].as_u64() > Some(500));
        host
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn run(&self, monitor: &str) -> Command {
        let mut command = Command::new(sterna());
        command.args(self.line(monitor)).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn line(&self, monitor: &str) -> Vec<String> {
        let mut line = vec!["run".to_owned(), format!("--qmp=unix:{}", self.at(monitor).display())];
        line.extend(MACHINE.map(str::to_owned));
        line
    }

    fn upgrade(&self, command: &[String]) -> Output {
        let mut upgrade = Command::new(sterna());
        upgrade.arg("upgrade").arg(self.at("a.qmp")).args(["--json", "--"]).args(command);
        upgrade.output().unwrap()
    }

    fn ask(&self, monitor: &str, command: &str) -> Value {
        connect(&self.at(monitor)).unwrap().execute(command, Value::Null).unwrap()
    }

    /// Asserts that the guest in that process is consistent and makes progress.
    fn assert_whole(&self, monitor: &str) {
        let mut vm = connect(&self.at(monitor)).unwrap();
        let steps =
            |vm: &mut Vm| vm.execute("x-sterna-query-guest", Value::Null).unwrap()["steps"][0].as_u64();
        let before = steps(&mut vm);
        eventually("further steps", || steps(&mut vm) > before.map(|steps| steps + 100));
        let verdict = vm.execute("x-sterna-check-guest", Value::Null).unwrap();
        assert_eq!(verdict["consistent"], true, "{verdict}");
    }
}

fn sterna() -> &'static str {
    env!("CARGO_BIN_EXE_sterna")
}

fn connect(socket: &Path) -> Option<Vm> {
    Vm::connect(&Endpoint::Unix(socket.to_owned())).ok()
}

fn eventually(what: &str, mut found: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !found() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn upgrade_moves_the_guest_to_a_new_process_and_ends_the_old_one() {
    let mut host = Host::new(&[]);
    let command = [vec![sterna().to_owned()], host.line("b.qmp")].concat();

    let output = host.upgrade(&command);

    assert!(output.status.success(), "{}", said(&output));
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    let pages = &record["statistics"];
    assert_eq!((&pages["normal_pages"], &pages["zero_pages"]), (&json!(0), &json!(0)), "{record}");
    assert!(said(&output).contains("the guest runs in process"), "{}", said(&output));
    eventually("the old process ends", || host.running[0].try_wait().unwrap().is_some());
    host.assert_whole("b.qmp");
}

/// The new process of the first upgrade is the old process of the second.
#[test]
fn upgraded_guest_is_upgraded_again() {
    let host = Host::new(&[]);
    let to = |monitor: &str| [vec![sterna().to_owned()], host.line(monitor)].concat();
    assert!(host.upgrade(&to("b.qmp")).status.success());
    let mut upgrade = Command::new(sterna());
    upgrade.arg("upgrade").arg(host.at("b.qmp")).arg("--").args(to("c.qmp"));

    let output = upgrade.output().unwrap();

    assert!(output.status.success(), "{}", said(&output));
    assert!(connect(&host.at("b.qmp")).is_none(), "the second process has ended");
    host.assert_whole("c.qmp");
}

#[test]
fn upgrade_that_fails_leaves_the_guest_where_it_was() {
    let host = Host::new(&[]);
    let with =
        |option: &str| [vec![sterna().to_owned()], host.line("b.qmp"), vec![option.to_owned()]].concat();
    let no_program = [vec!["/nowhere/sterna".to_owned()], host.line("b.qmp")].concat();
    for (command, word) in [
        (no_program, "cannot start /nowhere/sterna"),
        // This process exits before it listens.
        (with("--no-such-option"), "no-such-option"),
        // These processes listen, but their machines differ.
        (with("--ram=65M"), "RAM"),
        (with("--backing=anonymous"), "--backing memfd"),
    ] {
        // `--ram` must not be given twice, so the default is removed if the command has its own.
        let command: Vec<_> = command
            .iter()
            .filter(|word| {
                !(word.as_str() == "--ram=64M" && command.iter().any(|other| other == "--ram=65M"))
            })
            .cloned()
            .collect();
        let output = host.upgrade(&command);

        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(word), "{word}: {}", said(&output));
        assert!(connect(&host.at("b.qmp")).is_none(), "{word}: the new process is left");
        host.assert_whole("a.qmp");
        let mode = &host.ask("a.qmp", "query-migrate-parameters")["mode"];
        assert_eq!(mode, "normal", "{word}: the next migration may go to another host");
    }
}

#[test]
fn upgrade_to_a_process_without_a_monitor_is_refused() {
    let host = Host::new(&[]);
    let mut command = [vec![sterna().to_owned()], host.line("b.qmp")].concat();
    command.retain(|word| !word.starts_with("--qmp"));

    let output = host.upgrade(&command);

    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("add `--qmp=unix:PATH`"), "{}", said(&output));
    host.assert_whole("a.qmp");
}

#[test]
fn private_memory_is_refused_with_the_option_that_helps() {
    let host = Host::new(&["--backing=anonymous"]);
    let command = [vec![sterna().to_owned()], host.line("b.qmp")].concat();

    let output = host.upgrade(&command);

    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("--backing memfd"), "{}", said(&output));
    host.assert_whole("a.qmp");
}

#[test]
fn same_host_needs_a_unix_socket() {
    let host = Host::new(&[]);
    let mut migrate = Command::new(sterna());
    migrate.arg("migrate").arg(host.at("a.qmp")).args(["tcp:127.0.0.1:1", "--same-host"]);

    let output = migrate.output().unwrap();

    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("unix:PATH"), "{}", said(&output));
    host.assert_whole("a.qmp");
}
