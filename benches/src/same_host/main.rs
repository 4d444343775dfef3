//! Measures a move to another process of the same host without a copy of memory. Sterna and QEMU both do it
//! with `cpr-transfer`.
//!
//! - The guest is a boot sector, the same for both, on the same KVM. It writes and checks 32 MiB, whatever
//!   the machine's size. All other memory is never touched.
//! - **The downtime is measured by the guest**: the longest time between two of its pages, which it writes
//!   every 100 µs.
//! - The new process waits before the move starts, so its start is not measured. QEMU's process does nothing
//!   before it has the descriptors, which it receives first. Its machine is therefore made while the guest
//!   still runs.
//! - Pages copied are the source's counts (`normal` and `duplicate` in `query-migrate`).
//! - The sides alternate. The results are medians.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod qemu;
mod sterna;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::{Lab, Side};
use sterna_benches::markdown::{self, Measured};
use sterna_benches::peer::Peer;
use sterna_benches::words::GuestWords;
use sterna_benches::{Failure, goal};
use sterna_interop::{Guest, Root};

/// RAM for which the guest's sector is built; it sweeps half of it.
const SECTOR_BYTES: u64 = 64 << 20;
const PAGES_PER_SECOND: u64 = 10_000;
const SIDES: [Side; 2] = [Side::Qemu, Side::Sterna];
/// Goal of the downtime, milliseconds.
const DOWNTIME: f64 = 20.0;
/// Time for which the guest works before it moves.
const BEFORE: Duration = Duration::from_millis(200);

