//! Measures takeovers, from the decision to the guest's first step at the standby.
//!
//! - [`Cause::Loss`]: the primary's host is lost when a large checkpoint has just become held. The standby
//!   decides after lease and margin, which are listed separately. It has copied the held checkpoint to RAM
//!   long before.
//! - [`Cause::Plan`]: an operator requests a planned takeover. The guest runs until most of its state has
//!   arrived, then the last checkpoint becomes held. The standby decides immediately, and must still copy the
//!   content of its journal.
//! - The time starts at the last poll in which the standby had not decided. QEMU's secondary leaves the
//!   decision to an operator: there the time starts at `x-colo-lost-heartbeat`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sterna_benches::words::GuestWords;
use sterna_interop::{Ram, Root};

use crate::Failure;
use crate::pair::{self, Other};
use crate::pauses::{Times, Watched as _};
use crate::plan::{Cell, Load, Pair};
use crate::process::{ask, number, seconds, wait};
use crate::sterna;

/// Number of different counts that prove that the guest runs. The copy of the last checkpoint also changes
/// them.
const STEPS: usize = 5;
const LOOK: Duration = Duration::from_micros(20);
/// Share of the checkpoint interval after which a planned takeover is requested. It is large, so that much
/// data must be sent.
const PLANNED: f64 = 0.8;
const PAGE: u64 = 4096;
const REPORT: &str = "x-sterna-query-protection";
const TAKE_OVER: &str = "x-sterna-takeover";

/// Why the guest moves to the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Loss,
    Plan,
}

/// Takeovers of one kind.
pub(crate) struct Takeovers {
    pub(crate) times: Times,
    /// The condition for the standby's decision. `None` for QEMU, where an operator decides.
    pub(crate) decision: Option<Decision>,
    /// Median of the bytes that arrived between request and decision. 0 if the primary was lost.
    pub(crate) came_bytes: u64,
}

/// The condition that a standby waits for before it decides.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Decision {
    /// The end of lease and margin.
    Patience(Duration),
    /// The last checkpoint of a planned takeover.
    LastCheckpoint,
}

struct Takeover {
    took: Duration,
    decision: Option<Decision>,
    came_bytes: u64,
}

/// Measures several takeovers of a cell's kind. `None`: QEMU has no planned takeover.
pub(crate) fn measure(
    root: &Root,
    sterna: &Path,
    cell: &Cell,
    cause: Cause,
    tries: u32,
) -> Result<Option<Takeovers>, Failure> {
    let (mut times, mut decision, mut came_bytes) = (Vec::new(), None, Vec::new());
    for _ in 0..tries {
        let one = match (cell.pair, cause) {
            (Pair::SternaSterna, _) => into_sterna(root, sterna, cell, cause)?,
            (Pair::QemuQemu, Cause::Loss) => into_secondary(root, sterna, cell)?,
            (Pair::QemuQemu, Cause::Plan) => return Ok(None),
            (Pair::QemuStandby | Pair::QemuSterna, _) => into_waiting_qemu(root, sterna, cell, cause)?,
        };
        times.push(one.took);
        decision = one.decision;
        came_bytes.push(one.came_bytes);
    }
    came_bytes.sort_unstable();
    let came_bytes = came_bytes.get(came_bytes.len() / 2).copied().unwrap_or(0);
    Ok(Some(Takeovers { times: Times::new(times), decision, came_bytes }))
}

/// The cell of a takeover: many writes, and a long interval between checkpoints.
pub(crate) fn cell(pair: Pair, mut like: Cell) -> Cell {
    (like.pair, like.load, like.delay, like.channels) = (pair, Load::Heavy, Duration::from_millis(600), 0);
    like
}

fn into_sterna(root: &Root, sterna: &Path, cell: &Cell, cause: Cause) -> Result<Takeover, Failure> {
    let mut protected = sterna::Protected::begin(root, sterna, cell)?;
    let words = GuestWords::of_process(protected.standby.id())?;
    let patience = await_checkpoint(|| protected.standby.execute(REPORT, Value::Null))?;
    match cause {
        Cause::Loss => kill(protected.primary.id())?,
        Cause::Plan => {
            std::thread::sleep(cell.delay.mul_f64(PLANNED));
            protected.standby.execute(TAKE_OVER, json!({"planned": true}))?;
        }
    }
    let decided = await_decision(|| protected.standby.execute(REPORT, Value::Null))?;
    let took = first_step(&words, decided.at)?;
    Ok(Takeover { took, decision: Some(cause.decision(patience)), came_bytes: decided.bytes })
}

