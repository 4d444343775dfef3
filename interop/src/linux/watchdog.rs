//! The watchdog of a primary's host. It runs while a lease is promised, and resets the host if the primary's
//! process is stopped. The VM's software watchdog only logs the reset in the kernel's log.
#![allow(clippy::print_stdout)]

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sterna_qmp::{Client, Endpoint};

use super::console::PATIENCE;
use super::{network, said};
use crate::scenarios::{Failure, ensure};
use crate::{sterna, sterna_does};

const DEVICE: &str = "/dev/watchdog0";
/// File with the kernel's state of the device.
const STATE: &str = "/sys/class/watchdog/watchdog0/state";
const LEASE: Duration = Duration::from_secs(10);
/// Allowed delay of the log message after the end of the lease. One core does all the work here.
const LATE: Duration = Duration::from_secs(3);

pub(super) fn ends_a_primary_that_stands_still() -> Result<(), Failure> {
    network::up("lo", None)?;
    ends_with_the_protection()?;
    let pair = Pair::protected()?;
    let mut log = KernelLog::from_now_on()?;

    pair.here.signal(Signal::STOP)?;
    let stopped = Instant::now();
    log.wait_for("softdog: Triggered")?;
    let after = stopped.elapsed();
    println!("LAB the watchdog was triggered {after:.1?} after the primary had stopped");
    let survives = until("the survivor", || Ok(pair.there.ask("query-status")?["status"] == "running"));
    pair.here.signal(Signal::CONT)?;

    survives?;
    ensure(after < LEASE + LATE, || format!("the lease lasts {LEASE:?}, and it took {after:?}"))
}

/// The watchdog stops with the protection, so it resets no host.
fn ends_with_the_protection() -> Result<(), Failure> {
    let pair = Pair::protected()?;
    ensure(state()? == "active", || "the watchdog does not run".to_owned())?;

    sterna_does(&["unprotect", &pair.here.monitor()])?;

    until("end of the watchdog", || Ok(state()? == "inactive"))
}

fn state() -> Result<String, Failure> {
    std::fs::read_to_string(STATE).map(|text| text.trim().to_owned()).map_err(said)
}

/// A guest and its standby, in processes of their own.
struct Pair {
    here: Side,
    there: Side,
    _protects: Process,
    _directory: tempfile::TempDir,
}

impl Pair {
    fn protected() -> Result<Self, Failure> {
        let directory = tempfile::tempdir().map_err(said)?;
        let at = directory.path();
        std::fs::create_dir(at.join("arbiter")).map_err(said)?;
        let here = Side::start(at, "here", &["--watchdog", DEVICE])?;
        let there = Side::start(at, "there", &["--incoming=defer"])?;
        let way = format!("unix:{}", at.join("way").display());
        let mut protect = sterna();
        protect.args(["protect", &here.monitor(), &way, "--standby-qmp", &there.monitor()]);
        let protects = protect.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let protects = Process(protects.map_err(said)?);
        until("checkpoints", || {
            Ok(there.ask("x-sterna-query-protection")?["checkpoints"].as_u64() >= Some(3))
        })?;
        Ok(Self { here, there, _protects: protects, _directory: directory })
    }
}

/// A process, killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Side {
    process: Process,
    monitor: PathBuf,
}

impl Side {
    fn start(at: &Path, name: &str, more: &[&str]) -> Result<Self, Failure> {
        let monitor = at.join(name);
        let log = File::create(at.join(format!("{name}.log"))).map_err(said)?;
        let mut command = sterna();
        command.args(["run", "--machine=process", "--ram=16M"]).args(more);
        command.arg(format!("--lease={}s", LEASE.as_secs()));
        command.arg(format!("--arbiter=file:{}", at.join("arbiter").display()));
        command.arg(format!("--qmp=unix:{}", monitor.display()));
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().map_err(said)?;
        let side = Self { process: Process(process), monitor };
        until("a monitor", || Ok(side.ask("query-status").is_ok()))?;
        Ok(side)
    }

    fn monitor(&self) -> String {
        format!("unix:{}", self.monitor.display())
    }

    /// Asks the monitor. A process of `sterna info` for each answer would take most of this scenario's time.
    fn ask(&self, command: &str) -> Result<Value, Failure> {
        let mut monitor = Client::connect(&Endpoint::Unix(self.monitor.clone()), PATIENCE).map_err(said)?;
        monitor.execute(command, Value::Null).map_err(said)
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        kill_process(Pid::from_child(&self.process.0), signal).map_err(said)
    }
}

fn until(what: &str, is_so: impl Fn() -> Result<bool, Failure>) -> Result<(), Failure> {
    let begin = Instant::now();
    while !is_so()? {
        ensure(begin.elapsed() < PATIENCE, || format!("no {what}"))?;
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Reader of the kernel's log.
struct KernelLog(File);

impl KernelLog {
    fn from_now_on() -> Result<Self, Failure> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open("/dev/kmsg").map_err(said)?;
        file.seek(SeekFrom::End(0)).map_err(said)?;
        Ok(Self(file))
    }

    fn wait_for(&mut self, text: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        let mut record = [0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(length) if String::from_utf8_lossy(&record[..length]).contains(text) => return Ok(()),
                Ok(_) => continue,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // Older records were overwritten in the meantime.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => continue,
                Err(error) => return Err(said(error)),
            }
            ensure(begin.elapsed() < PATIENCE, || format!("the kernel's log has no `{text}`"))?;
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
