//! The VMs of a protection, and `sterna protect`, as users start them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_drive::Vm;
use sterna_qmp::Endpoint;

pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn sterna() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
}

pub fn connect(socket: &Path) -> Option<Vm> {
    Vm::connect(&Endpoint::Unix(socket.to_owned())).ok()
}

pub fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs an operator's command and returns its output.
pub fn command(name: &str, socket: &Path, more: &[&str]) -> Output {
    sterna().arg(name).arg(socket).args(more).output().unwrap()
}

/// A child process that is killed when this value is dropped.
pub struct Process(pub Child);

impl Process {
    pub fn kill(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    pub fn wait(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(begin.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A directory with the VMs' sockets, their files and the arbiter. A VM's name is the name of its files.
pub struct Site(tempfile::TempDir);

impl Site {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("arbiter")).unwrap();
        Self(directory)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn socket(&self, side: &str) -> PathBuf {
        self.path(&format!("{side}.qmp"))
    }

    /// `sterna run` with a monitor and this arbiter, and no other options.
    pub fn vm(&self, side: &str, arbiter: &str) -> Command {
        let mut vm = sterna();
        vm.arg("run")
            .arg(format!("--qmp=unix:{}", self.socket(side).display()))
            .arg(format!("--arbiter={arbiter}"))
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(self.path(&format!("{side}.err"))).unwrap());
        vm
    }

    /// The arbiter that both sides use.
    pub fn arbiter(&self) -> String {
        format!("file:{}", self.path("arbiter").display())
    }

    /// Starts the VM, and waits for its monitor.
    pub fn start(&self, side: &str, vm: &mut Command) -> Process {
        // Removes the socket of a VM that was killed earlier.
        let _ = std::fs::remove_file(self.socket(side));
        let process = Process(vm.spawn().unwrap());
        wait("the monitor", || connect(&self.socket(side)).is_some());
        process
    }

    /// The command `sterna protect` from one side to another.
    pub fn protect(&self, from: &str, to: &str, more: &[&str]) -> Command {
        let mut protect = sterna();
        protect
            .arg("protect")
            .arg(self.socket(from))
            .arg(format!("unix:{}", self.path(&format!("to-{to}")).display()))
            .arg("--standby-qmp")
            .arg(self.socket(to))
            .arg("--json")
            .args(more)
            .stdout(Stdio::null())
            .stderr(File::create(self.path("protect.err")).unwrap());
        let has_delay = more.iter().any(|option| option.starts_with("--checkpoint-delay"));
        protect.args((!has_delay).then_some("--checkpoint-delay=20"));
        protect
    }

    /// The messages of the last `sterna protect`.
    pub fn protect_said(&self) -> String {
        std::fs::read_to_string(self.path("protect.err")).unwrap()
    }

    pub fn ask(&self, side: &str, command: &str) -> Value {
        connect(&self.socket(side)).unwrap().execute(command, Value::Null).unwrap()
    }

    pub fn report(&self, side: &str) -> Value {
        self.ask(side, "x-sterna-query-protection")
    }

    pub fn is_running(&self, side: &str) -> bool {
        self.ask(side, "query-status")["running"] == true
    }

    /// Number of checkpoints in the protection of this side.
    pub fn checkpoints(&self, side: &str) -> u64 {
        self.report(side)["checkpoints"].as_u64().unwrap_or(0)
    }

    /// Waits until the standby holds `more` additional checkpoints.
    pub fn await_checkpoints(&self, side: &str, more: u64) {
        let before = self.checkpoints(side);
        let begin = Instant::now();
        while self.checkpoints(side) < before + more {
            assert!(begin.elapsed() < PATIENCE, "checkpoints did not come: {}", self.protect_said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
