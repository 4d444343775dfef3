//! A QEMU of the root as a child process. It has two monitors, a serial port in a file, and a directory of
//! its own.
//!
//! All of its files are in a temporary directory. Dropping it kills the process and removes the directory. If
//! a test panics, the end of the output of QEMU and of the guest is printed to standard error first.

mod builder;
mod migration;
mod state;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};
use tempfile::TempDir;

use crate::Failure;
use crate::ticks::{Tick, ticks};

pub use builder::{Accelerator, Builder, Ram};

/// Time limit of every wait. Each wait takes only seconds on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Interval of polling for states without an event.
const STEP: Duration = Duration::from_millis(10);

/// A running QEMU, killed when dropped.
pub struct Qemu {
    process: Child,
    directory: TempDir,
    monitor: Client,
}

impl Qemu {
    /// Starts `command` and connects to its monitor in `directory`.
    fn start(mut command: Command, directory: TempDir) -> Result<Self, Failure> {
        let log = directory.path().join("log");
        let file = std::fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let second = file.try_clone().map_err(|error| format!("{}: {error}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(second);
        let mut process = command.spawn().map_err(|error| format!("cannot start QEMU: {error}"))?;
        match connect(&mut process, &directory.path().join("qmp")) {
            Ok(monitor) => Ok(Self { process, directory, monitor }),
            Err(why) => {
                // An error means that the process has ended by itself.
                let _ = process.kill();
                let _ = process.wait();
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                Err(format!("{why}; it said: {}", log.trim()))
            }
        }
    }

    /// The monitor that the harness uses.
    pub fn qmp(&mut self) -> &mut Client {
        &mut self.monitor
    }

    /// Socket of a second monitor without a client: for `sterna save`, `restore` and `migrate`.
    pub fn operator_socket(&self) -> PathBuf {
        self.directory.path().join("operator")
    }

    /// A directory for sockets, images and certificates, removed with this process.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Number of the process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Executes a QMP command on the harness's monitor. `arguments` is an object or null.
    ///
    /// # Errors
    /// QEMU's refusal; or the failure of the monitor, with the end of QEMU's output.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Failure> {
        self.monitor.execute(command, arguments).map_err(|error| self.explain(&error.to_string()))
    }

    /// Stops the guest with `stop`.
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    pub fn stop(&mut self) -> Result<(), Failure> {
        self.execute("stop", Value::Null).map(drop)
    }

    /// Resumes the guest with `cont`.
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    pub fn resume(&mut self) -> Result<(), Failure> {
        self.execute("cont", Value::Null).map(drop)
    }

    /// The status in `query-status`: `running`, `paused`, `postmigrate`, `inmigrate`…
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    pub fn status(&mut self) -> Result<String, Failure> {
        let status = self.execute("query-status", Value::Null)?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits until `query-status` reports `wanted`.
    ///
    /// # Errors
    /// The last status, after [`PATIENCE`].
    pub fn wait_for_status(&mut self, wanted: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            let status = self.status()?;
            if status == wanted {
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                return Err(self.explain(&format!("it is {status}, not {wanted}")));
            }
            std::thread::sleep(STEP);
        }
    }

    /// The complete output on the serial port so far.
    pub fn serial(&self) -> String {
        let bytes = std::fs::read(self.directory.path().join("serial")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The lines of [`serial`](Self::serial). The last one may be incomplete.
    pub fn serial_lines(&self) -> Vec<String> {
        self.serial().lines().map(str::to_owned).collect()
    }

    /// The guest's ticks so far, in this machine.
    pub fn ticks(&self) -> Vec<Tick> {
        ticks(&self.serial())
    }

    /// Waits until the guest has ticked `more` times from now, in this machine.
    ///
    /// # Errors
    /// A tick was BAD, QEMU ended, or no line arrived within [`PATIENCE`].
    pub fn wait_for_ticks(&mut self, more: usize) -> Result<Tick, Failure> {
        let wanted = self.ticks().len() + more;
        let begin = Instant::now();
        loop {
            let ticks = self.ticks();
            if let Some(bad) = ticks.iter().find(|tick| !tick.ok) {
                return Err(self.explain(&format!("the guest's memory changed: tick {} is BAD", bad.number)));
            }
            if let Some(last) = ticks.last().filter(|_| ticks.len() >= wanted) {
                return Ok(*last);
            }
            if let Some(status) = self.ended() {
                return Err(self.explain(&format!("it ended with {status}")));
            }
            if begin.elapsed() > PATIENCE {
                let serial = self.serial_lines();
                let last = serial.last().map_or("nothing", String::as_str);
                let count = ticks.len();
                let why = format!("the guest ticked {count} times, not {wanted}; it said last: {last}");
                return Err(self.explain(&why));
            }
            std::thread::sleep(STEP);
        }
    }

    /// Exit status of the process, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().ok().flatten()
    }

    /// Quits QEMU and waits for its end.
    ///
    /// # Errors
    /// QEMU ended with a failure, or not within [`PATIENCE`].
    pub fn quit(mut self) -> Result<(), Failure> {
        self.execute("quit", json!({}))?;
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if let Some(status) = self.ended() {
                return if status.success() {
                    Ok(())
                } else {
                    Err(self.explain(&format!("it ended with {status}")))
                };
            }
            std::thread::sleep(STEP);
        }
        Err(self.explain("it did not quit"))
    }

    /// Kills the process with SIGKILL. This simulates a peer that dies in the middle of a migration.
    pub fn kill(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Output of QEMU.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// `why`, with the end of QEMU's output.
    fn explain(&self, why: &str) -> Failure {
        let log = self.log();
        if log.trim().is_empty() { why.to_owned() } else { format!("{why}; QEMU said: {}", log.trim()) }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let serial = self.serial();
            let tail: Vec<&str> = serial.lines().rev().take(20).collect();
            #[allow(clippy::print_stderr, reason = "a failing test says what it knows")]
            {
                eprintln!("QEMU {} said: {}", self.process.id(), self.log().trim());
                eprintln!("its guest's last lines:");
                tail.iter().rev().for_each(|line| eprintln!("    {line}"));
            }
        }
    }
}

/// Connects as soon as QEMU listens. It is an error if the process ends before.
fn connect(process: &mut Child, socket: &Path) -> Result<Client, Failure> {
    let begin = Instant::now();
    loop {
        if let Ok(Some(status)) = process.try_wait() {
            return Err(format!("QEMU ended with {status}"));
        }
        if socket.exists()
            && let Ok(client) = Client::connect(&Endpoint::Unix(socket.to_path_buf()), PATIENCE)
        {
            return Ok(client);
        }
        if begin.elapsed() > PATIENCE {
            return Err("QEMU's monitor did not answer".into());
        }
        std::thread::sleep(STEP);
    }
}
