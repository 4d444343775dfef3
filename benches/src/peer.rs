//! A machine's process, QEMU or `sterna run`, driven over QMP. Both accept the same commands.

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

/// Time limit of a start, an answer, or a complete migration.
const PATIENCE: Duration = Duration::from_secs(120);
/// Smaller memory files are not guest RAM.
const LEAST_RAM_BYTES: u64 = 1 << 20;

/// Settings of a migration; the names are QEMU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// Capability `multifd` with this number of channels.
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
    /// The settings that were applied last.
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
                // An error means that the process has ended by itself.
                let _ = process.kill();
                let _ = process.wait();
                let log = std::fs::read_to_string(directory.path().join("log")).unwrap_or_default();
                Err(format!("{name}: {why}; it said: {}", log.trim()))
            }
        }
    }

    /// The directory of the machine's sockets.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Socket of a second monitor, for another client.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("operator")
    }

    /// Number of the machine's process.
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

    /// Prepares the machine for a migration with these settings, without a bandwidth limit.
    pub fn prepare(&mut self, settings: &Settings) -> Result<(), Failure> {
        // A capability that was never on is not set, because the machine may not know it.
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

    /// Discards events. Otherwise, events of another client's migration would be taken for events of the next
    /// one.
    pub fn forget_events(&mut self) -> Result<(), Failure> {
        let name = self.name;
        while self.monitor.next_event(Duration::ZERO).map_err(|error| format!("{name}: {error}"))?.is_some() {
        }
        Ok(())
    }

    /// The next event. `None` if there is no event within `wait`.
    pub fn next_event(&mut self, wait: Duration) -> Result<Option<QmpEvent>, Failure> {
        let name = self.name;
        self.monitor.next_event(wait).map_err(|error| format!("{name}: {error}"))
    }

    /// Waits for a guest on a free port of loopback. Returns the address.
    pub fn listen(&mut self) -> Result<String, Failure> {
        self.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}))?;
        let query = self.execute("query-migrate", Value::Null)?;
        match query["socket-address"][0]["port"].as_str() {
            Some(port) => Ok(format!("tcp:127.0.0.1:{port}")),
            None => Err(format!("{}: it listens nowhere: {query}", self.name)),
        }
    }

    /// Waits for the event that reports the end of the migration. Call [`prepare`](Self::prepare) first.
    pub fn wait_until_completed(&mut self) -> Result<(), Failure> {
        self.wait_until_over(PATIENCE)
    }

    /// Like [`wait_until_completed`](Self::wait_until_completed), but waits at most `limit`.
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

    /// Waits for `lines` lines of the guest on the serial port. All of them must be good.
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

    /// The memory files of guest RAM.
    pub fn ram(&self) -> Result<Vec<File>, Failure> {
        ram_of(self.process.id())
    }

    /// `why`, with the end of the machine's log.
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
        // Errors mean that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The memory files that are guest RAM of process `pid`, in order of creation.
pub fn ram_of(pid: u32) -> Result<Vec<File>, Failure> {
    let place = PathBuf::from(format!("/proc/{}/fd", pid));
    let failed = |error: std::io::Error| format!("{}: {error}", place.display());
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(&place).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // The process may close a descriptor during the scan.
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
