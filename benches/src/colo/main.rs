//! Measures the cost of protecting a guest: pauses, checkpoints, output and takeovers. It compares Sterna
//! with QEMU's own protection (COLO).
//!
//! - QEMU's machine is the same in all rows: `pc`, one vCPU, a network card only for a talker, no replicated
//!   disk. Pauses are measured by the machine's own clock: from its event STOP to its event RESUME, in
//!   microseconds. The seeding's pause is left out. All machines run on KVM if it is available; Sterna's need
//!   it.
//! - `qemu-qemu`: QEMU with `-incoming` and `x-colo`, whose guest also runs. `qemu-sterna`: the same QEMU
//!   with `sterna protect` and `sterna standby`. `sterna-sterna`: two VMs of `sterna run` and
//!   `sterna protect`. `qemu-standby`, only on request: `sterna standby` alone.
//! - Every side is a process of its own, so its CPU time and memory can be measured. The primary's CPU time
//!   is the sum of QEMU and `sterna protect`.
//! - All sides are connected by Unix sockets on this host and share its cores.
//! - The guest is a boot sector with a set pace. It counts the times between two of its pages
//!   (`interop/src/workload/boot.rs`).
//! - A plain copy of as many pages with as many threads is listed next to the pauses of Sterna's VM.
//! - The pairs alternate within each setting, so that a machine that is slower for a while is slower for all.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

mod copy;
mod goals;
mod guest;
mod pair;
mod pauses;
mod plan;
mod process;
mod recovery;
mod row;
mod sterna;
mod table;

use std::path::PathBuf;

use clap::Parser;
use serde_json::{Value, json};
use sterna_benches::before::{self, Migrations};
use sterna_benches::markdown::{self, Measured};
use sterna_benches::{Failure, goal};
use sterna_interop::Root;

use plan::{Cell, Load, Pair};
use recovery::Cause;
use row::Row;

/// Measures protected guests. Without --pairs, --loads, --delays and --channels: the whole matrix, and
/// takeovers.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, MiB; 256 or more.
    #[arg(long, default_value_t = 512)]
    ram: u64,
    /// Which programs protect the guest [default of a part: qemu-qemu, qemu-sterna, sterna-sterna].
    #[arg(long, value_enum, value_delimiter = ',')]
    pairs: Vec<Pair>,
    /// Work of the guest [default of a part: idle, middle].
    #[arg(long, value_enum, value_delimiter = ',')]
    loads: Vec<Load>,
    /// Milliseconds between checkpoints [default of a part: 100].
    #[arg(long, value_delimiter = ',')]
    delays: Vec<u64>,
    /// Multifd channels; 0: only the main channel [default of a part: 0].
    #[arg(long, value_delimiter = ',')]
    channels: Vec<u8>,
    /// How Sterna's primary takes pages: `x-sterna-checkpoint-copy`. In the whole matrix, modes other than
    /// the first run only at 100 ms over the main channel.
    #[arg(long, value_delimiter = ',', default_value = plan::MODES)]
    modes: Vec<String>,
    /// Limit of checkpoints in flight at Sterna's primary (`x-sterna-checkpoints-in-flight`).
    #[arg(long, default_value_t = 1)]
    in_flight: u8,
    /// Seconds for each row; extended to at least 15 checkpoints.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Takeovers of each kind, reported as a median; 0: none.
    #[arg(long, default_value_t = 3)]
    takeovers: u32,
    /// An earlier `sterna` command, to compare migrations without protection.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Migrations of each of the two `sterna` commands.
    #[arg(long, default_value_t = 15)]
    migrations: u32,
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

fn main() {
    let args = Args::parse();
    if let Err(why) = run(&args) {
        eprintln!("{why}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("bench colo") else { return Ok(()) };
    print!("{}", table::head());
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for cell in plan::cells(args) {
        note(&cell, measure(&root, args, &cell), &mut rows, &mut failures);
    }
    for (cell, cause) in takeovers(args) {
        let taken = recovery::measure(&root, &args.sterna, &cell, cause, args.takeovers);
        let row = taken.map(|taken| taken.map(|taken| Row::of_takeovers(&cell, &taken)));
        if let Some(row) = row.map_err(|why| format!("takeover: {why}")).transpose() {
            note(&cell, row, &mut rows, &mut failures);
        }
    }
    let unprotected = args
        .before
        .as_ref()
        .map(|before| before::measure(before, &args.sterna, args.ram << 20, args.migrations.max(1)));
    write(args, &rows, unprotected.transpose()?)?;
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

fn measure(root: &Root, args: &Args, cell: &Cell) -> Result<Row, Failure> {
    let measured = match cell.pair {
        Pair::SternaSterna => sterna::measure(root, &args.sterna, cell),
        _ => pair::measure(root, &args.sterna, cell),
    };
    measured.map(|measured| Row::of(cell, &measured))
}

/// Adds a row. A failed measurement is printed, and the bench continues.
fn note(cell: &Cell, row: Result<Row, Failure>, rows: &mut Vec<Row>, failures: &mut Vec<Failure>) {
    match row {
        Ok(row) => {
            println!("{}", table::row(&row));
            rows.push(row);
        }
        Err(why) => {
            let why = format!("{}: {why}", cell.name());
            eprintln!("{why}");
            failures.push(why);
        }
    }
}

/// One cell for each pair and cause, if takeovers are to be measured.
fn takeovers(args: &Args) -> Vec<(Cell, Cause)> {
    let mut taken: Vec<Cell> = Vec::new();
    for cell in plan::cells(args).into_iter().filter(|_| args.takeovers > 0) {
        if !taken.iter().any(|before| before.pair == cell.pair) {
            taken.push(recovery::cell(cell.pair, cell));
        }
    }
    let causes = [Cause::Loss, Cause::Plan];
    taken.into_iter().flat_map(|cell| causes.map(|cause| (cell.clone(), cause))).collect()
}

fn write(args: &Args, rows: &[Row], unprotected: Option<[Migrations; 2]>) -> Result<(), Failure> {
    let mut goals = goals::goals(rows);
    goals.extend(unprotected.iter().flat_map(|sides| before::goals(sides, "a migration without `x-colo`")));
    let goals = goal::table(&goals);
    println!("\n{goals}");
    if let Some(file) = &args.json {
        let rows: Vec<Value> = rows.iter().map(Row::value).collect();
        let all = json!({"schema": "sterna-bench-colo", "version": 2, "ram_mib": args.ram, "rows": rows});
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if let Some(file) = &args.markdown {
        let lines: Vec<String> = rows.iter().map(|row| table::row(row) + "\n").collect();
        let tables = format!("{goals}\n{}{}", table::head(), lines.concat());
        let text = markdown::document(&Measured::now("colo"), &tables);
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
