//! A guest with a standby, in processes of their own. Its host is lost suddenly. Its connections, its files
//! and its pings must continue.
#![allow(clippy::print_stdout)]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use sterna_vmm::DiskMigration;

use super::console::{Console, PATIENCE};
use super::files::{Files, check_file_system};
use super::machine::{ROOT_DISK, Setup, check_disk};
use super::{LONGEST_GAP, guest, network, said};
use crate::scenarios::{Failure, ensure};
use crate::{sterna, sterna_does};

/// The lease. It is long, because one core does all the work here and heartbeats may be late.
const LEASE: Duration = Duration::from_secs(10);
/// Interval between checkpoints.
const INTERVAL_MS: &str = "200";
/// Time limit of the seeding. In the lab, a disk is copied at about 2 MB/s.
const SEEDING: Duration = Duration::from_secs(900);
/// Number of checkpoints before the host is lost.
const CHECKPOINTS: u64 = 20;
/// Numbers that the guest sends afterwards.
const NUMBERS: u64 = 1000;
const ROOT_BYTES: u64 = 1 << 30;
const OTHER_BYTES: u64 = 8 << 20;

/// Kills the primary. No peer of the guest must reconnect.
pub(super) fn outlives_its_host() -> Result<(), Failure> {
    network::up("lo", None)?;
    let setup =
        Setup { has_root: true, disk: Some(DiskMigration::Copy), has_network: true, ..Setup::default() };
    let directory = tempfile::tempdir().map_err(said)?;
    let at = directory.path();
    let arbiter = at.join("arbiter");
    std::fs::create_dir(&arbiter).map_err(said)?;
    let peer = network::Peer::start()?;
    let here = Side::start(at, "here", Path::new(ROOT_DISK), Some(&setup))?;
    peer.wait_for_numbers(1)?;
    let root = empty(at.join("root"), ROOT_BYTES)?;
    let there = Side::start(at, "there", &root, None)?;
    let pings = network::Pings::start()?;
    let begin = Instant::now();
    let mut command = sterna();
    let way = format!("unix:{}", at.join("way").display());
    command.args(["protect", &here.monitor(), &way, "--standby-qmp", &there.monitor()]);
    let mut protects = quiet(command.args(["--checkpoint-delay", INTERVAL_MS]))?;
    there.await_checkpoints(CHECKPOINTS).map_err(|why| {
        let infos = [&here, &there].map(|side| side.info().map_or_else(|why| why, |info| info.to_string()));
        format!("{why}; here: {}; there: {}", infos[0], infos[1])
    })?;
    println!("LAB {CHECKPOINTS} checkpoints after {:.1?}", begin.elapsed());
    peer.wait_for_numbers(1)?;

    here.kill();
    let lost = Instant::now();
    there.comes_to_run()?;
    println!("LAB the guest runs at its standby after {:.1?}", lost.elapsed());
    // The numbers arrive over the same connection.
    peer.wait_for_numbers(NUMBERS)?;
    println!("LAB {NUMBERS} numbers of it came until {:.1?}", lost.elapsed());
    let away = lost.elapsed();
    let pings = pings.finish()?;
    there.type_in(guest::END)?;
    there.ends()?;
    let _ = protects.kill();
    let _ = protects.wait();

    println!("LAB {pings}");
    ensure(pings.lost() < away + LEASE, || format!("{pings}, and it was away for less than {away:?}"))?;
    let console = Console::of_bytes(joined(here.said(), &there.said()));
    let ticks = console.check(&setup, None, LONGEST_GAP + away)?;
    let seen = peer.seen()?;
    let sent = console.of(guest::SENT);
    ensure(sent == [[seen.numbers, 0]], || format!("{seen:?}, and the guest says {sent:?}"))?;
    check_file_system(&root)?;
    check_disk(&setup, &there.other_disk(), ticks)
}

/// Joins a guest's output on both sides. The survivor repeats the end of the earlier output.
fn joined(mut before: Vec<u8>, after: &[u8]) -> Vec<u8> {
    let most = before.len().min(after.len());
    let again = (0..=most).rev().find(|length| before.ends_with(&after[..*length])).unwrap_or(0);
    before.extend_from_slice(&after[again..]);
    before
}

