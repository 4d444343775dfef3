//! `sterna save` and `sterna restore` with Sterna's own VMM, as users run them. Tests with QEMU are interop's
//! `qemu_save`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_drive::Vm;
use sterna_qmp::Endpoint;

/// A VM that is killed when the test ends.
pub struct Process {
    child: Child,
    socket: PathBuf,
}

impl Process {
    pub fn start(socket: PathBuf, more: &[&str]) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["run", "--machine=process", "--ram=64M"])
            .arg(format!("--qmp=unix:{}", socket.display()))
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let process = Self { child, socket };
        process.vm();
        process
    }

    /// The monitor's address, as on a command line.
    pub fn socket(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    pub fn vm(&self) -> Vm {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match Vm::connect(&Endpoint::Unix(self.socket.clone())) {
                Ok(vm) => return vm,
                Err(error) => assert!(Instant::now() < deadline, "no monitor: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sterna(command: &str, first: &Path, second: &Path, more: &[&str]) -> Output {
    let mut sterna = Command::new(env!("CARGO_BIN_EXE_sterna"));
    sterna.arg(command).arg(first).arg(second).arg("--json").args(more).output().unwrap()
}

fn told(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[test]
fn save_and_restore_of_our_own_vmm_move_the_guest() {
    for form in ["mapped-ram", "legacy", "sterna", "legacy-zstd"] {
        let directory = tempfile::tempdir().unwrap();
        let (image, socket) = (directory.path().join("vm.img"), directory.path().join("a.qmp"));
        let source = Process::start(socket.clone(), &[]);

        let saved = told(&sterna("save", &socket, &image, &["--format", form]));

        assert_eq!(
            (&saved["format"], &saved["was_running"], &saved["is_running"]),
            (&json!(form), &json!(true), &json!(false))
        );
        assert_ne!(source.vm().run_state().unwrap(), "running");
        let target = Process::start(directory.path().join("b.qmp"), &["--incoming", "defer"]);
        let restored = told(&sterna("restore", &image, &target.socket, &[]));
        assert_eq!(restored["is_running"], json!(true));
        assert_eq!(target.vm().run_state().unwrap(), "running");
    }
}

#[test]
fn save_onto_an_existing_file_is_refused_and_the_guest_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("vm.img"), directory.path().join("a.qmp"));
    let source = Process::start(socket.clone(), &[]);
    std::fs::write(&image, "precious").unwrap();

    let refused = sterna("save", &socket, &image, &[]);

    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(std::fs::read(&image).unwrap(), b"precious");
    assert_eq!(source.vm().run_state().unwrap(), "running");
    told(&sterna("save", &socket, &image, &["--force", "--resume-after"]));
    assert_eq!(source.vm().run_state().unwrap(), "running");
    let names = std::fs::read_dir(directory.path()).unwrap().flatten();
    let left: Vec<_> = names.filter(|name| name.file_name().to_string_lossy().contains("vm.img")).collect();
    assert_eq!(left.len(), 1, "{left:?}");
}
