//! Measures a guest that runs before its memory has arrived: Sterna to Sterna and QEMU to QEMU, both with
//! `postcopy-preempt`.
//!
//! - The guest is a boot sector, the same for both, on the same KVM. It writes half of its RAM at full speed,
//!   in pages that are far apart, and checks each page. It counts the times between two pages by length
//!   (`interop/src/workload/boot.rs`). The other half is random bytes.
//! - `faults`: the migration switches to postcopy as soon as it has started, so nearly all of the memory is
//!   sent after the guest. **The duration of a fault is the time that the guest measures**: from one page to
//!   the next. After the switch, as many of the longest times count as pages were requested
//!   (`postcopy-requests`). The longest time of each move is its downtime and does not count. The table also
//!   shows the destination's own value (`postcopy-latency`).
//! - The time from the switch to the last page starts at the source's event STOP and ends when the
//!   destination's migration has completed. The table also shows a plain copy through one socket over the
//!   same link in the same run. It also shows the time of a short request for a page on an idle link.
//! - The link is the loopback of a network namespace with a token bucket, or the loopback without a limit.
//! - `writer`: a guest that writes four times the link's bandwidth. Its link is slower, because KVM may
//!   emulate each instruction here. It first gets a precopy, and is then switched. Its downtime is compared
//!   with a guest that writes one page per second.
//! - The sides alternate, so that a machine that is slower for a while is slower for both.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

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
    /// Parts to run.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "faults,writer")]
    only: Vec<Part>,
    /// RAM of the guests, MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..=2048))]
    ram: u64,
    /// Bandwidths of links, MB/s; 0: the loopback without a limit.
    #[arg(long, value_delimiter = ',', default_value = "200,0")]
    link: Vec<u64>,
    /// Multifd channels; 0: the main channel and the preempt channel.
    #[arg(long, value_delimiter = ',', default_value = "0,2")]
    channels: Vec<u8>,
    /// Moves of each side for each row.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// RAM of the guest of `writer`, MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(64..=2048))]
    writer_ram: u64,
    /// Bandwidth of the link of `writer`, MB/s.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    writer_link: u64,
    /// Time limit of the precopy of `writer`, seconds.
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// An earlier `sterna` command, to compare plain precopies.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Precopies of each of the two `sterna` commands.
    #[arg(long, default_value_t = 31)]
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Faults,
    Writer,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()))
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
                    // A failed row does not stop the other rows.
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

/// Median of the values; NaN without values.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
