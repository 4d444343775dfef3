//! VM processes that a command starts, controls through their monitors, and ends before it exits.
//!
//! A child has its own process group, so that Ctrl-C reaches only the command. The command sends `quit` over
//! QMP, and kills the child if it does not exit in time. Dropping a [`VmProcess`] kills it, also during a
//! panic. If the command itself is killed, the kernel kills the child (`--exit-with-parent`).

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_qmp::Endpoint;

use crate::exit::{Status, Stop};
use crate::monitor::Monitor;

/// `sterna run` fills the RAM of its guest before it opens its monitor, which takes time.
const START_LIMIT: Duration = Duration::from_secs(120);
const QUIT_LIMIT: Duration = Duration::from_secs(10);

/// A child process that executes `sterna run`. Dropping it kills the process.
pub struct VmProcess {
    name: &'static str,
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl VmProcess {
    /// Starts the executable of this process as `sterna run` with `arguments`. Socket and log file are
    /// created in `directory`.
    pub fn start(name: &'static str, directory: &Path, arguments: &[String]) -> Result<Self, Stop> {
        let failed = |error: std::io::Error| Stop::failed(format!("cannot start the {name} VM: {error}"));
        let (socket, log) = (directory.join(format!("{name}.qmp")), directory.join(format!("{name}.log")));
        let program = std::env::current_exe().map_err(failed)?;
        let child = Command::new(program)
            .args(["run", "--name", name])
            .arg(format!("--qmp=unix:{}", socket.display()))
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(failed)?)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Self { name, child, socket, log })
    }

    /// Connects to the child's monitor as soon as the socket exists, within `START_LIMIT`.
    pub fn monitor(&mut self) -> Result<Monitor, Stop> {
        let endpoint = Endpoint::Unix(self.socket.clone());
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if self.socket.exists() {
                match Monitor::connect(&endpoint) {
                    Ok(monitor) => return Ok(monitor),
                    Err(stop) if stop.status == Status::Cancelled => return Err(stop),
                    // The socket exists, but the child does not accept connections yet.
                    Err(_) => {}
                }
            }
            self.check_alive()?;
            if Instant::now() > deadline {
                return Err(Stop::failed(format!(
                    "the {} VM has no monitor after {START_LIMIT:?}",
                    self.name
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// CPU seconds of the process so far: user and system time of all threads.
    pub fn cpu_seconds(&self) -> Option<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).ok()?;
        cpu_seconds(&stat, rustix::param::clock_ticks_per_second())
    }

    /// Sends `quit`, waits for the exit, and kills the process after `QUIT_LIMIT`.
    pub fn quit(mut self, monitor: &mut Monitor) -> Result<(), Stop> {
        // The process may exit before its answer is sent. Its exit status tells whether `quit` worked.
        let _ = monitor.try_execute("quit", Value::Null);
        let deadline = Instant::now() + QUIT_LIMIT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => {
                    return Err(Stop::failed(format!(
                        "the {} VM ended with {status}{}",
                        self.name,
                        self.said()
                    )));
                }
                _ if Instant::now() > deadline => {
                    return Err(Stop::failed(format!("the {} VM did not quit and was killed", self.name)));
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn check_alive(&mut self) -> Result<(), Stop> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => {
                Err(Stop::failed(format!("the {} VM ended with {status}{}", self.name, self.said())))
            }
            Err(error) => {
                Err(Stop::failed(format!("cannot wait for the {} VM's process: {error}", self.name)))
            }
        }
    }

    /// The child's standard error, as the end of an error message.
    fn said(&self) -> String {
        match std::fs::read_to_string(&self.log) {
            Ok(text) if !text.trim().is_empty() => format!("; its messages: {}", text.trim()),
            _ => String::new(),
        }
    }
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fields 14 and 15 of proc_pid_stat(5). Field 2, the name, may contain spaces and parentheses, so fields are
/// counted after its last `)`.
fn cpu_seconds(stat: &str, ticks_per_second: u64) -> Option<f64> {
    let rest = &stat[stat.rfind(')')? + 1..];
    let mut fields = rest.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks as f64 / ticks_per_second as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_seconds_of_an_odd_name_are_found_behind_it() {
        let stat = "77 (a) b) c) R 1 77 77 0 -1 4194560 1 0 0 0 250 150 0 0 20 0 1 0";

        assert_eq!(cpu_seconds(stat, 100), Some(4.0));
        assert_eq!(cpu_seconds("77 (x) R 1", 100), None);
    }
}
