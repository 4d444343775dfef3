//! What protecting a guest costs it: pauses, checkpoints, output and takeovers, QEMU's own (COLO) beside Sterna's.
//!
//! - QEMU's machine is the same in all rows: `pc`, one vCPU, no network card but a talker's, no replicated disk. The clock of pauses is the
//!   machine's own: from its event STOP to its event RESUME, in microseconds. The seeding's pause is left out. All machines run on KVM, if there
//!   is one; Sterna's need it.
//! - `qemu-qemu`: QEMU with `-incoming` and `x-colo`, whose guest runs, too. `qemu-sterna`: `sterna protect` and `sterna standby` beside the same
//!   QEMU. `sterna-sterna`: two VMs of `sterna run` and `sterna protect`. `qemu-standby`, if asked for: `sterna standby` alone.
//! - Every side is a process of its own, so CPU time and memory are its own. The primary's is QEMU and `sterna protect`.
//! - All are connected by Unix sockets on this host, so the cores are shared by everybody.
//! - The guest is a boot sector that is paced and counts the times between two of its pages (`interop/src/workload/boot.rs`).
//! - Beside the pauses of Sterna's VM stands what a plain copy of as many pages takes, with as many threads.
//! - Pairs take turns with each setting, so that a machine that is slower for a while is slower for all.
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

/// Measures protected guests. Without --pairs, --loads, --delays and --channels: the whole matrix, and takeovers.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, MiB; 256 or more.
    #[arg(long, default_value_t = 512)]
    ram: u64,
    /// Who protects whom [default of a part: qemu-qemu, qemu-sterna, sterna-sterna].
    #[arg(long, value_enum, value_delimiter = ',')]
    pairs: Vec<Pair>,
    /// What the guest does [default of a part: idle, middle].
    #[arg(long, value_enum, value_delimiter = ',')]
    loads: Vec<Load>,
    /// Milliseconds from checkpoint to checkpoint [default of a part: 100].
    #[arg(long, value_delimiter = ',')]
    delays: Vec<u64>,
    /// Multifd channels; 0: the main channel alone [default of a part: 0].
    #[arg(long, value_delimiter = ',')]
    channels: Vec<u8>,
    /// How Sterna's primary takes pages: `x-sterna-checkpoint-copy`. In the whole matrix, others than the first
    /// only at 100 ms over the main channel.
    #[arg(long, value_delimiter = ',', default_value = plan::MODES)]
    modes: Vec<String>,
    /// Checkpoints on their way at Sterna's primary (`x-sterna-checkpoints-in-flight`).
    #[arg(long, default_value_t = 1)]
    in_flight: u8,
    /// Seconds for each row; 15 checkpoints, at least.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Takeovers of each kind, of which the median counts; 0: none.
    #[arg(long, default_value_t = 3)]
    takeovers: u32,
    /// An earlier `sterna` command: migrations that are not protected are compared with its.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Migrations of each of the two.
    #[arg(long, default_value_t = 15)]
    migrations: u32,
    /// The `sterna` command.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write goals and rows as `benches/RESULTS.md` has them.
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

/// One row that could not be measured is said, and does not cost the others.
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

/// Of each pair and cause once, if there are to be any.
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
