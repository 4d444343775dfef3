//! Measures the cost of a sync of dirty bitmaps. It is compared with the machine's limits. Run with
//! `cargo xtask bench sync`.
//!
//! - *merge*: merges a guest's words into its bitmaps, with blocks that are aligned to a word and blocks that
//!   are not. It is compared with a plain copy of the same words, and with a loop over single pages.
//! - *sync*: a complete sync of a guest with vhost devices and random dirty pages. The devices share one log,
//!   or have one each.
//! - *pagemap*, *kvm*: the kernel's logs, compared with the same system calls without merging.
//!
//! The variants of a part are timed one after another in each repetition, so that other load on the host
//! affects all of them equally. The output is medians, and medians of the repetitions' ratios.
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
    /// Pages that are dirty at a sync; the default is 10 GB/s for 100 ms.
    #[arg(long, default_value_t = 250_000)]
    dirty: u64,
    /// Blocks of the merged guest.
    #[arg(long, default_value_t = 8)]
    blocks: u64,
    /// Number of vhost devices.
    #[arg(long, default_value_t = 24)]
    devices: u64,
    /// Memory under userfaultfd, MiB.
    #[arg(long, default_value_t = 2048)]
    pagemap: u64,
    /// Pages that a KVM guest writes between two syncs.
    #[arg(long, default_value_t = 50_000)]
    written: u64,
    /// Repetitions of each measurement.
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// Run only these parts.
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

/// Reports a part that cannot run here.
fn skipped(part: &str, reason: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED {part}: {reason}");
}
