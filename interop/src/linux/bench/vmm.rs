//! A VMM process with one Linux guest: Sterna's reference machine or QEMU's microvm, driven through the same
//! monitor.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};
use tempfile::TempDir;

use super::super::{Files, console, guest, network, said};
use crate::scenarios::{Failure, ensure};
use crate::sterna;

/// Interval of polling.
const STEP: Duration = Duration::from_millis(5);
/// Kernel command line of the guests of both VMMs.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet noxsave LAB=";

/// The VMM that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Sterna,
    Qemu,
}

impl Kind {
    pub(super) const BOTH: [Self; 2] = [Self::Sterna, Self::Qemu];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sterna => "Sterna",
            Self::Qemu => "QEMU",
        }
    }
}

/// A disk of a guest.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    pub(super) path: PathBuf,
    /// How a Sterna moves the disk.
    pub(super) migrate: &'static str,
}

/// Settings with which a VMM is started.
#[derive(Debug, Clone, Default)]
pub(super) struct Spec {
    pub(super) ram_mib: u64,
    pub(super) disks: Vec<Disk>,
    /// Whether it has a network card at the lab's bridge.
    pub(super) has_network: bool,
    pub(super) reports: bool,
    /// The guest's part of the kernel command line. `None`: the VMM waits for a guest.
    pub(super) guest: Option<String>,
}

/// A running VMM, killed when dropped.
pub(super) struct Vmm {
    process: Child,
    directory: TempDir,
    monitor: Client,
    started: Instant,
}

impl Vmm {
    /// Starts a VMM, and waits until its monitor answers.
    pub(super) fn start(kind: Kind, spec: &Spec) -> Result<Self, Failure> {
        let directory = tempfile::tempdir().map_err(said)?;
        let tap = spec.has_network.then(network::new_tap);
        let mut command = match kind {
            Kind::Sterna => of_sterna(spec, directory.path(), tap.as_deref())?,
            Kind::Qemu => of_qemu(spec, directory.path(), tap.as_deref())?,
        };
        let log = std::fs::File::create(directory.path().join("log")).map_err(said)?;
        let started = Instant::now();
        command.stdin(Stdio::null()).stdout(log.try_clone().map_err(said)?).stderr(log);
        let mut process = command.spawn().map_err(|error| format!("{}: {error}", kind.name()))?;
        match connected(&mut process, directory.path(), tap.as_deref()) {
            Ok(monitor) => Ok(Self { process, directory, monitor, started }),
            Err(why) => {
                let _ = process.kill();
                let _ = process.wait();
                let log = std::fs::read_to_string(directory.path().join("log")).unwrap_or_default();
                Err(format!("{}: {why}; it said: {}", kind.name(), log.trim()))
            }
        }
    }

    pub(super) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Failure> {
        self.monitor.execute(command, arguments).map_err(|error| format!("{command}: {error}"))
    }

    /// Waits for a line of the guest that begins with this word. Returns the rest of the line, and its time
    /// after the start.
    pub(super) fn wait_for(&mut self, word: &str) -> Result<(String, Duration), Failure> {
        loop {
            let text = std::fs::read(self.directory.path().join("serial")).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            if let Some(found) = whole.lines().find_map(|line| line.trim_end().strip_prefix(word)) {
                return Ok((found.trim().to_owned(), self.started.elapsed()));
            }
            let last = || text.lines().last().unwrap_or_default().to_owned();
            ensure(self.started.elapsed() < console::PATIENCE, || {
                format!("no {word}; it said last: {}", last())
            })?;
            if let Some(status) = self.process.try_wait().map_err(said)? {
                return Err(format!("it ended with {status} before {word}; it said last: {}", last()));
            }
            std::thread::sleep(STEP);
        }
    }

