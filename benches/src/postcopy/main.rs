//! A guest that runs before its memory is there, Sterna to Sterna beside QEMU to QEMU, both with `postcopy-preempt`.
//!
//! - The guest is a boot sector, the same for both, on the same KVM: it writes half of its RAM, page after page far apart, at full speed,
//!   checks each page, and counts the times between two pages by length (`interop/src/workload/boot.rs`). The other half is random bytes.
//! - `faults`: the migration is switched as soon as it has begun, so nearly all of the memory follows the guest. **A fault is what the guest
//!   saw of it**: the time from one page to the next. Of all such times after the switch as many of the longest count as pages were
//!   asked for (`postcopy-requests`), without the longest of each move, which is its downtime. What the destination says of itself
//!   (`postcopy-latency`) stands beside.
//! - From the switch to the last page: from the source's event STOP until the destination's migration has completed. Beside it a plain copy
//!   through one socket over the same link in the same run, and a page for a short question over the link when it carries nothing else.
//! - The link is the loopback of a network namespace with a token bucket, or the loopback as it is.
//! - `writer`: a guest that writes four times what a link carries (a slower one, since KVM here may emulate each instruction) is left
//!   to precopy first, then switched. Its downtime stands beside that of a guest that writes one page a second.
//! - The sides take turns, so that a machine that is slower for a while is slower for both.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

mod faults;
mod goals;
mod pair;
mod table;
mod writer;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use serde_json::json;
use sterna_benches::before;
use sterna_benches::machines::{Lab, Side};
use sterna_benches::markdown::{self, Measured};
use sterna_benches::{Failure, goal};
use sterna_interop::Root;

const PAGE_BYTES: u64 = 4096;
const SIDES: [Side; 2] = [Side::Qemu, Side::Sterna];

/// Measures postcopy.
#[derive(Parser)]
struct Args {
    /// Which parts to run.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "faults,writer")]
    only: Vec<Part>,
    /// RAM of the guests, MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..=2048))]
    ram: u64,
    /// Bandwidths of links, MB/s; 0: the loopback as it is.
    #[arg(long, value_delimiter = ',', default_value = "200,0")]
    link: Vec<u64>,
    /// Multifd channels; 0: the main channel, and that of requested pages.
    #[arg(long, value_delimiter = ',', default_value = "0,2")]
    channels: Vec<u8>,
    /// Moves of each side for each row.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// RAM of the guest of `writer`, MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(64..=2048))]
    writer_ram: u64,
    /// Bandwidth of its link, MB/s.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    writer_link: u64,
    /// Seconds that its precopy has to end.
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// An earlier `sterna` command: plain precopies are compared with its.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Precopies of each of the two.
    #[arg(long, default_value_t = 31)]
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Faults,
    Writer,
}

fn main() -> std::process::ExitCode {
    match run(&Args::parse()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    if Root::qemu_for("bench postcopy").is_none() {
        return Ok(());
    }
    let (mut rows, mut writers, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    if args.only.contains(&Part::Faults) {
        print!("{}", table::head());
        for link in args.link.iter().map(|&link| (link > 0).then_some(link)) {
            for &channels in &args.channels {
                match faults::measure(args, link, channels) {
                    Ok(measured) => {
                        measured.iter().for_each(|row| println!("{}", table::row(row)));
                        rows.extend(measured);
                    }
                    // It does not cost the others.
                    Err(why) => failures.push(format!("link {link:?}, {channels} channels: {why}")),
                }
            }
        }
    }
    if args.only.contains(&Part::Writer) {
        writer::measure(args).map_or_else(|why| failures.push(why), |measured| writers = measured);
    }
    let mut lines = goals::of_faults(&rows);
    lines.extend(goals::of_writers(&writers));
    if let Some(before) = &args.before {
        let sides = before::measure(before, &args.sterna, args.ram << 20, args.migrations.max(1))?;
        lines.extend(before::goals(&sides, "a plain precopy"));
    }
    let goals = goal::table(&lines);
    println!("\n{goals}");
    if let Some(file) = &args.json {
        let faults: Vec<_> = rows.iter().map(faults::Row::value).collect();
        let writers: Vec<_> = writers.iter().map(writer::Row::value).collect();
        let all = json!({
            "schema": "sterna-bench-postcopy", "version": 1, "ram_mib": args.ram, "faults": faults, "writers": writers,
        });
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if let Some(file) = &args.markdown {
        let all: Vec<String> = rows.iter().map(|row| table::row(row) + "\n").collect();
        let text = format!("{goals}\n{}{}", table::head(), all.concat());
        let text = markdown::document(&Measured::now("postcopy"), &text);
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

fn lab(args: &Args, namespace: Option<&str>) -> Result<Lab, Failure> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(|error| format!("the guests need KVM: /dev/kvm: {error}"))?;
    let root = Root::qemu_for("bench postcopy");
    Ok(Lab { root, sterna: args.sterna.clone(), kvm: true, namespace: namespace.map(str::to_owned) })
}

/// The middle one; not a number of nothing.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
