//! A machine's process, QEMU or `sterna run`, driven over QMP: both take the same commands.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_interop::ticks::ticks;
use sterna_qmp::{Client, Endpoint, QmpEvent};
use tempfile::TempDir;

use crate::Failure;
use crate::clock::CpuClock;

/// How long a start, an answer or a whole migration may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// What is smaller is no guest RAM.
const LEAST_RAM_BYTES: u64 = 1 << 20;

/// How a migration is made; the names are QEMU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// Capability `multifd` with so many channels.
    pub channels: Option<u8>,
    /// Capability `mapped-ram`.
    pub mapped: bool,
    /// Parameter `direct-io`.
    pub direct: bool,
}

/// A running machine, killed when dropped.
pub struct Peer {
    name: &'static str,
    process: Child,
    directory: TempDir,
    monitor: Client,
    clock: CpuClock,
    /// As they were set last.
    settings: Settings,
}

impl Peer {
    /// Starts `command`, whose monitor is the socket `qmp` in `directory`.
    pub fn start(name: &'static str, mut command: Command, directory: TempDir) -> Result<Self, Failure> {
        let log =
            File::create(directory.path().join("log")).map_err(|error| format!("{name}'s log: {error}"))?;
        let second = log.try_clone().map_err(|error| format!("{name}'s log: {error}"))?;
        command.stdin(Stdio::null()).stdout(log).stderr(second);
        let mut process = command.spawn().map_err(|error| format!("cannot start {name}: {error}"))?;
        let made = connect(&mut process, &directory.path().join("qmp"))
            .and_then(|monitor| Ok((monitor, CpuClock::of(process.id())?)));
        match made {
            Ok((monitor, clock)) => {
                Ok(Self { name, process, directory, monitor, clock, settings: Settings::default() })
            }
            Err(why) => {
                // An error means that it has ended by itself.
                let _ = process.kill();
                let _ = process.wait();
                let log = std::fs::read_to_string(directory.path().join("log")).unwrap_or_default();
                Err(format!("{name}: {why}; it said: {}", log.trim()))
            }
        }
    }

    /// The directory of its sockets.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Its monitor for another client.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("operator")
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// CPU time of the process so far.
    pub fn cpu(&self) -> Duration {
        self.clock.read()
    }

