//! Measures migrations of real QEMUs through two `sterna relay` processes.
//!
//! - `speed`: QEMU 11 to QEMU 11, directly, through two relays, and through two relays with TLS, in turn. The link is the loopback of a
//!   network namespace with a token bucket, or the loopback without a limit. RAM is random bytes; the guest rewrites a small part of it
//!   and runs during the migration. CPU time is that of both relays.
//! - `cuts`: the network between the relays is away for some seconds in precopy, for every connection; or one connection is lost. The
//!   pace of the migration is QEMU's `max-bandwidth`.
//! - `random`: each migration is cut up to five times, at random bytes. Some outages are longer than the window. At the end, one guest
//!   runs. If it moved, its RAM is compared byte for byte before it runs.
//! - `many`: many migrations at once through one pair of relays.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod cuts;
mod many;
mod pair;
mod random;
mod speed;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use sterna_benches::goal::{self, Goal};
use sterna_benches::machines::Lab;
use sterna_benches::markdown::{self, Measured};
use sterna_benches::{Failure, exit};
use sterna_interop::Root;

/// Measures migrations through relays.
#[derive(Parser)]
struct Args {
    /// Parts to run.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "speed,cuts,many")]
    only: Vec<Part>,
    /// RAM of the guests of `speed` and `cuts`, MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(128..=2048))]
    ram: u64,
    /// Bandwidths of links, MB/s; 0: the loopback without a limit.
    #[arg(long, value_delimiter = ',', default_value = "200,0")]
    link: Vec<u64>,
    /// Migrations of each kind for each row of `speed`.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// The QEMU: 11, or 10 (`cargo xtask roots qemu-trixie`).
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(10..=11))]
    qemu: u32,
    /// Lengths of outages of `cuts`, seconds. 0: one connection is lost. The long form: `--cut 60,300`.
    #[arg(long, value_delimiter = ',', default_value = "0,1,5")]
    cut: Vec<f64>,
    /// Migrations of `random`.
    #[arg(long, default_value_t = 100)]
    count: u32,
    /// Seed of `random`.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Migrations at once of `many`.
    #[arg(long, default_value_t = 64)]
    many: usize,
    /// The `sterna` command to measure.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the goals to this file, in the form of `benches/RESULTS.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Speed,
    Cuts,
    Random,
    Many,
}

impl Args {
    fn root(&self) -> Option<Root> {
        match self.qemu {
            10 => Root::qemu_trixie_for("bench relay"),
            _ => Root::qemu_for("bench relay"),
        }
    }

    fn lab(&self, namespace: Option<&str>) -> Result<Lab, Failure> {
        let root = self.root().ok_or("there is no QEMU")?;
        let kvm = PathBuf::from("/dev/kvm").exists();
        Ok(Lab {
            root: Some(root),
            sterna: self.sterna.clone(),
            kvm,
            namespace: namespace.map(str::to_owned),
        })
    }
}

fn main() -> std::process::ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Failure> {
    if args.root().is_none() {
        return Ok(());
    }
    let (mut goals, mut failures): (Vec<Goal>, Vec<Failure>) = (Vec::new(), Vec::new());
    for part in &args.only {
        let measured = match part {
            Part::Speed => speed::measure(args),
            Part::Cuts => cuts::measure(args),
            Part::Random => random::measure(args),
            Part::Many => many::measure(args),
        };
        // A part that fails does not stop the others.
        measured.map_or_else(|why| failures.push(why), |measured| goals.extend(measured));
    }
    let goals = goal::table(&goals);
    println!("\n{goals}");
    if let Some(file) = &args.markdown {
        let text = markdown::document(&Measured::now("relay"), &goals);
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
