//! Takeovers: from the decision to the guest's first step at the other side.
//!
//! The primary's host is lost at the moment at which a large checkpoint has become held. A standby decides when lease and margin are over, which
//! stands beside; the time counts from the last look at which it had not decided. QEMU's secondary leaves that to a human: from
//! `x-colo-lost-heartbeat` on.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sterna_benches::words::GuestWords;
use sterna_interop::{Ram, Root};

use crate::Failure;
use crate::pair::{self, Other};
use crate::pauses::{Times, Watched as _};
use crate::plan::{Cell, Load, Pair};
use crate::process::{ask, number, seconds, wait};
use crate::sterna;

/// Different counts until the guest is known to write them: the last checkpoint's copy changes them, too.
const STEPS: usize = 5;
const LOOK: Duration = Duration::from_micros(20);

/// Takeovers of one kind.
pub(crate) struct Takeovers {
    pub(crate) times: Times,
    /// Lease and margin of the standby; none of QEMU, where a human decides.
    pub(crate) decision: Option<Duration>,
}

struct Takeover {
    took: Duration,
    decision: Option<Duration>,
}

/// So many of a cell's kind.
pub(crate) fn measure(root: &Root, sterna: &Path, cell: &Cell, tries: u32) -> Result<Takeovers, Failure> {
    let (mut times, mut decision) = (Vec::new(), None);
    for _ in 0..tries {
        let one = match cell.pair {
            Pair::SternaSterna => into_sterna(root, sterna, cell)?,
            Pair::QemuQemu => into_secondary(root, sterna, cell)?,
            Pair::QemuStandby | Pair::QemuSterna => into_waiting_qemu(root, sterna, cell)?,
        };
        times.push(one.took);
        decision = one.decision;
    }
    Ok(Takeovers { times: Times::new(times), decision })
}

/// What is taken over: much that is written, and seldom a checkpoint.
pub(crate) fn cell(pair: Pair, mut like: Cell) -> Cell {
    (like.pair, like.load, like.delay, like.channels) = (pair, Load::Heavy, Duration::from_millis(600), 0);
    like
}

fn into_sterna(root: &Root, sterna: &Path, cell: &Cell) -> Result<Takeover, Failure> {
    let mut protected = sterna::Protected::begin(root, sterna, cell)?;
    let words = GuestWords::of_process(protected.standby.id())?;
    let decision = await_checkpoint(|| protected.standby.execute("x-sterna-query-protection", Value::Null))?;
    kill(protected.primary.id())?;
    let began = await_decision(|| protected.standby.execute("x-sterna-query-protection", Value::Null))?;
    Ok(Takeover { took: first_step(&words, began)?, decision: Some(decision) })
}

fn into_waiting_qemu(root: &Root, sterna: &Path, cell: &Cell) -> Result<Takeover, Failure> {
    let memory = tempfile::Builder::new().prefix("sterna-bench-").tempdir_in("/dev/shm");
    let memory = memory.map_err(|error| format!("/dev/shm: {error}"))?;
    let waiting = pair::builder(root, cell).ram(Ram::File).incoming_defer().command_in(memory.path())?;
    let mut more: Vec<OsString> =
        vec!["--json".into(), "--ram-dir".into(), memory.path().into(), "--".into()];
    more.push(waiting.get_program().to_owned());
    more.extend(waiting.get_args().map(ToOwned::to_owned));
    let mut protected = pair::Protected::begin(root, sterna, cell, &more)?;
    let standby = protected.standby_monitor().ok_or("no standby")?;
    wait("the VM that waits", Duration::from_millis(20), || {
        let report = ask(standby, "x-sterna-query-protection")?;
        Ok((report["waiting-vm"] == "waits").then_some(()))
    })?;
    let decision = await_checkpoint(|| ask(standby, "x-sterna-query-protection"))?;
    let words = GuestWords::open(&memory.path().join("ram"))?;
    protected.lose_primary();
    let standby = protected.standby_monitor().ok_or("no standby")?;
    let began = await_decision(|| ask(standby, "x-sterna-query-protection"))?;
    let took = first_step(&words, began);
    let _survivor = Survivor::of(&protected.place.path().join("standby.log"))?;
    Ok(Takeover { took: took?, decision: Some(decision) })
}