    /// Resident bytes of the VMM's own memory. The guest's memory is not included, because it is shared
    /// memory.
    pub(super) fn resident_bytes(&self) -> Result<u64, Failure> {
        let path = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(path).map_err(said)?;
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
                .ok_or_else(|| format!("no {name}"))
        };
        Ok((kib("RssAnon:")? + kib("RssFile:")?) << 10)
    }

    /// Moves the guest to `there`. Returns the answer to `query-migrate` afterwards.
    pub(super) fn move_to(&mut self, there: &mut Self, multifd: bool) -> Result<Value, Failure> {
        let uri = format!("unix:{}", there.directory.path().join("migration").display());
        for side in [&mut *self, &mut *there] {
            let capabilities = json!([{ "capability": "multifd", "state": multifd }]);
            side.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
            side.execute("migrate-set-parameters", json!({ "max-bandwidth": 0, "multifd-channels": 2 }))?;
        }
        there.execute("migrate-incoming", json!({ "uri": uri }))?;
        self.execute("migrate", json!({ "uri": uri }))?;
        let begin = Instant::now();
        loop {
            let info = self.execute("query-migrate", json!({}))?;
            match info["status"].as_str().unwrap_or_default() {
                "completed" => return Ok(info),
                "failed" | "cancelled" => return Err(format!("the migration ended: {info}")),
                _ => ensure(begin.elapsed() < console::PATIENCE, || format!("it does not end: {info}"))?,
            }
            std::thread::sleep(STEP);
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn connected(process: &mut Child, directory: &Path, tap: Option<&str>) -> Result<Client, Failure> {
    let endpoint = Endpoint::Unix(directory.join("qmp"));
    let begin = Instant::now();
    loop {
        match Client::connect(&endpoint, console::PATIENCE) {
            Ok(monitor) => {
                tap.map_or(Ok(()), network::join)?;
                return Ok(monitor);
            }
            Err(error) => ensure(begin.elapsed() < console::PATIENCE, || error.to_string())?,
        }
        if let Some(status) = process.try_wait().map_err(said)? {
            return Err(format!("it ended with {status}"));
        }
        std::thread::sleep(STEP);
    }
}

/// The kernel's complete command line for a guest.
fn command_line(text: &str) -> String {
    format!("{COMMAND_LINE}{} {text}", guest::NAME)
}

fn of_sterna(spec: &Spec, directory: &Path, tap: Option<&str>) -> Result<Command, Failure> {
    let files = Files::new()?;
    let mut command = sterna();
    command.args(["run", "--machine", "kvm", "--name", "linux", "--ram", &format!("{}M", spec.ram_mib)]);
    command.arg("--qmp").arg(format!("unix:{}", directory.join("qmp").display()));
    command.arg("--serial").arg(directory.join("serial"));
    for disk in &spec.disks {
        let (path, migrate) = (disk.path.display(), disk.migrate);
        command.arg("--disk").arg(format!("{path},direct=on,migrate={migrate}"));
    }
    if let Some(tap) = tap {
        command.arg("--net").arg(format!("tap:{tap},mac={}", network::guest_mac()));
    }
    if spec.reports {
        command.arg("--free-page-reporting");
    }
    match &spec.guest {
        Some(text) => {
            command.arg("--kernel").arg(files.kernel()).arg("--initrd").arg(files.initrd());
            command.args(["--append", &command_line(text)]);
        }
        None => {
            command.args(["--incoming", "defer"]);
        }
    }
    Ok(command)
}

fn of_qemu(spec: &Spec, directory: &Path, tap: Option<&str>) -> Result<Command, Failure> {
    let files = Files::new()?;
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", "microvm,acpi=on,memory-backend=ram", "-accel", "kvm", "-cpu", "host", "-smp", "1"]);
    command.args(["-m", &spec.ram_mib.to_string(), "-nodefaults", "-no-user-config", "-display", "none"]);
    command.args(["-object", &format!("memory-backend-memfd,id=ram,size={}M,share=on", spec.ram_mib)]);
    command.args(["-global", "virtio-mmio.force-legacy=false"]);
    command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", directory.join("qmp").display()));
    command.arg("-serial").arg(format!("file:{}", directory.join("serial").display()));
    for (index, disk) in spec.disks.iter().enumerate() {
        let path = disk.path.display();
        let options =
            format!("file={path},if=none,id=d{index},format=raw,cache=none,aio=io_uring,discard=unmap");
        command.args(["-drive", &options, "-device", &format!("virtio-blk-device,drive=d{index}")]);
    }
    if let Some(tap) = tap {
        let options = format!("tap,id=n,ifname={tap},script=no,downscript=no,vhost=off");
        let mac = network::guest_mac();
        command.args(["-netdev", &options, "-device", &format!("virtio-net-device,netdev=n,mac={mac}")]);
    }
    if spec.reports {
        command.args(["-device", "virtio-balloon-device,free-page-reporting=on"]);
    }
    // Kernel and command line are part of the machine, which QEMU compares on both sides.
    let line = command_line(spec.guest.as_deref().unwrap_or_default());
    command.arg("-kernel").arg(files.kernel()).arg("-initrd").arg(files.initrd()).args(["-append", &line]);
    if spec.guest.is_none() {
        command.args(["-incoming", "defer"]);
    }
    Ok(command)
}