fn empty(path: PathBuf, bytes: u64) -> Result<PathBuf, Failure> {
    File::create(&path).and_then(|file| file.set_len(bytes)).map_err(said)?;
    Ok(path)
}

/// A machine in a process of its own.
struct Side {
    process: Mutex<Child>,
    directory: PathBuf,
}

impl Side {
    /// Starts a machine with a working guest, or one that waits for a guest.
    fn start(at: &Path, name: &str, root: &Path, guest: Option<&Setup>) -> Result<Self, Failure> {
        let directory = at.join(name);
        std::fs::create_dir(&directory).map_err(said)?;
        let other = empty(directory.join("disk"), OTHER_BYTES)?;
        let files = Files::new()?;
        let tap = network::new_tap();
        let mut command = sterna();
        command.args(["run", "--machine=kvm", "--ram=256M", "--serial=stdio", "--rng"]);
        command.arg(format!("--lease={}s", LEASE.as_secs()));
        command.arg(format!("--arbiter=file:{}", at.join("arbiter").display()));
        command.arg(format!("--qmp=unix:{}", directory.join("qmp").display()));
        for disk in [root, &other] {
            command.arg(format!("--disk={},migrate=copy", disk.display()));
        }
        command.arg(format!("--net=tap:{tap}"));
        match guest {
            Some(setup) => command
                .arg("--kernel")
                .arg(files.kernel())
                .arg("--initrd")
                .arg(files.initrd())
                .args(["--append", &setup.command_line(guest::UNTIL_TOLD)]),
            None => command.arg("--incoming=defer"),
        };
        let console = File::create(directory.join("console")).map_err(said)?;
        let log = File::create(directory.join("log")).map_err(said)?;
        let process = command.stdin(Stdio::piped()).stdout(console).stderr(log).spawn().map_err(said)?;
        let side = Self { process: Mutex::new(process), directory };
        side.until("its monitor", |side| Ok(side.info().is_ok()))?;
        network::join(&tap).map(|()| side)
    }

    fn monitor(&self) -> String {
        format!("unix:{}", self.directory.join("qmp").display())
    }

    fn other_disk(&self) -> PathBuf {
        self.directory.join("disk")
    }

    /// The output of `sterna info` for the machine.
    fn info(&self) -> Result<Value, Failure> {
        serde_json::from_str(&sterna_does(&["info", &self.monitor(), "--json"])?).map_err(said)
    }

    fn await_checkpoints(&self, count: u64) -> Result<(), Failure> {
        self.within(SEEDING, "checkpoint", |side| {
            let info = side.info()?;
            Ok(find(&info, "checkpoints").and_then(Value::as_u64) >= Some(count))
        })
    }

    fn comes_to_run(&self) -> Result<(), Failure> {
        self.until("the guest", |side| Ok(side.info()?["status"] == "running"))
    }

    fn type_in(&self, text: &str) -> Result<(), Failure> {
        let mut process = self.process.lock();
        let stdin = process.stdin.as_mut().ok_or("it has no standard input")?;
        stdin.write_all(text.as_bytes()).and_then(|()| stdin.flush()).map_err(said)
    }

    /// Waits until the guest switches itself off.
    fn ends(&self) -> Result<(), Failure> {
        self.until("its end", |side| Ok(side.process.lock().try_wait().map_err(said)?.is_some()))
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> Result<bool, Failure>) -> Result<(), Failure> {
        self.within(PATIENCE, what, is_so)
    }

    fn within(
        &self,
        patience: Duration,
        what: &str,
        is_so: impl Fn(&Self) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let begin = Instant::now();
        while !is_so(self)? {
            ensure(begin.elapsed() < patience, || {
                let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
                format!("no {what}: {log}; {}", Console::of_bytes(self.said()).last())
            })?;
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn said(&self) -> Vec<u8> {
        std::fs::read(self.directory.join("console")).unwrap_or_default()
    }

    /// Kills the process like `kill -9`.
    fn kill(&self) {
        let mut process = self.process.lock();
        // An error means that the process has ended by itself.
        let _ = process.kill();
        let _ = process.wait();
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The first value of that name at any depth.
fn find<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Object(fields) => {
            fields.get(name).or_else(|| fields.values().find_map(|value| find(value, name)))
        }
        _ => None,
    }
}

fn quiet(command: &mut Command) -> Result<Child, Failure> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(said)
}
