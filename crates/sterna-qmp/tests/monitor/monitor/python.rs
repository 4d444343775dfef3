//! Tests the monitor with an unchanged `qemu.qmp` from PyPI, which is written for QEMU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::support::{ClientExt, Monitor};

#[test]
fn qemu_qmp_from_pypi_drives_the_monitor() {
    let name = "qemu_qmp_from_pypi_drives_the_monitor";
    let python = match venv_with_qemu_qmp() {
        Ok(python) => python,
        Err(reason) => return skipped(name, &reason),
    };
    let monitor = Monitor::running();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/dialogue.py");
    let output = run(Command::new(&python).arg(script).arg(&monitor.path)).unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("dialogue complete"), "{stdout}\n{stderr}");
    assert_eq!(monitor.engine.outgoing().parameters.lock().unwrap().multifd_channels, 4);
    monitor.client().event_free();
}

trait EventFree {
    fn event_free(self);
}

impl EventFree for sterna_qmp::Client {
    /// Checks that the monitor still answers after the script.
    fn event_free(mut self) {
        self.ok("query-status", serde_json::Value::Null);
    }
}

fn skipped(name: &str, reason: &str) {
    #[allow(clippy::print_stderr)]
    {
        eprintln!("SKIPPED {name}: {reason}");
    }
}

/// The interpreter of a virtual environment in the target directory. Creates the environment if it is missing.
fn venv_with_qemu_qmp() -> Result<PathBuf, String> {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qemu-qmp-venv");
    let python = venv.join("bin/python3");
    let usable = |python: &Path| {
        let mut import = Command::new(python);
        import.args(["-c", "import qemu.qmp"]);
        run(&mut import).is_ok_and(|output| output.status.success())
    };
    if !usable(&python) {
        succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]);
        succeed(pip.args(["--timeout", "15", "qemu.qmp"]))?;
    }
    if usable(&python) { Ok(python) } else { Err("qemu.qmp is installed but cannot be imported".into()) }
}

fn run(command: &mut Command) -> Result<Output, String> {
    command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let output = run(command)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?} failed: {}", said.lines().last().unwrap_or("no reason given")))
}