    /// Executes a QMP command.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Failure> {
        let name = self.name;
        self.monitor.execute(command, arguments).map_err(|error| format!("{name}: {error}"))
    }

    /// Makes the machine ready for a migration of that kind, without a limit on bandwidth.
    pub fn prepare(&mut self, settings: &Settings) -> Result<(), Failure> {
        // What was never on need not be known there.
        let had = std::mem::replace(&mut self.settings, *settings);
        let switches = [
            ("events", true, true),
            ("multifd", had.channels.is_some(), settings.channels.is_some()),
            ("mapped-ram", had.mapped, settings.mapped),
        ];
        let switches = switches.into_iter().filter(|(_, was, is)| *was || *is);
        let switches: Vec<Value> =
            switches.map(|(name, _, is)| json!({"capability": name, "state": is})).collect();
        self.execute("migrate-set-capabilities", json!({ "capabilities": switches }))?;
        let mut parameters = json!({"max-bandwidth": 0});
        if let Some(channels) = settings.channels {
            parameters["multifd-channels"] = channels.into();
        }
        if had.direct || settings.direct {
            parameters["direct-io"] = settings.direct.into();
        }
        self.execute("migrate-set-parameters", parameters)?;
        self.forget_events()
    }

    /// Events of a migration that another client drove would pass for those of the next.
    pub fn forget_events(&mut self) -> Result<(), Failure> {
        let name = self.name;
        while self.monitor.next_event(Duration::ZERO).map_err(|error| format!("{name}: {error}"))?.is_some() {
        }
        Ok(())
    }

    /// The next event, if there is one within that time.
    pub fn next_event(&mut self, wait: Duration) -> Result<Option<QmpEvent>, Failure> {
        let name = self.name;
        self.monitor.next_event(wait).map_err(|error| format!("{name}: {error}"))
    }

    /// Waits for a guest on a free port of loopback; gives back the address.
    pub fn listen(&mut self) -> Result<String, Failure> {
        self.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}))?;
        let query = self.execute("query-migrate", Value::Null)?;
        match query["socket-address"][0]["port"].as_str() {
            Some(port) => Ok(format!("tcp:127.0.0.1:{port}")),
            None => Err(format!("{}: it listens nowhere: {query}", self.name)),
        }
    }

    /// Waits for the event that says that the migration is over. After [`prepare`](Self::prepare) only.
    pub fn wait_until_completed(&mut self) -> Result<(), Failure> {
        self.wait_until_over(PATIENCE)
    }

    /// As [`wait_until_completed`](Self::wait_until_completed), no longer than `limit`.
    pub fn wait_until_over(&mut self, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.monitor.next_event(left).map_err(|error| self.explain(&error.to_string()))?;
            let Some(event) = event else { return Err(self.explain("the migration does not end")) };
            match event.data["status"].as_str().filter(|_| event.name == "MIGRATION") {
                Some("completed") => return Ok(()),
                Some(status @ ("failed" | "cancelled")) => {
                    let query = self.execute("query-migrate", Value::Null).unwrap_or_default();
                    let why = query["error-desc"].as_str().unwrap_or("no reason given");
                    return Err(self.explain(&format!("the migration has {status}: {why}")));
                }
                _ => {}
            }
        }
    }

    /// Waits for so many lines of the guest on the serial port, all of them good.
    pub fn wait_for_ticks(&self, lines: usize) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = std::fs::read(self.directory().join("serial")).unwrap_or_default();
            let ticks = ticks(&String::from_utf8_lossy(&said));
            if let Some(bad) = ticks.iter().find(|tick| !tick.ok) {
                return Err(format!("the guest's memory changed: its line {} says so", bad.number));
            }
            if ticks.len() >= lines {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err("the guest shows no life".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The memory files behind guest RAM.
    pub fn ram(&self) -> Result<Vec<File>, Failure> {
        ram_of(self.process.id())
    }

    /// `why`, and the end of what the machine said.
    fn explain(&self, why: &str) -> Failure {
        let log = std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        let said: Vec<&str> = log.lines().rev().take(3).collect();
        let said: Vec<&str> = said.into_iter().rev().collect();
        format!(
            "{}: {why}{}{}",
            self.name,
            if said.is_empty() { "" } else { "; it said: " },
            said.join(" / ")
        )
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Errors mean that it has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The memory files behind the guest RAM of process `pid`, in the order in which they were made.
pub fn ram_of(pid: u32) -> Result<Vec<File>, Failure> {
    let place = PathBuf::from(format!("/proc/{}/fd", pid));
    let failed = |error: std::io::Error| format!("{}: {error}", place.display());
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(&place).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // A descriptor may be closed while we look.
        let is_memory = std::fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        found.extend(number.filter(|_| is_memory).map(|number| (number, path)));
    }
    found.sort();
    let mut files: Vec<File> = Vec::new();
    let mut seen = Vec::new();
    for (_, path) in found {
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if about.len() >= LEAST_RAM_BYTES && !seen.contains(&about.ino()) {
            seen.push(about.ino());
            files.push(file);
        }
    }
    Ok(files)
}

fn connect(process: &mut Child, socket: &Path) -> Result<Client, Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok(Some(status)) = process.try_wait() {
            return Err(format!("ended with {status}"));
        }
        if socket.exists()
            && let Ok(client) = Client::connect(&Endpoint::Unix(socket.to_path_buf()), PATIENCE)
        {
            return Ok(client);
        }
        if Instant::now() > deadline {
            return Err("has no monitor".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
