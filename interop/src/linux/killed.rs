//! Kills the process of one side while its guest moves. The guest must never be in two machines, and never
//! partly in one.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use super::console::{Console, PATIENCE};
use super::files::Files;
use super::machine::Setup;
use super::{guest, network, said};
use crate::scenarios::{Failure, ensure};
use crate::{sterna, sterna_does};

/// Seed of the kill times.
const SEED: u64 = 1;
const KILLS: u32 = 12;
/// Number of the guest's ticks between two moves.
const TICKS: u64 = 5;
const INTERVAL: Duration = Duration::from_millis(50);

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
    /// `sterna migrate`, which is not needed after the start of the migration.
    Command,
}

/// Moves one guest between machines in processes of their own. In each move, one process is killed.
pub(super) fn is_killed() -> Result<(), Failure> {
    network::up("lo", None)?;
    let mut random = fastrand::Rng::with_seed(SEED);
    let directory = tempfile::tempdir().map_err(said)?;
    let place = |name: &str| directory.path().join(name);
    let first = Side::with_guest(place("first"))?;
    let begin = Instant::now();
    let mut here = Side::empty(place("second"))?;
    let status = first.moves_to(&here)?.wait().map_err(said)?;
    ensure(status.success(), || format!("a move in peace ended with {status}"))?;
    here.goes_on_from(&first)?;
    let usual = begin.elapsed();
    drop(first);
    for number in 0..KILLS {
        let victim = [Victim::Source, Victim::Destination, Victim::Command][number as usize % 3];
        let there = Side::empty(place(&format!("there-{number}")))?;
        let mut command = here.moves_to(&there)?;
        let after = usual.mul_f64(random.f64());
        std::thread::sleep(after);
        match victim {
            Victim::Source => here.kill(),
            Victim::Destination => there.kill(),
            Victim::Command => command.kill().map_err(said)?,
        }
        let status = command.wait().map_err(said)?;
        let survivor = survivor(victim, here, there);
        let survivor = survivor.map_err(|why| format!("{victim:?} killed after {after:?}: {why}"))?;
        let whereabouts = survivor.as_ref().map_or("ended with its process", |(_, place)| place);
        println!(
            "LAB {victim:?} killed after {after:.1?}, `sterna migrate` {status}: the guest {whereabouts}"
        );
        here = match survivor {
            Some((side, _)) => side,
            None => Side::with_guest(place(&format!("again-{number}")))?,
        };
    }
    Ok(())
}

/// Returns the side where the guest continues, if there is one.
fn survivor(victim: Victim, here: Side, there: Side) -> Result<Option<(Side, &'static str)>, Failure> {
    const STAYS: &str = "runs where it was";
    const HAS_MOVED: &str = "has moved";
    match victim {
        Victim::Source if there.comes_to_run()? => {
            there.goes_on_from(&here)?;
            Ok(Some((there, HAS_MOVED)))
        }
        Victim::Source => {
            ensure(there.ticks() == 0, || "the guest ran there, and does no more".to_owned())?;
            Ok(None)
        }
        // The guest ran at the destination when that process was killed.
        Victim::Destination if there.ticks() > 0 => {
            ensure(!here.comes_to_run()?, || "the guest runs in both".to_owned()).map(|()| None)
        }
        Victim::Destination => {
            if !here.comes_to_run()? {
                if here.info()?["query_migrate"]["status"] == "completed" {
                    // The guest was at the destination, and had not ticked.
                    return Ok(None);
                }
                // The source has sent everything without an answer. The operator knows that the other process
                // has ended.
                sterna_does(&["decide", &here.monitor(), "source"])?;
            }
            here.lives()?;
            Ok(Some((here, STAYS)))
        }
        Victim::Command => {
            let has_moved = there.comes_to_run()?;
            let stays = here.state()? == RUNNING;
            ensure(has_moved != stays, || format!("it runs here: {stays}, there: {has_moved}"))?;
            if has_moved {
                there.goes_on_from(&here)?;
                return Ok(Some((there, HAS_MOVED)));
            }
            here.lives()?;
            Ok(Some((here, STAYS)))
        }
    }
}

const RUNNING: &str = "running";

/// A machine in a process of its own.
struct Side {
    process: Mutex<Child>,
    directory: PathBuf,
}