fn into_waiting_qemu(root: &Root, sterna: &Path, cell: &Cell, cause: Cause) -> Result<Takeover, Failure> {
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
        let report = ask(standby, REPORT)?;
        Ok((report["waiting-vm"] == "waits").then_some(()))
    })?;
    let patience = await_checkpoint(|| ask(standby, REPORT))?;
    let words = GuestWords::open(&memory.path().join("ram"))?;
    match cause {
        Cause::Loss => protected.lose_primary(),
        Cause::Plan => {
            std::thread::sleep(cell.delay.mul_f64(PLANNED));
            let planned = standby.execute(TAKE_OVER, json!({"planned": true}));
            planned.map_err(|error| format!("{TAKE_OVER}: {error}"))?;
        }
    }
    let standby = protected.standby_monitor().ok_or("no standby")?;
    let decided = await_decision(|| ask(standby, REPORT))?;
    let took = first_step(&words, decided.at);
    let _survivor = Survivor::of(&protected.place.path().join("standby.log"))?;
    Ok(Takeover { took: took?, decision: Some(cause.decision(patience)), came_bytes: decided.bytes })
}

/// A takeover by QEMU's secondary. Its guest has run all the time, and may continue after the command.
fn into_secondary(root: &Root, sterna: &Path, cell: &Cell) -> Result<Takeover, Failure> {
    let mut protected = pair::Protected::begin(root, sterna, cell, &[])?;
    let mut resumes = 0;
    wait("checkpoints", Duration::ZERO, || {
        resumes += usize::from(protected.next_event()?.is_some_and(|event| event.name == "RESUME"));
        Ok((resumes > 3).then_some(()))
    })?;
    kill(protected.primary.pid())?;
    let Other::Qemu { secondary, .. } = &mut protected.other else { return Err("no secondary".to_owned()) };
    let words = GuestWords::of_process(secondary.pid())?;
    let began = Instant::now();
    secondary.execute("x-colo-lost-heartbeat", Value::Null)?;
    wait("the guest", Duration::from_micros(200), || Ok((secondary.status()? == "running").then_some(())))?;
    Ok(Takeover { took: first_step(&words, began)?, decision: None, came_bytes: 0 })
}

/// Time of a standby's decision, and the bytes that arrived since the takeover was requested.
struct Decided {
    at: Instant,
    bytes: u64,
}

impl Cause {
    fn decision(self, patience: Duration) -> Decision {
        match self {
            Self::Loss => Decision::Patience(patience),
            Self::Plan => Decision::LastCheckpoint,
        }
    }
}

/// Waits until a further checkpoint is held. Returns the time after which the standby decides by itself.
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

/// The last time at which the standby was seen waiting for the primary.
fn await_decision(mut report: impl FnMut() -> Result<Value, Failure>) -> Result<Decided, Failure> {
    let mut last = Decided { at: Instant::now(), bytes: 0 };
    let mut first = None;
    wait("the decision", Duration::from_micros(200), || {
        let asked = Instant::now();
        let report = report()?;
        let pages = number(&report, "pages")?;
        last.bytes = pages.saturating_sub(*first.get_or_insert(pages)) * PAGE;
        if matches!(report["state"].as_str(), Some("following" | "holding")) {
            last.at = asked;
            return Ok(None);
        }
        Ok(Some(()))
    })?;
    Ok(last)
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

/// The QEMU that runs the guest. It outlives `sterna standby`, and is killed when this is dropped.
struct Survivor {
    process: u32,
    directory: Option<PathBuf>,
}

impl Survivor {
    /// Reads the QEMU's process number from the standby's last line.
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
        // The process may have ended. Only a temporary directory is removed.
        let _ = kill(self.process);
        if let Some(directory) =
            self.directory.as_ref().filter(|place| place.starts_with(std::env::temp_dir()))
        {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}