/// QEMU's own: its guest has run there all the time, and may run on when it says so.
fn into_secondary(root: &Root, sterna: &Path, cell: &Cell) -> Result<Takeover, Failure> {
    let mut protected = pair::Protected::begin(root, sterna, cell, &[])?;
    let mut resumes = 0;
    wait("checkpoints", Duration::ZERO, || {
        resumes += usize::from(protected.next_event()?.is_some_and(|event| event.name == "RESUME"));
        Ok((resumes > 3).then_some(()))
    })?;
    kill(protected.primary.id())?;
    let Other::Qemu { secondary, .. } = &mut protected.other else { return Err("no secondary".to_owned()) };
    let words = GuestWords::of_process(secondary.id())?;
    let began = Instant::now();
    secondary.execute("x-colo-lost-heartbeat", Value::Null)?;
    wait("the guest", Duration::from_micros(200), || Ok((secondary.status()? == "running").then_some(())))?;
    Ok(Takeover { took: first_step(&words, began)?, decision: None })
}

/// Waits until another checkpoint has become held after some; how long the standby waits until it decides by itself.
fn await_checkpoint(mut report: impl FnMut() -> Result<Value, Failure>) -> Result<Duration, Failure> {
    let mut held = None;
    wait("checkpoints", Duration::from_micros(200), || {
        let report = report()?;
        let now = number(&report, "checkpoints")?;
        if now > *held.get_or_insert(now.max(3)) {
            return seconds(&report["contact"], "patience").map(Some);
        }
        Ok(None)
    })
}

/// The last moment at which the standby was seen waiting for the primary.
fn await_decision(mut report: impl FnMut() -> Result<Value, Failure>) -> Result<Instant, Failure> {
    let mut last = Instant::now();
    wait("the decision", Duration::from_micros(200), || {
        let asked = Instant::now();
        let report = report()?;
        if matches!(report["state"].as_str(), Some("following" | "holding")) {
            last = asked;
            return Ok(None);
        }
        Ok(Some(last))
    })
}

fn first_step(words: &GuestWords, began: Instant) -> Result<Duration, Failure> {
    let mut last = words.gaps()?.pages();
    let mut steps = 0;
    wait("the guest's first step", LOOK, || {
        let now = words.gaps()?.pages();
        steps += usize::from(now != last);
        last = now;
        Ok((steps >= STEPS).then(|| began.elapsed()))
    })
}

fn kill(process: u32) -> Result<(), Failure> {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or("no process")?;
    kill_process(pid, Signal::KILL).map_err(|error| format!("killing process {process}: {error}"))
}

/// The QEMU that runs the guest, which outlives `sterna standby`; it ends with this.
struct Survivor {
    process: u32,
    directory: Option<PathBuf>,
}

impl Survivor {
    /// By the standby's last line.
    fn of(log: &Path) -> Result<Self, Failure> {
        wait("the end of sterna standby", Duration::from_millis(20), || {
            let said = std::fs::read_to_string(log).unwrap_or_default();
            let last = said.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
            let Some(last) = last.filter(|last| last["state"] == "taken over") else { return Ok(None) };
            let process = last["process"].as_u64().and_then(|process| u32::try_from(process).ok());
            let messages = last["messages"].as_str().map(PathBuf::from);
            let directory = messages.and_then(|path| path.ancestors().nth(2).map(Path::to_owned));
            Ok(process.map(|process| Self { process, directory }))
        })
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        // It may have ended; its directory is a temporary one.
        let _ = kill(self.process);
        if let Some(directory) =
            self.directory.as_ref().filter(|place| place.starts_with(std::env::temp_dir()))
        {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}
