//! What a sync of dirty bitmaps costs, beside what the machine can do at best. `cargo xtask bench sync`.
//!
//! - *merge*: a guest's words into its bitmaps, with blocks that begin with a word and blocks that do not,
//!   beside a plain copy of the same words and beside going page by page.
//! - *sync*: a whole sync of a guest with vhost devices, random pages dirty; the devices share one log, or
//!   have one each.
//! - *pagemap*, *kvm*: the kernel's logs, beside the same system calls with nobody who merges.
//!
//! The variants of a part are timed one after the other in each repetition, so that a noisy neighbour hits all
//! alike; what is printed are medians, and medians of the ratios repetition by repetition.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod kvm;
mod merge;
mod pagemap;
mod random;
mod table;
mod whole;

use clap::{Parser, ValueEnum};
use table::Table;

/// Times the sync of dirty bitmaps.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, GiB.
    #[arg(long, default_value_t = 256)]
    guest: u64,
    /// Pages that are dirty at a sync: those of 10 GB/s in 100 ms.
    #[arg(long, default_value_t = 250_000)]
    dirty: u64,
    /// Blocks that the merged guest consists of.
    #[arg(long, default_value_t = 8)]
    blocks: u64,
    /// vhost devices.
    #[arg(long, default_value_t = 24)]
    devices: u64,
    /// Memory under userfaultfd, MiB.
    #[arg(long, default_value_t = 2048)]
    pagemap: u64,
    /// Pages that a KVM guest writes between two syncs.
    #[arg(long, default_value_t = 50_000)]
    written: u64,
    /// Repetitions.
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Print results as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Merge,
    Sync,
    Pagemap,
    Kvm,
}

type Failed = Box<dyn std::error::Error>;

fn main() -> Result<(), Failed> {
    let args = Args::parse();
    let mut tables = Vec::new();
    for part in [Part::Merge, Part::Sync, Part::Pagemap, Part::Kvm] {
        if !args.only.is_empty() && !args.only.contains(&part) {
            continue;
        }
        let measured: Vec<Table> = match part {
            Part::Merge => merge::measure(&args)?,
            Part::Sync => whole::measure(&args)?,
            Part::Pagemap => pagemap::measure(&args)?.into_iter().collect(),
            Part::Kvm => kvm::measure(&args)?,
        };
        if !args.json {
            measured.iter().for_each(|table| println!("{table}"));
        }
        tables.extend(measured);
    }
    if args.json {
        println!("{}", serde_json::Value::from_iter(tables.iter().map(Table::json)));
    }
    Ok(())
}

/// Says that a part cannot run here.
fn skipped(part: &str, reason: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED {part}: {reason}");
}
