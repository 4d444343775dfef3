//! Measures whether, when, and with which downtime migrations end. The results are compared with the
//! forecasts.
//!
//! - `forecast`: four patterns of writing at five rates each, below and above the rate that converges, over a
//!   link of known speed. The forecast is printed, and with `--json` stored, before the first byte is sent.
//! - `limits`: the downtime that a guest measures against `downtime-limit`, over many migrations with a
//!   convergent forecast. `--rate` sets the guest's write rate.
//! - `qemu`: the same boot-sector guest on the same KVM, in QEMU and in Sterna, over the same link. It finds
//!   the largest dirty rate that converges, the largest at which the limit is kept (`--rival-limit`), and the
//!   guest's downtime.
//! - `lanes`: how lanes spend their time under full load, without a limit.
//!
//! The link is the loopback of a separate network namespace with a token bucket. It has the same speed for
//! the last pages as for the first, as real links have; `max-bandwidth` would limit only the rounds. All
//! machines are processes, driven over QMP as an operator drives them.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

mod forecast;
mod lanes;
mod limits;
mod record;
mod rival;
mod tide;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use serde_json::Value;
use sterna_benches::Failure;
use sterna_benches::link::Link;
use sterna_benches::machines::Lab;
use sterna_interop::Root;

use record::Record;

const PAGE_BYTES: u64 = 4096;

/// Times migrations of guests that write.
#[derive(Debug, Parser)]
pub struct Args {
    /// Parts to run.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "forecast,limits,qemu,lanes")]
    only: Vec<Part>,
    /// Migrations for each limit.
    #[arg(long, default_value_t = 200)]
    runs: usize,
    /// Downtime limits, ms.
    #[arg(long, value_delimiter = ',', default_value = "300,100,50")]
    limits: Vec<u64>,
    /// Write rate of the guest of `limits`, in percent of the link's bandwidth.
    #[arg(long, value_name = "PERCENT", default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..=1000))]
    rate: u64,
    /// RAM of the guests, MiB.
    #[arg(long, default_value_t = 256)]
    ram: u64,
    /// Bandwidth of the link, MB/s.
    #[arg(long, default_value_t = 200)]
    link: u64,
    /// Tries at each rate in the comparison with QEMU.
    #[arg(long, default_value_t = 3)]
    tries: usize,
    /// Downtime limit in the comparison with QEMU, ms.
    #[arg(long, value_name = "MS", default_value_t = 100)]
    rival_limit: u64,
    /// The `sterna` to be timed [default: in the directory of this program].
    #[arg(long, overrides_with = "sterna")]
    sterna: Option<PathBuf>,
    /// Write all results to this file after each part; forecasts are written before their migrations start.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write rows to this file after each part, in the form of benches/RESULTS.md.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Forecast,
    Limits,
    Qemu,
    Lanes,
}

fn main() -> std::process::ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let sterna = match &args.sterna {
        Some(path) => path.clone(),
        None => beside()?,
    };
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    let mut lab = Lab { root: Root::qemu_for("the rows of QEMU"), sterna, kvm, namespace: None };
    let mut record = Record::new(args.json.clone(), args.markdown.clone());
    for part in &args.only {
        let name = format!("{part:?}").to_lowercase();
        println!("\n{name}");
        match one(*part, args, &mut lab, &mut record) {
            Ok(found) => record.put(&name, found)?,
            Err(why) => println!("SKIPPED {name}: {why}"),
        }
    }
    Ok(())
}

fn one(part: Part, args: &Args, lab: &mut Lab, record: &mut Record) -> Result<Value, Failure> {
    match part {
        Part::Lanes => lanes::all(lab, args),
        Part::Forecast | Part::Limits | Part::Qemu => {
            let link = Link::new(args.link)?;
            lab.namespace = Some(link.name().to_owned());
            let found = match part {
                Part::Qemu => rival::all(lab, args),
                Part::Limits => limits::all(lab, args),
                _ => forecast::all(lab, args, record),
            };
            lab.namespace = None;
            found
        }
    }
}

fn beside() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(|error| format!("where am I: {error}"))?;
    let path = own.with_file_name("sterna");
    if path.exists() { Ok(path) } else { Err(format!("no {}: build it, or give --sterna", path.display())) }
}

/// Pages per second that correspond to `percent` percent of the link's bandwidth.
fn pages_per_second(args: &Args, percent: u64) -> u64 {
    args.link * 1_000_000 * percent / 100 / PAGE_BYTES
}

/// Median of the values; NaN without values.
fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The quantile at `share`.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}