impl Side {
    /// Starts a machine and waits until its guest has booted.
    fn with_guest(directory: PathBuf) -> Result<Self, Failure> {
        let files = Files::new()?;
        let mut command = sterna();
        command.arg("run").arg("--kernel").arg(files.kernel()).arg("--initrd").arg(files.initrd());
        let side = Self::start(
            directory,
            command.args(["--append", &Setup::default().command_line(guest::UNTIL_TOLD)]),
        )?;
        side.lives().map(|()| side)
    }

    fn empty(directory: PathBuf) -> Result<Self, Failure> {
        Self::start(directory, sterna().args(["run", "--incoming=defer"]))
    }

    fn start(directory: PathBuf, command: &mut Command) -> Result<Self, Failure> {
        std::fs::create_dir(&directory).map_err(said)?;
        command.args(["--machine=kvm", "--ram=160M", "--serial"]).arg(directory.join("console"));
        command.args(["--qmp", &format!("unix:{}", directory.join("qmp").display())]);
        let side = Self { process: Mutex::new(quiet(command)?), directory };
        let begin = Instant::now();
        while side.state().is_err() {
            ensure(begin.elapsed() < PATIENCE, || format!("{command:?} does not answer"))?;
            std::thread::sleep(INTERVAL);
        }
        Ok(side)
    }

    /// Starts `sterna migrate`.
    fn moves_to(&self, there: &Self) -> Result<Child, Failure> {
        let mut command = sterna();
        command.args(["migrate", &self.monitor(), "tcp:127.0.0.1:0", "--dest-qmp", &there.monitor()]);
        quiet(command.args(["--cap", "auto-converge"]))
    }

    /// Kills the process like `kill -9`.
    fn kill(&self) {
        let mut process = self.process.lock();
        // An error means that the process has ended by itself.
        let _ = process.kill();
        let _ = process.wait();
    }

    fn monitor(&self) -> String {
        format!("unix:{}", self.directory.join("qmp").display())
    }

    /// The output of `sterna info` for the machine.
    fn info(&self) -> Result<Value, Failure> {
        serde_json::from_str(&sterna_does(&["info", &self.monitor(), "--json"])?).map_err(said)
    }

    fn state(&self) -> Result<String, Failure> {
        Ok(self.info()?["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Whether the guest runs, after no migration can change it any more.
    fn comes_to_run(&self) -> Result<bool, Failure> {
        let begin = Instant::now();
        loop {
            let info = self.info()?;
            if info["status"] == RUNNING && !is_under_way(&info) {
                return Ok(true);
            }
            let has_ended = self.process.lock().try_wait().map_err(said)?.is_some();
            if has_ended || !is_under_way(&info) {
                return Ok(false);
            }
            ensure(begin.elapsed() < PATIENCE, || format!("it does not come to an end: {info}"))?;
            std::thread::sleep(INTERVAL);
        }
    }

    /// Checks that the guest's ticks continue.
    fn lives(&self) -> Result<(), Failure> {
        let (begin, before) = (Instant::now(), self.ticks());
        while self.ticks() < before + TICKS {
            ensure(begin.elapsed() < PATIENCE, || {
                format!("no tick: {}, {}", self.console().last(), self.ticks())
            })?;
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// Checks that the guest's ticks continue after the last one at the other side.
    fn goes_on_from(&self, there: &Self) -> Result<(), Failure> {
        self.lives()?;
        let (last, ticks) = (there.ticks(), self.console().of(guest::TICK));
        let first = ticks.first().and_then(|tick| tick.first().copied()).unwrap_or(0);
        // The line of one tick may be split between both consoles.
        ensure((last + 1..=last + 2).contains(&first), || format!("tick {first} comes after {last}"))
    }

    fn ticks(&self) -> u64 {
        self.console().ticks()
    }

    fn console(&self) -> Console {
        // Without the file, the guest has printed nothing.
        Console::of_bytes(std::fs::read(self.directory.join("console")).unwrap_or_default())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a migration may still change the guest's location.
fn is_under_way(info: &Value) -> bool {
    let status = info["query_migrate"]["status"].as_str().unwrap_or("none");
    !["none", "completed", "failed", "cancelled", "undecided"].contains(&status)
}

fn quiet(command: &mut Command) -> Result<Child, Failure> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(said)
}