/// Measures moves to another process of the same host.
#[derive(Parser)]
struct Args {
    /// RAM of the machine, GiB.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16")]
    gib: Vec<u64>,
    /// Moves of each side.
    #[arg(long, default_value_t = 7)]
    runs: u32,
    /// The `sterna` command to measure.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write goals and rows to this file, in the form of `benches/RESULTS.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Results of one move.
#[derive(Debug, Clone, Copy)]
struct Move {
    /// Downtime that the guest measured, in seconds.
    downtime: f64,
    /// From the command until the source reports the end, in seconds.
    took: f64,
    pages: u64,
}

struct Row {
    side: Side,
    gib: u64,
    downtimes: Vec<f64>,
    took: f64,
    /// The maximum of all moves.
    pages: u64,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("bench same-host") else { return Ok(()) };
    let lab = Lab { root: Some(root.clone()), sterna: args.sterna.clone(), kvm: true, namespace: None };
    let place = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
    let sector = place.path().join("sector");
    lab.boot_sector_of(Guest::Boot, SECTOR_BYTES, &sector)?;
    let mut rows = Vec::new();
    println!("{HEAD}");
    for &gib in &args.gib {
        let mut moves = SIDES.map(|_| Vec::new());
        for _ in 0..args.runs.max(1) {
            for (side, moves) in SIDES.into_iter().zip(&mut moves) {
                let moved = match side {
                    Side::Qemu => qemu::once(&root, gib << 30, &sector),
                    Side::Sterna => sterna::once(&lab, gib << 30, &sector),
                };
                moves.push(moved.map_err(|why| format!("{}, {gib} GiB: {why}", side.word()))?);
            }
        }
        for (side, moves) in SIDES.into_iter().zip(&moves) {
            let row = Row::of(side, gib, moves);
            println!("{}", row.text());
            rows.push(row);
        }
    }
    write(args, &rows)
}

fn write(args: &Args, rows: &[Row]) -> Result<(), Failure> {
    let goals = goal::table(&goals(rows));
    println!("\n{goals}");
    if let Some(file) = &args.json {
        let rows: Vec<Value> = rows.iter().map(Row::value).collect();
        let all = json!({"schema": "sterna-bench-same-host", "version": 1, "rows": rows});
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if let Some(file) = &args.markdown {
        let lines: Vec<String> = rows.iter().map(|row| row.text() + "\n").collect();
        let text = format!("{goals}\n{HEAD}\n{}", lines.concat());
        let text = markdown::document(&Measured::now("same-host"), &text);
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

fn goals(rows: &[Row]) -> Vec<Goal> {
    let ours = rows.iter().filter(|row| row.side == Side::Sterna);
    ours.flat_map(|row| {
        let qemu = rows.iter().find(|other| other.side == Side::Qemu && other.gib == row.gib);
        let beside = qemu.map_or_else(String::new, |qemu| format!("QEMU {:.1}", qemu.downtime() * 1e3));
        [
            Goal::of(
                &format!("{} GiB: downtime that the guest saw, ms", row.gib),
                row.downtime() * 1e3,
                &beside,
                Bound::AtMost(DOWNTIME),
            ),
            Goal {
                what: format!("{} GiB: pages copied", row.gib),
                measured: row.pages.to_string(),
                goal: "0".to_owned(),
                is_short: row.pages > 0,
            },
        ]
    })
    .collect()
}

const HEAD: &str = "| side | RAM | downtime, ms: median / most | `migrate` to its end, ms | pages copied |\n\
                    | --- | --- | --- | --- | --- |";

impl Row {
    fn of(side: Side, gib: u64, moves: &[Move]) -> Self {
        Self {
            side,
            gib,
            downtimes: sorted(moves.iter().map(|one| one.downtime)),
            took: middle(&sorted(moves.iter().map(|one| one.took))),
            pages: moves.iter().map(|one| one.pages).max().unwrap_or_default(),
        }
    }

    fn downtime(&self) -> f64 {
        middle(&self.downtimes)
    }

    fn most(&self) -> f64 {
        self.downtimes.last().copied().unwrap_or(f64::NAN)
    }

    fn text(&self) -> String {
        format!(
            "| {} | {} GiB | {:.1} / {:.1} | {:.1} | {} |",
            self.side.word(),
            self.gib,
            self.downtime() * 1e3,
            self.most() * 1e3,
            self.took * 1e3,
            self.pages
        )
    }

    fn value(&self) -> Value {
        json!({
            "side": self.side.word(),
            "gib": self.gib,
            "downtime_ms": self.downtimes.iter().map(|time| time * 1e3).collect::<Vec<f64>>(),
            "took_ms": self.took * 1e3,
            "pages_copied": self.pages,
        })
    }
}

/// Runs the guest, which writes its pages at the set pace.
fn begin(source: &mut Peer) -> Result<GuestWords, Failure> {
    source.execute("cont", Value::Null)?;
    source.wait_for_ticks(1)?;
    let words = GuestWords::of_process(source.id())?;
    words.set_pace(PAGES_PER_SECOND)?;
    std::thread::sleep(BEFORE);
    let on = json!([{"capability": "events", "state": true}]);
    source.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
    source.execute("migrate-set-parameters", json!({"mode": "cpr-transfer"}))?;
    source.forget_events()?;
    words.clear_longest_gap()?;
    Ok(words)
}

/// Waits for the end of a move. Both processes share the memory, so the source's file still shows the guest's
/// words.
fn end(
    began: Instant,
    source: &mut Peer,
    destination: impl FnOnce() -> Result<Peer, Failure>,
    words: &GuestWords,
) -> Result<Move, Failure> {
    source.wait_until_completed()?;
    let took = began.elapsed().as_secs_f64();
    let destination = destination()?;
    // The guest runs in the new process and has checked every byte.
    destination.wait_for_ticks(1)?;
    let downtime = words.longest_gap()?.as_secs_f64();
    let query = source.execute("query-migrate", Value::Null)?;
    let counted = |name: &str| query["ram"][name].as_u64();
    let pages = counted("normal").zip(counted("duplicate"));
    let (normal, zero) = pages.ok_or_else(|| format!("it does not say what it copied: {query}"))?;
    Ok(Move { downtime, took, pages: normal + zero })
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn middle(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A socket in that directory, as an address.
fn address(place: &Path, name: &str) -> String {
    format!("unix:{}", place.join(name).display())
}
